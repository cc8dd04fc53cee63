"""How Sphinx builds the documentation (`make docs`): the pages in Markdown, and the reference from docstrings.

A comment on a line of its own in a page of `reference/` stands for what is made from the code:

- `<!-- public sinks -->`: all classes and functions that `airflow_kafka_spark.sinks` offers;
- `<!-- public hooks.spark.hook SparkHook -->`: some of a module;
- `<!-- commands -->`, `<!-- settings -->`: the command line, and Airflow's configuration.
"""

from __future__ import annotations

import inspect
import re
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING

from sphinx.util import logging

import airflow_kafka_spark

if TYPE_CHECKING:
    from airflow.cli.cli_config import Arg
    from sphinx.application import Sphinx

project = "airflow-provider-kafka-spark"
author = "the authors of airflow-provider-kafka-spark"
version = release = airflow_kafka_spark.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["images"]
html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False

myst_heading_anchors = 4
smartquotes = False  # `--why` stays as it is
suppress_warnings = ["misc.highlighting_failure"]

autodoc_typehints = "none"
autodoc_preserve_defaults = True


def public(module: str, *names: str) -> str:
    """Return the directives for the public names of a module, or for some of them."""
    path = f"airflow_kafka_spark.{module}"
    found = import_module(path)
    kinds = {name: "class" if inspect.isclass(getattr(found, name)) else "function" for name in names or found.__all__}
    directives = "\n\n".join(f".. auto{kind}:: {path}.{name}" for name, kind in kinds.items())
    return f"```{{eval-rst}}\n{directives}\n```"


def commands() -> str:
    """Return a section for each command of the command line."""
    from airflow_kafka_spark.cli.definition import COMMANDS

    sections = []
    for command in COMMANDS:
        rows = "\n".join(f"| {_flags_of(arg)} | {_escaped(arg.kwargs['help'])} |" for arg in command.args)
        sections.append(f"## {command.name}\n\n{command.help}.\n\n| argument | |\n| --- | --- |\n{rows}")
    return "\n\n".join(sections)


def settings() -> str:
    """Return a section for each option of Airflow's configuration."""
    from airflow_kafka_spark.provider_info import get_provider_info

    sections = []
    for name, option in get_provider_info()["config"]["kafka_spark"]["options"].items():
        default = f"`{option['default']}`" if option["default"] else "none"
        sections.append(f"## {name}\n\n{option['description']}\nDefault: {default}. Example: `{option['example']}`.")
    return "\n\n".join(sections)


def _flags_of(arg: Arg) -> str:
    return ", ".join(f"`{flag}`" for flag in arg.flags) + (" (required)" if arg.kwargs.get("required") else "")


def _escaped(text: str) -> str:
    return re.sub(r"([<|*_])", r"\\\1", text)


MADE = {"public": public, "commands": commands, "settings": settings}


def fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the comments of a page of the reference."""
    if page.startswith("reference/"):
        comment = re.compile(rf"^<!-- ({'|'.join(MADE)})([\w. ]*) -->$", re.MULTILINE)
        source[0] = comment.sub(lambda found: MADE[found[1]](*found[2].split()), source[0])


def warn_of_undescribed(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Warn of the arguments of a constructor that no docstring describes, neither the class's nor one that it inherits from."""
    if not inspect.isclass(found) or issubclass(found, Enum):
        return
    classes = [each for each in found.__mro__ if each.__module__.startswith("airflow_kafka_spark.")]
    texts = [inspect.getdoc(part) or "" for each in classes for part in (each, vars(each).get("__init__"))]
    described = set(re.findall(r":param (\w+):", "\n".join(texts)))
    if missing := inspect.signature(found).parameters.keys() - described - {"args", "kwargs"}:
        logging.getLogger(__name__).warning("%s does not describe %s", name, ", ".join(sorted(missing)))


def setup(app: Sphinx) -> None:
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", warn_of_undescribed)
