"""JSON: bare objects, Connect's envelope, and JSON Schema in Confluent's wire format."""
