"""Guarantees of all sinks of lake tables beside the contract: other writers, maintenance, replays, evolution, refusals."""

from __future__ import annotations

import datetime as dt
import os
import pickle
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.snapshots import Operation

from airflow_kafka_spark.errors import Fenced, SinkUnavailable, WindowConflict
from airflow_kafka_spark.faults import COMPACTING
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.delta.records import Records
from airflow_kafka_spark.sinks.iceberg.writer import Attempts
from airflow_kafka_spark.sinks.lake.tasks import rewrite
from airflow_kafka_spark.sinks.storage.store import TableStore
from tests.sinks.attempt import Victim, apply, write_all
from tests.sinks.delta.cases import DeltaCase
from tests.sinks.feed import SCHEMA, Feed, Job, replayed, row
from tests.sinks.iceberg.cases import IcebergCase
from tests.sinks.oracle import same_multiset

SMALL = pa.schema([("id", pa.int64()), ("name", pa.string()), ("ratio", pa.float64())])
Lake = DeltaCase | IcebergCase


@pytest.fixture
def lake(new_lake) -> Lake:
    return new_lake(SMALL)


@pytest.fixture
def feed() -> Feed:
    return Feed(SMALL)


def attempts(lake: Lake) -> list[Path]:
    return list(lake.path.rglob("_airflow/attempts/*"))


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_a_task_that_writes_a_split_imports_no_library_of_tables(lake, feed, tmp_path):
    """The driver makes its commit of them. In each Python worker their import takes more CPU than writing 100,000 rows."""
    job = feed.next()
    code = """if True:
        import pickle, sys
        from tests.sinks.attempt import write_split
        writer, split, batches = pickle.load(sys.stdin.buffer)
        assert write_split(writer, split, batches).records
        print(sorted({"deltalake", "pandas", "pydantic", "pyiceberg"} & set(sys.modules)))
    """
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        given = pickle.dumps((writer.make_split_writer(), job.splits[0], list(job.rows[0])))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", code], input=given, env=env, capture_output=True, check=True, timeout=300)
    assert done.stdout.split() == [b"[]"]


# --- other writers --------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_commit_of_others_between_look_and_commit_loses_and_doubles_nothing(lake, feed, tmp_path):
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "victim") as attempt:
        assert attempt.stopped()
        lake.of_others(-1, -2)
        lake.of_others(-3)
        assert attempt.wake() == 0
    assert Counter(lake.ids()) == Counter([*first.ids, *job.ids, -1, -2, -3])
    assert lake.leftovers() == []
    assert apply(lake.sink, job).number == 2


@pytest.mark.faults
def test_an_attempt_whose_files_were_removed_commits_nothing_although_no_other_attempt_has(lake, feed, tmp_path):
    """The attempt that has removed them gave up, so that the window is still open when the zombie wakes."""
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "victim") as zombie:
        assert zombie.stopped()
        with lake.sink.begin(job.window, job.splits, job.shape):
            pass
        assert zombie.wake() == 1
        assert "Fenced" in zombie.log.read_text()
    assert lake.sink.find_applied(job.window) is None
    assert lake.sink.find_last_applied(feed.pipeline).number == 1
    same_multiset(first.expected, lake.read())
    apply(lake.sink, job)
    same_multiset(first.expected + job.expected, lake.read())
    assert lake.leftovers() == []


def test_an_attempt_that_was_fenced_commits_nothing_though_all_its_files_are_there(lake, feed, monkeypatch):
    """The next attempt dies between the fence and the removal of the files."""
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        with monkeypatch.context() as patch:
            patch.setattr(Records, "_remove", die)
            patch.setattr(Attempts, "remove", die)
            with pytest.raises(RuntimeError, match="killed"):
                lake.sink.begin(job.window, job.splits, job.shape)
        with pytest.raises(Fenced):
            writer.commit(results)
    assert lake.sink.find_applied(job.window) is None
    same_multiset(first.expected, lake.read())
    apply(lake.sink, job)
    same_multiset(first.expected + job.expected, lake.read())
    assert lake.leftovers() == []


def test_files_of_a_commit_whose_outcome_is_not_known_stay(lake, feed, monkeypatch):
    """The commit arrives, its answer does not, and then the table does not answer either."""
    job = feed.next()
    with (
        pytest.raises(SinkUnavailable, match="no answer"),
        lake.sink.begin(job.window, job.splits, job.shape) as writer,
    ):
        prepare = writer.prepare

        def unanswered() -> None:
            raise writer.make_unavailable_error(writer.committing, "no answer")

        def lose_answers(table: Any, change: Any) -> Any:
            record, try_commit = prepare(table, change)

            def commit() -> Exception:
                assert try_commit() is None
                monkeypatch.setattr(writer, "load", unanswered)
                return TimeoutError()

            return record, commit

        monkeypatch.setattr(writer, "prepare", lose_answers)
        writer.commit(write_all(writer, job))
    same_multiset(job.expected, lake.read())
    apply(lake.sink, feed.next())
    assert Counter(i for i in lake.ids() if i in job.ids) == Counter(job.ids)
    assert lake.leftovers() == []


@pytest.mark.faults
@pytest.mark.parametrize("point", ["sink.in_transaction", "sink.committed"])
def test_maintenance_and_other_writers_between_two_attempts_lose_nothing(lake, feed, tmp_path, point):
    first, job, third = feed.next(), feed.next(), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, point, tmp_path / "victim") as victim:
        assert victim.died()
    lake.of_others(-1)
    lake.maintain()
    lake.of_others(-2)
    for one in (job, third, job):
        apply(lake.sink, one)
    assert Counter(lake.ids()) == Counter([*first.ids, *job.ids, *third.ids, -1, -2])


def test_files_of_a_running_attempt_that_others_remove_are_noticed_before_its_commit(lake, feed):
    apply(lake.sink, feed.next())
    before, job = lake.ids(), feed.next()
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        if isinstance(lake, DeltaCase):
            lake.maintain()  # VACUUM, with a retention of nothing
        else:
            Path(writer.data.make_full_path(results[0].token["files"][0]["path"])).unlink()
        with pytest.raises(SinkUnavailable, match=r"VACUUM|remove_orphan_files"):
            writer.commit(results)
    assert sorted(lake.ids()) == sorted(before)
    apply(lake.sink, job)
    assert Counter(lake.ids()) == Counter([*before, *job.ids])


def test_pipelines_that_write_to_one_table_at_the_same_time_lose_and_double_nothing(new_lake):
    """The pipelines also create the table, compact it and replay their windows while others commit. A catalog in SQLite may be
    locked for a moment."""
    lake = new_lake(SMALL, optimize=2, window_column="moved_in")
    feeds = [Feed(SMALL, f"shop.pipeline{n}", first_id=1000 * n) for n in range(3)]
    jobs = [[feed.next(2, 1, 0) for _ in range(3)] for feed in feeds]

    def move(own: list[Job]) -> None:
        for job in [*own, *(replayed(job) for job in own[:2])]:
            for _ in range(10):
                with suppress(SinkUnavailable):
                    assert apply(lake.sink, job).ranges == job.window.ranges
                    break

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(move, jobs))
    assert Counter(lake.ids()) == Counter(i for own in jobs for job in own for i in job.ids)
    assert [lake.sink.find_last_applied(feed.pipeline).number for feed in feeds] == [3, 3, 3]
    assert all(lake.sink.find_applied(replayed(job).window) for own in jobs for job in own[:2])
    if isinstance(lake, DeltaCase):
        entries = [path.read_text() for path in lake.path.glob("_delta_log/*.json")]
        assert sum('"metaData"' in entry for entry in entries) == 1, "created once"


# --- replays --------------------------------------------------------------------------------------------------------


def test_a_replay_replaces_the_rows_of_its_window_in_one_commit(new_lake, feed):
    lake = new_lake(SMALL)
    jobs = [feed.next(20, 5, 9) for _ in range(3)]
    for job in jobs:
        apply(lake.sink, job)
    lake.of_others(-1)
    again = replayed(jobs[1], first=5)
    assert 0 < len(again.ids) < len(jobs[1].ids)
    assert lake.sink.find_applied(again.window) is None
    before = lake.commits()
    assert apply(lake.sink, again).replay == 1
    assert lake.commits() == before + 1
    assert Counter(lake.ids()) == Counter([*jobs[0].ids, *again.ids, *jobs[2].ids, -1])
    assert lake.sink.find_last_applied(feed.pipeline).number == 3
    twice = replayed(jobs[1], replay=2)
    for one in (twice, again, twice):
        apply(lake.sink, one)
    assert Counter(lake.ids()) == Counter([*(i for job in jobs for i in job.ids), -1])
    if isinstance(lake, IcebergCase):
        lake.expire()
        assert lake.sink.find_last_applied(feed.pipeline).number == 3, "the snapshot of the replay knows the newest window, too"
        # The summary counts what was removed.
        assert lake.table().current_snapshot().summary["total-records"] == str(len(lake.ids()))
    fourth = feed.next()
    apply(lake.sink, fourth)
    assert Counter(lake.ids()) == Counter([*(i for job in [*jobs, fourth] for i in job.ids), -1])
    assert lake.sink.find_last_applied(feed.pipeline).number == 4


@pytest.mark.faults
@pytest.mark.parametrize("point", ["sink.in_transaction", "sink.committed"])
def test_a_replay_that_dies_is_repeated_and_a_zombie_of_it_changes_nothing(lake, feed, tmp_path, point):
    job, second = feed.next(), feed.next()
    apply(lake.sink, job)
    apply(lake.sink, second)
    again = replayed(job, first=3)
    with Victim(lake.sink, again, point, tmp_path / "victim") as victim:
        assert victim.died()
    with Victim(lake.sink, again, "sink.in_transaction:stop", tmp_path / "zombie") as zombie:
        stopped = zombie.stopped()
        assert stopped == (point == "sink.in_transaction")
        apply(lake.sink, again)
        if stopped:
            zombie.wake()
    assert Counter(lake.ids()) == Counter([*again.ids, *second.ids])
    apply(lake.sink, feed.next())
    assert not attempts(lake)


def test_a_replay_of_a_window_whose_files_were_rewritten_is_refused(lake, feed):
    job = feed.next()
    apply(lake.sink, job)
    lake.of_others(-1)
    again = replayed(job)
    assert lake.sink.find_window_replay_problems(again.window) == []
    lake.maintain()
    (problem,) = lake.sink.find_window_replay_problems(again.window)
    assert problem.where == "on_rerun" and "rewritten" in problem.what, "it is said before a replay is planned, too"
    with pytest.raises(WindowConflict, match="rewritten"):
        apply(lake.sink, again)
    assert Counter(lake.ids()) == Counter([*job.ids, -1])
    assert not attempts(lake)


def test_a_replay_of_a_rewritten_window_goes_by_its_window_column(new_lake, feed):
    lake = new_lake(SMALL, window_column="moved_in")
    jobs = [feed.next(20, 5, 9) for _ in range(3)]
    for job in jobs:
        apply(lake.sink, job)
    lake.of_others(-1)
    lake.maintain()
    again = replayed(jobs[1], first=5)
    assert lake.sink.find_window_replay_problems(again.window) == []
    before = lake.commits()
    assert apply(lake.sink, again).written == len(again.ids)
    assert lake.commits() == before + 1
    assert Counter(lake.ids()) == Counter([*jobs[0].ids, *again.ids, *jobs[2].ids, -1])
    lake.schema = pa.schema([("id", pa.int64()), ("moved_in", pa.string())])
    assert {line["moved_in"] for line in lake.read() if line["id"] in again.ids} == {str(jobs[1].window)}
    apply(lake.sink, again)
    apply(lake.sink, replayed(jobs[1], replay=2))
    assert Counter(lake.ids()) == Counter([*(i for job in jobs for i in job.ids), -1])
    # A window that was written before the option was set cannot be distinguished from others.
    plain = replace(lake.sink, window_column=None)
    apply(plain, fourth := feed.next())
    lake.maintain()
    assert [p.where for p in lake.sink.find_window_replay_problems(replayed(fourth).window)] == ["on_rerun"]
    with pytest.raises(WindowConflict):
        apply(lake.sink, replayed(fourth))


def test_a_replay_that_was_committed_needs_no_files_and_an_unknown_window_is_not_replayed(lake, feed):
    job, unknown = feed.next(), feed.next()
    again = replayed(job)
    assert "no record" in lake.sink.find_window_replay_problems(again.window)[0].what, "there is no table yet"
    apply(lake.sink, job)
    assert "no record" in lake.sink.find_window_replay_problems(replayed(unknown).window)[0].what
    apply(lake.sink, again)
    lake.maintain()
    assert lake.sink.find_window_replay_problems(again.window) == [], "its attempt died before the close: only that is left"


# --- compaction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [(), ("flag",)], ids=["plain", "partitioned"])
def test_small_files_are_compacted_behind_every_so_many_windows_and_values_stay(new_lake, columns):
    lake = new_lake(SCHEMA, optimize=3, window_column="moved_in", compression="zstd")
    sink, feed = replace(lake.sink, partition_by=columns), Feed(SCHEMA)
    jobs = [feed.next(40, 3, 1) for _ in range(4)]
    counts = []
    for job in jobs:
        apply(sink, job)
        counts.append(len(lake.files()))
    values = len({None, *({True, False} if columns else ())})
    assert counts[1] > counts[2] == values, "behind the third window there is one file for each partition"
    assert counts[3] > values
    same_multiset([line for job in jobs for line in job.expected], lake.read())
    again = replayed(jobs[2], first=5)
    apply(sink, again)
    expected = [*jobs[0].expected, *jobs[1].expected, *again.expected, *jobs[3].expected]
    same_multiset(expected, lake.read())
    assert sink.find_last_applied(feed.pipeline).number == 4
    if isinstance(lake, IcebergCase):
        compacted = [s for s in lake.table().snapshots() if s.summary.operation == Operation.REPLACE]
        assert [(s.summary["added-records"], s.summary["deleted-records"]) for s in compacted] == [("132", "132")]
        lake.expire()
        assert sink.find_applied(jobs[3].window).number == 4, "the tag is behind the compaction"


def test_a_compaction_that_fails_leaves_its_window_committed(lake, feed, monkeypatch, caplog):
    def fails(*args: Any, **options: Any) -> None:
        raise OSError("the disk is full")

    sink, job, second = replace(lake.sink, optimize=1), feed.next(), feed.next()
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "join_files", fails)
        assert apply(sink, job).written == len(job.ids)
    assert "not compacted" in caplog.text and "the disk is full" in caplog.text
    same_multiset(job.expected, lake.read())
    apply(sink, second)
    same_multiset(job.expected + second.expected, lake.read())
    assert attempts(lake) == [] and len(lake.files()) == 1
    assert [problem.where for problem in replace(sink, optimize=0).validate(feed.shape)] == ["sink.optimize"]


@pytest.mark.faults
@pytest.mark.parametrize("point", COMPACTING)
def test_an_attempt_that_is_killed_while_it_compacts_loses_and_doubles_nothing(new_lake, feed, tmp_path, point):
    lake = new_lake(SMALL, optimize=2)
    first, job, *others = (feed.next() for _ in range(4))
    apply(lake.sink, first)
    with Victim(lake.sink, job, point, tmp_path / "victim") as victim:
        assert victim.died()
    assert Counter(lake.ids()) == Counter(first.ids + job.ids), "the window was committed before"
    lake.of_others(-1)
    for one in (job, *others):
        assert apply(lake.sink, one).ranges == one.window.ranges
    assert Counter(lake.ids()) == Counter([i for one in (first, job, *others) for i in one.ids] + [-1])
    assert len(lake.files()) == 1, "the next compaction is not disturbed"
    assert attempts(lake) == []


@pytest.mark.faults
def test_a_compaction_that_resumes_behind_other_writers_undoes_nothing_of_theirs(new_lake, feed, tmp_path):
    lake = new_lake(SMALL, optimize=2)
    first, job, third = (feed.next() for _ in range(3))
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.compacting:stop", tmp_path / "zombie") as zombie:
        assert zombie.stopped()
        lake.of_others(-1)
        for one in (job, third):
            apply(lake.sink, one)
        lake.delete(first.ids[0])
        assert zombie.wake() == 0
    assert Counter(lake.ids()) == Counter([*first.ids[1:], *job.ids, *third.ids, -1])
    fourth = feed.next()
    apply(lake.sink, fourth)
    assert Counter(lake.ids()) == Counter([*first.ids[1:], *job.ids, *third.ids, *fourth.ids, -1])
    assert attempts(lake) == []


@pytest.mark.faults
def test_a_compaction_that_resumes_behind_another_one_of_its_files_doubles_nothing(new_lake, feed, tmp_path):
    lake, another = new_lake(SMALL, optimize=1), Feed(SMALL, "shop.another", first_id=1000)
    job, other = feed.next(), another.next(1, 0, 0)
    with Victim(lake.sink, job, "sink.compacting:stop", tmp_path / "zombie") as zombie:
        assert zombie.stopped()
        apply(lake.sink, other)
        assert len(lake.files()) == 1
        assert zombie.wake() == 0
    assert Counter(lake.ids()) == Counter([*job.ids, *other.ids])


# --- columns --------------------------------------------------------------------------------------------------------


def test_new_columns_are_added_to_the_table_and_older_rows_have_none(lake, feed):
    apply(lake.sink, feed.next(3, 0, 0))
    wider = replace(feed, schema=SCHEMA)
    (*_, problem) = lake.sink.validate(wider.shape)
    assert "it is new" in problem.what and "auto_evolve" in problem.action
    sink = replace(lake.sink, auto_evolve=True)
    assert sink.validate(wider.shape) == []
    job = wider.next(2, 0, 0)
    with pytest.raises(SinkUnavailable, match="auto_evolve"):
        apply(lake.sink, job)
    apply(sink, job)
    apply(sink, replace(wider, schema=SMALL).next(1, 1, 1))
    lake.schema = SCHEMA
    found = {line["id"]: line for line in lake.read()}
    assert sorted(found) == list(range(3 + 2 + 3))
    assert found[0]["place"] is None and found[0]["name"] == row(0)["name"]
    same_multiset(job.expected, [found[i] for i in job.ids])
    assert sink.validate(feed.shape) == [], "rows may lack columns of the table"


WIDE = pa.schema(
    [
        ("id", pa.int64()),
        ("big", pa.int64()),
        ("ratio", pa.float64()),
        ("amount", pa.decimal128(12, 2)),
        ("place", pa.struct([("city", pa.string())])),
        ("places", pa.list_(pa.struct([("zip", pa.int64())]))),
        ("by_name", pa.map_(pa.string(), pa.struct([("a", pa.string())]))),
    ]
)
NARROW = pa.schema(
    [
        ("id", pa.int64()),
        ("big", pa.int16()),
        ("ratio", pa.float32()),
        ("amount", pa.decimal128(9, 2)),
        ("place", pa.struct([("zip", pa.int64()), ("lines", pa.list_(pa.string()))])),
        ("places", pa.list_(pa.struct([("note", pa.string()), ("zip", pa.int32())]))),
        ("by_name", pa.map_(pa.string(), pa.struct([("a", pa.string()), ("day", pa.date32())]))),
    ]
)
GROWN = pa.schema(
    [
        *(WIDE.field(at) for at in range(4)),
        ("place", pa.struct([("city", pa.string()), ("zip", pa.int64()), ("lines", pa.list_(pa.string()))])),
        ("places", pa.list_(pa.struct([("zip", pa.int64()), ("note", pa.string())]))),
        ("by_name", pa.map_(pa.string(), pa.struct([("a", pa.string()), ("day", pa.date32())]))),
    ]
)


def wide_row(i: int) -> dict[str, Any]:
    by_name = [("k", {"a": "x"}), ("l", None)]
    place = {"city": f"c{i}"} if i % 3 else None
    amount = Decimal(f"{i}1234567.25")
    return {
        "id": i,
        "big": 2**40 + i,
        "ratio": 0.1,
        "amount": amount,
        "place": place,
        "places": [{"zip": i}, None],
        "by_name": by_name,
    }


def narrow_row(i: int) -> dict[str, Any]:
    place = {"zip": i, "lines": ["a", None]} if i % 3 else None
    by_name = [("k", {"a": None, "day": dt.date(1582, 1, i % 28 + 1)})]
    places = [{"note": "n", "zip": i}]
    return {"id": i, "big": -i, "ratio": 0.5, "amount": Decimal("-1.25"), "place": place, "places": places, "by_name": by_name}


def grown(line: dict[str, Any]) -> dict[str, Any]:
    """Return a row as the table has it, with all members."""
    made = dict(line)
    for name in ("place", "places", "by_name"):
        kind = GROWN.field(name).type
        made[name] = _filled(line[name], kind)
    return made


def _filled(value: Any, kind: pa.DataType) -> Any:
    if value is None or not pa.types.is_nested(kind):
        return value
    if pa.types.is_struct(kind):
        return {
            kind.field(at).name: _filled(value.get(kind.field(at).name), kind.field(at).type) for at in range(kind.num_fields)
        }
    if pa.types.is_map(kind):
        return [(key, _filled(item, kind.item_type)) for key, item in value]
    return [_filled(item, kind.value_type) for item in value]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_members_of_structures_are_added_or_left_out_and_narrower_numbers_are_taken(new_lake, mode):
    options = {"mode": mode, "key": ["id"] if mode == "upsert" else ()}
    lake = new_lake(GROWN, **options)
    wide, narrow = Feed(WIDE), Feed(NARROW)
    jobs = [wide.next(6, 0, 1, values=wide_row)]
    apply(lake.sink, jobs[0])
    problems = {p.where.rpartition(" ")[2]: p.action for p in lake.sink.validate(narrow.shape)}
    assert problems.keys() == {"`place`", "`places`", "`by_name`"}, "all at once, and no number"
    assert all("auto_evolve" in action for action in problems.values())
    evolving = replace(lake.sink, auto_evolve=True)
    assert evolving.validate(narrow.shape) == []
    narrow.number, narrow.first_id, narrow.positions = wide.number, wide.first_id, dict(wide.positions)
    jobs.append(narrow.next(5, 2, 0, values=narrow_row))
    with pytest.raises(SinkUnavailable, match="auto_evolve"):
        apply(lake.sink, jobs[1])
    apply(evolving, jobs[1])
    wide.number, wide.first_id, wide.positions = narrow.number, narrow.first_id, dict(narrow.positions)
    assert lake.sink.validate(wide.shape) == [], "rows may lack members of structures"
    jobs.append(wide.next(2, 0, 0, values=wide_row))
    apply(lake.sink, jobs[2])
    expected = [grown(line) for job in jobs for line in job.expected]
    same_multiset(expected, lake.read())
    if mode == "upsert":
        # Files of each of the three schemas are rewritten.
        changed = {line["id"] for line in (expected[0], expected[8], expected[-1])}
        rest = [line for line in expected if line["id"] not in changed]
        news = [wide_row(i) | {"place": None} for i in sorted(changed)]
        job = wide.next(len(news), 0, 0, values=lambda i: news[i - wide.first_id + len(news)])
        apply(lake.sink, job)
        same_multiset([*rest, *map(grown, news)], lake.read())


def test_columns_of_another_type_or_spelling_are_refused(lake, feed):
    apply(lake.sink, feed.next())
    schema = pa.schema([("id", pa.string()), ("NAME", pa.string()), ("ratio", pa.float64())])
    option = "path" if isinstance(lake, DeltaCase) else "table"
    found = {p.where: p.what for p in lake.sink.validate(Shape("p", schema))}
    assert found.keys() == {f"sink.{option} column `id`", f"sink.{option} column `NAME`"}
    assert "found string; expected long" in found[f"sink.{option} column `id`"]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "where"),
    [
        ({"mode": "merge"}, "sink.mode"),
        ({"compression": "rar"}, "sink.compression"),
        ({"options": {"max_open_files": 0}}, "sink.options"),
        ({"options": {"schema": None}}, "sink.options"),
        ({"options": {"no such option": 1}}, "sink.options"),
        ({"partition_by": "nobody"}, "sink.partition_by"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant_are_refused_before_anything_runs(lake, feed, option, where):
    before = lake.everything()
    (problem,) = replace(lake.sink, **option).validate(feed.shape)
    assert problem.where == where and problem.what
    assert lake.everything() == before


def test_a_table_that_does_not_exist_is_refused_unless_it_may_be_created(lake, feed):
    (problem,) = replace(lake.sink, auto_create=False).validate(feed.shape)
    assert "auto_create" in problem.action


def test_a_committed_attempt_whose_note_could_not_be_removed_keeps_its_files(lake, feed, monkeypatch):
    """The store refuses deletions for a while: the note of an attempt stays behind several later commits."""
    jobs = [feed.next() for _ in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "remove_all", lambda self, path: None)
        for job in jobs[:2]:
            apply(lake.sink, job)
    for job in jobs[2:]:
        apply(lake.sink, job)
    assert Counter(lake.ids()) == Counter(i for job in jobs for i in job.ids)
    assert attempts(lake) == []
