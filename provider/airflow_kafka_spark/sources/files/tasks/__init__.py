"""Code of file sources that runs in Spark's tasks."""
