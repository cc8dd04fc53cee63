"""A table that is read by its pages: each row once if the table does not change, and a refusal if it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.base import FrozenWindow
from airflow_kafka_spark.sources.jdbc.pages import make_changed_condition
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from tests.sinks.postgres.kit import Place
from tests.sources.jdbc.kit import read, same, source_of, windows
from tests.support.waiting import eventually

ROWS = 2_000
COLUMNS = "id bigint, note text"


def fill(place: Place, table: str = "t") -> None:
    """Create a table of some thirty pages, without a key."""
    place.execute(f"CREATE TABLE {table} ({COLUMNS})")
    place.execute(f"INSERT INTO {table} SELECT n, repeat('x', 90) FROM generate_series(1, {ROWS}) n")
    place.execute(f"ANALYZE {table}")


def paged(place: Place, **options: Any) -> JdbcSource:
    return source_of(place, split_by="pages", include_columns=["id"], **{"split_records": 300, **options})


def publish(source: JdbcSource, frozen: FrozenWindow) -> list[tuple]:
    """Return the rows of a window as an operator publishes them: it is complete only if they have not changed."""
    rows = [row for part in read(source, frozen.splits) for row in part]
    source.check_published(frozen.splits, frozen.position)
    return rows


def publish_pass(source: JdbcSource, then: Callable[[int], object] = lambda window: None) -> list[tuple]:
    """Return the rows of a pass.

    :param then: called after each window, with its number.
    """
    rows = []
    for number, frozen in enumerate(windows(source)):
        rows += publish(source, frozen)
        then(number)
    return rows


@pytest.mark.parametrize("max_records", [None, 700])
def test_windows_of_pages_have_each_row_once(place: Place, max_records: int | None) -> None:
    """Without a key, with pages whose rows were deleted and updated before, and of all kinds of partitions."""
    fill(place)
    place.execute("DELETE FROM t WHERE id % 3 = 0 OR id BETWEEN 500 AND 900")
    place.execute("UPDATE t SET note = repeat('y', 200) WHERE id % 5 = 0")
    place.execute(f"CREATE TABLE p ({COLUMNS}) PARTITION BY RANGE (id)")
    place.execute("CREATE TABLE low PARTITION OF p FOR VALUES FROM (0) TO (800)")
    place.execute('CREATE TABLE "High" (note text, dropped int, id bigint)')
    place.execute('ALTER TABLE "High" DROP COLUMN dropped')
    place.execute('ALTER TABLE p ATTACH PARTITION "High" FOR VALUES FROM (800) TO (5000)')
    place.execute("CREATE TABLE none PARTITION OF p FOR VALUES FROM (5000) TO (6000)")
    place.execute("INSERT INTO p SELECT * FROM t")
    place.execute("CREATE MATERIALIZED VIEW m AS SELECT * FROM t")
    expected = place.rows("SELECT id FROM t")
    assert len(expected) > ROWS / 2
    for table in ("t", "p", "m"):
        source = paged(place, table=table, max_records=max_records)
        assert source.validate() == []
        seen = list(windows(source))
        assert len(seen) > 2 if max_records else len(seen) == 1
        same([row for frozen in seen for row in publish(source, frozen)], expected)
        assert [frozen.remaining for frozen in seen] == [True] * (len(seen) - 1) + [False]
        again = source.freeze(seen[-1].position)
        assert (again.position["pass"], again.position["complete"]) == (2, max_records is None)
    place.execute("TRUNCATE t")
    empty = paged(place).freeze(None)
    assert (empty.splits, empty.remaining, empty.position["complete"]) == ((), False, True)


CHANGES = {
    "a row moves from a page that is not read to one that is": "UPDATE t SET note = 'moved' WHERE id = {last}",
    "a row moves from a page that is read to one that is not": "UPDATE t SET note = repeat('z', 2000) WHERE id = 1",
    "a row is inserted": "INSERT INTO t VALUES (0, 'new')",
    "the file is written again, in another order": "CLUSTER t USING by_id",
    "the table is emptied and filled": "WITH d AS (DELETE FROM t RETURNING *) INSERT INTO t SELECT * FROM d",
    "the table is truncated": "TRUNCATE t",
    "a table with old rows begins to inherit from it": "ALTER TABLE old INHERIT t",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_changes_while_it_is_read_by_pages_is_refused_before_the_pass_is_complete(place: Place, change: str) -> None:
    fill(place)
    fill(place, "old")
    place.execute("CREATE INDEX by_id ON t (id DESC)")
    # The first page has room for a row that moves.
    place.execute("DELETE FROM t WHERE id < 30 AND id > 1")
    place.execute("VACUUM t")
    ((last,),) = place.rows("SELECT max(id) FROM t")
    source = paged(place, max_records=700)
    # Changes that move no row are no reason: those of locks, deletes and the removal of old versions.
    harmless = ("SELECT count(*) FROM (SELECT FROM t FOR UPDATE) AS locked", "DELETE FROM t WHERE id = 31", "VACUUM (FREEZE) t")
    rows = publish_pass(source, lambda number: number or [place.execute(statement) for statement in harmless])
    assert set(place.rows("SELECT id FROM t")) <= set(rows) and len(set(rows)) == len(rows)

    def alter(number: int) -> None:
        if number == 0:
            place.execute(CHANGES[change].format(last=last))

    with pytest.raises(SourceRejected, match="since the pass by pages began"):
        publish_pass(source, alter)
    # The last window is refused, too, if those before it are given up.
    place.execute("INSERT INTO t SELECT * FROM ONLY old")
    frozen = list(windows(source, None))[-1]
    place.execute(CHANGES["a row is inserted"])
    with pytest.raises(SourceRejected, match="rows were inserted or updated|was rewritten"):
        source.check_published(frozen.splits, frozen.position)
    # Then it is read by the key, in a new pass.
    by_key = source_of(place, key="id", include_columns=["id"])
    given_up = {**frozen.position, "complete": False}
    again = by_key.freeze(given_up)
    assert again.position["pass"] == frozen.position["pass"] + 1
    same([row for part in read(by_key, again.splits) for row in part], place.rows("SELECT id FROM t"))
    assert paged(place).freeze(again.position).position["pass"] == again.position["pass"] + 1


def test_a_version_that_is_newer_than_the_pass_is_not_read_so_that_no_row_is_there_twice(place: Place) -> None:
    """Of a row that moves and is then deleted, nothing is left that a check could find."""
    fill(place)
    place.execute(f"DELETE FROM t WHERE id BETWEEN {ROWS - 100} AND {ROWS - 1}")
    place.execute("VACUUM t")
    source = paged(place, max_records=700)
    first, *others = windows(source)
    pages = [row for part in read(source, first.splits) for row in part]
    place.execute("UPDATE t SET note = repeat('z', 1000) WHERE id = 1")
    ((page,),) = place.rows("SELECT (ctid::text::point)[0]::int FROM t WHERE id = 1")
    assert others[-1].splits[-1]["pages"][3] > page >= others[0].splits[0]["pages"][2], "it moves to a page that is not read yet"
    pages += [row for frozen in others for part in read(source, frozen.splits) for row in part]
    assert len(set(pages)) == len(pages)
    place.execute("DELETE FROM t WHERE id = 1")
    source.check_published(others[-1].splits, others[-1].position)
    assert set(place.rows("SELECT id FROM t")) <= set(pages)


def test_a_pass_by_pages_begins_when_the_transactions_have_ended_that_were_open(place: Place) -> None:
    """A version that such a transaction writes later, in a subtransaction, would seem to be older than the pass."""
    fill(place)
    place.execute("CREATE TABLE other (n int)")
    with place.server.connect() as writer:
        writer.execute(f"INSERT INTO {place.quoted}.other VALUES (1)")
        place.execute("DELETE FROM t WHERE id = 1")
        with pytest.raises(SourceUnavailable, match=r"transaction \d+ is still open"):
            paged(place, writers_timeout=0.01).freeze(None)
        found: list[FrozenWindow] = []
        freezing = threading.Thread(target=lambda: found.append(paged(place).freeze(None)))
        freezing.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_snapshot_xmin%' AND pid <> pg_backend_pid()"
        eventually(lambda: place.rows(waiting) != [(0,)])
        writer.execute(f"INSERT INTO {place.quoted}.t VALUES (-1, '')")
        writer.commit()
        freezing.join(30)
    same(publish(paged(place), found[0]), place.rows("SELECT id FROM t"))


def test_ids_of_transactions_are_compared_across_their_wrap_around(place: Place) -> None:
    ((now,),) = place.rows("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    since = now - 5 if now > 10 else now
    ids = {since: True, now: True, since - 1: False, since - 2**30: False, since - 2**31 + 9: False, since - 2**31 - 9: False}
    # The last two are permanent: those of rows that initdb and pg_upgrade have written.
    for xid, is_changed in {**ids, 1: False, 2: False}.items():
        text = f"CAST('{xid % 2**32}' AS xid)"
        assert place.rows(f"SELECT {make_changed_condition(text, since)}") == [(is_changed,)], xid - since


def test_sessions_that_read_have_memory_for_the_pages_of_a_split_and_no_less_than_the_role_has(place: Place) -> None:
    source = paged(place)
    with place.make_role("secret") as role:
        place.connect_as(role, "secret")
        for given, expected in (("1MB", "64MB"), ("100MB", "100MB")):
            place.execute(f"ALTER ROLE {role} SET work_mem = '{given}'")
            with source.find_database().open_session("asking for its memory") as session:
                assert session.fetch_rows("SHOW work_mem") == [(expected,)]


def test_what_has_no_pages_is_refused_before_it_is_read(place: Place) -> None:
    fill(place)
    place.execute("CREATE VIEW v AS SELECT * FROM t")
    place.execute(f"CREATE TABLE p ({COLUMNS}) PARTITION BY RANGE (id)")
    place.execute("CREATE TABLE low PARTITION OF p FOR VALUES FROM (0) TO (800)")

    def problems(source: JdbcSource) -> list[tuple[str, str]]:
        return [(problem.where, problem.what) for problem in source.validate()]

    ((where, what),) = problems(paged(place, table="v"))
    assert where == "source.split_by" and "v has no pages of its own; expected a table, a partitioned table or" in what
    assert {where for where, _ in problems(paged(place, cursor="id"))} >= {"source.split_by"}
    assert ("source.key", 'it means nothing with `split_by="pages"`') in problems(paged(place, key="id"))
    of_query = JdbcSource(place.conn_id, query="SELECT 1 AS id", split_by="pages")
    assert ("source.split_by", "it is `pages`, and a query has no pages; expected `table`") in problems(of_query)
    assert "expected one of key, pages" in problems(source_of(place, split_by="file", key="id"))[0][1]
    with place.make_role("secret") as role:
        place.connect_as(role, "secret")
        place.execute(f"GRANT USAGE ON SCHEMA {place.quoted} TO {role}; GRANT SELECT ON p TO {role}")
        ((where, what),) = problems(paged(place, table="p"))
        assert where == "source.split_by" and "needs SELECT on each partition" in what
        place.execute(f"GRANT SELECT ON low TO {role}; ALTER TABLE low ENABLE ROW LEVEL SECURITY")
        ((_, what),) = problems(paged(place, table="p"))
        assert "row security hides rows" in what
