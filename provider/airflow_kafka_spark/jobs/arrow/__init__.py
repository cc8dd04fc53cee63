"""Chains of transforms that Spark's tasks compute in Arrow, where the results are equal to Spark's.

``catalyst`` translates the chain, as Spark's analyzer leaves it, into a program. ``tasks.program`` runs the program over batches
with ``tasks.functions``, each of which is proven to return what Spark's function returns. If a chain has an expression that is
not implemented here, Spark computes the whole chain.
"""
