"""A table against its copy: equal copies of all types, and lost, doubled and changed rows, each found and named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_kafka_spark.errors import SinkDiffers, ValidationError
from airflow_kafka_spark.operators import VerifyOperator
from airflow_kafka_spark.sources import JdbcSource
from airflow_kafka_spark.verification.concurrency import ConcurrentWork
from airflow_kafka_spark.verification.database_side import DatabaseSide
from tests.sinks.postgres.kit import Place
from tests.support.documents import read_grants
from tests.support.mariadb import translate
from tests.support.runs import ROOT, context
from tests.verification.conftest import MARIA


def verify(place: Place, store: Any = None, **options: Any) -> dict[str, Any]:
    given = {"source": JdbcSource(place.conn_id, f"{place.quoted}.s"), "sink": place.sink("t"), **options}
    operator = VerifyOperator(task_id="verify", **given)
    return operator.execute({**context("run1"), "task_state_store": store})


def named(found: dict[str, Any] | SinkDiffers) -> list[dict[str, Any]]:
    differences = found["differences"] if isinstance(found, dict) else [d.to_json() for d in found.differences]
    return sorted(differences, key=str)


@pytest.fixture
def orders(place: Place) -> Place:
    """A table ``s`` of 1,000 rows, and its copy ``t``."""
    columns = "(id bigint PRIMARY KEY, amount numeric(12, 2), note text)"
    for table in ("s", "t"):
        place.connection.execute(f"CREATE TABLE {table} {columns}".encode())
        place.connection.execute(f"INSERT INTO {table} SELECT n, n / 4.0, 'note ' || n FROM generate_series(1, 1000) n".encode())
    return place


def test_equal_tables_are_equal(orders: Place) -> None:
    found = verify(orders, chunk_rows=100)
    assert found["equal"] and (found["source_rows"], found["sink_rows"], found["method"]) == (1000, 1000, "ranges")
    assert found["chunks"] == 11 and not found["differences"]


def test_rows_that_are_missing_extra_or_different_are_counted_and_named(orders: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_kafka_spark.verification.comparison.READ_ROWS", 20)
    for statement in (
        "DELETE FROM t WHERE id IN (1, 500)",
        "INSERT INTO t VALUES (0, 0, 'x'), (2000, 0, 'x')",
        "UPDATE t SET amount = amount + 0.01 WHERE id = 250",
        "UPDATE t SET note = NULL, amount = 1 WHERE id = 1000",
        "UPDATE s SET note = '' WHERE id = 77",
        "UPDATE t SET note = NULL WHERE id = 77",
    ):
        orders.connection.execute(statement.encode())
    with pytest.raises(SinkDiffers, match="2 missing in the sink, 2 only in the sink, 3 different") as raised:
        verify(orders, chunk_rows=100)
    assert named(raised.value) == [
        {"kind": "different", "key": {"id": 1000}, "columns": ["amount", "note"]},
        {"kind": "different", "key": {"id": 250}, "columns": ["amount"]},
        {"kind": "different", "key": {"id": 77}, "columns": ["note"]},
        {"kind": "extra", "key": {"id": 0}},
        {"kind": "extra", "key": {"id": 2000}},
        {"kind": "missing", "key": {"id": 1}},
        {"kind": "missing", "key": {"id": 500}},
    ]
    found = verify(orders, chunk_rows=100, max_keys=2, on_difference="warn")
    assert (found["missing"], found["extra"], found["different"], len(found["differences"])) == (2, 2, 3, 2)


def test_a_row_that_is_there_twice_is_found_in_a_table_without_a_key(orders: Place) -> None:
    orders.connection.execute("ALTER TABLE t DROP CONSTRAINT t_pkey")
    orders.connection.execute("ALTER TABLE t ALTER COLUMN id DROP NOT NULL")
    orders.connection.execute("INSERT INTO t SELECT * FROM t WHERE id = 300")
    orders.connection.execute("INSERT INTO t VALUES (301, 0, 'another row of this key')")
    orders.connection.execute("INSERT INTO t VALUES (NULL, 0, 'without a key')")
    for index, method in (("", "buckets"), ("CREATE INDEX ON t (id)", "ranges")):
        orders.connection.execute((index or "SELECT 1").encode())
        found = verify(orders, on_difference="warn", chunk_rows=300)
        assert (found["method"], found["doubled"], found["extra"], found["sink_rows"]) == (method, 2, 1, 1003)
        assert named(found) == [
            {"kind": "doubled", "key": {"id": 300}},
            {"kind": "doubled", "key": {"id": 301}},
            {"kind": "extra", "key": {"id": None}},
        ]


def test_keys_of_text_that_both_databases_sort_differently_are_compared_by_buckets(
    place: Place, maria: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_kafka_spark.verification.buckets.READ_ROWS", 3)
    rows = [(f"{'aAbBéß'[n % 6]}{n // 6}", n % 7, n / 8) for n in range(300)]
    maria.execute("CREATE TABLE s (code varchar(10), part int, amount double, PRIMARY KEY (part, code))")
    place.connection.execute("CREATE TABLE t (part bigint, code text, amount double precision, PRIMARY KEY (part, code))")
    for code, part, amount in rows:
        maria.execute("INSERT INTO s VALUES (%s, %s, %s)", (code, part, amount))
        place.connection.execute("INSERT INTO t VALUES (%s, %s, %s)", (part, code, amount))
    source = JdbcSource(MARIA, "s")
    found = verify(place, source=source, chunk_rows=70)
    assert found["equal"] and (found["method"], found["source_rows"], found["sink_rows"]) == ("buckets", 300, 300)
    place.connection.execute("DELETE FROM t WHERE code = 'é7'")
    place.connection.execute("UPDATE t SET code = 'a9 ' WHERE code = 'A9'")
    place.connection.execute("UPDATE t SET amount = 0 WHERE code = 'ß20'")
    found = verify(place, source=source, chunk_rows=70, on_difference="warn")
    parts = {code: part for code, part, _ in rows}
    assert named(found) == [
        {"kind": "different", "key": {"part": parts["ß20"], "code": "ß20"}, "columns": ["amount"]},
        {"kind": "extra", "key": {"part": parts["A9"], "code": "a9 "}},
        {"kind": "missing", "key": {"part": parts["é7"], "code": "é7"}},
        {"kind": "missing", "key": {"part": parts["A9"], "code": "A9"}},
    ]
    only_key = verify(place, source=source, exclude_columns="amount", on_difference="warn")
    assert (only_key["different"], only_key["missing"], only_key["extra"]) == (0, 2, 1)


def test_rows_that_a_recheck_finds_equal_do_not_differ(orders: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.connection.execute("DELETE FROM t WHERE id = 42")
    waited = []

    def arrive(work: ConcurrentWork, seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            orders.connection.execute("INSERT INTO t SELECT * FROM s WHERE id = 42")

    monkeypatch.setattr(ConcurrentWork, "wait", arrive)
    found = verify(orders, chunk_rows=100, rechecks=1, recheck_delay=7, on_difference="warn")
    assert (found["missing"], found["differing_chunks"], found["settled_chunks"]) == (1, 1, 0)
    for method in ("ranges", "buckets"):
        found = verify(orders, chunk_rows=100, rechecks=3, recheck_delay=7)
        assert (found["equal"], found["differing_chunks"], found["settled_chunks"], found["method"]) == (True, 1, 1, method)
        assert waited == [7, 7]
        waited.pop()
        orders.connection.execute("DELETE FROM t WHERE id = 42")
        orders.connection.execute("ALTER TABLE t DROP CONSTRAINT IF EXISTS t_pkey")


class Store:
    """Airflow's store, which holds JSON and outlives the task.

    :param file: the file that keeps it.
    :param kills: SIGKILL once a state of this many chunks is stored.
    """

    def __init__(self, file: Path, kills: int = 0) -> None:
        self.file, self.kills = file, kills

    def get(self, key: str) -> Any:
        return json.loads(self.file.read_text()).get(key) if self.file.exists() else None

    def set(self, key: str, value: Any) -> None:
        self.file.write_text(json.dumps({key: value}))
        if value["chunks"] == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def delete(self, key: str) -> None:
        self.file.unlink(missing_ok=True)


KILLED = """
import sys
from pathlib import Path
from types import SimpleNamespace
from airflow_kafka_spark.verification import comparison
from tests.verification import test_verify
comparison.SAVE_SECONDS = 0.0
conn_id, schema, state = sys.argv[1:]
sink = test_verify.JdbcSource(conn_id, f"{schema}.t")
place = SimpleNamespace(conn_id=conn_id, quoted=schema, sink=lambda table: sink)
test_verify.verify(place, test_verify.Store(Path(state), kills=3), chunk_rows=100, parallel=1)
"""


def test_a_retry_behind_sigkill_continues_behind_the_chunks_that_are_compared(orders: Place, tmp_path: Path) -> None:
    orders.connection.execute("DELETE FROM t WHERE id IN (50, 950)")
    state = tmp_path / "state"
    command = [sys.executable, "-c", KILLED, orders.conn_id, orders.quoted, str(state)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    # Not seen: these chunks are compared.
    orders.connection.execute("DELETE FROM t WHERE id IN (150, 250)")
    sink = JdbcSource(orders.conn_id, f"{orders.quoted}.t")
    other = tmp_path / "of another key"
    other.write_text(state.read_text())
    orders.connection.execute("CREATE INDEX ON s (id, amount); CREATE INDEX ON t (id, amount)")
    longer = JdbcSource(orders.conn_id, f"{orders.quoted}.s", key=["id", "amount"])
    found = verify(orders, Store(other), source=longer, sink=sink, chunk_rows=100, on_difference="warn")
    assert (found["method"], found["missing"]) == ("ranges", 4), "the position is one of another key"
    found = verify(orders, Store(state), sink=sink, chunk_rows=100, on_difference="warn")
    assert named(found) == [{"kind": "missing", "key": {"id": 50}}, {"kind": "missing", "key": {"id": 950}}]
    assert (found["chunks"], found["source_rows"], found["sink_rows"], found["differing_chunks"]) == (11, 1000, 998, 2)
    again = verify(orders, Store(state), sink=sink, chunk_rows=100, on_difference="warn")
    assert again["missing"] == 4, "an attempt behind a complete one begins anew"
    assert not state.exists()


def test_a_server_that_does_not_answer_is_asked_again(orders: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.connection.execute("DELETE FROM t WHERE id = 50")
    waits = []

    def ended(side: DatabaseSide, session: Any, chunk: Any, sums: Any = DatabaseSide.compute_sums) -> Any:
        if not waits:
            orders.connection.execute("SELECT pg_terminate_backend(%s)", [session.connection.info.backend_pid])
        return sums(side, session, chunk)

    monkeypatch.setattr(ConcurrentWork, "wait", lambda work, seconds: waits.append(seconds))
    monkeypatch.setattr(DatabaseSide, "compute_sums", ended)
    found = verify(orders, chunk_rows=300, parallel=1, on_difference="warn")
    assert named(found) == [{"kind": "missing", "key": {"id": 50}}] and found["source_rows"] == 1000
    assert waits == [1.0]


def test_the_log_names_the_range_of_a_chunk_that_differs_and_lists_all_rows_in_one_entry(orders: Place, caplog) -> None:
    caplog.set_level("INFO")
    orders.connection.execute("DELETE FROM t WHERE id IN (50, 60)")
    verify(orders, chunk_rows=300, parallel=1, rechecks=1, recheck_delay=0.1, on_difference="warn")
    assert [m for m in caplog.messages if "differ" in m and "against" not in m] == [
        "A chunk differs: rows up to key 300. The source has 300 rows in it, the sink 298",
        "Recheck 1 of 1: 1 chunk differs, and is compared again in 0.1 s",
        "The rows that differ, 2 named:\n  missing: id=50\n  missing: id=60",
    ]
    (summary,) = [m for m in caplog.messages if "against" in m]
    assert summary.endswith("Chunks: 4 compared, 1 differed at first, 0 of these were equal later")


def test_only_rows_of_the_condition_are_compared(orders: Place) -> None:
    orders.connection.execute("UPDATE t SET note = 'changed' WHERE id > 900")
    orders.connection.execute("DELETE FROM t WHERE id = 10")
    found = verify(orders, where="id <= 900 -- those that have come to rest", on_difference="warn")
    assert named(found) == [{"kind": "missing", "key": {"id": 10}}] and found["source_rows"] == 900
    assert verify(orders, where="id BETWEEN 11 AND 900", sink_where="id BETWEEN 11 AND 900 AND amount > 0")["equal"]


def test_all_problems_are_named_before_anything_is_compared(orders: Place) -> None:
    orders.connection.execute("ALTER TABLE s ADD COLUMN shape point[], ADD COLUMN only_here int, ADD COLUMN at timestamp")
    orders.connection.execute("ALTER TABLE t ADD COLUMN shape text, ADD COLUMN at text, ADD COLUMN only_there int")
    with pytest.raises(ValidationError) as raised:
        verify(orders, columns={"gone": "x"}, exclude_columns=["id"], chunk_rows=0, parallel="x", on_difference="explode")
    assert [p.where for p in raised.value.problems] == [
        "parallel", "chunk_rows", "on_difference", "columns", "exclude_columns",
        "source column `shape`", "source column `only_here`", "source column `at`",
    ]  # fmt: skip
    assert "the sink's table" in str(raised.value.problems[6]), "both tables may have one name"
    without = ["shape", "only_here", "at"]
    with pytest.raises(ValidationError) as raised:
        verify(orders, exclude_columns=without, where="nothing = 1")
    assert [p.where for p in raised.value.problems] == ["where", "sink_where"]
    with pytest.raises(ValidationError) as raised:
        verify(orders, source=JdbcSource(orders.conn_id, "nowhere"), sink=orders.sink("t2"), exclude_columns=without)
    assert [p.where for p in raised.value.problems] == ["source.table", "sink.table"]
    with pytest.raises(ValidationError) as raised:
        verify(orders, source=orders.sink("t"), sink="t")
    assert [p.where for p in raised.value.problems] == ["source", "sink"]
    with pytest.raises(TypeError, match="Did you mean `chunk_rows` for `chunk_row`"):
        verify(orders, chunk_row=5)
    operator = VerifyOperator(
        task_id="verify", source=JdbcSource(orders.conn_id, "{{ x }}"), sink=orders.sink("t"), where="{{ x }}", chunk_rows=0
    )
    operator.render_template_fields({"x": None})
    with pytest.raises(ValidationError) as raised:
        operator.execute(context("run1"))
    assert [p.where for p in raised.value.problems] == ["where", "source.table", "chunk_rows"]
    assert verify(orders, exclude_columns=without)["columns"] == ["id", "amount", "note"]


def test_columns_of_other_names_and_templates_are_compared(orders: Place) -> None:
    orders.connection.execute("ALTER TABLE t RENAME COLUMN id TO order_id")
    orders.connection.execute("DELETE FROM t WHERE order_id > 990")
    source = JdbcSource("{{ params.conn }}", f"{orders.quoted}.s")
    operator = VerifyOperator(
        task_id="verify", source=source, sink=orders.sink("t"), columns={"id": "order_id"}, where="{{ params.where }}",
        sink_where="", on_difference="warn",
    )  # fmt: skip
    operator.render_template_fields({"params": {"conn": orders.conn_id, "where": "id <= 991"}})
    found = operator.execute(context("run1"))
    assert named(found) == [{"kind": "missing", "key": {"id": 991}}]


@pytest.mark.parametrize(
    ("source", "sink", "method", "values"),
    [
        ("smallint", "bigint", "ranges", "-3, 0, 7"),
        ("numeric(12,2)", "numeric", "ranges", "-1.5, 0, 7.25"),
        ("numeric(12,2)", "bigint", "buckets", "-1, 0, 7"),
        ("timestamptz", "timestamp", "ranges", "'2026-03-29 02:30+02', '2026-03-29 00:30:00.000001+00', '2026-03-30+00'"),
        ("date", "timestamp", "buckets", "'2026-03-29', '2026-03-30', '0044-03-15 BC'"),
        ("bytea", "bytea", "ranges", "'', '\\x00', '\\xff00'"),
        ("uuid", "uuid", "ranges", "'6f9619ff-8b86-d011-b42d-00c04fc964ff', '00000000-8b86-d011-b42d-00c04fc964ff'"),
        ('text COLLATE "C"', 'varchar(9) COLLATE "C"', "ranges", "'a', 'B', 'é''\\'"),
        ("text", 'text COLLATE "C"', "ranges", "'a', 'B', 'é'"),
        ("boolean", "boolean", "buckets", "true, false"),
        ("double precision", "double precision", "buckets", "0.1, 1e300, 'NaN'"),
    ],
)
def test_keys_of_any_type_cut_both_tables_alike(place: Place, source: str, sink: str, method: str, values: str) -> None:
    """Each chunk has one row, which both tables have."""
    place.connection.execute("SET TimeZone = 'UTC'")
    for table, kind in (("s", source), ("t", sink)):
        place.connection.execute(f"CREATE TABLE {table} (k {kind}, n integer DEFAULT 1, PRIMARY KEY (k, n))".encode())
    rows = ", ".join(f"({value})" for value in values.split(", "))
    place.connection.execute(f"INSERT INTO s (k) VALUES {rows}".encode())
    place.connection.execute("INSERT INTO t SELECT * FROM s")
    place.connection.execute("UPDATE s SET n = 2; UPDATE t SET n = 2")
    found = verify(place, chunk_rows=1, on_difference="warn")
    collation = "SELECT datcollate FROM pg_database WHERE datname = current_database()"
    if source == "text" and place.connection.execute(collation).fetchall() != [("C",)]:
        method = "buckets"
    assert (found["equal"], found["method"], found["source_rows"]) == (True, method, len(values.split(", ")))
    place.connection.execute("DELETE FROM t WHERE k = (SELECT k FROM t ORDER BY k DESC LIMIT 1)")
    found = verify(place, chunk_rows=1, on_difference="warn")
    assert (found["missing"], found["extra"], found["different"]) == (1, 0, 0)


def test_keys_of_mariadb_cut_both_tables_alike(place: Place, maria: Any) -> None:
    kinds = [
        ("bigint unsigned", "numeric(20,0)", ["1", "18446744073709551615"]),
        ("bigint unsigned", "bigint", ["1", "18446744073709551615"]),
        ("int", "smallint", ["-70000", "5"]),
        ("decimal(12,2)", "numeric(12,2)", ["-1.50", "7"]),
        ("datetime(6)", "timestamptz", ["'1999-12-31 23:59:59.999999'", "'2026-01-01'"]),
        ("timestamp(3)", "timestamptz", ["'2026-03-29 02:30:00.123'", "'2026-01-01'"]),
        ("date", "date", ["'0001-01-01'", "'9999-12-31'"]),
        ("varbinary(9)", "bytea", ["X'FF00'", "X''"]),
    ]
    place.connection.execute("SET TimeZone = 'UTC'")
    for kind, other, values in kinds:
        maria.execute("DROP TABLE IF EXISTS s")
        place.connection.execute("DROP TABLE IF EXISTS t")
        maria.execute(f"CREATE TABLE s (k {kind} NOT NULL, n int, PRIMARY KEY (k, n))")
        place.connection.execute(f"CREATE TABLE t (k {other} NOT NULL, n int, PRIMARY KEY (k, n))".encode())
        in_sink = 0
        for value in values:
            maria.execute(f"INSERT INTO s VALUES ({value}, 1)")
            if value not in ("18446744073709551615", "-70000") or other.startswith("numeric"):
                literal = "'\\x" + value[2:] if value.startswith("X") else value
                place.connection.execute(f"INSERT INTO t VALUES ({literal}, 1)".encode())
                in_sink += 1
        found = verify(place, source=JdbcSource(MARIA, "s"), chunk_rows=1, on_difference="warn")
        assert found["method"] == "ranges", kind
        assert (found["source_rows"], found["sink_rows"], found["missing"], found["extra"]) == (2, in_sink, 2 - in_sink, 0), kind


def test_the_documented_rights_are_enough(place: Place, maria: Any, mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    maria.execute("CREATE TABLE orders (id bigint PRIMARY KEY, note text)")
    maria.execute(translate("INSERT INTO orders SELECT seq, seq FROM seq_1_to_50"))
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, note text); INSERT INTO t SELECT n, n FROM generate_series(1, 49) n")
    role = f"{place.schema}_reader"
    place.execute(f"CREATE ROLE \"{role}\" LOGIN PASSWORD 'hush'")
    maria.execute("DROP USER IF EXISTS reader")
    maria.execute("CREATE USER reader IDENTIFIED BY 'hush'")
    for statement in read_grants("verification.md", "shop.orders", airflow="reader"):
        maria.execute(statement)
    names = {"sales.orders": f"{place.quoted}.t", "sales": place.quoted, "airflow": f'"{role}"'}
    for statement in read_grants("verification.md", "GRANT USAGE", **names):
        place.execute(statement)
    found = {**json.loads(place.server.connection_json()), "login": role, "password": "hush"}
    place.connect_with(json.dumps(found))
    monkeypatch.setenv("AIRFLOW_CONN_READER", f"mysql://reader:hush@{mariadb.host}:{mariadb.port}")
    try:
        with pytest.raises(SinkDiffers) as error:
            verify(place, source=JdbcSource("reader", "shop.orders"))
        assert named(error.value) == [{"kind": "missing", "key": {"id": 50}}]
        place.execute(f'REVOKE SELECT ON t FROM "{role}"')
        with pytest.raises(ValidationError) as refused:
            verify(place, source=JdbcSource("reader", "shop.orders"))
        assert {p.where.partition(".")[0] for p in refused.value.problems} == {"sink"}
        place.execute(f'GRANT SELECT ON t TO "{role}"')
        maria.execute("REVOKE SELECT ON shop.orders FROM reader")
        maria.execute("GRANT SELECT (id) ON shop.orders TO reader")
        with pytest.raises(
            ValidationError, match=r"source\.table: role 'reader'@'%' may not read column `\*` of `shop`\.`orders`"
        ):
            verify(place, source=JdbcSource("reader", "shop.orders"))
    finally:
        place.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')
