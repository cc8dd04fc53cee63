"""The ledger: a compacted Kafka topic that holds the position and the windows of each pipeline."""
