"""A core set of tests, crash tests among them, with other versions of Python, Spark, Airflow and the clients (``make matrix``).

Each combination has an environment of its own in ``build/matrix``, which is kept for the next run. A summary is written into
``build/matrix/results.md``: the ranges of ``setup.cfg`` and the table of the README follow from it.

Ranges of packages are overridden. A Python outside of ``python_requires`` cannot be installed: widen that to try it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "matrix"

CORE = (
    "tests/hooks/spark/test_hook.py",
    "tests/hooks/spark/test_worker.py",
    "tests/hooks/spark/test_executor_check.py",
    "tests/formats/test_contract.py",
    "tests/formats/test_kernels.py",
    "tests/operators/test_kafka_to_sink.py",
    "tests/operators/test_source_to_kafka.py",
    "tests/operators/test_pause.py",
    "tests/faults/test_kill.py",
    "tests/faults/test_publish.py",
    "tests/sources/kafka",
    "tests/sinks/kafka",
    "tests/librdkafka",
    "tests/transforms/test_arrow.py",
)
"""Reading and writing with each format, both directions, task attempts that are killed, transforms in Arrow as in Spark, and the
memory of the client."""

SHOWN = ("apache-airflow", "pyspark", "confluent-kafka", "pyarrow", "pandas")


@dataclass(frozen=True)
class Combination:
    """Versions that are tried together.

    :param name: of the combination.
    :param python: the minor version of Python.
    :param versions: requirements that differ from the tested set (``constraints.txt``), those of setup.cfg included.
    :param free: packages whose version is not that of the tested set, because ``versions`` need others.
    :param is_free: no package has the version of the tested set: another Airflow needs other versions of most.
    """

    name: str
    python: str
    versions: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    is_free: bool = False


# Releases of Spark whose Kafka connector and pyspark are both to be had.
COMBINATIONS = (
    Combination("tested-set", "3.12"),
    Combination("spark-3.5", "3.11", ("pyspark==3.5.7", "pandas<3"), ("py4j", "numpy")),
    Combination("spark-newest", "3.12", ("pyspark==4.2.0",), ("py4j",)),
    Combination("python-3.10", "3.10"),
    Combination("python-3.13", "3.13"),
    # pyiceberg's catalogs in SQL need SQLAlchemy 2, and Airflow 3.0 an older one: a marker that never holds leaves pyiceberg out.
    Combination(
        "airflow-3.0",
        "3.12",
        ("apache-airflow>=3.0,<3.1", "pyspark==4.0.0", "pyiceberg>=0.12 ; python_version < '3'"),
        is_free=True,
    ),
    Combination("airflow-3.1", "3.12", ("apache-airflow>=3.1,<3.2", "pyspark==4.2.0"), is_free=True),
    Combination("oldest-clients", "3.11", ("confluent-kafka==2.10.1", "pyarrow==16.1.0", "pandas==2.2.2"), ("numpy",)),
    Combination("newest-clients", "3.12", ("confluent-kafka>=2.10.1", "pyarrow>=16.1", "pyspark==4.2.0"), is_free=True),
)


def interpreter(version: str) -> str | None:
    """Return an interpreter of a minor version of Python, from the PATH or of pyenv; None without one."""
    versions = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for candidate in (f"python{version}", *map(str, reversed(versions))):
        try:
            done = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return candidate
    return None


def install(made: Combination, python: str) -> str:
    """Make the environment of a combination unless it is there.

    :return: its interpreter.
    :raises subprocess.CalledProcessError: it cannot be installed.
    """
    home = PLACE / made.name
    own, stamp = home / "bin" / "python", home / ".installed"
    wanted = json.dumps([python, made.versions, made.free, made.is_free, (ROOT / "setup.cfg").read_text(encoding="utf-8")])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return str(own)
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--seed", "--python", python, str(home)], check=True)
    overrides, constraints = home / "overrides.txt", home / "constraints.txt"
    overrides.write_text("\n".join(made.versions), encoding="utf-8")
    named = {_name(requirement) for requirement in (*made.versions, *made.free)} | {"pyspark-client"}
    pins = [] if made.is_free else (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints.write_text("\n".join(pin for pin in pins if _name(pin) not in named), encoding="utf-8")
    command = [*uv, "pip", "install", "--quiet", "--python", str(own), "-c", str(constraints), "--override", str(overrides)]
    subprocess.run([*command, "-e", f"{ROOT}[dev]", "setuptools"], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return str(own)


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0].lower() if found else ""


def versions(python: str) -> dict[str, str]:
    """Return the versions of an environment that the summary shows."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {SHOWN!r}}}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def run(made: Combination, arguments: Sequence[str]) -> tuple[str, str]:
    """Install a combination, run the tests with it, and return its row of the summary, and the last line of the tests."""
    python = interpreter(made.python)
    shown = dict.fromkeys(SHOWN, "")
    if python is None:
        return _row(made, shown, "not run"), f"no Python {made.python} was found"
    try:
        own = install(made, python)
    except subprocess.CalledProcessError:
        return _row(made, shown, "cannot be installed"), "the installer has said why"
    shown = versions(own)
    log = PLACE / f"{made.name}.log"
    command = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE, *arguments]
    with open(log, "w", encoding="utf-8") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = f"ended by signal {-code}" if code < 0 else lines[-1] if lines else ""
    return _row(made, shown, "passed" if code == 0 else "failed"), f"{last} ({log})"


def _row(made: Combination, shown: dict[str, str], verdict: str) -> str:
    return f"| {made.name} | {made.python} | {' | '.join(shown[name] for name in SHOWN)} | {verdict} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    names = [made.name for made in COMBINATIONS]
    parser.add_argument("which", nargs="*", help=f"combinations (default: all): {', '.join(names)}")
    parser.add_argument("--pytest", default="", help="further arguments of pytest, as one text")
    options = parser.parse_args()
    if unknown := set(options.which) - set(names):
        parser.error(f"unknown combinations: {', '.join(sorted(unknown))}")
    PLACE.mkdir(parents=True, exist_ok=True)
    rows = []
    for made in COMBINATIONS:
        if options.which and made.name not in options.which:
            continue
        begun = time.monotonic()
        row, said = run(made, shlex.split(options.pytest))
        rows.append(row)
        print(f"{row}\n   {said}, {time.monotonic() - begun:.0f} s", flush=True)
    head = f"| combination | Python | {' | '.join(SHOWN)} | core tests |"
    table = "\n".join([head, "| " + " | ".join(["---"] * (len(SHOWN) + 3)) + " |", *rows])
    (PLACE / "results.md").write_text(f"{table}\n", encoding="utf-8")
    print(f"\n{table}")
    return 0 if all(row.endswith("| passed |") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
