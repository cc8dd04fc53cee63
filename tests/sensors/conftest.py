from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.lag import connection, hook, topic

__all__ = ["connection", "hook", "topic"]


@pytest.fixture
def context():
    """Return the part of Airflow's context that a sensor needs: ``context(run_id, data_interval_start=...)``."""

    def make(run_id: str = "run1", dag_id: str = "dag", **dag_run: Any) -> dict[str, Any]:
        ti = SimpleNamespace(dag_id=dag_id, run_id=run_id, task_id="task", map_index=-1)
        return {"ti": ti, "dag_run": SimpleNamespace(**dag_run)}

    return make
