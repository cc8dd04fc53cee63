"""The base of sinks that write files: places, stores, attempts, records of windows, and the files that tasks write."""
