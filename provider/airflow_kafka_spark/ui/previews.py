"""Previews that are read from Kafka during a request: the next window, and dead letters. Bounded in time and in size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from airflow_kafka_spark.control.records import read_records
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.ui.responses import RequestRefused, redacted, status_of
from airflow_kafka_spark.windows.model import Landed, TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Message

    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

T = TypeVar("T")

MAX_THREADS = 4
TIMEOUT_SECONDS = 30.0
MAX_READ_SECONDS = 10.0
MAX_DEAD_LETTERS = 100
"""Dead letters that one request returns at most."""
MAX_SCANNED = 2_000
"""Records that one request reads at most. A topic may contain dead letters of several pipelines."""
MAX_TEXT = 4096
"""Characters of a key, a value or a reason that are shown."""
MAX_HEADER_TEXT = 512
MAX_HEADERS = 50

PREFIX = "__connect.errors."

_pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kafka-spark-ui-ask")


def run_with_timeout(work: Callable[[], T], doing: str, seconds: float = TIMEOUT_SECONDS) -> T:
    """Run ``work`` in another thread, and return its result.

    :param work: what to run.
    :param doing: its description, for the error message.
    :param seconds: the longest time to wait.
    :raises RequestRefused: 503 if it takes longer. The thread goes on, so a change may still be made.
    """
    future = _pool.submit(work)
    try:
        return future.result(timeout=seconds)
    except FutureTimeout:
        future.cancel()
        action = "Look again in a moment"
        raise RequestRefused(
            503, f"{doing} takes longer than {seconds:.0f} s", expected="an answer of Kafka", action=action
        ) from None


# --- the next window ----------------------------------------------------------------------------------------------------


def next_window(work: Callable[[], Preview], unread: Sequence[str] = ()) -> dict[str, Any]:
    """Return the next window of a pipeline, or why planning it would fail.

    :param work: plans the window.
    :param unread: arguments of the task that only its run knows. Their defaults were used.
    :raises KafkaSparkError: Kafka does not answer.
    """
    try:
        found = run_with_timeout(work, "Planning the next window")
    except KafkaSparkError as error:
        if status_of(error) == 503:
            raise
        return {"refused": redacted(str(error))}
    except ValueError as error:
        return {"refused": redacted(str(error))}
    facts = {name: getattr(found, name) for name in ("number", "begins", "run", "offsets", "bytes", "age", "held_back")}
    warnings = list(found.warnings)
    if unread and found.run is None:
        names = ", ".join(f"`{name}`" for name in unread)
        warnings.append(f"Only the run knows {names}: the default counts here")
    facts["warnings"] = warnings
    return {"next": {**facts, "ranges": [vars(r) for r in found.ranges], "gaps": [vars(g) for g in found.gaps]}}


# --- dead letters -------------------------------------------------------------------------------------------------------


def preview_bytes(value: bytes | None, most: int = MAX_TEXT) -> dict[str, Any] | None:
    """Return the beginning of ``value`` as text, or as hexadecimal digits if it is not UTF-8.

    The pages show it as text, never as HTML.

    :param most: number of characters that are shown.
    """
    if value is None:
        return None
    part = value[: most * 4]
    try:
        found = part.decode()
        binary = "\x00" in found
    except UnicodeDecodeError as error:
        # A character that the cut has divided does not make the value binary.
        cut_off = len(part) < len(value) and error.start >= len(part) - 3 and error.reason == "unexpected end of data"
        found, binary = (part[: error.start].decode(), False) if cut_off else ("", True)
    if binary:
        part = value[: most // 2]
        return {"text": part.hex(), "bytes": len(value), "cut": len(part) < len(value), "binary": True}
    return {"text": found[:most], "bytes": len(value), "cut": len(found[:most].encode()) < len(value), "binary": False}


@dataclass(frozen=True)
class DeadLetterReader:
    """Reads dead letters of a pipeline by their offsets, without a consumer group.

    :param pipelines: names of the pipeline and of its data intervals' ledgers.
    :param landed: where the dead letters are.
    :param limit: number of dead letters to read.
    """

    pipelines: frozenset[str]
    landed: Sequence[Landed]
    limit: int

    def read(self, hook: KafkaHook) -> list[dict[str, Any]]:
        """Return the first dead letters.

        The topic may contain dead letters of other pipelines between them, which are left out if their headers name another
        pipeline. Records without such headers are all returned.

        :raises KafkaSparkError: Kafka does not answer.
        """
        ranges: dict[TopicPartition, tuple[int, int]] = {}
        for part in self.landed:
            start, end = ranges.get(part.topic_partition, (part.first, 0))
            ranges[part.topic_partition] = (min(start, part.first), max(end, part.last + 1))
        messages = read_records(hook, ranges, "reading dead letters", seconds=MAX_READ_SECONDS)
        found: list[dict[str, Any]] = []
        with closing(messages):
            for message in islice(messages, MAX_SCANNED):
                if record := self._dead_letter(message):
                    found.append(record)
                if len(found) == self.limit:
                    break
        return found

    def _dead_letter(self, message: Message) -> dict[str, Any] | None:
        headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
        # The last ones count: a dead letter of a dead letter has the headers of both.
        context: Mapping[str, str] = {
            name.removeprefix(PREFIX): (value or b"").decode(errors="replace")
            for name, value in headers
            if name.startswith(PREFIX)
        }
        if "connector.name" in context and context["connector.name"] not in self.pipelines:
            return None
        kind, timestamp = message.timestamp()
        origin = f"{context['topic']}-{context.get('partition')}@{context.get('offset')}" if "topic" in context else None
        return {
            "topic": message.topic(),
            "partition": message.partition(),
            "offset": message.offset(),
            "timestamp": timestamp if kind and timestamp >= 0 else None,
            "key": preview_bytes(message.key()),
            "value": preview_bytes(message.value()),
            "headers": [[name[:MAX_HEADER_TEXT], preview_bytes(value, MAX_HEADER_TEXT)] for name, value in headers[:MAX_HEADERS]],
            "reason": context.get("exception.message", "")[:MAX_TEXT] or None,
            "stage": context.get("stage") or None,
            "exception": context.get("exception.class.name") or None,
            "origin": origin,
        }
