"""The data path: a window is read, decoded, transformed and written to a sink or a topic, as one Spark job."""
