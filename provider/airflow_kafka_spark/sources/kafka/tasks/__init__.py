"""Runs in Spark's tasks."""
