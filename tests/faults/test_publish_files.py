"""The task's process, or a worker of it, dies while files are published to Kafka. Files arrive, go and change before the retry.

After each test: every row of the files is there exactly once, for a read_committed background reader and for a reader at the end.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.operators import SourceToKafkaOperator
from airflow_kafka_spark.sources import FilesSource
from airflow_kafka_spark.testing import EmbeddedKafka
from tests.support.distribution import extended
from tests.support.kafka_sinks import with_sink
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import SPARK, create_ledger
from tests.support.reader import Reader, same_log
from tests.support.runs import Attempts
from tests.support.waiting import eventually, settled

pytestmark = pytest.mark.faults

FORMATS = ("parquet", "json")
"""Tasks read the first, Spark reads the second."""


def make(path: str, format: str, **options: Any) -> SourceToKafkaOperator:
    """Build the operator, in this process or another."""
    schema = "id bigint, name string" if format == "json" else None
    source = FilesSource(path, format, schema=schema, split_bytes=4_000)
    return SourceToKafkaOperator(task_id="task", source=source, **with_sink(options, key="id"))


@dataclass(kw_only=True)
class Inbox(Attempts):
    """A directory of files, the pipeline that publishes them, and the topic.

    :param there: the ids of the rows of each file that was put there.
    """

    make = staticmethod(make)

    kafka: EmbeddedKafka
    path: Path
    format: str
    name: str
    topic: str
    reader: Reader
    there: dict[str, range]

    @property
    def arguments(self) -> dict[str, Any]:
        own = {"path": str(self.path), "format": self.format, "topic": self.topic}
        return {**own, "pipeline": self.name, "ledger_topic": f"ledger-{self.name}", **self.options}

    def put(self, name: str, rows: int, mtime: int) -> None:
        """Rename a complete file into the directory."""
        first = sum(map(len, self.there.values()))
        self.there[name] = range(first, first + rows)
        self.write(name, self.there[name], mtime)

    def write(self, name: str, ids: range, mtime: int) -> None:
        """Write a file with these rows."""
        hidden = self.path / f"_{name}"
        found = [{"id": id, "name": f"näme {id}"} for id in ids]
        if self.format == "parquet":
            pq.write_table(pa.Table.from_pylist(found), hidden, row_group_size=100)
        else:
            hidden.write_text("".join(json.dumps(row) + "\n" for row in found))
        os.utime(hidden, (mtime, mtime))
        hidden.rename(self.path / name)

    def find_published(self) -> set[int]:
        """Return the ids of the rows that a reader sees now; a transaction may be open."""
        found = committed_records(self.kafka.connection_extra(), self.topic, stable=False)
        return {int(key or b"") for _, _, key, _ in found}

    def check(self) -> int:
        """Check that every row of the files is on the topic exactly once."""
        settled(self.topic, self.arguments["ledger_topic"])
        records = committed_records(self.kafka.connection_extra(), self.topic)
        expected = [(str(id).encode(), {"id": id, "name": f"näme {id}"}) for ids in self.there.values() for id in ids]
        found = [(key, json.loads(value or b"")) for _, _, key, value in records]
        compared = same_multiset(map(repr, expected), map(repr, found))
        assert same_log(records, self.reader.caught_up()) == compared
        return compared


@pytest.fixture
def inbox(
    kafka: EmbeddedKafka, unique: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> Iterator[Inbox]:
    name, topic = unique("inbox"), unique("files")
    kafka.create_topic(topic, 3)
    create_ledger(kafka, name)
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    (tmp_path / "in").mkdir()
    place = {"path": tmp_path / "in", "directory": tmp_path}
    with Reader(kafka.connection_extra(), topic) as reader:
        made = Inbox(kafka=kafka, format=format, name=name, topic=topic, reader=reader, there={}, **place)
        try:
            yield made
        finally:
            made.end_victims()


@pytest.mark.parametrize("format", FORMATS)
def test_killed_between_two_splits_then_retried_every_row_of_the_files_is_published_exactly_once(inbox):
    """Meanwhile files arrive, also with an older time, and files of the last window, and published ones of this window, go."""
    inbox.put("early", 50, 1_000)
    assert inbox.run("run0")["records_written"] == 50
    inbox.put("large", 1_500, 2_000)
    for number in range(3):
        inbox.put(f"small{number}", 40, 2_001 + number)
    victim = inbox.victim("run1", fault="publish.committed")
    assert victim.wait() == 1 and victim.fired, victim.tail()
    # Kafka answers a commit before every partition has its marker.
    published = eventually(lambda: inbox.find_published() - set(inbox.there["early"]))
    assert len(published) < 1_620
    (inbox.path / "early").unlink()
    inbox.put("old", 30, 1_500)
    inbox.put("new", 30, 3_000)
    retried = inbox.run("run1")
    assert (retried["window"], retried["records_written"]) == ("0000000002", 1_620)
    assert inbox.run("run1") == retried, "a cleared task does nothing and returns the same report"
    assert inbox.run("run2")["records_written"] == 60
    assert inbox.check() == 1_730


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("point", ["planned", extended("publish.committed")])
def test_a_file_that_goes_or_changes_after_a_kill_is_refused_until_it_is_put_back_and_then_published_exactly_once(inbox, point):
    """In both windows, the file is larger than a split, so it is not published as a whole."""
    for number, change in enumerate(("gone", "rewritten")):
        inbox.put(change, 1_500, 2_000 + number)
        victim = inbox.victim(f"run{number}", fault=point)
        victim.wait()
        assert victim.fired, victim.tail()
        if change == "gone":
            (inbox.path / change).rename(inbox.path / f"_{change}")
        else:
            ids = inbox.there[change]
            inbox.write(change, range(ids.start + 10**6, ids.stop + 10**6), 5_000)
        before = Counter(inbox.find_published())
        said = f"`{change}` has {'vanished' if change == 'gone' else 'changed'} since"
        with pytest.raises(SourceRejected, match=said):
            inbox.run(f"run{number}")
        assert before <= Counter(inbox.find_published())
        if change == "gone":
            (inbox.path / f"_{change}").rename(inbox.path / change)
        else:
            inbox.write(change, inbox.there[change], 2_000 + number)
        assert inbox.run(f"run{number}")["records_written"] == 1_500
    assert inbox.check() == 3_000


@pytest.mark.parametrize("format", ["parquet"])
@pytest.mark.parametrize("point", ["job.done", extended("close.in_transaction")])
def test_killed_after_the_last_split_every_row_is_there_exactly_once_although_the_files_are_gone_or_rewritten(inbox, point):
    """Every split is published, and the ledger has no COMPLETE. The next window refuses the rewritten file."""
    inbox.put("gone", 900, 2_000)
    inbox.put("rewritten", 100, 2_001)
    victim = inbox.victim("run0", fault=point)
    assert victim.wait() == -9 and victim.fired, victim.tail()
    (inbox.path / "gone").unlink()
    inbox.write("rewritten", range(10**6, 10**6 + 100), 2_002)
    inbox.put("new", 30, 1_000)
    retried = inbox.run("run0")
    assert (retried["window"], retried["records_written"]) == ("0000000001", 1_000)
    with pytest.raises(SourceRejected, match="`rewritten` has changed after being read"):
        inbox.run("run1")
    inbox.write("rewritten", inbox.there["rewritten"], 2_001)
    assert inbox.run("run1")["records_written"] == 30
    assert inbox.check() == 1_030
