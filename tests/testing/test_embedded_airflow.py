"""The embedded Airflow before it starts: its components, and the database of its metadata.

tests/with_airflow/test_without_scheduler.py has the tests of a running one.
"""

from __future__ import annotations

from airflow_kafka_spark.testing import EmbeddedAirflow
from airflow_kafka_spark.testing.airflow import SqliteDatabase


def test_the_dag_processor_is_a_component_unless_it_is_left_out(tmp_path):
    assert EmbeddedAirflow(tmp_path)._components == ("dag-processor",)
    assert EmbeddedAirflow(tmp_path, components=("triggerer",), dag_processor=False)._components == ("triggerer",)


def test_sqlite_begins_as_a_copy_of_one_that_was_migrated_before(tmp_path, monkeypatch):
    monkeypatch.setenv("AIRFLOW_KAFKA_SPARK_CACHE", str(tmp_path / "cache"))
    migrated = []
    for home in (tmp_path / "one", tmp_path / "two"):
        home.mkdir()
        database = SqliteDatabase(home)
        database.start()
        database.migrate({}, lambda home=home: migrated.append(home) or (home / "airflow.db").touch())
        assert (home / "airflow.db").exists()
    assert migrated == [tmp_path / "one"]
    again = SqliteDatabase(tmp_path / "two")
    again.start()
    again.migrate({}, lambda: migrated.append("again"))
    assert migrated[1:] == ["again"], "a database that is kept is brought up to date by Airflow"
