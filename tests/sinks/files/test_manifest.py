"""A files sink whose windows are published by manifests, on a file system. ``s3_cases.py`` runs it on a store of objects."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pytest

from airflow_kafka_spark.errors import Fenced, SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks import window_files, write_symlink_manifest
from airflow_kafka_spark.sinks.base import Guarantee
from airflow_kafka_spark.sinks.files.manifest import Commit, ManifestTable
from airflow_kafka_spark.sinks.files.sink import FilesSink
from airflow_kafka_spark.sinks.storage.store import TableStore
from airflow_kafka_spark.windows.binding import compare_endpoints
from tests.sinks.attempt import apply, write_all
from tests.sinks.feed import SCHEMA, Feed


@pytest.fixture
def sink(tmp_path: Path) -> FilesSink:
    return FilesSink(str(tmp_path / "orders"), visibility="manifest")


@pytest.fixture
def feed() -> Feed:
    return Feed(SCHEMA)


def ids(sink: FilesSink) -> list[int]:
    files = window_files(sink.path)
    return pa.dataset.dataset(files, format="parquet").to_table(columns=["id"])["id"].to_pylist() if files else []


def log_of(sink: FilesSink, feed: Feed) -> list[dict]:
    """Return the commits of the pipeline, in their order."""
    entries = Path(sink.path, "_windows").glob("*/log/*.json")
    return [json.loads(path.read_text()) for path in sorted(entries)]


def test_readers_get_the_files_of_complete_windows(sink, feed):
    sink = replace(sink, partition_by=["flag"])
    jobs = [feed.next(20, 10, 5) for _ in range(3)]
    for job in jobs[:2]:
        apply(sink, job)
    with sink.begin(jobs[2].window, jobs[2].splits, jobs[2].shape) as writer:
        write_all(writer, jobs[2])
        files = window_files(sink.path)
        read = duckdb.sql(f'SELECT id, flag, "window" FROM read_parquet({files}, hive_partitioning = true)').fetchall()
    expected = [line for job in jobs[:2] for line in job.expected]
    assert Counter((i, {"true": True, "false": False}.get(str(f).lower())) for i, f, _ in read) == Counter(
        (line["id"], line["flag"]) for line in expected
    )
    assert len({window for _, _, window in read}) == 2
    assert window_files(sink.path, pipelines=["nobody"]) == []
    assert window_files(sink.path, pipelines=[feed.pipeline]) == files
    assert sink.guarantee is Guarantee.EXACTLY_ONCE


@pytest.mark.parametrize("partition_by", [[], ["flag"]])
def test_a_symlink_manifest_names_the_files_of_complete_windows(sink, feed, partition_by):
    """Trino, Athena and Hive read such a directory: per partition, a text with one URI per line."""
    sink = replace(sink, partition_by=partition_by)
    jobs = [feed.next(20, 10, 5) for _ in range(2)]
    assert write_symlink_manifest(sink.path) == 0
    apply(sink, jobs[0])
    with sink.begin(jobs[1].window, jobs[1].splits, jobs[1].shape) as writer:
        write_all(writer, jobs[1])
        assert write_symlink_manifest(sink.path) == len(window_files(sink.path))
    named: dict[str, list[str]] = {}
    for manifest in Path(sink.path, "_symlink_format_manifest").rglob("manifest"):
        named[manifest.parent.name] = manifest.read_text().splitlines()
    assert sorted(file for files in named.values() for file in files) == sorted(window_files(sink.path))
    read = duckdb.sql(f"SELECT id FROM read_parquet({[file for files in named.values() for file in files]})").fetchall()
    assert Counter(i for (i,) in read) == Counter(jobs[0].ids)
    if partition_by:
        assert {name for name in named if named[name]} == {"flag=true", "flag=false", "flag=__HIVE_DEFAULT_PARTITION__"}
        assert all(f"/{name}/" in file for name, files in named.items() for file in files)
    else:
        assert set(named) == {"_symlink_format_manifest"}


def test_nothing_that_is_not_hidden_is_below_the_table(sink, feed):
    apply(sink, feed.next())
    assert all(path.name[0] == "_" for path in Path(sink.path).iterdir())


def test_a_replay_replaces_its_window_and_leaves_no_file_of_it(sink, feed):
    jobs = [feed.next() for _ in range(2)]
    for job in jobs:
        apply(sink, job)
    before = set(window_files(sink.path))
    again = replace(jobs[0], window=replace(jobs[0].window, replay=1), rows={**jobs[0].rows, 0: []})
    assert sink.find_replay_problems() == []
    assert apply(sink, again).replay == 1
    assert Counter(ids(sink)) == Counter([*again.ids, *jobs[1].ids])
    assert {str(path) for path in Path(sink.path, "_data").rglob("*.parquet")} == set(window_files(sink.path)) != before


def test_an_attempt_that_begins_later_fences_the_earlier_one_which_commits_nothing(sink, feed):
    apply(sink, feed.next())
    job = feed.next()
    with sink.begin(job.window, job.splits, job.shape) as early:
        results = write_all(early, job)
        with sink.begin(job.window, job.splits, job.shape):
            pass
        with pytest.raises(Fenced):
            early.commit(results)
    assert [bool(entry["fenced"]) for entry in log_of(sink, feed)] == [False, True]
    apply(sink, job)
    assert not {i for i, count in Counter(ids(sink)).items() if count > 1} and set(job.ids) <= set(ids(sink))


def test_a_write_whose_answer_is_lost_is_looked_for_and_not_repeated(sink, feed, monkeypatch):
    job = feed.next()
    create = TableStore.create

    def lose(self: TableStore, path: str, content: str) -> bool:
        create(self, path, content)
        raise OSError("the connection was closed")

    with sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        monkeypatch.setattr(TableStore, "create", lose)
        assert writer.commit(results).written == len(job.expected)
        monkeypatch.undo()
    assert len(log_of(sink, feed)) == 1
    assert Counter(ids(sink)) == Counter(job.ids)


def test_a_write_that_arrives_after_its_attempt_has_given_up_is_excluded_by_the_fence_or_is_the_window(sink, feed, monkeypatch):
    """The two orders of a late write and the next attempt's fence."""
    for late_first, job in ((True, feed.next()), (False, feed.next())):
        late: list[tuple] = []

        def refuse(self: TableStore, path: str, content: str, late: list[tuple] = late) -> bool:
            late.append((self, path, content))
            raise OSError("503 Slow Down")

        with sink.begin(job.window, job.splits, job.shape) as writer:
            results = write_all(writer, job)
            monkeypatch.setattr(TableStore, "create", refuse)
            with pytest.raises(SinkUnavailable, match="503 Slow Down"):
                writer.commit(results)
            monkeypatch.undo()
        assert set(job.ids).isdisjoint(ids(sink))
        if late_first:
            assert TableStore.create(*late[0])
            assert apply(sink, job).written == len(job.expected)
        else:
            with sink.begin(job.window, job.splits, job.shape) as writer:
                assert not TableStore.create(*late[0])
                assert writer.commit(write_all(writer, job)).written == len(job.expected)
        assert Counter(i for i in ids(sink) if i in set(job.ids)) == Counter(job.ids)
    with sink.begin(feed.next().window, job.splits, job.shape):
        pass
    assert {str(path) for path in Path(sink.path, "_data").rglob("*.parquet")} == set(window_files(sink.path))


def test_a_committed_attempt_whose_note_could_not_be_removed_keeps_its_files(sink, feed, monkeypatch):
    """The store refuses deletions for a while: the note of an attempt stays behind several later commits."""
    jobs = [feed.next() for _ in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "remove_all", lambda self, path: None)
        for job in jobs[:2]:
            apply(sink, job)
    assert len(list(Path(sink.path, "_airflow/attempts").iterdir())) == 2
    for job in jobs[2:]:
        apply(sink, job)
    assert Counter(ids(sink)) == Counter(i for job in jobs for i in job.ids)
    assert list(Path(sink.path, "_airflow/attempts").iterdir()) == []


def test_a_driver_that_dies_behind_its_commit_leaves_a_window_that_the_next_look_shows(sink, feed, monkeypatch):
    job = feed.next()
    with monkeypatch.context() as patch:
        patch.setattr(ManifestTable, "show", lambda self, commit: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(SinkUnavailable), sink.begin(job.window, job.splits, job.shape) as writer:
            writer.commit(write_all(writer, job))
    assert ids(sink) == []
    assert sink.find_applied(job.window).written == len(job.expected)
    assert Counter(ids(sink)) == Counter(job.ids)


def test_looking_for_the_newest_commit_does_not_list_the_log(sink, feed, monkeypatch):
    for _ in range(3):
        apply(sink, feed.next(1, 0, 0))
    asked: list[tuple[str, list[str]]] = []
    list_names_after = TableStore.list_names_after

    def look(self: TableStore, directory: str, name: str) -> list[str]:
        found = list_names_after(self, directory, name)
        asked.append((name, found))
        return found

    monkeypatch.setattr(TableStore, "list_names_after", look)
    assert sink.find_last_applied(feed.pipeline).number == 3
    assert [[name for name in found if name[0].isdigit()] for _, found in asked] == [[f"{3:020d}.json"]] * len(asked)
    # The newest commit is found with a missing, old or damaged hint.
    (hint,) = Path(sink.path).glob("_windows/*/log/newest")
    for content in ("", "1"):
        hint.write_text(content)
        assert sink.find_last_applied(feed.pipeline).number == 3
    hint.unlink()
    assert sink.find_last_applied(feed.pipeline).number == 3


def test_what_is_no_entry_of_the_log_is_a_conflict(sink, feed):
    job = feed.next()
    apply(sink, job)
    (entry,) = Path(sink.path).glob("_windows/*/log/*.json")
    entry.write_text("{}")
    with pytest.raises(WindowConflict, match="cannot be understood"):
        sink.find_applied(job.window)


def test_a_commit_comes_back_as_it_was_written():
    commit = Commit(7, 3, "orders-00000000000000000001", None, ("a", "b"))
    assert Commit.load(7, commit.dump()) == commit


def test_one_table_has_one_visibility(sink, feed, tmp_path):
    apply(sink, feed.next())
    (problem,) = replace(sink, visibility="rename").validate(feed.shape)
    assert problem.where == "sink.visibility" and "published by `manifest`" in problem.what
    renamed = FilesSink(str(tmp_path / "renamed"))
    apply(renamed, Feed(SCHEMA).next())
    (problem,) = replace(renamed, visibility="manifest").validate(feed.shape)
    assert "published by `rename`" in problem.what
    # An open window keeps it: an attempt of either kind does not fence those of the other.
    ends = (renamed.find_destination(), replace(renamed, visibility="manifest").find_destination())
    for known, found in (ends, ends[::-1]):
        assert [difference.what for difference in compare_endpoints(known, found)] == ["visibility"]


def test_columns_and_format_are_compared_with_the_windows_that_are_there(sink, feed):
    apply(sink, feed.next())
    assert sink.validate(feed.shape) == []
    (problem,) = replace(sink, format="orc").validate(feed.shape)
    assert "holds parquet files of this pipeline" in problem.what
    wider = replace(feed.shape, schema=feed.shape.schema.append(pa.field("more", pa.int64())))
    (problem,) = sink.validate(wider)
    assert "`more`" in problem.where and replace(sink, auto_evolve=True).validate(wider) == []


def test_a_commit_looks_at_the_log_once_and_the_look_counts_for_all_it_decides(sink, feed, monkeypatch):
    apply(sink, feed.next())
    job = feed.next()
    with sink.begin(job.window, job.splits, job.shape) as writer:
        results, looks, newest_commit = write_all(writer, job), [], ManifestTable.find_newest_commit

        def look(self: ManifestTable, pipeline: str) -> Commit:
            looks.append(pipeline)
            return newest_commit(self, pipeline)

        monkeypatch.setattr(ManifestTable, "find_newest_commit", look)
        writer.commit(results)
    assert looks == [feed.pipeline]
