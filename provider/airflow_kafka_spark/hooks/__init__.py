"""What wraps Kafka and Spark: metadata and offsets, the ledger, sessions, connector jars."""
