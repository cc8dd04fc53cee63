"""A role of PostgreSQL changes while a window is moved: its password, or a right.

Sessions that are open stay, and new ones are refused. Each test then corrects only the Airflow connection, or the right, and runs
the task again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from airflow_kafka_spark.errors import SinkUnavailable, SourceRejected, ValidationError
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.support import workers
from tests.support.pipelines import Pipeline, pipeline
from tests.support.shop import Shop, shop

OLD, NEW = "password-of-before", "password-of-now"


def run_sql(postgres: EmbeddedPostgres, *statements: str) -> None:
    with postgres.connect(autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def connect(monkeypatch: pytest.MonkeyPatch, conn_id: str, postgres: EmbeddedPostgres, role: str, password: str) -> None:
    fields = {**json.loads(postgres.connection_json()), "login": role, "password": password}
    monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(fields))


def make_role(postgres: EmbeddedPostgres, role: str, table: str) -> None:
    run_sql(
        postgres,
        f"CREATE ROLE \"{role}\" LOGIN PASSWORD '{OLD}'",
        f'GRANT ALL ON "{table}" TO "{role}"',
        f'GRANT ALL ON SCHEMA public TO "{role}"',
        f'GRANT ALL ON ALL TABLES IN SCHEMA public TO "{role}"',
    )


def run_stopped(made: Pipeline | Shop, point: str, once: Path, change: Callable[[], None]) -> None:
    """Run an attempt, and change something while one of its tasks is stopped.

    :raises Exception: the error of the attempt.
    """
    with workers.fault_in_tasks(f"{point}:stop", once), ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(made.run, "run1")
        pid = workers.wait_stopped(once)
        change()
        workers.wake(pid)
        attempt.result()


@pytest.mark.parametrize("kind", ["postgres", "postgres-split"])
def test_a_password_that_changes_while_a_window_is_moved_is_named_and_each_record_is_there_once_with_the_new_one(
    kafka, postgres, unique, tmp_path, monkeypatch, caplog, kind
):
    role = unique("role")
    with pipeline(kind, kafka, lambda: postgres, unique, tmp_path, partitions=6) as made:
        make_role(postgres, role, made.place)
        connect(monkeypatch, "warehouse", postgres, role, OLD)
        made.produce(600)
        made.run("run0")
        made.produce(600)
        change = f"ALTER ROLE \"{role}\" PASSWORD '{NEW}'"
        with pytest.raises(SinkUnavailable, match=f'password authentication failed for user "{role}"') as failure:
            run_stopped(made, "split.flushed", tmp_path / "once", lambda: run_sql(postgres, change))
        assert failure.value.action.startswith("Correct the login of the Airflow connection")
        with pytest.raises(ValidationError, match="sink.conn_id.*password authentication failed"):
            made.run("run1")
        connect(monkeypatch, "warehouse", postgres, role, NEW)
        assert made.run("run1")["records_written"] == 600
        assert made.check() == 1200
        assert OLD not in f"{failure.value}{caplog.text}" and NEW not in caplog.text


def test_a_right_that_is_revoked_while_rows_are_published_is_named_and_each_row_is_there_once_when_it_is_granted(
    kafka, postgres, unique, tmp_path, monkeypatch
):
    role = unique("role")
    with shop(kafka, postgres, unique, tmp_path) as made:
        make_role(postgres, role, made.table)
        connect(monkeypatch, "shop", postgres, role, OLD)
        made.sell(1200)
        revoke = f'REVOKE SELECT ON "{made.table}" FROM "{role}"'
        with pytest.raises(SourceRejected, match="reading split .*permission denied for table") as failure:
            run_stopped(made, "publish.begin", tmp_path / "once", lambda: run_sql(postgres, revoke))
        assert failure.value.action == "Grant the user of the connection what is missing"
        run_sql(postgres, f'GRANT SELECT ON "{made.table}" TO "{role}"')
        assert made.run("run1")["records_written"] == 1200
        assert made.check() == 1200
