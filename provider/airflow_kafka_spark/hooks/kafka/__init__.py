"""Kafka clients for the driver, the triggerer and Spark's tasks. Import what you need from the modules: this file stays empty."""
