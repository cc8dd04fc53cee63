"""The mutants: faults that a careless change could make, each with the tests that have to find it."""

from __future__ import annotations

from tests.mutants.model import Mutant
from tests.mutants.windows import OF_WINDOWS
from tests.mutants.writing import OF_WRITING

MUTANTS: tuple[Mutant, ...] = (*OF_WINDOWS, *OF_WRITING)
