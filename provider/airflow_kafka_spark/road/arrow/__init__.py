"""A chain of transforms, run in Arrow within Spark's tasks, where that gives what Spark itself would give.

``catalyst`` reads what Spark's analyzer has made of the chain; ``expressions`` and ``types`` say what of that is known here;
``building`` makes a program of it; ``tasks.program`` runs that over batches, by ``tasks.functions``: functions that are proven
to do what Spark's do. A chain with anything else in it is left to Spark.
"""
