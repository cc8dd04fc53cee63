"""A Spark process that stays between tasks: ``keep_alive`` in the extra of a ``spark`` connection with a local master."""
