"""The Iceberg sink: windows become snapshots of an Iceberg table."""
