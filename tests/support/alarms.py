"""Lines of a log that would alarm a user."""

from __future__ import annotations

import re

_ALARM = re.compile(
    r"\[(?:warning|error|critical) *\]|\b(?:WARN|WARNING|ERROR|FATAL|CRITICAL)\b|^%[0-4]\||Traceback|Exception|^\s+at \S"
)
_OF_AIRFLOW = re.compile(
    r"graphviz|StarletteDeprecationWarning|DeprecatedImportWarning"
    r"|'kafka' has been already registered|already registered, skipping"
)
"""Lines of Airflow itself, which it writes with any provider. The type `kafka`: docs/installation.md. The plugin: in an editable
installation Airflow finds the metadata of this package twice.
"""


def alarms(log: str) -> list[str]:
    """Return the lines of level WARNING or worse, those of librdkafka, and those of stack traces of Python and Java."""
    return [line for line in log.splitlines() if _ALARM.search(line) and not _OF_AIRFLOW.search(line)]
