"""Airflow's store of the state of a task instance, which Airflow 3.3 and later have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class TaskStateStore(Protocol):
    """Airflow's store of the state of a task instance."""

    def get(self, key: str) -> Any:
        """Return the JSON value of a key; None if the key does not exist."""

    def delete(self, key: str) -> None:
        """Remove a key."""

    def set(self, key: str, value: object) -> None:
        """Store a JSON value under a key."""


def find_task_state_store(context: Mapping[str, Any]) -> TaskStateStore | None:
    """Return the store of a task; None if Airflow has none (before 3.3).

    :param context: the context of the task.
    """
    try:
        return context.get("task_state_store")
    except Exception:
        return None
