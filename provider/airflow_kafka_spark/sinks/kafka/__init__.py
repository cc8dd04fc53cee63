"""Kafka topics as a sink: ``sink.py`` has the class that users write; ``tasks/`` runs in Spark's Python workers."""
