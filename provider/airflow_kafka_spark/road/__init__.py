"""The one road through the house: a window is read, decoded and handed to its sink, as one Spark job."""
