"""The base of the sinks of Delta and Iceberg: options, and upserts by key."""
