"""A mutation check: deliberate faults in the provider, each of which named tests of the suite have to find.

``python -m tests.mutants`` runs it. The faults are in :mod:`tests.mutants.catalog`.
"""
