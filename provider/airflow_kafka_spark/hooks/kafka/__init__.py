"""Kafka clients for the driver, the triggerer and Spark's tasks. Import from the modules; this file contains no code."""
