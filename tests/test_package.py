"""The package as others meet it: its metadata, its wheel in an empty environment, and what importing it costs."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import jsonschema
import pytest
from packaging.requirements import Requirement

import airflow_kafka_spark
from airflow_kafka_spark.provider_info import get_provider_info

NAME = "airflow-provider-kafka-spark"
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "provider" / "airflow_kafka_spark"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

# What takes long to import, and belongs into functions.
HEAVY = (
    "adbc_driver_manager",
    "adbc_driver_postgresql",
    "confluent_kafka",
    "deltalake",
    "pandas",
    "psycopg",
    "pyarrow",
    "pyiceberg",
    "pyspark",
)

# A module imports from its own floor or from one below, never from above.
FLOORS = {
    "arguments": -1,
    "errors": -1,
    "librdkafka": -1,
    "windows": 0,
    "hooks": 10,
    "ledger": 12,
    "control": 14,
    "formats": 20,
    "sinks": 20,
    "sources": 20,
    "transforms": 20,
    "triggers": 20,
    "bad_records": 25,
    "jobs": 30,
    "verification": 30,
    "operators": 40,
    "plugins": 40,
    "sensors": 40,
    "ui": 40,
    "testing": 50,
    "cli": 60,
    "demo": 70,
}

# What a DAG file may import, directly or through the scheduler.
DAG_FILE_PACKAGES = ("formats", "operators", "plugins", "sensors", "sinks", "sources", "transforms", "triggers", "windows")


def module_files(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module below ``package`` by its dotted name, found on disk, without importing any."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def importable(names: dict[str, Path]) -> list[str]:
    """Return the modules that may be imported anywhere: without commands and modules for Spark's Python workers."""
    return [name for name in names if not name.endswith("__main__") and ".tasks." not in name]


def run(*command: object, cwd: Path, **variables: str) -> str:
    """Run a command that knows nothing of this checkout, and return what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "AIRFLOW", "VIRTUAL_ENV"))} | variables
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- metadata -------------------------------------------------------------------------------------------------------


def test_provider_info_is_valid_against_the_schema_of_airflow() -> None:
    airflow = importlib.util.find_spec("airflow")
    assert airflow is not None and airflow.submodule_search_locations
    schema = json.loads((Path(airflow.submodule_search_locations[0]) / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)


def test_provider_info_and_metadata_agree() -> None:
    info = get_provider_info()
    metadata = importlib.metadata.metadata(NAME)
    assert info["package-name"] == metadata["Name"] == NAME
    assert info["versions"] == [metadata["Version"]] == [airflow_kafka_spark.__version__]
    entries = importlib.metadata.distribution(NAME).entry_points.select(group="apache_airflow_provider")
    assert [entry.load() for entry in entries] == [get_provider_info]


def test_every_module_that_provider_info_names_exists() -> None:
    info = get_provider_info()
    listed = {name for key in ("operators", "hooks") for entry in info[key] for name in entry["python-modules"]}
    assert listed <= set(module_files())


def test_pyspark_client_is_pinned_to_the_pyspark_of_the_constraints() -> None:
    extra = [
        requirement
        for requirement in map(Requirement, importlib.metadata.requires(NAME) or [])
        if requirement.marker and requirement.marker.evaluate({"extra": "spark-provider"})
    ]
    pins = {requirement.name: str(requirement.specifier) for requirement in extra if requirement.name.startswith("pyspark")}
    constrained = {str(r.specifier) for r in constraints() if r.name == "pyspark"}
    assert pins.keys() == {"pyspark", "pyspark-client"}
    assert set(pins.values()) == constrained


def constraints() -> list[Requirement]:
    lines = CONSTRAINTS.read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_each_package_once(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    valid = [r for r in constraints() if r.marker is None or r.marker.evaluate(environment)]
    assert not [name for name, count in Counter(r.name for r in valid).items() if count > 1]
    assert not [str(r) for r in valid if r.url or [s.operator for s in r.specifier] != ["=="]]


# --- the wheel ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uv() -> str | None:
    """The fast installer, if there is one."""
    return shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that building leaves nothing in the checkout and finds nothing of earlier builds."""
    copy = tmp_path_factory.mktemp("source") / "project"
    leftovers = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "spark-warehouse")
    shutil.copytree(ROOT, copy, ignore=leftovers)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, uv: str | None) -> Path:
    """The wheel, built from the source archive as ``make dist`` does."""
    installer = ["--installer", "uv"] if uv else []
    path = os.pathsep.join([str(Path(uv).parent) if uv else "", os.environ.get("PATH", "")])
    run(sys.executable, "-m", "build", *installer, "--outdir", source / "dist", source, cwd=source, PATH=path)
    assert [path.name for path in (source / "dist").glob("*.tar.gz")]
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty_python(wheel: Path, uv: str | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and its dependencies, nothing else."""
    home = tmp_path_factory.mktemp("empty")
    python = home / "venv" / "bin" / "python"
    if uv:
        run(uv, "venv", "--quiet", "--python", sys.executable, home / "venv", cwd=home)
        install = [uv, "pip", "install", "--quiet", "--python", python, "-c", CONSTRAINTS, wheel]
        # What the constraints name was installed here before, so uv mostly has it: reading the index takes 40 times as long.
        if subprocess.run([*install, "--offline"], cwd=home, capture_output=True, check=False).returncode:
            run(*install, cwd=home)
    else:
        run(sys.executable, "-m", "venv", home / "venv", cwd=home)
        run(python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, wheel, cwd=home)
    return python


def test_the_wheel_holds_the_package_and_nothing_else(source: Path, wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in files if name.split("/")[0].endswith(".dist-info")}
    package = source / "provider"
    assert files - about == {str(path.relative_to(package)) for path in package.rglob("*") if is_shipped(path)}
    assert "airflow_kafka_spark/py.typed" in files
    assert any(name.endswith("/licenses/LICENSE") for name in about)


def is_shipped(path: Path) -> bool:
    """Return True if a file below the source root belongs into the wheel."""
    made_by_building = any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
    return path.is_file() and not made_by_building


@pytest.mark.timeout(900)
def test_the_wheel_works_in_an_empty_environment(source: Path, empty_python: Path, tmp_path: Path) -> None:
    code = """if True:
        import importlib, json, sys
        for name in json.loads(sys.argv[1]):
            importlib.import_module(name)
        print(sys.modules["airflow_kafka_spark"].__file__)
    """
    names = json.dumps(importable(module_files(source / "provider" / "airflow_kafka_spark")))
    origin = run(empty_python, "-c", code, names, cwd=tmp_path, AIRFLOW_HOME=str(tmp_path)).splitlines()[-1]
    assert Path(origin).is_relative_to(empty_python.parents[1])


@pytest.mark.timeout(900)
def test_airflow_shows_the_provider(empty_python: Path, tmp_path: Path) -> None:
    airflow = empty_python.with_name("airflow")
    shown = run(airflow, "providers", "get", NAME, "--output", "json", cwd=tmp_path, AIRFLOW_HOME=str(tmp_path))
    assert f'"Provider": "{NAME}"' in shown
    assert f'"Version": "{airflow_kafka_spark.__version__}"' in shown


# --- what imports what ----------------------------------------------------------------------------------------------


@cache
def imported(path: Path, module: str) -> tuple[str, ...]:
    """The dotted names that a file imports anywhere, in functions and for type checking too."""
    return tuple(_imported(path, module))


def _imported(path: Path, module: str) -> Iterator[str]:
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*relative, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_importing_what_a_dag_file_imports_loads_no_heavy_library(tmp_path: Path) -> None:
    names = [name for name in importable(module_files()) if name.count(".") == 0 or name.split(".")[1] in DAG_FILE_PACKAGES]
    code = """if True:
        import importlib, json, sys
        names, heavy = json.loads(sys.argv[1])
        for name in names:
            importlib.import_module(name)
            loaded = [library for library in heavy if library in sys.modules]
            assert not loaded, f"importing {name} loads {loaded}"
    """
    given = json.dumps([names, HEAVY])
    kept = {name: value for name, value in os.environ.items() if name == "PYTHONPYCACHEPREFIX"}
    run(sys.executable, "-c", code, given, cwd=tmp_path, AIRFLOW_HOME=str(tmp_path), PYTHONPATH=str(PACKAGE.parent), **kept)


def test_windows_imports_neither_airflow_nor_spark_nor_kafka() -> None:
    forbidden = {"airflow", *HEAVY}
    found = {
        name: sorted(target for target in imported(path, name) if target.split(".")[0] in forbidden)
        for name, path in module_files().items()
        if name.split(".")[1:2] == ["windows"]
    }
    assert found
    assert not {name: targets for name, targets in found.items() if targets}


def test_what_runs_in_sparks_tasks_imports_neither_airflow_nor_spark() -> None:
    """Executors have no Airflow, and a worker that imports pyspark's driver side takes seconds to start."""
    in_tasks = [name for name in module_files() if ".tasks." in name]
    assert len(in_tasks) > 30
    for name, target in reached_imports(in_tasks):
        assert target.split(".")[0] not in ("airflow", "pyspark"), f"{name} imports {target}, and Spark's tasks import {name}"


@pytest.mark.parametrize("table", ["delta", "iceberg"])
def test_tasks_that_write_a_lake_table_import_neither_its_library_nor_pandas(table) -> None:
    """pyiceberg and pandas take seconds of CPU in each Python worker: longer than the writing of most windows."""
    slow = ("deltalake", "pandas", "pyiceberg", "pyarrow.dataset")
    found = {target for _, target in reached_imports([f"airflow_kafka_spark.sinks.{table}.tasks.data_files"])}
    assert "pyarrow.parquet" in found
    assert not {target for target in found if target.startswith(slow)}


def reached_imports(names: list[str]) -> Iterator[tuple[str, str]]:
    """Each module that is imported with these, and what it imports itself."""
    modules = module_files()
    reached, left = set(names), list(names)
    while left:
        name = left.pop()
        parts = name.split(".")
        # The packages above a module are imported with it.
        targets = [".".join(parts[:end]) for end in range(1, len(parts))]
        for target in imported_at_once(modules[name]):
            yield name, target
            targets += [target, target.rpartition(".")[0]]
        new = {target for target in targets if target in modules} - reached
        reached |= new
        left += new


def imported_at_once(path: Path) -> Iterator[str]:
    """The dotted names that importing a file imports: not those within functions, nor those for type checking."""

    def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                yield from statements(node.orelse)
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from statements([*node.body, *getattr(node, "orelse", ())])
            else:
                yield node

    for node in statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_downwards_only() -> None:
    upwards = [
        f"{name} imports {target}"
        for name, path in module_files().items()
        for target in imported(path, name)
        if (floor := floor_of(name)) is not None and (other := floor_of(target)) is not None and other > floor
    ]
    assert not upwards


def test_nothing_imports_in_circles() -> None:
    """Imports of types only, and imports within functions, are included."""
    modules = {name: path for name, path in module_files().items() if path.name != "__init__.py"}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        # What is imported is a module, or something in one.
        targets = {part for target in imported(path, name) for part in (target, target.rpartition(".")[0]) if part in modules}
        found[name] = targets
    assert len(found) > 200 and sum(map(len, found.values())) > 1000
    TopologicalSorter(found).prepare()  # names a circle where there is one


def folder_of(module: str) -> str:
    """The folder of a module, without `tasks`: code of tasks belongs to the folder around it."""
    return ".".join(part for part in module.split(".")[1:-1] if part != "tasks")


def test_folders_do_not_import_each_other_in_circles() -> None:
    """Code that two folders share is in a folder below both. A folder and its own subfolders count as one."""
    modules = {name: path for name, path in module_files().items() if path.name != "__init__.py"}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        here = folder_of(name)
        for target in imported(path, name):
            there = next((folder_of(part) for part in (target, target.rpartition(".")[0]) if part in modules), here)
            if not f"{here}.".startswith(f"{there}.") and not f"{there}.".startswith(f"{here}.") and here and there:
                found.setdefault(here, set()).add(there)
    assert len(found) > 20
    TopologicalSorter(found).prepare()  # names a circle where there is one


def test_sources_and_sinks_do_not_know_each_other() -> None:
    """Sources and sinks are on one floor. Code that both need is on the floor below."""
    neighbours = {"sinks": "sources", "sources": "sinks"}
    found = {
        name: [target for target in imported(path, name) if target.split(".")[:2] == ["airflow_kafka_spark", neighbour]]
        for name, path in module_files().items()
        if (neighbour := neighbours.get(name.partition(".")[2].partition(".")[0]))
    }
    assert len(found) > 20
    assert not {name: targets for name, targets in found.items() if targets}


def test_every_subpackage_has_its_floor() -> None:
    subpackages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert subpackages <= FLOORS.keys()


def floor_of(module: str) -> int | None:
    """The floor of a module of this package; none for its ground files (faults, version) and for other packages."""
    top, *below = module.split(".")
    return FLOORS.get(below[0]) if top == "airflow_kafka_spark" and below else None


def test_every_benchmark_can_be_imported_and_imports_what_exists():
    from importlib import import_module

    paths = sorted(path for path in (PACKAGE.parents[1] / "benchmarks").glob("*.py") if path.stem != "__main__")
    assert len(paths) > 5
    missing = []
    for path in paths:
        import_module(f"benchmarks.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # Imports within functions, too.
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("airflow_kafka_spark"):
                module = import_module(str(node.module))
                found = {*vars(module), *getattr(module, "__all__", ())}
                for name in [alias.name for alias in node.names if alias.name not in found]:
                    is_module = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}") is not None
                    missing += [] if is_module else [f"{path.name}: {node.module}.{name}"]
    assert missing == []


def test_a_module_of_the_name_of_the_distribution_exists_in_which_airflow_looks_for_example_dags():
    name = "airflow-provider-kafka-spark"
    assert name in {line.split()[-1] for line in (ROOT / "setup.cfg").read_text().splitlines() if line.startswith("name = ")}
    importlib.import_module(name.replace("-", "_"))
