"""Connections to other systems: Kafka, Spark, PostgreSQL and schema registries, and the connector jars that Spark loads."""
