"""Change events of Debezium."""
