"""The task that writes a split to several sinks: each row is in one of them, and an error in one sink aborts all."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyspark
import pytest

from airflow_kafka_spark.errors import SinkRejected, SinkUnavailable, SparkJobFailed
from airflow_kafka_spark.formats.base import CAPTURED, END, ERROR, LEFT_OUT, OFFSET, ORIGINAL, TOMBSTONE
from airflow_kafka_spark.hooks.databases import SESSION_ENDED
from airflow_kafka_spark.jobs.tasks.account import Tolerance
from airflow_kafka_spark.jobs.tasks.sort import RecordOrigin
from airflow_kafka_spark.jobs.tasks.write import OTHERS, REFUSED, TAKEN, CapturingWriter, OtherSink, WriteTask
from airflow_kafka_spark.jobs.watch import collect, find_reason, is_retryable
from airflow_kafka_spark.sinks.base import Rows, SplitWriter
from airflow_kafka_spark.sinks.kafka.tasks.encode import HEADERS
from airflow_kafka_spark.sinks.kafka.tasks.publish import RecordBatches
from airflow_kafka_spark.windows.codec import decode_result, encode_result
from airflow_kafka_spark.windows.dead_letters import OffsetSet
from airflow_kafka_spark.windows.model import OffsetRange, PackedSplits, Split, SplitResult, Window

COLUMN = f"{CAPTURED}0"
COLUMNS = pa.schema([("id", pa.int64())])
ROW = pa.struct([("id", pa.int64()), (TOMBSTONE, pa.bool_())])
ORIGINALS = {"key": pa.binary(), "value": pa.binary(), "timestamp": pa.int64(), "headers": HEADERS}
SPLIT = Split(0, OffsetRange("orders", 0, 0, 10))


class ListWriter(SplitWriter):
    """Keep the rows of a split in a list.

    :param unfit: ids of rows that it refuses.
    :param fails: True if writing fails.
    """

    def __init__(self, unfit: frozenset[int] = frozenset(), *, fails: bool = False) -> None:
        self.unfit, self.fails = unfit, fails
        self.ids: list[int] = []
        self.is_open = self.is_aborted = False

    def open(self, split: Split) -> None:
        self.is_open = True

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        return {at: "too wide" for at, i in enumerate(rows.batch.column("id").to_pylist()) if i in self.unfit}

    def write(self, rows: Rows) -> None:
        if self.fails:
            raise SinkUnavailable("file:///lake", "writing", "no space left")
        self.ids += rows.batch.column("id").to_pylist()

    def close(self) -> Mapping[str, Any]:
        return {"rows": len(self.ids)}

    def abort(self) -> None:
        self.is_aborted = True


def batch(
    offsets: list[int], taken: set[int], filtered: set[int] = frozenset(), end: SplitResult | None = None
) -> pa.RecordBatch:
    """Return records whose id is the offset. In the row of the other sink, the value is ten times as large."""
    count = len(offsets)
    rows = [{"id": 10 * at, TOMBSTONE: False} if at in taken else None for at in offsets]
    columns = {
        "id": pa.array(offsets, pa.int64()),
        TOMBSTONE: pa.array([False] * count),
        OFFSET: pa.array(offsets, pa.int64()),
        ERROR: pa.nulls(count, pa.string()),
        COLUMN: pa.array(rows, ROW),
        LEFT_OUT: pa.array([at in taken or at in (filtered or ()) for at in offsets]),
        **{ORIGINAL[part]: pa.nulls(count, kind) for part, kind in ORIGINALS.items()},
        END: pa.array([encode_result(end) if end else None] * count, pa.string()),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def write(own: SplitWriter, other: SplitWriter, tolerance: Tolerance | None) -> SplitResult:
    """Write six records at the offsets 0 to 5: a filter removes 0, and 1, 2 and 5 go to the other sink."""
    others = (OtherSink(COLUMN, COLUMNS, CapturingWriter(other), "write"),)
    task = WriteTask(PackedSplits.of([SPLIT]), COLUMNS, own, "fail", tolerance, others=others)
    batches = [batch([0, 1, 2], {1, 2}, {0}), batch([3, 4, 5], {5}), batch([-1], set(), end=SplitResult(0, records=6))]
    return decode_result(task._write(SPLIT, RecordBatches(iter(batches)), RecordOrigin()))


def test_each_row_is_in_one_sink_and_counted_there() -> None:
    own, other = ListWriter(), ListWriter()
    result = write(own, other, None)
    (there,) = map(decode_result, result.token[OTHERS])
    assert (own.ids, other.ids) == ([3, 4], [10, 20, 50])
    assert (result.records, result.filtered, result.routed, result.handed_over) == (6, 1, 3, 2)
    assert (there.records, there.filtered, there.handed_over) == (3, 0, 3)
    assert list(OffsetSet.from_text(there.token[TAKEN])) == [1, 2, 5]


def test_a_row_that_the_other_sink_cannot_hold_is_a_bad_record_of_that_sink() -> None:
    own, other = ListWriter(), ListWriter(frozenset({20}))
    result = write(own, other, Tolerance())
    (there,) = map(decode_result, result.token[OTHERS])
    assert (own.ids, other.ids) == ([3, 4], [10, 50])
    assert (result.rejected, result.routed) == (0, 3)
    assert (there.records, there.rejected, there.handed_over) == (3, 1, 2)
    assert [(bad.offset, bad.reason) for bad in there.samples] == [(2, "too wide")] and there.letters
    assert list(OffsetSet.from_text(there.token[REFUSED])) == [2]


@pytest.mark.parametrize("failing", ["own", "other"])
def test_an_error_of_one_sink_aborts_the_split_in_all(failing: str) -> None:
    own, other = ListWriter(fails=failing == "own"), ListWriter(fails=failing == "other")
    with pytest.raises(SinkUnavailable, match="no space left"):
        write(own, other, None)
    assert own.is_open and own.is_aborted and other.is_open and other.is_aborted


SPARK_SAID = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 1 times
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2935)
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1988, in main
    process()
{error}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
"""


def test_an_error_of_a_task_is_the_reason_of_its_job_with_its_samples_and_without_its_class() -> None:
    ended = SinkUnavailable("postgres://db/t", "loading split 0 of window a#1", SESSION_ENDED)
    refused = SinkRejected("postgres://db/t", "a#1", "a value does not fit", samples=["t-0@1: x", "t-0@2: y"])
    full = SinkUnavailable("postgres://db/t", "loading split 0 of window a#1", "no space left", "Make room")
    assert (ended.retryable, full.retryable) == (True, False)
    said = [SPARK_SAID.format(error=f"airflow_kafka_spark.errors.sinks.{type(e).__name__}: {e}") for e in (ended, refused, full)]
    reason = f"Sink postgres://db/t failed while loading split 0 of window a#1: {SESSION_ENDED}."
    assert str(SparkJobFailed("a#1", find_reason(RuntimeError(said[0])))).startswith(
        f"The Spark job of window a#1 failed: {reason} "
    )
    assert find_reason(RuntimeError(said[1])).splitlines()[1:3] == ["  t-0@1: x", "  t-0@2: y"]
    assert [is_retryable(RuntimeError(text)) for text in (*said, "Connection reset")] == [True, False, False, True]
    assert (
        find_reason(RuntimeError(SPARK_SAID.format(error="ValueError: of a user's function")))
        == "ValueError: of a user's function"
    )


@pytest.mark.parametrize(
    "exit_of_executor, advice",
    [
        ("Command exited with code 52", " (its JVM ran out of memory; raise `spark.executor.memory`)"),
        (
            "Container from a bad node: container_1 on host: h2. Exit status: 137. code 137",
            " (it was killed, most likely because memory ran out; raise `spark.executor.memoryOverhead`)",
        ),
        ("worker lost: Not receiving heartbeat for 60 seconds", ""),
    ],
)
def test_an_executor_that_ends_again_and_again_is_the_reason_of_its_job_with_what_its_exit_code_means(
    exit_of_executor: str, advice: str
) -> None:
    said = f""": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, \
most recent failure: Lost task 0.3 in stage 0.0 (TID 3) (127.0.0.2 executor 2): ExecutorLostFailure (executor 2 exited caused by \
one of the running tasks) Reason: {exit_of_executor}
Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2935)
"""
    assert find_reason(RuntimeError(said)) == f"executor 2 on 127.0.0.2 ended: {exit_of_executor}{advice}"


def test_a_job_whose_jvm_has_ended_before_its_thread_runs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyspark's thread first calls the JVM, to copy properties of the job."""

    class WithoutJvm(threading.Thread):
        def run(self) -> None:
            raise ConnectionResetError("the JVM has ended")

    monkeypatch.setattr(pyspark, "InheritableThread", WithoutJvm)
    with pytest.raises(SparkJobFailed, match="the JVM has ended"):
        collect(SimpleNamespace(context=object(), collect=list), Window("a", 1, (), "run", ""))


def test_the_reason_of_a_cast_that_fails_is_not_the_line_of_code_that_spark_quotes() -> None:
    said = """Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times:
org.apache.spark.SparkNumberFormatException: [CAST_INVALID_INPUT] The value 'x' of the type "STRING" cannot be cast to "INT".
== DataFrame ==
"cast" was called from
jdk.internal.reflect.GeneratedMethodAccessor84.invoke(Unknown Source)

\tat org.apache.spark.sql.errors.QueryExecutionErrors$.invalidInputInCastToNumberError(QueryExecutionErrors.scala:147)
"""
    assert "[CAST_INVALID_INPUT] The value 'x'" in find_reason(RuntimeError(said))
    assert not is_retryable(RuntimeError(said))
