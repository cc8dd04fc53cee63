"""Kafka as a source: topics and their logs."""
