"""The base of sinks of lake tables: options, the place of a table, attempts at it, and the files that tasks write."""
