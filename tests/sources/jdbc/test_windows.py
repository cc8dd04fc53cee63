"""Windows of tables and queries: splits tile them, and windows in a row give each row once, whatever the key."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.hooks.databases import SESSION_ENDED, quote
from airflow_kafka_spark.sources.jdbc import windows as jdbc_windows
from airflow_kafka_spark.sources.jdbc.postgres import PostgresSession
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.windows.binding import compare_endpoints
from airflow_kafka_spark.windows.model import RowsAhead
from airflow_kafka_spark.windows.report import parse_position_progress
from tests.sinks.postgres.kit import Place
from tests.sources.jdbc.kit import KeyedTable, every_row, keyed_tables, read, same, source_of, through_json, windows
from tests.support.waiting import eventually


def fill(place: Place, columns: str, rows: list[tuple], table: str = "t") -> None:
    place.execute(f'DROP TABLE IF EXISTS "{table}" CASCADE')
    place.execute(f'CREATE TABLE "{table}" (n bigint, {columns})')
    with place.connection.cursor() as cursor, cursor.copy(f'COPY "{table}" FROM STDIN'.encode()) as copy:
        for number, row in enumerate(rows):
            copy.write_row((number, *row))


# --- tiling -------------------------------------------------------------------------------------------------------------

TEXT = st.text(st.sampled_from("aAbB'\"\\%_ éß\n\t{}𝄞"), max_size=4)
MOMENT = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "integer": st.integers(-3, 3) | st.integers(-(2**31), 2**31 - 1),
    "text": TEXT,
    'text COLLATE "C"': TEXT,
    'text COLLATE "pg_c_utf8"': TEXT,
    "char(5)": TEXT.map(lambda text: text.rstrip()),
    "numeric": st.decimals(-1000, 1000, places=3) | st.just(Decimal("NaN")) | st.decimals(allow_nan=False, allow_infinity=False),
    "double precision": st.floats(),
    "real": st.floats(width=32),
    "uuid": st.uuids(),
    "bytea": st.binary(max_size=3),
    "boolean": st.booleans(),
    "date": st.dates() | st.just("infinity"),
    "timestamp": MOMENT | st.sampled_from(["infinity", "-infinity", "4713-01-01 00:00:00 BC"]),
    "timestamptz": MOMENT.map(lambda moment: moment.replace(tzinfo=timezone.utc)),
    "time": st.times(),
    "interval": st.timedeltas(timedelta(-1000), timedelta(1000)),
    '"Mood\'s"': st.sampled_from(["sad", "it's \\ ok", "happy"]),
    "positive": st.integers(1, 5),
    "inet": st.ip_addresses(v=4).map(str),
    "jsonb": st.sampled_from(['{"a": "it\'s"}', "[1]", "2.0", '"x"']),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(keyed_tables(KEYS, quote), st.integers(1, 20), st.none() | st.integers(1, 25), st.booleans())
def test_splits_tile_the_table(
    place: Place, table: KeyedTable, split_records: int, max_records: int | None, indexed: bool
) -> None:
    """Composite, text, skewed and NULL keys: every row is in one split of one window."""
    place.execute(
        "DO $$ BEGIN CREATE TYPE \"Mood's\" AS ENUM ('sad', 'it''s \\ ok', 'happy'); "
        "CREATE DOMAIN positive AS integer CHECK (VALUE > 0); "
        "EXCEPTION WHEN duplicate_object THEN NULL; END $$"
    )
    rows = table.rows
    fill(place, table.columns, rows)
    distinct = len(set(map(str, rows))) == len(rows) and not any(None in row for row in rows)
    if indexed:
        place.execute(f"CREATE INDEX ON t ({table.index})")
        with contextlib.suppress(psycopg.errors.UniqueViolation):
            place.execute(f"CREATE UNIQUE INDEX ON t ({table.index})")
    source = source_of(place, key=table.key, include_columns=["n"], split_records=split_records, max_records=max_records)
    found, seen = every_row(source)
    assert sorted(found) == [(n,) for n in range(len(rows))]
    if max_records is None:
        assert len(seen) == bool(rows)
    for frozen in seen:
        parts = read(source, frozen.splits)
        ranges = [part for part, split in zip(parts, frozen.splits, strict=True) if not split.get("null")]
        if distinct:
            assert all(len(part) <= split_records for part in ranges)
            assert max_records is None or sum(map(len, ranges)) <= max_records


@pytest.mark.parametrize("max_records", [None, 7])
def test_skewed_keys_give_splits_of_the_same_size(place: Place, max_records: int | None) -> None:
    """A table for which arithmetic on min and max would put all rows but one into one split."""
    fill(place, "id bigint PRIMARY KEY", [(n,) for n in range(100)] + [(10**18,)])
    source = source_of(place, split_records=7, max_records=max_records)
    sizes = [len(part) for frozen in windows(source) for part in read(source, frozen.splits)]
    assert sizes == [7] * 14 + [3]


@pytest.mark.parametrize("index", ["", "INDEX", "UNIQUE INDEX"])
def test_cuts_are_the_same_with_and_without_an_index(place: Place, index: str) -> None:
    """Splits follow a unique index if there is one; else rows are sorted and numbered."""
    fill(place, "a int NOT NULL, b text NOT NULL", [(n % 7, f"{n:03}") for n in range(100)])
    if index:
        place.execute(f"CREATE {index} ON t (a, b)")
    source = source_of(place, key=("a", "b"), split_records=9, max_records=50)
    seen = list(windows(source))
    assert [frozen.rows for frozen in seen] == [50, 50]
    assert [[len(part) for part in read(source, frozen.splits)] for frozen in seen] == [[9] * 5 + [5]] * 2
    order = sorted((n % 7, f"{n:03}") for n in range(100))
    last = [order[at - 1] for at in (9, 18, 27, 36, 45, 50)]
    assert [split["to"] for split in seen[0].splits] == [[str(a), b] for a, b in last]


def test_a_pass_of_several_windows_says_how_far_it_is_and_the_next_pass_begins_anew(place: Place) -> None:
    fill(place, "id int PRIMARY KEY", [(n,) for n in range(100)])
    place.execute("ANALYZE t")
    source = source_of(place, split_records=10, max_records=40)
    position, found = None, []
    for _ in range(4):
        frozen = source.freeze(position)
        position = json.loads(json.dumps(frozen.position))
        progress = parse_position_progress(position)
        assert progress is not None
        found.append((progress.chunks, progress.all_chunks, progress.rows, progress.all_rows))
    assert found == [(4, 10, 40, 100), (8, 10, 80, 100), (10, 10, 100, 100), (4, 10, 40, 100)]
    assert "progress" not in source_of(place, split_records=10).freeze(None).position


def test_an_index_of_another_order_is_not_taken_for_one(place: Place) -> None:
    """Downwards, partial, of an expression, or by another collation."""
    fill(place, "a text NOT NULL, b int NOT NULL", [("aBc"[n % 3] + str(n), n) for n in range(50)])
    place.execute(
        "CREATE UNIQUE INDEX ON t (a DESC); CREATE UNIQUE INDEX ON t (b) WHERE b >= 0; CREATE UNIQUE INDEX ON t ((b + 1))"
    )
    place.execute("CREATE UNIQUE INDEX ON t (a text_pattern_ops, b); CREATE INDEX ON t USING hash (b)")
    place.execute('CREATE UNIQUE INDEX ON t (a COLLATE "POSIX", b)')
    with source_of(place).find_database().open_session("looking") as session:
        relation = jdbc_windows.find_relation(source_of(place), session)
    assert relation.indexes == ()
    assert set(relation.keys) == {("a",), ("a", "b")}
    for key in ("a", "b", ("a", "b")):
        found, _ = every_row(source_of(place, key=key, include_columns=["n"], split_records=4))
        assert sorted(found) == [(n,) for n in range(50)]


def test_rows_without_a_key_are_a_split_of_their_own(place: Place) -> None:
    fill(place, "k int, name text", [(n if n % 3 else None, "x") for n in range(30)])
    source = source_of(place, key="k", split_records=5)
    frozen = source.freeze(None)
    assert [split.get("null", False) for split in frozen.splits] == [False] * 4 + [True]
    assert frozen.rows == 30
    assert [len(part) for part in read(source, frozen.splits)] == [5, 5, 5, 5, 10]


def test_a_key_of_nothing_but_null_is_one_split(place: Place) -> None:
    fill(place, "k int", [(None,)] * 4)
    source = source_of(place, key="k", max_records=2)
    frozen = source.freeze(None)
    assert [len(part) for part in read(source, frozen.splits)] == [4]
    assert not frozen.remaining


def test_the_bounds_are_sorted_as_the_column_is(place: Place) -> None:
    """They are not sorted as texts: 9 and 99999 come before 100000, for any name in the select list."""
    fill(place, "id bigint PRIMARY KEY", [(n,) for n in (9, 99999, 100000)])
    assert source_of(place, cursor="id").freeze(None).position["after"] == ["100000"]


# --- windows ------------------------------------------------------------------------------------------------------------


def test_incrementing_windows_follow_each_other(place: Place) -> None:
    fill(place, "id bigserial PRIMARY KEY", [(n,) for n in range(1, 26)])
    source = source_of(place, cursor="id", include_columns=["id"], split_records=4, max_records=10)
    found, seen = every_row(source)
    assert sorted(found) == [(n,) for n in range(1, 26)]
    assert [frozen.rows for frozen in seen] == [10, 10, 5]
    assert [frozen.remaining for frozen in seen] == [True, True, False]
    last = seen[-1].position
    assert source.freeze(last).splits == ()
    assert source.freeze(last).position == last
    place.execute("INSERT INTO t (n, id) VALUES (0, 40), (0, 39)")
    assert [sorted(part) for part in read(source, source.freeze(last).splits)] == [[(39,), (40,)]]


def test_an_empty_table_has_no_window(place: Place) -> None:
    for options in ({"cursor": "id"}, {"timestamp_column": "at"}, {"timestamp_column": "at", "cursor": "id"}, {}):
        fill(place, "id bigint PRIMARY KEY, at timestamptz NOT NULL", [])
        source = source_of(place, **options)
        first = through_json(source.freeze(None))
        assert (first.splits, first.remaining, first.rows) == ((), False, 0)
        place.execute("INSERT INTO t VALUES (1, 1, now() - interval '1 s')")
        frozen = source.freeze(first.position)
        assert len(frozen.splits) == 1, options
        assert frozen.rows == 1


def test_bulk_reads_the_whole_table_again(place: Place) -> None:
    """Each run publishes the whole table; a pass that max_records cuts short is resumed."""
    fill(place, "id bigint PRIMARY KEY", [(n,) for n in range(10)])
    source = source_of(place, include_columns=["id"], max_records=4)
    position, passes = None, []
    for _ in range(6):
        frozen = through_json(source.freeze(position))
        position = frozen.position
        ids = sorted(row[0] for part in read(source, frozen.splits) for row in part)
        passes.append((position["pass"], position["complete"], ids))
    assert passes == [
        (turn, done, ids) for turn in (1, 2) for done, ids in ((False, [0, 1, 2, 3]), (False, [4, 5, 6, 7]), (True, [8, 9]))
    ]


def test_a_pass_that_is_cut_short_takes_rows_without_a_key_once(place: Place) -> None:
    fill(place, "k int", [(n if n % 2 else None,) for n in range(20)])
    source = source_of(place, key=["k"], include_columns=["n"], max_records=3, split_records=2)
    found, _ = every_row(source)
    assert sorted(found) == [(n,) for n in range(20)]


@pytest.mark.parametrize(("kind", "later"), [("timestamp(0)", 600_000), ("timestamptz(1)", 0), ("timestamp", 0)])
def test_a_row_that_changes_within_the_second_of_the_last_row_is_read(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str, later: int
) -> None:
    """A column without a fraction gives such rows one timestamp, and the changed row may have a lower key than the last one."""
    ten = datetime(2026, 1, 1, 10, 0, 10, tzinfo=timezone.utc)
    place.execute(f'DROP TABLE IF EXISTS "t"; CREATE TABLE "t" (n int PRIMARY KEY, v int, at {kind} NOT NULL)')
    place.execute("INSERT INTO t SELECT n, 0, '2026-01-01 10:00:10Z' FROM generate_series(1, 3) n")
    now = ten + timedelta(milliseconds=400)
    monkeypatch.setattr(PostgresSession, "read_clock", lambda session: now)
    source = source_of(place, timestamp_column="at", include_columns=["n", "v"])
    first = through_json(source.freeze(None))
    seen = [row for part in read(source, first.splits) for row in part]
    # The statement began 0.1 s later, so a column of microseconds gets another timestamp.
    at = ten + timedelta(milliseconds=500) if not later else ten
    place.execute(f"UPDATE t SET v = 1, at = '{at.isoformat()}' WHERE n = 1")
    now += timedelta(microseconds=later or 200_000)
    second = through_json(source.freeze(first.position))
    seen += [row for part in read(source, second.splits) for row in part]
    assert dict(seen) == {1: 1, 2: 0, 3: 0}, "the last version of each row"


def test_rows_whose_timestamps_lie_in_the_future_are_named_with_their_number_and_the_largest(place: Place, caplog) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL, local timestamp NOT NULL, day date NOT NULL)")
    for number, ahead in enumerate(("-1 h", "1 min", "1 h", "1000 years")):
        moment = f"(SELECT now() + interval '{ahead}') AS x(m)"
        place.execute(f"INSERT INTO t SELECT {number}, m, m AT TIME ZONE 'Asia/Tokyo', m::date + 2 FROM {moment}")
    for column, rows in (("at", 2), ("local", 2), ("day", 4)):
        source = source_of(place, timestamp_column=column, db_timezone="Asia/Tokyo" if column == "local" else "UTC")
        frozen = source.freeze(None)
        assert frozen.ahead is not None and frozen.ahead.rows == rows
        assert frozen.ahead.largest.startswith(str(datetime.now(timezone.utc).year + 1000)[:3])
        assert f"{rows} rows have a `{column}` in the future, up to {frozen.ahead.largest}" in caplog.text
    # They are named as well if there is nothing to read, and if they wait for ever.
    place.execute("DELETE FROM t WHERE id < 3; UPDATE t SET at = 'infinity'")
    frozen = source_of(place, timestamp_column="at").freeze(None)
    assert (frozen.splits, frozen.ahead) == ((), RowsAhead(1, "infinity"))
    place.execute("DELETE FROM t")
    assert source_of(place, timestamp_column="at").freeze(None).ahead is None


def test_rows_of_a_query_without_a_cursor_are_refused_instead_of_left_out(place: Place) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY, at timestamptz)")
    place.execute("INSERT INTO t SELECT n, now() - interval '1 h' FROM generate_series(1, 5) AS x(n)")
    query = f"SELECT id, at, id AS n FROM {place.quoted}.t"
    first = JdbcSource(place.conn_id, query=query, timestamp_column="at", incrementing_column="n")
    position = first.freeze(None).position
    place.execute("INSERT INTO t VALUES (6, NULL), (7, NULL)")
    for start in (None, position):
        with pytest.raises(SourceRejected, match="2 of its rows have NULL in `at`, `n`.*IS NOT NULL.*validate_non_null=False"):
            first.freeze(start)
    accepted = replace(first, validate_non_null=False)
    assert accepted.freeze(None).rows == 5 and accepted.freeze(position).rows in (None, 0)


def test_a_column_that_is_not_null_for_new_rows_only_or_by_its_domain_only_may_hold_null(place: Place) -> None:
    place.execute("CREATE TABLE t (n int, id int); INSERT INTO t VALUES (1, 1), (2, NULL), (3, 3)")
    place.execute("ALTER TABLE t ADD CONSTRAINT later NOT NULL id NOT VALID")
    place.execute(
        "CREATE DOMAIN filled AS int NOT NULL; CREATE TABLE filler (id int, k filled); INSERT INTO filler VALUES (1, 1)"
    )
    place.execute("CREATE VIEW v AS SELECT n, k AS id FROM t LEFT JOIN filler USING (id)")
    for table, splits in (("t", [[1, 3], [2]]), ("v", [[1], [2, 3]])):
        bulk = source_of(place, table, key="id", include_columns=["n"])
        assert [sorted(n for (n,) in part) for part in read(bulk, bulk.freeze(None).splits)] == splits
        by_cursor = source_of(place, table, cursor="id")
        assert "`id` takes NULL" in str(by_cursor.validate())
        assert by_cursor.freeze(None).rows == len(splits[0])


def test_a_cursor_after_which_no_value_comes_is_refused(place: Place) -> None:
    place.execute("CREATE TABLE t (id numeric NOT NULL, at timestamptz NOT NULL, name text NOT NULL)")
    place.execute("INSERT INTO t VALUES (1, now(), 'a'), (2, now(), 'NaN')")
    sources = [source_of(place, cursor=column) for column in ("id", "at", "name")]
    assert [source.freeze(None).rows for source in sources] == [2, 2, 2]
    place.execute("INSERT INTO t VALUES ('NaN', 'infinity', 'b')")
    for source, value in zip(sources, ("NaN", "infinity"), strict=False):
        with pytest.raises(SourceRejected, match=f"of a row is {value}; rows that are inserted later.*never be read"):
            source.freeze(None)
    assert sources[2].freeze(None).rows == 3


def test_rows_of_tables_that_inherit_share_keys_and_are_counted(place: Place) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE more () INHERITS (t)")
    place.execute("INSERT INTO t SELECT generate_series(1, 10); INSERT INTO more SELECT generate_series(1, 10)")
    found, seen = every_row(source_of(place, cursor="id", split_records=3, max_records=7))
    assert sorted(found) == sorted((n,) for n in range(1, 11) for _ in range(2))
    assert [frozen.rows for frozen in seen] == [8, 8, 4]


def test_timestamps_wait_for_the_delay(place: Place) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL, local timestamp NOT NULL, day date NOT NULL)")
    # So far apart that none gets as old as the next one meanwhile.
    for number, age in enumerate((10_000, 1000, 500, 5, -500)):
        moment = f"(SELECT now() - interval '{age} s') AS x(m)"
        place.execute(f"INSERT INTO t SELECT {number}, m, m AT TIME ZONE 'Asia/Tokyo', m::date FROM {moment}")

    def ids(**options: Any) -> list[int]:
        source = source_of(place, include_columns=["id"], **options)
        return sorted(row[0] for part in read(source, source.freeze(None).splits) for row in part)

    assert ids(timestamp_column="at") == [0, 1, 2, 3]
    assert ids(timestamp_column="at", delay=200) == [0, 1, 2]
    assert ids(timestamp_column="local", delay=200, db_timezone="Asia/Tokyo") == [0, 1, 2]
    assert ids(timestamp_column="local", delay=200 + 9 * 3600, db_timezone="Asia/Tokyo") == []
    assert ids(timestamp_column="at", delay=999.5) == [0, 1]
    place.execute("UPDATE t SET day = current_date - id")
    assert ids(timestamp_column="day") == [1, 2, 3, 4]
    assert ids(timestamp_column="day", delay=2 * 86400) == [3, 4]


def test_a_window_may_end_between_rows_of_one_timestamp(place: Place) -> None:
    """The key, or the incrementing column, distinguishes them."""
    moments = [datetime(2026, 1, 1 + n // 10, tzinfo=timezone.utc) for n in range(30)]
    fill(
        place,
        "id text PRIMARY KEY, at timestamptz NOT NULL, seq int NOT NULL",
        [(f"{n:02}", m, -n) for n, m in enumerate(moments)],
    )
    for options in ({"timestamp_column": "at"}, {"timestamp_column": "at", "incrementing_column": "seq"}):
        source = source_of(place, include_columns=["n"], max_records=7, split_records=3, **options)
        found, seen = every_row(source)
        assert sorted(found) == [(n,) for n in range(30)]
        assert [frozen.rows or 0 for frozen in seen][-1] == 2
        assert max(len(part) for frozen in seen for part in read(source, frozen.splits)) == 3


def test_rows_with_equal_keys_stay_together(place: Place) -> None:
    moments = [datetime(2026, 1, 1 + n // 10, tzinfo=timezone.utc) for n in range(30)]
    fill(place, "at timestamptz NOT NULL", [(m,) for m in moments])
    source = source_of(place, include_columns=["n"], max_records=3, split_records=2, timestamp_column="at")
    found, seen = every_row(source)
    assert sorted(found) == [(n,) for n in range(30)]
    assert [len(part) for frozen in seen for part in read(source, frozen.splits)] == [10, 10, 10]
    assert [frozen.rows for frozen in seen] == [10, 10, 10]
    assert [frozen.remaining for frozen in seen] == [True, True, False]


def test_an_updated_row_leaves_the_open_window_and_comes_with_a_later_one(place: Place) -> None:
    fill(
        place,
        "id int PRIMARY KEY, at timestamptz NOT NULL, v text",
        [(n, datetime(2026, 1, 1, tzinfo=timezone.utc), "old") for n in range(9)],
    )
    source = source_of(place, include_columns=["id", "v"], timestamp_column="at", split_records=3)
    frozen = through_json(source.freeze(None))
    before = read(source, frozen.splits[:1])
    place.execute("UPDATE t SET v = 'new', at = now() - interval '1 s' WHERE id IN (1, 7)")
    place.execute("INSERT INTO t VALUES (0, 100, now() - interval '1 s', 'new')")
    rest = read(source, frozen.splits[1:])
    same([row for part in before + rest for row in part], [(n, "old") for n in range(9) if n != 7])
    later = through_json(source.freeze(frozen.position))
    same([row for part in read(source, later.splits) for row in part], [(1, "new"), (7, "new"), (100, "new")])


def test_rows_that_come_between_two_attempts_are_published_once(place: Place) -> None:
    """An unpublished split may take a late row, a published one is not read again, and the next window goes on behind."""
    fill(place, "id int PRIMARY KEY", [(n * 10,) for n in range(1, 10)])
    source = source_of(place, cursor="id", include_columns=["id"], split_records=3)
    frozen = through_json(source.freeze(None))
    (published,) = read(source, frozen.splits[:1])
    place.execute("INSERT INTO t VALUES (0, 15), (0, 45), (0, 95)")
    rest = read(source, frozen.splits[1:])
    later = read(source, source.freeze(frozen.position).splits)
    ids = [row[0] for part in [published, *rest, *later] for row in part]
    assert sorted(ids) == [10, 20, 30, 40, 45, 50, 60, 70, 80, 90, 95]


def test_a_query_is_a_source(place: Place) -> None:
    fill(place, "id int PRIMARY KEY, amount numeric", [(n, Decimal(n) / 8) for n in range(20)])
    query = f"SELECT id AS \"Id\", amount::numeric(10, 3), 'it''s' AS note FROM {place.quoted}.t WHERE id % 2 = 0 -- even;"
    for options in ({"key": ["Id"]}, {"cursor": "Id"}):
        source = JdbcSource(place.conn_id, query=query, split_records=3, **options)
        assert source.validate() == []
        assert source.find_columns() == ("Id", "amount", "note")
        found, _ = every_row(source)
        same(found, [(n, (Decimal(n) / 8).quantize(Decimal("0.001")), "it's") for n in range(0, 20, 2)])
    place.execute("CREATE VIEW v AS SELECT id FROM t")
    view = source_of(place, "v", key="id")
    known = view.find_origin()
    assert compare_endpoints(known, view.find_origin()) == () and "view" not in source_of(place).find_origin().facts
    place.execute("CREATE OR REPLACE VIEW v AS SELECT 20 - id AS id FROM t")
    [changed] = compare_endpoints(known, view.find_origin())
    assert changed.what == "view", "a retry would read the other splits of its window by another query"


def test_reading_changes_nothing(place: Place) -> None:
    """Not even functions that a query calls change anything."""
    place.execute("CREATE SEQUENCE s")
    source = JdbcSource(place.conn_id, query=f"SELECT nextval('{place.quoted}.s') AS id", cursor="id")
    with pytest.raises(SourceRejected, match="read-only"):
        source.freeze(None)


def test_views_partitions_and_generated_columns_can_be_read(place: Place) -> None:
    columns = "id int, part int, twice int GENERATED ALWAYS AS (id * 2) STORED, PRIMARY KEY (id, part)"
    place.execute(f"CREATE TABLE p ({columns}) PARTITION BY LIST (part)")
    place.execute("CREATE TABLE p0 PARTITION OF p FOR VALUES IN (0)")
    place.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)")
    place.execute("INSERT INTO p SELECT n, n % 2 FROM generate_series(1, 20) n")
    place.execute("CREATE VIEW v AS SELECT * FROM p")
    place.execute("CREATE MATERIALIZED VIEW m AS SELECT * FROM p")
    for table, key in (("p", ()), ("v", ("id",)), ("m", ("part", "id"))):
        source = source_of(place, table, key=key, split_records=6)
        assert source.validate() == []
        found, _ = every_row(source)
        same(found, [(n, n % 2, n * 2) for n in range(1, 21)])


# --- bounds -------------------------------------------------------------------------------------------------------------


def test_a_window_has_no_more_than_so_many_splits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jdbc_windows, "MAX_SPLITS", 5)
    fill(place, "k int", [(n if n < 95 else None,) for n in range(100)])
    source = source_of(place, key="k", include_columns=["n"], split_records=10)
    found, seen = every_row(source)
    assert sorted(found) == [(n,) for n in range(100)]
    assert [len(frozen.splits) for frozen in seen] == [5, 5, 1]
    assert [frozen.remaining for frozen in seen] == [True, True, False]


def test_long_keys_make_for_shorter_windows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has to fit into one record of the ledger."""
    monkeypatch.setattr(jdbc_windows, "MAX_BYTES", 3000)
    fill(place, "k text PRIMARY KEY", [(f"{n:03}" + "x" * 200,) for n in range(40)])
    source = source_of(place, include_columns=["n"], split_records=2)
    found, seen = every_row(source)
    assert sorted(found) == [(n,) for n in range(40)]
    assert len(seen) > 2
    assert all(len(str(frozen.splits)) < 3500 for frozen in seen)
    assert [frozen.rows for frozen in seen] == [sum(map(len, read(source, frozen.splits))) for frozen in seen]


# --- writers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"cursor": "id"}, {"timestamp_column": "at"}])
def test_a_transaction_that_is_writing_is_waited_for(place: Place, options: dict[str, Any]) -> None:
    """The transaction's rows are before the window's end, so that they would never be read."""
    place.execute("CREATE TABLE t (id bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp())")
    source = source_of(place, include_columns=["id"], **options)
    with place.server.connect() as late:
        late.execute(f"INSERT INTO {place.quoted}.t DEFAULT VALUES".encode())
        place.execute("INSERT INTO t DEFAULT VALUES")
        with pytest.raises(SourceUnavailable, match="transactions that write it") as caught:
            source_of(place, **options, writers_timeout=0.2).freeze(None)
        assert caught.value.retryable
        frozen: list[Any] = []
        thread = threading.Thread(target=lambda: frozen.append(source.freeze(None)))
        thread.start()
        thread.join(0.3)
        assert not frozen
        late.commit()
        thread.join(300)
    assert read(source, frozen[0].splits) == [[(1,), (2,)]]
    assert frozen[0].rows == 2


def test_readers_and_writers_of_other_tables_are_not_waited_for(place: Place) -> None:
    fill(place, "id int PRIMARY KEY", [(1,)])
    place.execute("CREATE TABLE other (id int)")
    with place.server.connect() as busy:
        busy.execute(f"SELECT * FROM {place.quoted}.t".encode())
        busy.execute(f"INSERT INTO {place.quoted}.other VALUES (1)".encode())
        assert source_of(place, cursor="id", writers_timeout=0.5).freeze(None).rows == 1


def test_writers_of_a_partition_are_waited_for(place: Place) -> None:
    place.execute("CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    place.execute("CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (0) TO (100)")
    place.execute("INSERT INTO p VALUES (2)")
    with place.server.connect() as late:
        late.execute(f"INSERT INTO {place.quoted}.p0 VALUES (1)".encode())
        with pytest.raises(SourceUnavailable):
            source_of(place, "p", cursor="id", writers_timeout=0.2).freeze(None)
        assert source_of(place, "p", cursor="id", writers_timeout=0).freeze(None).rows == 1
        assert source_of(place, "p", writers_timeout=0.2).freeze(None).rows == 1, "a pass of bulk is not meant to see it"


def test_a_cursor_is_refused_on_a_foreign_table_whose_writers_are_on_another_server(place: Place) -> None:
    place.execute("CREATE FOREIGN DATA WRAPPER elsewhere")
    place.execute("CREATE SERVER elsewhere FOREIGN DATA WRAPPER elsewhere")
    try:
        place.execute("CREATE TABLE t (id int NOT NULL) PARTITION BY RANGE (id)")
        place.execute("CREATE TABLE here PARTITION OF t FOR VALUES FROM (0) TO (100)")
        assert source_of(place, cursor="id").freeze(None).rows == 0
        place.execute("CREATE FOREIGN TABLE there PARTITION OF t FOR VALUES FROM (100) TO (200) SERVER elsewhere")
        for table in ("t", "there"):
            source = source_of(place, table, cursor="id")
            with pytest.raises(SourceRejected, match="another server holds rows.*never be read"):
                source.freeze(None)
            assert "source.writers_timeout" in [problem.where for problem in source.validate()]
    finally:
        place.execute("DROP FOREIGN DATA WRAPPER elsewhere CASCADE")


@pytest.mark.parametrize(
    ("utc", "lowest"),
    [
        ("2026-10-24 23:59:59", "2026-10-25 01:59:59"),
        ("2026-10-25 00:00:00", "2026-10-25 02:00:00"),
        ("2026-10-25 00:00:00.000001", "2026-10-25 02:00:00"),
        ("2026-10-25 00:59:59.999999", "2026-10-25 02:00:00"),
        ("2026-10-25 01:00:00", "2026-10-25 02:00:00"),
        ("2026-10-25 01:30:00", "2026-10-25 02:30:00"),
        ("2026-10-25 02:00:00", "2026-10-25 03:00:00"),
        ("2026-03-29 00:59:59", "2026-03-29 01:59:59"),
        ("2026-03-29 01:00:00", "2026-03-29 03:00:00"),
    ],
)
def test_a_window_ends_before_an_hour_that_the_clock_shows_twice_until_the_second_has_come(utc: str, lowest: str) -> None:
    instant = datetime.fromisoformat(utc).replace(tzinfo=timezone.utc)
    assert jdbc_windows.find_lowest_clock(instant, ZoneInfo("Europe/Berlin")) == datetime.fromisoformat(lowest)
    assert jdbc_windows.find_lowest_clock(instant, timezone.utc) == instant.replace(tzinfo=None)


def test_rows_of_the_second_of_two_equal_hours_are_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 2:30 and, half an hour later, at 2:00 again."""
    fill(place, "at timestamp NOT NULL", [("2026-10-25 01:50:00",), ("2026-10-25 02:20:00",)])
    source = source_of(place, timestamp_column="at", delay=0, db_timezone="Europe/Berlin")
    shown = iter(["2026-10-25 00:30+00", "2026-10-25 01:10+00", "2026-10-25 03:00+00"])
    monkeypatch.setattr(PostgresSession, "read_clock", lambda session: datetime.fromisoformat(next(shown)))
    first = source.freeze(None)
    place.execute("INSERT INTO t VALUES (9, '2026-10-25 02:05:00')")
    second = source.freeze(first.position)
    third = source.freeze(second.position)
    assert [first.rows, second.rows, third.rows] == [1, 1, 1]


# --- positions that no longer fit ---------------------------------------------------------------------------------------


def test_another_cursor_is_not_read_from_the_old_position(place: Place) -> None:
    fill(place, "id int PRIMARY KEY, other int NOT NULL", [(1, 2)])
    fill(place, "id int PRIMARY KEY", [(1,)], table="t2")
    position = source_of(place, cursor="id").freeze(None).position
    for changed in (source_of(place, cursor="other"), source_of(place), source_of(place, "t2", cursor="id")):
        with pytest.raises(SourceRejected, match="earlier windows were read in"):
            changed.freeze(position)


@pytest.mark.parametrize("options", [{"cursor": "id"}, {"key": "id", "max_records": 5}], ids=["cursor", "bulk"])
def test_a_position_is_left_alone_when_its_column_orders_rows_in_another_way(place: Place, options: dict[str, Any]) -> None:
    """As texts, 9 comes after 10, so rows would be published twice or never."""
    fill(place, "id int PRIMARY KEY", [(number,) for number in range(12)])
    source = source_of(place, **options)
    frozen = through_json(source.freeze(None))
    place.execute("ALTER TABLE t ALTER id TYPE numeric")
    assert source.freeze(frozen.position).rows == (0 if "cursor" in options else 5), "numbers have the same order"
    place.execute("ALTER TABLE t ALTER id TYPE text")
    for stale in (lambda: source.freeze(frozen.position), lambda: source.make_reader(frozen.splits, None)):
        with pytest.raises(SourceRejected, match="column `id` is of type text.*expected the order of number.*Change the type"):
            stale()
    frozen = source_of(place, max_records=2).freeze(None)
    place.execute('ALTER TABLE t ALTER id TYPE text COLLATE "C"')
    with pytest.raises(SourceRejected, match="orders rows as text C; expected the order of text"):
        source_of(place, max_records=2).freeze(frozen.position)


def test_a_sequence_that_was_set_back_is_noticed(place: Place) -> None:
    place.execute("CREATE TABLE t (id bigserial PRIMARY KEY, x int)")
    place.execute("INSERT INTO t SELECT nextval('t_id_seq') FROM generate_series(1, 50)")
    source = source_of(place, cursor="id")
    position = source.freeze(None).position
    assert source.freeze(position).splits == ()
    place.execute("TRUNCATE t RESTART IDENTITY")
    place.execute("INSERT INTO t (x) VALUES (1)")
    with pytest.raises(SourceRejected, match="it was set back"):
        source.freeze(position)


def test_a_table_that_was_created_again_is_refused_if_its_rows_lie_before_those_that_were_read(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    fill(place, "id int PRIMARY KEY", [(number,) for number in range(50)])
    source = source_of(place, cursor="id")
    position = through_json(source.freeze(None)).position
    fill(place, "id int PRIMARY KEY", [])
    empty = through_json(source.freeze(position))
    assert (empty.splits, empty.position) == ((), position), "it may still be filled"
    fill(place, "id int PRIMARY KEY", [(number,) for number in range(9)])
    with pytest.raises(SourceRejected, match=r"created again .*its last row is at 8; rows up to 49 were read.*start over"):
        source.freeze(empty.position)
    # The pipeline continues with a copy, like that of a table that is rebuilt each night.
    fill(place, "id int PRIMARY KEY", [(number,) for number in range(50)])
    copied = through_json(source.freeze(empty.position))
    assert copied.rows == 0 and "Rows up to 49 count as read" in caplog.text
    caplog.clear()
    fill(place, "id int PRIMARY KEY", [(number,) for number in range(60)])
    grown = through_json(source.freeze(copied.position))
    assert grown.rows == 10 and "Rows up to 49 count as read" in caplog.text
    caplog.clear()
    assert source.freeze(grown.position).rows == 0 and not caplog.text
    # An open window and a pass continue with it, too.
    bulk = source_of(place, max_records=20)
    begun = through_json(bulk.freeze(None))
    assert len(read(source, grown.splits)[0]) == 10 and bulk.freeze(begun.position).rows == 20 and not caplog.text
    fill(place, "id int PRIMARY KEY", [(number,) for number in range(60)])
    for again in (lambda: read(source, grown.splits), lambda: bulk.freeze(begun.position)):
        again()
        assert "The rest is read from the new one" in caplog.text
        caplog.clear()


def test_a_table_or_column_that_is_gone_is_reported(place: Place) -> None:
    fill(place, "id int PRIMARY KEY, k int NOT NULL", [(1, 1)])
    source = source_of(place, key="k")
    frozen = source.freeze(None)
    place.execute("ALTER TABLE t RENAME k TO gone")
    with pytest.raises(SourceRejected, match="no column `k` any more, by which earlier windows were cut. Put it back"):
        read(source, frozen.splits)
    place.execute("DROP TABLE t")
    with pytest.raises(SourceRejected, match="there is no table"):
        source.freeze(None)


def test_a_server_that_is_gone_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_NOWHERE", "postgres://u:s3cr3t@127.0.0.1:1/db")
    with pytest.raises(SourceUnavailable) as caught:
        JdbcSource("nowhere", "t", cursor="id").freeze(None)
    assert caught.value.retryable
    assert "s3cr3t" not in str(caught.value)


def test_a_session_that_breaks_off_is_worth_another_try(place: Place) -> None:
    fill(place, "id int PRIMARY KEY", [(1,)])
    with (
        pytest.raises(SourceUnavailable, match=SESSION_ENDED),
        source_of(place).find_database().open_session("reading") as session,
    ):
        session.fetch_rows("SELECT pg_terminate_backend(pg_backend_pid())")


def test_a_bound_is_a_value_whatever_it_looks_like(place: Place) -> None:
    keys = ["'; DROP TABLE t; --", "\\'", "E'\\x41'", "$$", "%s", "{}", '"', "\u2028", "NULL", ""]
    fill(place, "k text PRIMARY KEY", [(key,) for key in keys])
    source = source_of(place, include_columns=["k"], split_records=1)
    frozen = through_json(source.freeze(None))
    assert len(frozen.splits) == len(keys)
    assert all(len(part) == 1 for part in read(source, frozen.splits))
    assert sorted(row[0] for part in read(source, frozen.splits) for row in part) == sorted(keys)


def test_the_contract_says_nothing_while_a_dag_is_parsed() -> None:
    """No connection of that name is there: what a DAG file needs does not look it up."""
    source = JdbcSource("nowhere", "shop.orders", cursor="id")
    assert source.asset_uri == "x-jdbc://nowhere/shop/orders"
    assert source.effective_mode == "incrementing"
    assert JdbcSource("nowhere", "{{ t }}").asset_uri == "x-jdbc://nowhere/{{ t }}"
    assert JdbcSource("c", query="SELECT 1").asset_uri.startswith("x-jdbc://c/query-")
    assert JdbcSource("c", "t", timestamp_column="at", cursor="id").effective_mode == "timestamp+incrementing"
    assert JdbcSource("c", "t", key="id").key == ("id",)


def test_psycopg_is_the_oracle_of_these_tests(place: Place) -> None:
    """The helpers find a missing and a doubled row."""
    fill(place, "id int PRIMARY KEY", [(n,) for n in range(4)])
    with pytest.raises(AssertionError):
        same([(1,), (1,), (2,)], [(1,), (2,)])
    with pytest.raises(AssertionError):
        same([(1,)], [(1,), (2,)])
    with pytest.raises(psycopg.Error):
        place.execute("SELECT * FROM nothing")


def test_a_table_without_statistics_is_cut_along_its_index(place: Place) -> None:
    place.execute("CREATE TABLE t (id uuid PRIMARY KEY, note text)")
    place.execute("INSERT INTO t SELECT md5(n::text)::uuid, repeat('x', 50) FROM generate_series(1, 20000) n")
    source = source_of(place, split_records=500)
    name = "schemaname = current_schema() AND relname = 't'"
    scans = f"SELECT coalesce(sum(seq_scan), 0), coalesce(sum(idx_scan), 0) FROM pg_stat_user_tables WHERE {name}"
    # The index of the key was made by reading the whole table, which the session may not have counted yet.
    place.execute("SELECT pg_stat_force_next_flush()")
    ((read_whole, steps),) = place.rows(scans)
    assert len(source.freeze(None).splits) == 40
    assert eventually(lambda: place.rows(scans)[0][1] >= steps + 40)
    assert place.rows(scans)[0][0] == read_whole
