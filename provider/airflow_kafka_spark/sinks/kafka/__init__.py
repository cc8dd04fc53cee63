"""Kafka topics as a sink: ``sink.py`` has what users write; ``tasks/`` runs in Spark's Python workers."""
