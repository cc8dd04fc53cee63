"""All problems that would prevent the write of a window are found at once, before anything is read, and nothing is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, Problem, SinkRejected, SinkUnavailable, Unchecked
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.postgres.sink import PostgresSink
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.postgres.kit import Pipeline, Place, names, new_place, write
from tests.support.documents import list_commands, read_grants

KEYED = pa.schema([("id", pa.int64()), ("v", pa.string())])


def problems(sink: PostgresSink, schema: pa.Schema = KEYED, *, tombstones: bool = False) -> list[Problem]:
    return [p for p in sink.validate(Shape("dag.task", schema, tombstones)) if not isinstance(p, Unchecked)]


def only(found: list[Problem]) -> Problem:
    assert len(found) == 1, found
    return found[0]


def as_text(problem: Problem) -> str:
    return str(problem).replace('""', '"')


# --- connections ----------------------------------------------------------------------------------------------------------


def connection(place: Place, **changes: Any) -> str:
    return json.dumps({**json.loads(place.server.connection_json()), **changes})


def test_an_unknown_connection(place: Place):
    problem = only(problems(PostgresSink("nobody_made_it", "t")))
    assert problem.where == "sink.conn_id" and "nobody_made_it" in problem.what and "postgres" in problem.action


def test_a_connection_of_another_type(place: Place):
    place.connect_with(connection(place, conn_type="mysql"))
    assert "mysql" in only(problems(place.sink())).what


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"password": "wr'ong \\ pass"}, "password authentication failed"),
        ({"password": "a=b host=evil"}, "password authentication failed"),
        ({"schema": "no_such_database"}, "no_such_database"),
        ({"login": "nobody_at_all"}, "nobody_at_all"),
        ({"port": 1}, "refused"),
        ({"host": "no-such-host.invalid"}, "no-such-host.invalid"),
        ({"extra": {"sslmode": "require"}}, "SSL"),
    ],
    ids=["wrong password", "password with libpq words", "database", "role", "host down", "host unknown", "no TLS"],
)
def test_a_server_that_cannot_be_reached_is_one_clear_problem_without_the_password(place: Place, changes: dict, says: str):
    place.connect_with(connection(place, **changes))
    sink = place.sink(mode="upsert")
    found = problems(sink)
    # The other problems are reported, too.
    assert names(found) == {"sink.conn_id", "sink.key"}
    problem = next(p for p in found if p.where == "sink.conn_id")
    assert says in problem.what and place.conn_id in problem.what
    is_refused = "FATAL" in problem.what or "SSL" in problem.what
    assert problem.retryable is not is_refused, "a server that has refused the login refuses it again"
    password = changes.get("password", place.server.password)
    assert password not in str(problem)
    pipeline = Pipeline(KEYED)
    job = pipeline.job([{"id": 1}])
    for step in (
        lambda: sink.find_applied(job.window),
        lambda: sink.find_last_applied("p"),
        lambda: sink.begin(job.window, job.splits, job.shape),
    ):
        with pytest.raises(KafkaSparkError) as caught:
            step()
        assert isinstance(caught.value, SinkUnavailable | SinkRejected)
        chain = [caught.value, caught.value.__cause__]
        assert not any(password in text(error) for error in chain if error for text in (str, repr))


def test_extras_that_libpq_does_not_know_are_named(place: Place):
    place.connect_with(connection(place, extra={"sslmod": "require", "cursor": "dictcursor"}))
    assert "`sslmod`" in only(problems(place.sink())).what
    place.connect_with(connection(place, extra={"iam": True}))
    assert "`iam`" in only(problems(place.sink())).what
    with pytest.raises(ConnectionInvalid):
        _ = place.sink().uri


def test_extras_of_libpq_are_used_and_those_of_other_users_ignored(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text)")
    extra = {
        "cursor": "dictcursor",
        "connect_timeout": 3,
        "sslmode": "prefer",
        "options": "-c work_mem=8MB",
        "keepalives_idle": 5,
    }
    place.connect_with(connection(place, extra=extra))
    assert problems(place.sink()) == []
    with place.sink().find_server().connect() as session:
        assert session.execute("SELECT current_setting('work_mem')").fetchone() == ("8MB",)
    write(place.sink(), Pipeline(KEYED), [{"id": 1}])


def test_a_missing_driver_is_named_with_the_extra_that_brings_it(place: Place, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "[postgres]" in only(problems(place.sink())).action


# --- options --------------------------------------------------------------------------------------------------------------


def test_options_that_contradict_each_other_are_all_named(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text)")
    assert names(problems(place.sink(mode="merge", atomic="rows", merge="soon"))) == {"sink.mode", "sink.atomic", "sink.merge"}
    assert names(problems(place.sink(key=["id"], delete_enabled=True))) == {"sink.key", "sink.delete_enabled"}
    assert names(problems(place.sink(mode="upsert"))) == {"sink.key"}
    assert names(problems(place.sink(lock_timeout=0, windows_table="", window_column="", stage_schema="x" * 64))) >= {
        "sink.lock_timeout",
        "sink.windows_table",
        "sink.window_column",
        "sink.stage_schema",
    }
    assert names(problems(PostgresSink(place.conn_id, "a.b.c"))) == {"sink.table"}


def test_columns_that_cannot_be_are_named(place: Place):
    schema = pa.schema([(name, pa.int64()) for name in ("a", "a", "__airflow_x", "x" * 64, "n\x00")])
    found = problems(place.sink(auto_create=True), schema)
    assert names(found) == {"sink"} and len(found) == 4
    assert "no columns" in only(problems(place.sink(auto_create=True), pa.schema([]))).what
    odd = pa.schema(
        [("d", pa.month_day_nano_interval()), ("u", pa.union([pa.field("a", pa.int64())], "dense")), ("n", pa.null())]
    )
    assert names(problems(place.sink(auto_create=True), odd)) == {"sink.table column `u`", "sink.table column `n`"}
    assert names(problems(place.sink(auto_create=True), pa.schema([("ctid", pa.int64())]))) == {"sink.table column `ctid`"}


# --- tables ---------------------------------------------------------------------------------------------------------------


def test_a_missing_table_says_how_to_make_it(place: Place):
    problem = only(problems(place.sink("nothing")))
    assert problem.where == "sink.table" and '"nothing"' in problem.what and "auto_create" in problem.action
    assert problems(place.sink("nothing", auto_create=True)) == []
    assert place.tables() == []


def test_a_table_that_differs_in_case_is_suggested(place: Place):
    place.execute("CREATE TABLE orders (id bigint, v text)")
    assert '"orders"' in only(problems(place.sink("Orders"))).what


def test_a_missing_schema_is_never_created(place: Place):
    for creates in (True, False):
        found = problems(PostgresSink(place.conn_id, "no_such_schema.t", auto_create=creates))
        assert "no_such_schema" in only(found).what
    found = problems(place.sink("t", auto_create=True, stage_schema="nor_this"))
    assert only(found).where == "sink.stage_schema"


@pytest.mark.parametrize(
    "made, says",
    [
        ("CREATE VIEW t AS SELECT 1::bigint AS id, ''::text AS v", "a view"),
        ("CREATE MATERIALIZED VIEW t AS SELECT 1::bigint AS id, ''::text AS v", "a materialized view"),
        ("CREATE UNLOGGED TABLE t (id bigint, v text)", "UNLOGGED"),
    ],
)
def test_what_is_not_an_ordinary_table_is_refused(place: Place, made: str, says: str):
    place.execute(made)
    assert says in only(problems(place.sink())).what


def test_columns_are_compared_by_exact_name_and_every_one_is_named(place: Place):
    place.execute('CREATE TABLE t ("ID" bigint, needed text NOT NULL, made bigint GENERATED ALWAYS AS (1) STORED)')
    place.execute("ALTER TABLE t ADD own bigint GENERATED ALWAYS AS IDENTITY")
    schema = pa.schema([("id", pa.int64()), ("v", pa.string()), ("made", pa.int64()), ("own", pa.int64())])
    found = {p.where: str(p) for p in problems(place.sink(), schema)}
    assert set(found) == {f"sink.table column `{name}`" for name in ("id", "v", "needed", "made", "own")}
    assert "only `ID`" in found["sink.table column `id`"]
    assert 'ADD COLUMN "v" text' in found["sink.table column `v`"]


COLUMNS = [
    *("boolean", "smallint", "integer", "bigint", "numeric", "numeric(12,2)", "numeric(12,1)", "real", "double precision"),
    *("text", "varchar(5)", "char(5)", "name", "bytea", "date", "timestamp", "timestamptz", "time", "timetz", "interval"),
    *("json", "jsonb", "uuid", "inet", "bigint[]", "text[]", "uuid[]", "numeric(12,1)[]", "mood", "mood[]", "money", "int4range"),
]
ANYTHING_BY_TEXT = {"text", "varchar(5)", "char(5)", "json", "jsonb", "uuid", "inet", "mood", "int4range"}
FITS: dict[Any, set[str]] = {
    pa.bool_(): {"boolean"},
    pa.int16(): {"smallint", "integer", "bigint", "numeric", "numeric(12,2)", "numeric(12,1)", "real", "double precision"},
    pa.int32(): {"smallint", "integer", "bigint", "numeric", "numeric(12,2)", "numeric(12,1)", "double precision"},
    pa.int64(): {"smallint", "integer", "bigint", "numeric", "numeric(12,2)", "numeric(12,1)"},
    pa.uint64(): {"smallint", "integer", "bigint", "numeric", "numeric(12,2)", "numeric(12,1)"},
    pa.float32(): {"real", "double precision"},
    pa.float64(): {"double precision"},
    pa.decimal128(10, 2): {"numeric", "numeric(12,2)"},
    pa.decimal128(10, 0): {"smallint", "integer", "bigint", "numeric", "numeric(12,2)", "numeric(12,1)"},
    pa.string(): ANYTHING_BY_TEXT,
    pa.binary(): {"bytea"},
    pa.date32(): {"date", "timestamp", "timestamptz"},
    pa.timestamp("us"): {"timestamp", "timestamptz"},
    pa.timestamp("us", "UTC"): {"timestamp", "timestamptz"},
    pa.time64("us"): {"time"},
    pa.duration("us"): {"interval"},
    pa.list_(pa.int64()): {"bigint[]", "json", "jsonb", "numeric(12,1)[]"},
    pa.list_(pa.decimal128(10, 2)): {"json", "jsonb"},
    pa.list_(pa.string()): {"text[]", "uuid[]", "mood[]", "json", "jsonb"},
    pa.struct([("a", pa.int64())]): {"json", "jsonb", "text", "varchar(5)", "char(5)"},
    pa.map_(pa.string(), pa.int64()): {"json", "jsonb", "text", "varchar(5)", "char(5)"},
    pa.null(): set(COLUMNS),
}


def test_types_fit_where_every_value_arrives_as_it_is_or_fails(place: Place):
    """Every pair: what would round or cut silently is refused, with what was found and what was expected."""
    place.execute("CREATE TYPE mood AS ENUM ('sad')")
    place.execute(f"CREATE TABLE t ({', '.join(f'c{n} {kind}' for n, kind in enumerate(COLUMNS))})")
    assert len(COLUMNS) > 30
    for arrow, fits in FITS.items():
        assert fits <= set(COLUMNS)
        found = problems(place.sink(), pa.schema([(f"c{n}", arrow) for n in range(len(COLUMNS))]))
        refused = {COLUMNS[int(p.where.split("`")[1][1:])]: p for p in found}
        assert set(COLUMNS) - set(refused) == fits, arrow
        assert all("expected" in p.what and "the rows have" in p.what for p in found)


def test_a_key_needs_a_unique_index_of_exactly_its_columns(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text, w bigint)")
    schema = pa.schema([("id", pa.int64()), ("v", pa.string()), ("w", pa.int64())])
    sink = place.sink(mode="upsert", key=["id", "v"])
    for index in (
        "CREATE INDEX ON t (id, v)",
        "CREATE UNIQUE INDEX ON t (id)",
        "CREATE UNIQUE INDEX ON t (id, v, w)",
        "CREATE UNIQUE INDEX ON t (id, v) WHERE w > 0",
        "CREATE UNIQUE INDEX ON t (id, lower(v))",
        "ALTER TABLE t ADD UNIQUE (id, v) DEFERRABLE",
    ):
        place.execute(index)
        problem = only(problems(sink, schema))
        assert problem.where == "sink.key" and "CREATE UNIQUE INDEX" in problem.action
    place.execute("CREATE UNIQUE INDEX ON t (v, id) INCLUDE (w)")
    assert "deferrable" in only(problems(sink, schema)).what, "it is in the way of the other index"
    place.execute("ALTER TABLE t DROP CONSTRAINT t_id_v_key")
    assert problems(sink, schema) == []
    write(sink, Pipeline(schema), [{"id": 1, "v": "a"}])
    missing = problems(place.sink(mode="upsert", key=["id", "nobody"]), schema)
    assert "`nobody`" in only(missing).what


def test_offset_columns_are_demanded_where_asked_for(place: Place):
    place.execute('CREATE TABLE t (id bigint, v text, "__connect_offset" text)')
    found = problems(place.sink(offset_columns=True))
    assert sorted(p.where for p in found) == [
        "sink.offset_columns",
        "sink.offset_columns",
        "sink.table column `__connect_offset`",
    ]


# --- rights ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def role(place: Place) -> Iterator[str]:
    """A role that may only use the schema."""
    with place.connect_as_new_role("secret") as name:
        place.execute(f'GRANT USAGE ON SCHEMA {place.quoted} TO "{name}"')
        yield name


def test_missing_rights_are_all_named(place: Place, role: str):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    found = problems(place.sink(mode="upsert", key=["id"], delete_enabled=True))
    said = "\n".join(map(str, found))
    for right in ("CREATE", "DELETE", "INSERT", "SELECT", "UPDATE"):
        assert right in said
    place.execute(f'GRANT INSERT ON t TO "{role}"')
    place.execute(f'GRANT CREATE ON SCHEMA {place.quoted} TO "{role}"')
    assert problems(place.sink()) == []
    write(place.sink(), Pipeline(KEYED), [{"id": 1}])
    assert names(problems(place.sink(mode="upsert", key=["id"]))) == {"sink.table"}
    place.execute(f'GRANT SELECT, UPDATE, DELETE ON t TO "{role}"')
    sink = place.sink(mode="upsert", key=["id"], delete_enabled=True)
    assert problems(sink) == []
    write(sink, Pipeline(KEYED, "other", tombstones=True), [{"id": 1, "v": "new"}])


def test_the_grants_in_the_documentation_are_enough_for_every_mode(place: Place, role: str):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    place.execute(f'REVOKE USAGE ON SCHEMA {place.quoted} FROM "{role}"')
    database = json.loads(place.server.connection_json())["schema"]
    own = {"sales.orders": "t", "sales": place.quoted, "warehouse": f'"{database}"', "airflow": f'"{role}"'}
    for statement in read_grants("sinks.md", "GRANT INSERT", **own):
        place.execute(statement)
    sinks = [
        place.sink(mode="upsert", key=["id"], delete_enabled=True),
        place.sink(atomic="split"),
    ]
    for number, sink in enumerate(sinks):
        assert problems(sink) == []
        write(sink, Pipeline(KEYED, f"p{number}"), [{"id": number, "v": "new"}])
    assert place.rows("SELECT id FROM t ORDER BY id") == [(0,), (1,)]


def test_each_missing_right_is_named_with_the_command_that_grants_it(place: Place, role: str):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    database = json.loads(place.server.connection_json())["schema"]
    place.execute(f'REVOKE TEMPORARY ON DATABASE "{database}" FROM PUBLIC')
    sinks = [place.sink(mode="upsert", key=["id"], delete_enabled=True), place.sink(atomic="split")]
    try:
        place.execute(*(command for sink in sinks for problem in problems(sink) for command in list_commands(problem)))
        assert [problems(sink) for sink in sinks] == [[], []]
        for right, rest in (
            ("USAGE", f"SCHEMA {place.quoted}"), ("CREATE", f"SCHEMA {place.quoted}"), ("TEMPORARY", f'DATABASE "{database}"'),
            *((right, "t") for right in ("INSERT", "SELECT", "UPDATE", "DELETE")),
        ):  # fmt: skip
            place.execute(f'REVOKE {right} ON {rest} FROM "{role}"')
            found = [problem for sink in sinks for problem in problems(sink)]
            assert found and all(right in f"{problem.what} {problem.action}" for problem in found), right
            place.execute(*(command for problem in found for command in list_commands(problem)))
            assert [problems(sink) for sink in sinks] == [[], []], right
    finally:
        place.execute(f'GRANT TEMPORARY ON DATABASE "{database}" TO PUBLIC')


def test_stages_in_another_schema_need_no_right_to_create_beside_the_target(
    place: Place, role: str, postgres: EmbeddedPostgres, unique: Callable[[str], str]
):
    place.execute("CREATE TABLE t (id bigint, v text)")
    place.execute(f'GRANT INSERT ON t TO "{role}"')
    with new_place(postgres, unique("stages")) as other:
        other.execute(f'GRANT USAGE, CREATE ON SCHEMA {other.quoted} TO "{role}"')
        sink = place.sink(stage_schema=other.schema)
        # Only the record of windows is missing; somebody who may makes it.
        assert "airflow_windows" in only(problems(sink)).what
        place.execute("CREATE TABLE airflow_windows (pipeline text, number bigint)")
        assert "lacks DELETE, INSERT, SELECT, UPDATE" in only(problems(sink)).what
        place.execute("DROP TABLE airflow_windows")
        place.connect_with(connection(place))
        write(place.sink(), Pipeline(KEYED, "the owner's"), [{"id": 0}])
        place.connect_with(connection(place, login=role, password="secret"))
        place.execute(f'GRANT SELECT, INSERT, UPDATE, DELETE ON airflow_windows TO "{role}"')
        assert problems(sink) == []
        write(sink, Pipeline(KEYED), [{"id": 1}])
        other.execute(f'REVOKE ALL ON SCHEMA {other.quoted} FROM "{role}"')


def test_row_level_security_that_applies_is_refused(place: Place, role: str):
    place.execute("CREATE TABLE t (id bigint, v text); ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    place.execute(f'GRANT ALL ON t TO "{role}"; GRANT CREATE ON SCHEMA {place.quoted} TO "{role}"')
    assert "row-level security" in only(problems(place.sink())).what
    place.connect_with(connection(place))
    assert problems(place.sink()) == []


def test_a_read_only_role_is_refused(place: Place, role: str):
    place.execute("CREATE TABLE t (id bigint, v text)")
    place.execute(f'GRANT ALL ON t TO "{role}"; GRANT CREATE ON SCHEMA {place.quoted} TO "{role}"')
    place.execute(f'ALTER ROLE "{role}" SET default_transaction_read_only = on')
    assert "read-only" in only(problems(place.sink())).what


def test_a_role_that_may_have_too_few_sessions_is_refused(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text)")
    for limit, by_split, by_window in ((1, "needs 2", "needs 3"), (2, "", "needs 3"), (3, "", "")):
        for sink, expected in ((place.sink(atomic="split"), by_split), (place.sink(), by_window)):
            # A role for each: a session that was closed counts until its server process has ended.
            with place.connect_as_new_role("secret") as role:
                place.execute(f'GRANT USAGE, CREATE ON SCHEMA {place.quoted} TO "{role}"; GRANT ALL ON t TO "{role}"')
                place.execute(f'ALTER ROLE "{role}" CONNECTION LIMIT {limit}')
                found = problems(sink)
            assert expected in found[0].what if expected else found == []


def test_another_table_under_the_name_of_the_record_is_refused(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text); CREATE TABLE airflow_windows (id bigint)")
    assert only(problems(place.sink())).where == "sink.windows_table"


@pytest.mark.parametrize("table", ['t"; DROP TABLE t; --', "t'; DROP TABLE t; --", "t\\'; SELECT pg_sleep(10)", "%(x)s {} $1"])
def test_what_looks_like_sql_in_a_name_is_just_a_name(place: Place, table: str):
    place.execute("CREATE TABLE t (id bigint, v text)")
    quoted = '"' + table.replace('"', '""') + '"'
    odd = pa.schema([("id", pa.int64()), (table, pa.string())])
    found = problems(place.sink(quoted, mode="upsert", key=[table], windows_table=table + "w", stage_schema=table), odd)
    assert names(found) == {"sink.table", "sink.stage_schema"}
    assert names(problems(place.sink("t", mode="upsert", key=[table]), odd)) == {f"sink.table column `{table}`"}
    assert place.tables() == ["t"]


def test_validate_changes_nothing_and_takes_few_seconds(place: Place):
    import time

    place.execute("CREATE TABLE t (id bigint, v text)")
    before = place.rows("SELECT count(*) FROM pg_class"), place.one("SELECT pg_current_wal_insert_lsn()")
    begun = time.monotonic()
    assert problems(place.sink()) == []
    assert problems(place.sink("other", auto_create=True)) == []
    assert time.monotonic() - begun < 30
    assert place.rows("SELECT count(*) FROM pg_class") == before[0]
    assert place.tables() == ["t"]


def test_a_table_that_changed_after_validation_fails_the_window_clearly(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text)")
    sink, pipeline = place.sink(), Pipeline(KEYED)
    assert problems(sink) == []
    place.execute("ALTER TABLE t DROP COLUMN v")
    with pytest.raises(SinkRejected, match="no column `v`"):
        write(sink, pipeline, [{"id": 1}])
    place.execute("DROP TABLE t")
    with pytest.raises(SinkRejected, match="no such table"):
        write(sink, Pipeline(KEYED), [{"id": 1}])


def test_no_password_in_the_environment_of_the_server(place: Place):
    """Return what other sessions can see of this one."""
    place.execute("CREATE TABLE t (id bigint, v text)")
    with psycopg.connect(place.server.dsn) as watcher:
        job = Pipeline(KEYED).job([{"id": 1}])
        with place.sink().begin(job.window, job.splits, job.shape) as writer:
            task = writer.make_split_writer()
            task.open(job.splits[0])
            task.write(job.rows[0][0])
            seen = str(watcher.execute("SELECT * FROM pg_stat_activity").fetchall())
            task.abort()
    assert "airflow-kafka-spark" in seen and place.server.password not in seen
    assert os.environ[f"AIRFLOW_CONN_{place.conn_id.upper()}"]
