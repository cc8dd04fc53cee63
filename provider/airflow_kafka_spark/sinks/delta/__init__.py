"""The Delta sink: windows become commits of a Delta table."""
