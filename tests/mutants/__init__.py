"""A mutation check: deliberate faults in the provider, each with the tests that have to find it.

``python -m tests.mutants`` runs it. The faults are in :mod:`tests.mutants.catalog`.
"""
