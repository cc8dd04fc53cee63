"""All problems of a table, a query or their options are reported in one error before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_kafka_spark.errors import Unchecked
from airflow_kafka_spark.hooks.databases import SESSION_ENDED
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.sources.jdbc.validation import ServerValidation
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.postgres.kit import Place, names, new_place
from tests.sources.jdbc.kit import source_of
from tests.sources.postgres_cdc.kit import create_citext
from tests.support.documents import list_commands


@pytest.fixture
def place(postgres: EmbeddedPostgres, unique: Callable[[str], str]) -> Iterator[Place]:
    """A schema of its own in PostgreSQL, and an Airflow connection that leads to it."""
    with new_place(postgres, unique("orders").replace("-", "_")) as found:
        found.execute(
            "CREATE TABLE t (id bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT now(), maybe int, later timestamptz, "
            'doc json NOT NULL, flag boolean NOT NULL, "Name" text NOT NULL, tags int[] NOT NULL)'
        )
        yield found


def validate(source: JdbcSource) -> dict[str, str]:
    """Return the problems with their remedies by argument; each argument has one."""
    problems = [problem for problem in source.validate() if not isinstance(problem, Unchecked)]
    assert len(names(problems)) == len(problems), problems
    assert all(where.startswith("source") for where in names(problems))
    return {problem.where: f"{problem.what}. {problem.action}" for problem in problems}


def test_a_session_that_is_ended_during_the_validation_asks_for_another_try(place: Place) -> None:
    """The server ends the session in which the validation asks a question."""
    source = source_of(place)
    asked = ServerValidation(source, source.find_database(), True)._ask(
        "source.conn_id", "connecting", lambda session: session.fetch_rows("SELECT pg_terminate_backend(pg_backend_pid())")
    )
    assert [(p.where, SESSION_ENDED in p.what, p.action) for p in asked[1]] == [("source.conn_id", True, "Run the task again")]


GOOD: list[dict[str, Any]] = [
    {},
    {"cursor": "id"},
    {"cursor": "id", "mode": "incrementing"},
    {"incrementing_column": "id"},
    {"timestamp_column": "at", "delay": 60},
    {"timestamp_column": "at", "cursor": "id"},
    {"timestamp_column": "later", "validate_non_null": False},
    {"key": ["Name", "id"]},
    {"key": "maybe"},
    {"include_columns": ["id", "doc"]},
    {"mode": "bulk", "max_records": 10},
]


def test_good_options_have_no_problems(place: Place) -> None:
    for options in GOOD:
        assert source_of(place, **options).validate() == [], options


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"mode": "incremental"}, "source.mode", "expected one of bulk, incrementing"),
    ({"mode": "incrementing"}, "source.cursor", "needs it"),
    ({"mode": "timestamp"}, "source.timestamp_column", "needs it"),
    ({"mode": "timestamp+incrementing", "cursor": "id"}, "source.timestamp_column", "needs it"),
    ({"mode": "bulk", "cursor": "id"}, "source.cursor", "means nothing"),
    ({"mode": "incrementing", "cursor": "id", "timestamp_column": "at"}, "source.timestamp_column", "means nothing"),
    ({"cursor": "id", "incrementing_column": "maybe", "validate_non_null": False}, "source.cursor", "the same option"),
    ({"cursor": "at", "timestamp_column": "at"}, "source.timestamp_column", "incrementing column too"),
    ({"cursor": "id", "key": "id"}, "source.key", "cut by the cursor"),
    ({"delay": 5}, "source.delay", "means nothing"),
    ({"timestamp_column": "at", "delay": -1}, "source.delay", "at least 0"),
    ({"split_records": 0}, "source.split_records", "at least 1"),
    ({"split_records": "10"}, "source.split_records", "whole number"),
    ({"max_records": 0}, "source.max_records", "at least 1"),
    ({"fetchsize": 0}, "source.fetchsize", "at least 1"),
    ({"writers_timeout": -1}, "source.writers_timeout", "at least 0"),
    ({"db_timezone": "Mars/Olympus"}, "source.db_timezone", "not a time zone"),
    ({"key": ["id", "id"]}, "source.key", "twice"),
    ({"include_columns": []}, "source.include_columns", "it is empty"),
    ({"include_columns": ["id", "nothing"]}, "source.include_columns", "no column `nothing`"),
    ({"include_columns": ["NAME"]}, "source.include_columns", "only `Name`: names are compared exactly"),
    ({"key": "nothing"}, "source.key", "no column `nothing`"),
    ({"key": "doc"}, "source.key", "in no order"),
    ({"key": "tags"}, "source.key", "in no order"),
    ({"cursor": "nothing"}, "source.cursor", "no column `nothing`"),
    ({"incrementing_column": "nothing"}, "source.incrementing_column", "no column `nothing`"),
    ({"cursor": "maybe"}, "source.cursor", "takes NULL"),
    ({"timestamp_column": "later"}, "source.timestamp_column", "takes NULL"),
    ({"cursor": "flag"}, "source.cursor", "do not grow"),
    ({"timestamp_column": "Name"}, "source.timestamp_column", "expected a timestamp or a date"),
]


def test_a_bad_option_is_named(place: Place) -> None:
    for options, where, what in BAD:
        found = validate(source_of(place, **options))
        assert list(found) == [where], options
        assert what in found[where], options


def test_a_key_whose_operators_the_session_does_not_see_is_refused(place: Place) -> None:
    """``>`` would compare `citext` as `text`, in another order than that in which the table is cut."""
    schema = create_citext(place)
    place.execute(f"CREATE TABLE names (id {schema}.citext PRIMARY KEY)")
    text = validate(source_of(place, table="names"))["source.key"]
    assert "in no order. Name another column, or have the schema of its type in the `search_path`" in text
    place.connect_with(f"{place.server.connection_uri()}?options=-csearch_path%3D{place.schema},{schema}")
    assert source_of(place, table="names").validate() == []


def test_all_problems_are_reported_at_once(place: Place) -> None:
    place.execute("CREATE TABLE bare (x int)")
    source = source_of(place, "bare", split_records=0, max_records=-1, include_columns=["y"], db_timezone="x", delay=1)
    expected = {"split_records", "max_records", "include_columns", "db_timezone", "delay", "key"}
    assert set(validate(source)) == {f"source.{option}" for option in expected}


def test_either_a_table_or_a_query(place: Place) -> None:
    assert "neither is given" in validate(JdbcSource(place.conn_id))["source"]
    assert "both are given" in validate(JdbcSource(place.conn_id, "t", query="SELECT 1"))["source"]
    assert "it is empty" in validate(JdbcSource(place.conn_id, query=" ;"))["source.query"]
    assert "not the name of a table" in validate(JdbcSource(place.conn_id, "a.b.c"))["source.table"]


def test_a_table_that_is_not_there(place: Place) -> None:
    assert "there is no table" in validate(source_of(place, "nothing"))["source.table"]
    assert f'there is "{place.schema}"."t", and names are compared exactly' in validate(source_of(place, "T"))["source.table"]
    assert "there is no table" in validate(JdbcSource(place.conn_id, "nowhere.t"))["source.table"]


def test_a_query_that_cannot_be_read(place: Place) -> None:
    assert "syntax error" in validate(JdbcSource(place.conn_id, query="SELEC 1", key="x"))["source.query"]
    assert "does not exist" in validate(JdbcSource(place.conn_id, query="SELECT * FROM nothing", key="x"))["source.query"]
    assert "two columns `a`" in validate(JdbcSource(place.conn_id, query="SELECT 1 AS a, 2 AS a", key="a"))["source.query"]
    assert "no primary key" in validate(JdbcSource(place.conn_id, query="SELECT 1 AS a"))["source.key"]
    assert "no column `b`" in validate(JdbcSource(place.conn_id, query="SELECT 1 AS a", cursor="b"))["source.cursor"]
    dropping = f"SELECT 1 AS a) AS x; DROP TABLE {place.quoted}.t; SELECT (SELECT 1"
    assert "multiple commands" in validate(JdbcSource(place.conn_id, query=dropping, key="a"))["source.query"]
    deleting = f"WITH gone AS (DELETE FROM {place.quoted}.t RETURNING id) SELECT id FROM gone"
    assert "must be at the top level" in validate(JdbcSource(place.conn_id, query=deleting, key="id"))["source.query"]
    assert "t" in place.tables()


def test_a_table_without_a_usable_key(place: Place) -> None:
    place.execute("CREATE TABLE bare (x int, y int)")
    place.execute(
        "CREATE UNIQUE INDEX ON bare (x); CREATE UNIQUE INDEX ON bare (y) WHERE y > 0; CREATE UNIQUE INDEX ON bare (abs(y))"
    )
    assert "no primary key" in validate(source_of(place, "bare"))["source.key"]
    assert source_of(place, "bare", key="x").validate() == []
    assert source_of(place, "bare", cursor="x", validate_non_null=False).validate() == []
    place.execute("ALTER TABLE bare ALTER x SET NOT NULL")
    assert source_of(place, "bare").validate() == []


def test_a_cursor_whose_sequence_does_not_only_grow(place: Place) -> None:
    place.execute("CREATE TABLE round (id int PRIMARY KEY GENERATED BY DEFAULT AS IDENTITY (CYCLE MAXVALUE 10))")
    place.execute("CREATE TABLE down (id int PRIMARY KEY GENERATED ALWAYS AS IDENTITY (INCREMENT -1))")
    assert "begins again" in validate(source_of(place, "round", cursor="id"))["source.incrementing_column"]
    assert "runs downwards" in validate(source_of(place, "down", cursor="id"))["source.incrementing_column"]
    assert source_of(place, "down").validate() == []


def test_columns_that_only_differ_in_case(place: Place) -> None:
    place.execute('CREATE TABLE c (id int PRIMARY KEY, "Id" int)')
    assert "upper and lower case" in validate(source_of(place, "c"))["source column `Id`"]
    assert source_of(place, "c", include_columns=["Id"]).validate() == []


def test_a_table_without_columns(place: Place) -> None:
    place.execute("CREATE TABLE empty ()")
    assert "no columns" in validate(source_of(place, "empty"))["source"]


def test_missing_rights_are_reported(place: Place) -> None:
    with place.connect_as_new_role("s3cr3t") as role:
        source = source_of(place, include_columns=["id"])
        usage, select = (
            f'GRANT {right} TO "{role}"' for right in (f'USAGE ON SCHEMA "{place.schema}"', f'SELECT ON "{place.schema}"."t"')
        )
        (problem,) = source.validate()
        found = f'role "{role}" may not use schema "{place.schema}" and may not read column `id` of "{place.schema}"."t"'
        assert (problem.what, list_commands(problem)) == (found, [usage, select])
        for alone, other in ((usage, select), (select, usage)):
            place.execute(alone)
            (problem,) = source.validate()
            assert list_commands(problem) == [other]
            place.execute(other)
            assert source.validate() == []
            place.execute(f"REVOKE USAGE ON SCHEMA {place.schema} FROM {role}; REVOKE SELECT ON t FROM {role}")
        place.execute(f"{usage}; GRANT SELECT (id, at) ON t TO {role}")
        assert source.validate() == []
        assert source_of(place, timestamp_column="at", include_columns=["id"]).validate() == []
        assert "column `Name` of" in validate(source_of(place, key="Name", include_columns=["id"]))["source.table"]
        (hidden,) = source_of(place).validate()
        assert hidden.what.count("`") == 12, "one line names all six"
        view = f"SELECT * FROM {place.quoted}.t"
        assert "permission denied" in validate(JdbcSource(place.conn_id, query=view, key="id"))["source.query"]


def test_a_connection_that_leads_nowhere(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it is not defined" in validate(JdbcSource("nothing_of_that_name", "t"))["source.conn_id"]
    monkeypatch.setenv("AIRFLOW_CONN_WEB", "http://example.org")
    assert "of type `http`" in validate(JdbcSource("web", "t"))["source.conn_id"]
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", "postgres://u:s3cr3t@127.0.0.1:1/db")
    down = validate(JdbcSource("down", "t", cursor="id", split_records=0))
    assert set(down) == {"source.conn_id", "source.split_records"}
    assert "127.0.0.1:1/db" in down["source.conn_id"]
    server = place.server
    wrong = f"postgres://{server.user}:s3cr3t@{server.host}:{server.port}/{server.database}"
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", wrong)
    assert "password authentication failed" in validate(JdbcSource("wrong", "t"))["source.conn_id"]
    assert "s3cr3t" not in str(validate(JdbcSource("wrong", "t"))) + str(down)


def test_settings_that_the_driver_for_spark_does_not_know_are_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """psycopg would connect, and every task fail."""
    monkeypatch.setenv("AIRFLOW_CONN_SOCKET", json.dumps({"conn_type": "postgres", "host": "/var/run", "schema": "x"}))
    sockets = [problem.what for problem in JdbcSource("socket", "t").validate()]
    assert any("by TCP" in what for what in sockets)
    uri = place.server.connection_uri()
    place.connect_with(f"{uri}?passfile=%2Ftmp%2Fnothing")
    assert "`passfile`" in validate(source_of(place))["source.conn_id"]
    place.connect_with(f"{uri}?sslmode=prefer&connect_timeout=5&options=-csearch_path%3Dpg_catalog")
    assert source_of(place).validate() == []


def test_nothing_is_changed(place: Place) -> None:
    before = place.tables()
    source_of(place, cursor="id").validate()
    assert place.tables() == before
    assert place.one("SELECT last_value FROM t_id_seq") == 1
