"""A table of PostgreSQL against copies in Delta, Iceberg and files, and in a sink that is not of this package."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, TableFeatures, convert_to_deltalake, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.types import LongType

from airflow_kafka_spark.errors import Problem, SinkUnavailable, ValidationError
from airflow_kafka_spark.sinks import DeltaSink, FilesSink, IcebergSink
from airflow_kafka_spark.sinks.base import ComparedTable, Guarantee, ReadPiece, Sink, SqlTable
from airflow_kafka_spark.verification.arrow_side import ArrowSide
from tests.sinks.attempt import apply
from tests.sinks.feed import Feed
from tests.sinks.iceberg.cases import delete_by_value
from tests.sinks.postgres.kit import Place
from tests.verification.test_verify import named, verify

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("flag", pa.bool_()),
        ("amount", pa.decimal128(20, 8)),
        ("ratio", pa.float64()),
        ("single", pa.float32()),
        ("note", pa.string()),
        ("raw", pa.binary()),
        ("at", pa.timestamp("us", "UTC")),
        ("local_at", pa.timestamp("us")),
        ("day", pa.date32()),
        ("code", pa.string()),
        ("data", pa.string()),
    ]
)
COLUMNS = (
    "id bigint PRIMARY KEY, flag boolean, amount numeric(20, 8), ratio double precision, single real, note text, raw bytea, "
    "at timestamptz, local_at timestamp, day date, code uuid, data json"
)
NAMES = [name for name in SCHEMA.names if name != "id"]
CODE = "6f9619ff-8b86-d011-b42d-00c04fc964ff"


def row(n: int) -> tuple[Any, ...]:
    """Return a row; every third row is NULL in all columns."""
    if n % 3 == 0:
        return (n, *[None] * len(NAMES))
    at = datetime(1969, 12, 31, 23, 59, 59, n)
    amount = Decimal(n).scaleb(-8) if n % 2 else Decimal(-n * 100)
    text = "é|𝄞" if n % 2 else ""
    return (
        n, n % 2 == 0, amount, n / 7, float(n), text, text.encode(), at.replace(tzinfo=timezone.utc), at, date(1600, 2, 29), CODE,
        f'{{"b": {n}.50, "a": []}}',
    )  # fmt: skip


def write_delta(path: Path, rows: pa.Table) -> Sink:
    write_deltalake(str(path), rows, mode="append")
    return DeltaSink(str(path))


def write_iceberg(path: Path, rows: pa.Table) -> Sink:
    options = {"type": "sql", "uri": f"sqlite:///{path}.db", "warehouse": f"file://{path}"}
    catalog = load_catalog("lake", **options)
    catalog.create_namespace_if_not_exists("shop")
    catalog.create_table_if_not_exists("shop.t", rows.schema).append(rows)
    catalog.close()
    return IcebergSink("shop.t", "verify_lake")


class WriteFiles:
    """Writes windows of a FilesSink.

    :param options: of the sink.
    """

    def __init__(self, **options: Any) -> None:
        self.options, self.feed = options, Feed(SCHEMA)

    def __call__(self, path: Path, rows: pa.Table) -> Sink:
        sink = FilesSink(str(path), partition_by=["code"], **self.options)
        first, lines = self.feed.first_id, rows.to_pylist()
        apply(sink, self.feed.next(len(lines), 0, 0, values=lambda n: lines[n - first]))
        return sink


@pytest.mark.parametrize(
    "writer",
    [
        lambda: write_delta,
        lambda: write_iceberg,
        lambda: WriteFiles(),
        lambda: WriteFiles(visibility="manifest", auto_evolve=True),
    ],
    ids=["delta", "iceberg", "files", "manifests"],
)
def test_rows_that_a_lake_lacks_or_has_otherwise_are_found(
    writer: Callable[[], Callable[[Path, pa.Table], Sink]], place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer()
    extra = {"name": "lake", "type": "sql", "uri": f"sqlite:///{tmp_path}/t.db", "warehouse": f"file://{tmp_path}/t"}
    monkeypatch.setenv("AIRFLOW_CONN_VERIFY_LAKE", json.dumps({"conn_type": "iceberg", "extra": extra}))
    rows = [row(n) for n in range(1, 301)]
    place.connection.execute(f"CREATE TABLE s ({COLUMNS})".encode())
    with place.connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO s VALUES ({', '.join(['%s'] * len(SCHEMA))})".encode(), rows)
    for part in (rows[:200], rows[200:]):
        sink = write(tmp_path / "t", pa.table(list(map(list, zip(*part, strict=True))), SCHEMA))
    found = verify(place, sink=sink, chunk_rows=70)
    assert found["equal"] and (found["method"], found["source_rows"], found["sink_rows"]) == ("buckets", 300, 300)
    write(tmp_path / "t", pa.table(list(map(list, zip(row(5), row(1000), strict=True))), SCHEMA))
    for statement in (
        "INSERT INTO s (id) VALUES (0)",
        "UPDATE s SET amount = amount + 0.00000001 WHERE id = 1",
        "UPDATE s SET note = NULL WHERE id = 2",
        "UPDATE s SET at = at + interval '1 microsecond', ratio = ratio + 1e-15, single = 1, raw = '\\x00', code = NULL, "
        "local_at = '2000-01-01', day = '1600-03-01', data = '{}', flag = NULL WHERE id = 4",
    ):
        place.connection.execute(statement.encode())
    found = verify(place, sink=sink, chunk_rows=70, on_difference="warn")
    assert named(found) == [
        {"kind": "different", "key": {"id": 1}, "columns": ["amount"]},
        {"kind": "different", "key": {"id": 2}, "columns": ["note"]},
        {
            "kind": "different",
            "key": {"id": 4},
            "columns": ["flag", "ratio", "single", "raw", "at", "local_at", "day", "code", "data"],
        },
        {"kind": "doubled", "key": {"id": 5}},
        {"kind": "extra", "key": {"id": 1000}},
        {"kind": "missing", "key": {"id": 0}},
    ]
    if not isinstance(sink, FilesSink):
        assert verify(place, sink=sink, where="id > 5", sink_where="id > 5 AND id < 1000")["equal"]
    with pytest.raises(ValidationError) as raised:
        verify(place, sink=sink, where="id > 5", sink_where="nothing = 5")
    assert [problem.where for problem in raised.value.problems] == ["sink_where"]
    place.connection.execute("ALTER TABLE s ADD COLUMN more int[]")
    with pytest.raises(ValidationError, match="source column `more`"):
        verify(place, sink=sink)
    if not isinstance(sink, FilesSink):
        refuse_rows_that_delete_files_may_delete(sink, tmp_path / "t", place)


def refuse_rows_that_delete_files_may_delete(sink: DeltaSink | IcebergSink, path: Path, place: Place) -> None:
    """Let another writer delete rows in a way that readers of files do not see. Assert that such a table is refused."""
    if isinstance(sink, DeltaSink):
        DeltaTable(path).alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
        where, said = f"sink.path table {sink.uri}", "deletionVectors"
    else:
        with sink.open() as lake:
            delete_by_value(lake.load_newest("deleting"), 7)
        where, said = "sink", "deletes rows by their values"
    # A condition that the deleted row does not meet changes nothing.
    for options in ({}, {"where": "id > 100", "sink_where": "id > 100"}):
        with pytest.raises(ValidationError, match=said) as raised:
            verify(place, sink=sink, **options)
        assert [problem.where for problem in raised.value.problems] == [where]
    # They may come while rows are compared, too, and then nothing is asked again.
    side = ArrowSide(sink.find_compared_table(), ("id",), ("decimal",), 1, "")
    with pytest.raises(SinkUnavailable) as refused:
        side.explain()
    assert not refused.value.retryable


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_instants_of_any_year_that_spark_has_written_are_compared_by_their_values(
    kind: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark writes timestamps as INT96, also when it compacts a table."""
    extra = {"name": "lake", "type": "sql", "uri": f"sqlite:///{tmp_path}/t.db", "warehouse": f"file://{tmp_path}/t"}
    monkeypatch.setenv("AIRFLOW_CONN_VERIFY_LAKE", json.dumps({"conn_type": "iceberg", "extra": extra}))
    place.connection.execute(b"CREATE TABLE s (id bigint PRIMARY KEY, at timestamptz)")
    rows = [(year, datetime(year, 1, 3, 0, 0, 0, 1, timezone.utc)) for year in (1, 1582, 1677, 2026, 2262, 9999)]
    with place.connection.cursor() as cursor:
        cursor.executemany(b"INSERT INTO s VALUES (%s, %s)", rows)
    table = pa.table(list(map(list, zip(*rows, strict=True))), pa.schema([SCHEMA.field("id"), SCHEMA.field("at")]))
    path = tmp_path / "t"
    if kind == "delta":
        path.mkdir()
        pq.write_table(table, path / "spark.parquet", use_deprecated_int96_timestamps=True)
        convert_to_deltalake(path)
        sink: Sink = DeltaSink(str(path))
    else:
        sink = write_iceberg(path, table)
        (file,) = path.rglob("*.parquet")
        pq.write_table(pq.read_table(file, partitioning=None), file, use_deprecated_int96_timestamps=True, store_schema=False)
    assert verify(place, sink=sink)["equal"]
    assert verify(place, sink=sink, where="id > 1500", sink_where="id > 1500")["source_rows"] == 5
    if isinstance(sink, IcebergSink):
        # The table has these columns without a new snapshot.
        with sink.open() as lake, lake.load_newest("changing").update_schema() as change:
            change.rename_column("at", "moved_at").add_column("more", LongType())
        place.connection.execute(b"ALTER TABLE s ADD COLUMN more bigint")
        renamed = {"sink": sink, "columns": {"at": "moved_at"}}
        assert verify(place, **renamed)["equal"]
        condition = "moved_at > '1600-01-01T00:00:00+00:00' AND more IS NULL"
        assert verify(place, **renamed, where="at > '1600-01-01Z'", sink_where=condition)["source_rows"] == 4


@dataclass(frozen=True)
class SqliteSink(Sink):
    """A sink of which only the table is needed here.

    :param path: the database.
    """

    path: Path
    guarantee = Guarantee.EXACTLY_ONCE

    @property
    def uri(self) -> str:
        return f"x-sqlite://{self.path}/t"

    def validate(self, shape: Any) -> list[Problem]:
        raise NotImplementedError

    find_last_applied = find_applied = begin = validate


class ComparedSqliteSink(SqliteSink):
    def find_compared_table(self) -> ComparedTable:
        return SqliteTable(self)


@dataclass(frozen=True)
class SqliteTable(ComparedTable):
    """The table, read in parts of at most seven rows."""

    sink: SqliteSink

    @property
    def name(self) -> str:
        return self.sink.uri

    def find_problems(self, condition: str) -> list[Problem]:
        return []

    def fetch(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self.sink.path)) as connection:
            return connection.execute(query).fetchall()

    def load_schema(self) -> pa.Schema | None:
        types = {"INTEGER": pa.int64(), "TEXT": pa.string(), "REAL": pa.float64()}
        found = [(name, types[kind]) for name, kind in self.fetch("SELECT name, type FROM pragma_table_info('t')")]
        return pa.schema(found) if found else None

    def read_pieces(self, columns: Sequence[str], condition: str) -> Iterator[ReadPiece]:
        schema = self.load_schema()
        assert schema is not None
        selected, where = ", ".join(columns), condition or "true"

        def read(first: int) -> Iterator[pa.RecordBatch]:
            rows = self.fetch(f"SELECT {selected} FROM t WHERE rowid BETWEEN {first} AND {first + 6} AND ({where})")
            yield from pa.Table.from_pylist(
                [dict(zip(columns, row, strict=True)) for row in rows], pa.schema([schema.field(name) for name in columns])
            ).to_batches()

        ((last,),) = self.fetch("SELECT max(rowid) FROM t")
        for first in range(1, last + 1, 7):
            yield partial(read, first)


def test_the_table_that_another_sink_returns_is_compared(place: Place, tmp_path: Path) -> None:
    place.connection.execute(b"CREATE TABLE s (id bigint PRIMARY KEY, amount numeric(9, 2), note text, ratio double precision)")
    place.connection.execute(
        b"INSERT INTO s SELECT n, n / 4.0, nullif('note ' || n, 'note 8'), n / 7.0 FROM generate_series(1, 30) n"
    )
    sink = ComparedSqliteSink(tmp_path / "copy.db")
    for missing, said in ((SqliteSink(sink.path), "`find_compared_table` returns None"), (sink, f"there is no table {sink.uri}")):
        with pytest.raises(ValidationError, match=said) as raised:
            verify(place, sink=missing)
        assert [problem.where for problem in raised.value.problems] == ["sink"]
    with closing(sqlite3.connect(sink.path)) as copy:
        copy.execute("CREATE TABLE t (id INTEGER, amount TEXT, note TEXT, ratio REAL, more TEXT)")
        rows = place.connection.execute(b"SELECT id, CAST(amount AS text), note, ratio FROM s").fetchall()
        copy.executemany("INSERT INTO t VALUES (?, ?, ?, ?, '')", rows)
        copy.commit()
        found = verify(place, sink=sink)
        assert found["equal"] and (found["method"], found["source_rows"], found["sink_rows"]) == ("buckets", 30, 30)
        for statement in (
            "DELETE FROM t WHERE id = 1",
            "UPDATE t SET note = '' WHERE id = 8",
            "UPDATE t SET amount = '7.51' WHERE id = 30",
        ):
            copy.execute(statement)
        copy.commit()
    assert named(verify(place, sink=sink, on_difference="warn")) == [
        {"kind": "different", "key": {"id": 30}, "columns": ["amount"]},
        {"kind": "different", "key": {"id": 8}, "columns": ["note"]},
        {"kind": "missing", "key": {"id": 1}},
    ]
    assert verify(place, sink=sink, where="id BETWEEN 9 AND 29")["sink_rows"] == 21
    (refused,) = ComparedTable.find_problems(SqliteTable(sink), "id > 5")
    assert refused.where == "sink_where", "a table that does not say that it applies conditions"
    with pytest.raises(ValidationError, match="OperationalError: no such column: gone") as raised:
        verify(place, sink=sink, sink_where="gone = 5")
    assert [problem.where for problem in raised.value.problems] == ["sink_where"]

    class ServerSink(SqliteSink):
        def find_compared_table(self) -> SqlTable:
            return SqlTable(place.conn_id, f"{place.quoted}.s")

    assert verify(place, sink=ServerSink(sink.path))["method"] == "ranges"
