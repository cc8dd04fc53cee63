"""Code of formats that runs in Spark's Python workers."""
