"""The Spark jobs that move windows: each reads, decodes and transforms a window, and writes it to a sink or a topic."""
