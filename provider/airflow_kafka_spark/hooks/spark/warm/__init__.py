"""A Spark process that is kept between tasks: ``keep_alive`` in the extra of a ``spark`` connection with a local master."""
