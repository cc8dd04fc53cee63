"""What the sinks of lake tables share: options, the place of a table, attempts at it, and the files that tasks write."""
