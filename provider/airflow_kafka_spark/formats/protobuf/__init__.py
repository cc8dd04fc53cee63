"""Protobuf in Confluent's wire format."""
