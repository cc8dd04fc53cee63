"""A chain of transforms, run in Arrow within Spark's tasks, where that gives what Spark itself would give.

``catalyst`` translates what Spark's analyzer has made of the chain, as far as its types, casts and expressions are known here.
``building`` assembles the program. ``tasks.program`` runs it over batches, by ``tasks.functions``: functions that are proven to
give what Spark's functions give. A chain with anything else in it is left to Spark.
"""
