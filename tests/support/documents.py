"""Code of the documentation and of messages, for tests that run it as it is written."""

from __future__ import annotations

import re

from airflow_kafka_spark.errors import Problem
from tests.support.runs import ROOT


def read_code(page: str, language: str, containing: str = "") -> str:
    """Return the only block of code of a page below ``docs`` in a language that has a text.

    :param page: the name of the page, as ``cdc.md``.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if containing in block]
    return found


def read_grants(page: str, containing: str, **names: str) -> list[str]:
    """Return the statements of a page's only block of SQL that has a text.

    :param names: name in the page -> the test's own name, which may be quoted.
    """
    statements = read_code(page, "sql", containing)
    for name, own in names.items():
        statements = re.sub(rf"(?<![\w.]){re.escape(name)}\b", lambda _, own=own: own, statements)
    return [statement.strip() for statement in statements.split(";") if statement.strip()]


def list_commands(problem: Problem) -> list[str]:
    """Return the statements of SQL that the action of a problem names, without what it names beside them."""
    found = re.findall(r"(?:GRANT|ALTER ROLE) .*?(?=, or |; |$)", problem.action)
    assert found, problem
    return found
