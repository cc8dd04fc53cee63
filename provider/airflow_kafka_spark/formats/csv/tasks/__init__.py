"""Code of this format that runs in Spark's Python workers."""
