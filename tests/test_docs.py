"""The documentation: its links, its DAGs, and that it names all there is. Nothing is built here; `make docs` does that."""

from __future__ import annotations

import ast
import builtins
import inspect
import pkgutil
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.providers.common.compat.sdk import BaseHook, BaseOperator

from airflow_kafka_spark import errors, formats, sinks, sources, transforms
from airflow_kafka_spark.cli.definition import COMMANDS
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.provider_info import get_provider_info
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
DAG_FILES = (*sorted((ROOT / "dags").glob("*.py")), *sorted((ROOT / "examples").glob("*.py")))

# What users import. `docs/conf.py` puts it into the reference.
PUBLIC = ("operators", "sensors", "sinks", "sources", "formats", "transforms", "errors", "testing")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text_of(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,6} (.+)$", text_of(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in headings]
    return frozenset(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain)


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# --- links ----------------------------------------------------------------------------------------------------------


def test_every_internal_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    targets = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page))]
    for page, target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(f"{named(page)}: {target}")
    assert not broken


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {name for block in code_blocks(DOCS / "index.md", r"\{toctree\}") for name in block.split()}
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} - {"index"}
    assert pages <= listed


# --- DAGs -----------------------------------------------------------------------------------------------------------


def dag_blocks() -> list[tuple[str, str]]:
    """The blocks of Python in the pages that hold a DAG, each with the name of its page."""
    return [(named(page), block) for page in PAGES for block in code_blocks(page, "python") if re.search(r"\bDAG\(", block)]


def test_every_dag_of_the_documentation_is_a_file() -> None:
    files = [path.read_text(encoding="utf-8") for path in DAG_FILES]
    unknown = [(page, block) for page, block in dag_blocks() if not any(block in text for text in files)]
    assert not unknown, "these pages have a DAG that no file below examples/ has"


@pytest.mark.parametrize("path", DAG_FILES, ids=named)
def test_every_example_is_parsed_without_a_server(path: Path) -> None:
    found = DagBag(path, safe_mode=False, bundle_name="testing")
    assert not found.import_errors
    assert found.dags and all(dag.tasks for dag in found.dags.values())


def test_no_two_examples_have_one_dag_id() -> None:
    ids = [m for path in DAG_FILES for m in re.findall(r'\bDAG\(\s*"(\w+)"', path.read_text(encoding="utf-8"))]
    # `orders` is the DAG of the first pages, in three versions.
    assert len(ids) >= len(DAG_FILES) and len([name for name in ids if name != "orders"]) == len({*ids} - {"orders"})


def test_every_block_of_python_is_valid() -> None:
    for page in PAGES:
        for block in code_blocks(page, "python"):
            ast.parse(block, named(page))


def takes(called: Callable[..., object]) -> set[str] | None:
    """Return the names of the arguments of a class or a function; None if it takes any."""
    shown = inspect.signature(called).parameters.values()
    names = {parameter.name for parameter in shown if parameter.kind is not parameter.VAR_KEYWORD}
    if len(names) == len(shown):
        return names
    if not (isinstance(called, type) and issubclass(called, BaseOperator)):
        return None
    # Airflow's own classes describe the other arguments of an operator or a sensor.
    return names.union(*(inspect.signature(each.__init__).parameters for each in called.__mro__ if "__init__" in vars(each)))


def test_every_argument_in_a_block_of_python_exists() -> None:
    modules = [import_module(f"airflow_kafka_spark.{name}") for name in PUBLIC]
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    blocks = [(page, block) for page in PAGES for block in code_blocks(page, "python")]
    calls = [(page, node) for page, block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    compared, unknown = 0, []
    for page, call in calls:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if not callable(called := public.get(name)) or (known := takes(called)) is None:
            continue
        compared += 1
        unknown += [f"{named(page)}: {name}({given.arg}=)" for given in call.keywords if given.arg and given.arg not in known]
    assert compared > 100 and not unknown


# --- the reference ------------------------------------------------------------------------------------------------


def in_reference() -> dict[str, set[str]]:
    """The names that the pages of the reference show of each module; all of ``__all__`` where a page names none."""
    shown: dict[str, set[str]] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for module, names in re.findall(r"^<!-- public ([\w.]+)([\w ]*) -->$", page.read_text(encoding="utf-8"), re.MULTILINE):
            found = import_module(f"airflow_kafka_spark.{module}")
            shown.setdefault(module, set()).update(names.split() or found.__all__)
            assert all(hasattr(found, name) for name in shown[module])
    return shown


MODULES = sorted((ROOT / "provider").rglob("*.py"))
ITEM = re.compile(r" *(:\w[^:]*:(?= |$)|- |\* |\d+\. )")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dedented_lines(text: str) -> list[str]:
    """Return the lines that begin left of the text of the field or item of a list which they go on."""
    found, least = [], 0
    for line in inspect.cleandoc(text).splitlines():
        indent = len(line) - len(line.lstrip())
        if item := ITEM.match(line):
            least = indent + (1 if item[1].startswith(":") else len(item[1]))
        elif not line.strip():
            least = 0
        elif indent < least:
            found.append(line)
    return found


def test_every_line_of_a_field_or_an_item_in_a_docstring_is_indented() -> None:
    """Sphinx, which makes the reference, refuses others."""
    assert dedented_lines("x\n\n:param a: one,\ntwo\n- three,\n four") == ["two", " four"]
    broken = [
        f"{named(path)}: {line}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for line in dedented_lines(ast.get_docstring(node) or "")
    ]
    assert broken == []


REFERENCE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


def defined_names(within: ast.Module | ast.ClassDef) -> set[str]:
    """Return the names that a module or a class defines or imports, and the attributes that methods of the class assign."""
    names: set[str] = set()
    for node in ast.walk(within):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


@cache
def names_of_modules() -> frozenset[str]:
    return frozenset().union(*(defined_names(parsed(path)) for path in MODULES))


@cache
def names_of_classes() -> dict[str, set[str]]:
    """The names of the methods and attributes of each class of the package, those of its base classes included."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for node in [node for path in MODULES for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]:
        own.setdefault(node.name, set()).update(defined_names(node))
        bases.setdefault(node.name, set()).update(ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases)

    def collect(name: str) -> set[str]:
        return own.get(name, set()).union(*(collect(base) for base in bases.get(name, set()) - {name}))

    return {name: collect(name) for name in own}


def leads_somewhere(name: str, around: set[str]) -> bool:
    """Return True if a reference leads to a module, or to something in a module or a class.

    :param name: the reference: a full name, one with a dot in front, which may be anywhere, or one of the module or class.
    :param around: the names of the module and of the classes in which the reference is.
    """
    *owner, last = name.lstrip(".").split(".")
    if owner and owner[-1] in names_of_classes():
        return last in names_of_classes()[owner[-1]]
    if name.startswith("."):
        is_module = any(named(path).endswith(f"{name.replace('.', '/')}.py") for path in MODULES)
        return is_module or last in names_of_modules()
    if not owner:
        return last in around or hasattr(builtins, last)
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def broken_references(module: ast.Module, text: str) -> list[str]:
    """Return the references of a module's docstrings that lead nowhere, each behind the number of its line."""
    here, broken = defined_names(module), []
    classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    for number, line in enumerate(text.splitlines(), 1):
        for name in REFERENCE.findall(line):
            inside = [names_of_classes()[c.name] for c in classes if c.lineno <= number <= (c.end_lineno or 0)]
            if not leads_somewhere(name, here.union(*inside)):
                broken.append(f"{number}: {name}")
    return broken


def test_every_reference_in_a_docstring_leads_to_something() -> None:
    text = '"""Calls :func:`open`, :meth:`Window.begin`, :meth:`Window.lost`, :data:`.LOST` and :func:`os.lost`."""'
    assert broken_references(ast.parse(text), text) == ["1: Window.begin", "1: Window.lost", "1: .LOST", "1: os.lost"]
    broken = {named(path): broken_references(parsed(path), path.read_text(encoding="utf-8")) for path in MODULES}
    assert {path: found for path, found in broken.items() if found} == {}


def test_the_reference_shows_every_public_name() -> None:
    shown = in_reference()
    missing = {name: set(import_module(f"airflow_kafka_spark.{name}").__all__) - shown.get(name, set()) for name in PUBLIC}
    assert not {name: names for name, names in missing.items() if names}


TABLES = {
    "sinks": (
        sinks.Sink,
        ("README.md", "docs/sinks.md", "docs/installation.md", "docs/intervals.md", "docs/offsets.md", "docs/upgrades.md"),
    ),
    "sources": (sources.RowSource, ("docs/sources.md", "docs/offsets.md", "docs/connections.md")),
    "formats": (formats.Format, ("docs/formats.md",)),
    "transforms": (transforms.Transform, ("docs/transforms.md",)),
}
"""Base classes, and the pages that compare all of their public subclasses."""


@pytest.mark.parametrize("package", TABLES)
def test_pages_that_compare_sinks_sources_formats_or_transforms_name_all_of_them(package: str) -> None:
    base, pages = TABLES[package]
    module = import_module(f"airflow_kafka_spark.{package}")
    found = {name: getattr(module, name) for name in module.__all__}
    public = [
        name for name, cls in found.items() if inspect.isclass(cls) and issubclass(cls, base) and not inspect.isabstract(cls)
    ]
    assert public
    assert not [f"{page} lacks {name}" for page in pages for name in public if name not in (ROOT / page).read_text("utf-8")]


def test_the_reference_shows_every_hook() -> None:
    names = [name for entry in get_provider_info()["hooks"] for name in entry["python-modules"]]
    hooks = {
        (name.removeprefix("airflow_kafka_spark."), found.__name__)
        for name in names
        for found in vars(import_module(name)).values()
        if inspect.isclass(found) and issubclass(found, BaseHook) and found.__module__ == name and hasattr(found, "conn_type")
    }
    shown = {(module, name) for module, found in in_reference().items() for name in found}
    assert len(hooks) >= len(names) and not hooks - shown


def test_every_argument_of_the_command_line_has_a_text_that_names_its_default() -> None:
    """The reference is made of these texts."""
    arguments = [(command.name, arg) for command in COMMANDS for arg in command.args]
    assert not [(name, arg.flags[0]) for name, arg in arguments if not arg.kwargs.get("help")]
    unsaid = [(n, arg.flags[0]) for n, arg in arguments if "default" in arg.kwargs and "(default: " not in arg.kwargs["help"]]
    assert not unsaid


def test_every_command_of_the_pages_has_these_options() -> None:
    flags = {command.name: {flag for arg in command.args for flag in arg.flags} for command in COMMANDS}
    command = re.compile(r"(?:airflow kafka-spark|python -m airflow_kafka_spark) ([a-z]+)([^`\n]*)")
    # Without the comments of blocks, and with the lines that a backslash continues.
    found = [(named(page), *m) for page in PAGES for m in command.findall(re.sub(r"\\\n|  +#.*", " ", page.read_text("utf-8")))]
    assert len(found) > 50
    assert not [f"{page}: {name}" for page, name, _ in found if name not in flags]
    assert not [
        f"{page}: {name} {option}"
        for page, name, rest in found
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", re.sub(r'"[^"]*"', "", rest))
        if option not in flags[name]
    ]


def test_every_setting_has_a_text_and_an_example() -> None:
    options = get_provider_info()["config"]["kafka_spark"]["options"]
    assert options and not [name for name, option in options.items() if not (option["description"] and option["example"])]


# --- troubleshooting ------------------------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    """The entries of the page *Troubleshooting*, by the name of their class."""
    _, *parts = re.split(r"^### (\w+)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_error_has_an_entry_and_every_entry_an_error() -> None:
    assert entries().keys() == set(errors.__all__)


def test_an_entry_has_cause_check_and_remedy_and_says_whether_a_retry_helps() -> None:
    for name, entry in entries().items():
        error, parts = getattr(errors, name), re.findall(r"^- \*\*(\w+)\.\*\* \S", entry, re.MULTILINE)
        assert parts == ["Cause", "Check", "Remedy"], name
        if issubclass(error, KafkaSparkError):
            helps = error.retryable or "retryable" in inspect.signature(error).parameters
            assert ("Retry:" in " ".join(entry.split())) == helps, name


def test_the_options_that_replace_properties_of_connectors_exist() -> None:
    """The options are in the right column of the tables of `migration.md`: `option=...`, and names of classes before a
    parenthesis.
    """
    modules = [import_module(f"airflow_kafka_spark.{name}") for name in PUBLIC]
    public = [CommittedOffsets, *(getattr(module, name) for module in modules for name in module.__all__)]
    known = {name for each in public if callable(each) for name in (each.__name__, *inspect.signature(each).parameters)}
    rows = [line for line in text_of(DOCS / "migration.md").splitlines() if line.startswith("| ")]
    codes = re.findall(r"`([^`]+)`", " ".join(row.split(" | ", 1)[1] for row in rows if " | " in row))
    found = {name for code in codes for name in re.findall(r"(\w+)=|\b([A-Z]\w+)\(", code)}
    assert len(found) > 30
    assert {option or kind for option, kind in found} - known == set()
