"""``python -m tests.mutants [NAME ...]``: apply each mutant to a copy of the provider and run the tests that have to find it.

The exit status is 0 when all chosen mutants were found, and 1 when one was not found or could not be run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tests.mutants.catalog import MUTANTS
from tests.mutants.model import Mutant
from tests.mutants.runner import ALL_FOUND, Checkout, Outcome

ROOT = Path(__file__).parents[2]
_WIDTH = max(len(mutant.name) for mutant in MUTANTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and print its table. Return the exit status."""
    options = _parser().parse_args(arguments)
    chosen = _chosen(options.names)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:{_WIDTH}}  {mutant.path}: {mutant.breaks}")
        return 0
    checkout = Checkout(options.checkout.resolve(), options.timeout)
    if not options.skip_baseline and not _baseline_passes(checkout, chosen):
        return 1
    print(f"{'mutant':{_WIDTH}}  {'outcome':13}  {'seconds':>7}  failing test: first line of its failure", flush=True)
    outcomes = []
    for mutant in chosen:
        outcome = checkout.try_mutant(mutant)
        outcomes.append(outcome)
        print(_line(mutant, outcome), flush=True)
    found = sum(outcome.state in ALL_FOUND for outcome in outcomes)
    print(f"{found} of {len(outcomes)} mutants were found")
    return 0 if found == len(outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Run tests against faulty copies of the provider."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run, or patterns such as 'ledger-*'; default all")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, metavar="DIR", help="a checkout with its own .venv; default this one"
    )
    parser.add_argument("--skip-baseline", action="store_true", help="do not run the tests against the unchanged provider first")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for the tests of one mutant; default 600"
    )
    return parser


def _chosen(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants that the names select, in the catalog's order. A name that selects none ends the script."""
    for name in names:
        if not any(fnmatchcase(mutant.name, name) for mutant in MUTANTS):
            sys.exit(f"there is no mutant `{name}`: see --list")
    return [mutant for mutant in MUTANTS if not names or any(fnmatchcase(mutant.name, name) for name in names)]


def _baseline_passes(checkout: Checkout, chosen: Sequence[Mutant]) -> bool:
    """Return True if all tests pass against the unchanged provider; print those that do not."""
    tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    print(f"{len(tests)} tests against the unchanged provider ...", flush=True)
    baseline = checkout.baseline(tests)
    for problem in baseline.problems:
        print(f"  {problem}")
    print(f"  {'not all passed' if baseline.problems else 'all passed'}, {baseline.seconds:.0f} s", flush=True)
    return not baseline.problems


def _line(mutant: Mutant, outcome: Outcome) -> str:
    said = ": ".join(filter(None, (outcome.test, outcome.line)))
    return f"{mutant.name:{_WIDTH}}  {outcome.state:13}  {outcome.seconds:7.1f}  {said}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
