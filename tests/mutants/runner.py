"""Run tests against a copy of the provider, in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants import plugin
from tests.mutants.model import PACKAGE, Mutant, NotApplicable

FOUND, FOUND_IN_SETUP, FOUND_HUNG = "found", "found (setup)", "found (hung)"
NOT_FOUND, NOT_RUN = "NOT FOUND", "NOT RUN"
ALL_FOUND = (FOUND, FOUND_IN_SETUP, FOUND_HUNG)

_STOP_SECONDS = 60


@dataclass(frozen=True)
class Outcome:
    """The result of a run of a mutant's tests.

    :param state: one of the constants of this module.
    :param seconds: how long the run took.
    :param test: the node id of the test that failed first.
    :param line: the first line of its failure, or why nothing was run.
    """

    state: str
    seconds: float
    test: str = ""
    line: str = ""


@dataclass(frozen=True)
class Baseline:
    """The result of the tests with the unchanged provider.

    :param seconds: how long the run took.
    :param problems: one line per test that did not pass.
    """

    seconds: float
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Checkout:
    """A checkout of the project with a virtual environment in ``.venv``.

    :param root: its directory.
    :param timeout: seconds that the tests of one mutant may take.
    """

    root: Path
    timeout: float

    def baseline(self, tests: Sequence[str]) -> Baseline:
        """Run tests against an unchanged copy of the provider. Each of them has to pass."""
        with self._copy() as package:
            ran = self._run(package, tests, stop_at_first=False)
        problems = [f"failed: {test} ({when}): {line}" for test, when, line in ran.found.get("failed", ())]
        problems += [f"skipped: {test}" for test in ran.found.get("skipped", ())]
        if ran.hung:
            problems.append(f"the run was stopped after {ran.seconds:.0f} s")
        elif ran.code != 0 and not problems:
            problems.append(f"pytest ended with status {ran.code}: {ran.tail}")
        return Baseline(ran.seconds, tuple(problems))

    def try_mutant(self, mutant: Mutant) -> Outcome:
        """Run a mutant's tests against a copy of the provider that has its fault."""
        with self._copy() as package:
            try:
                mutant.apply(package)
            except NotApplicable as error:
                return Outcome(NOT_RUN, 0.0, line=str(error))
            ran = self._run(package, mutant.tests, stop_at_first=True)
        failed = ran.found.get("failed")
        if failed:
            test, when, line = failed[0]
            return Outcome(FOUND if when == "call" else FOUND_IN_SETUP, ran.seconds, test, line)
        if ran.hung:
            return Outcome(FOUND_HUNG, ran.seconds, line=f"the tests did not end within {self.timeout:.0f} s")
        if ran.code == 0 and ran.found.get("passed"):
            return Outcome(NOT_FOUND, ran.seconds)
        return Outcome(NOT_RUN, ran.seconds, line=f"pytest ended with status {ran.code}: {ran.tail}")

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        """A copy of the package in a temporary directory, with the plugin beside it."""
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as directory:
            package = Path(directory).resolve() / "provider" / PACKAGE
            shutil.copytree(self.root / "provider" / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
            beside = package.parents[1] / "plugin"
            beside.mkdir()
            shutil.copy(plugin.__file__, beside / "mutant_plugin.py")
            yield package

    def _run(self, package: Path, tests: Sequence[str], *, stop_at_first: bool) -> _Ran:
        scratch = package.parents[1]
        result, log = scratch / "result.json", scratch / "log"
        options = ["-q", "-p", "no:cacheprovider", "-p", "mutant_plugin", "--no-header", *(["-x"] if stop_at_first else [])]
        options += ["-m", "not extended"]  # which `make test` does not run
        # First of all, and inherited by every process that a test starts, Spark's Python workers among them.
        path = os.pathsep.join([str(package.parent), str(scratch / "plugin")])
        env = {**os.environ, "PYTHONPATH": path, plugin.COPY: str(package), plugin.RESULT: str(result)}
        # Examples that fail because of a mutant are of no use elsewhere.
        env["HYPOTHESIS_STORAGE_DIRECTORY"] = str(scratch / "hypothesis")
        began = time.monotonic()
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [str(self.root / ".venv" / "bin" / "python"), "-m", "pytest", *options, *tests],
                cwd=self.root, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            hung = False
            try:
                process.wait(self.timeout if stop_at_first else None)
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                _stop(process)
        seconds = time.monotonic() - began
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        _remove_bytecode(found, package)
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return _Ran(process.returncode, hung, seconds, found, lines[-1] if lines else "it said nothing")


@dataclass(frozen=True)
class _Ran:
    """A run of pytest.

    :param found: what the plugin wrote; empty if it came to nothing.
    :param tail: the last line of output.
    """

    code: int
    hung: bool
    seconds: float
    found: Mapping[str, Any]
    tail: str


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a running test process: by an interrupt, which lets its fixtures stop their servers, then by SIGKILL."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _remove_bytecode(found: Mapping[str, Any], package: Path) -> None:
    """Remove the bytecode of the copy if tests keep bytecode in a separate directory: it is not used again."""
    if prefix := found.get("bytecode"):
        shutil.rmtree(Path(prefix, *package.parents[1].parts[1:]), ignore_errors=True)
