"""What is asked of Kafka while somebody waits: the next window, and a look at dead letters. Bounded in time and in size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_kafka_spark.errors import KafkaSparkError, KafkaUnavailable
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.ledger.topic import PROMPT
from airflow_kafka_spark.ui.answers import Refused, cleaned, status_of
from airflow_kafka_spark.windows.model import Landed, TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

T = TypeVar("T")

THREADS = 4
SECONDS = 30.0
READ_SECONDS = 10.0
MOST_LETTERS = 100
MOST_SCANNED = 2_000
"""Records that are read at most: others' letters lie in between."""
TEXT = 4096
HEADER_TEXT = 512
MOST_HEADERS = 50
FETCH_BYTES = 4 << 20

PREFIX = "__connect.errors."

_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kafka-spark-ui-ask")


def in_time(work: Callable[[], T], doing: str, seconds: float = SECONDS) -> T:
    """Run it in a thread of its own, and wait so long at most.

    :raises Refused: 503, it takes longer. It goes on: what changes something may still happen.
    """
    future = _pool.submit(work)
    try:
        return future.result(timeout=seconds)
    except TooLate:
        future.cancel()
        action = "Look again in a moment"
        raise Refused(503, f"{doing} takes longer than {seconds:.0f} s", expected="an answer of Kafka", action=action) from None


# --- the next window ----------------------------------------------------------------------------------------------------


def next_window(work: Callable[[], Preview], unread: Sequence[str] = ()) -> dict[str, Any]:
    """What the next window would be, or why there would be none.

    :param unread: arguments of the task that only its run knows, and that are not taken into account.
    :raises KafkaSparkError: Kafka does not answer.
    """
    try:
        found = in_time(work, "Planning the next window")
    except KafkaSparkError as error:
        if status_of(error) == 503:
            raise
        return {"refused": cleaned(str(error))}
    except ValueError as error:
        return {"refused": cleaned(str(error))}
    facts = {name: getattr(found, name) for name in ("number", "begins", "run", "offsets", "bytes", "age", "held_back")}
    warnings = list(found.warnings)
    if unread and found.run is None:
        names = ", ".join(f"`{name}`" for name in unread)
        warnings.append(f"Only the run knows {names}: the default counts here")
    facts["warnings"] = warnings
    return {"next": {**facts, "ranges": [vars(r) for r in found.ranges], "gaps": [vars(g) for g in found.gaps]}}


# --- dead letters -------------------------------------------------------------------------------------------------------


def text(value: bytes | None, most: int = TEXT) -> dict[str, Any] | None:
    """Bytes for people: cut, and as hex where they are no text. It is data: pages show it as text, never as HTML."""
    if value is None:
        return None
    part = value[: most * 4]
    try:
        found = part.decode()
        binary = "\x00" in found
    except UnicodeDecodeError as error:
        # A character that the cut has divided is no reason to take it for binary.
        cut_off = len(part) < len(value) and error.start >= len(part) - 3 and error.reason == "unexpected end of data"
        found, binary = (part[: error.start].decode(), False) if cut_off else ("", True)
    if binary:
        part = value[: most // 2]
        return {"text": part.hex(), "bytes": len(value), "cut": len(part) < len(value), "binary": True}
    return {"text": found[:most], "bytes": len(value), "cut": len(found[:most].encode()) < len(value), "binary": False}


@dataclass(frozen=True)
class Letters:
    """Where letters of a pipeline lie, and how many are to be looked at."""

    pipelines: frozenset[str]
    landed: Sequence[Landed]
    limit: int

    def read(self, hook: KafkaHook) -> list[dict[str, Any]]:
        """The first of them, read by offsets: nobody's group is joined.

        Letters of others may lie between them in the same topic: those that say so are left out. Without context on them, all
        that lie there are shown.

        :raises KafkaSparkError: Kafka does not answer.
        """
        import confluent_kafka

        ends: dict[TopicPartition, int] = {}
        starts: dict[TopicPartition, int] = {}
        for part in self.landed:
            tp = part.topic_partition
            starts[tp] = min(starts.get(tp, part.first), part.first)
            ends[tp] = max(ends.get(tp, 0), part.last + 1)
        described = hook.describe_topics({tp.topic for tp in starts}, missing="omit")
        existing = [tp for tp in starts if tp.topic in described and tp.partition in described[tp.topic].partitions]
        if not existing:
            return []
        bounds = hook.offsets(existing)
        left = {tp: ends[tp] for tp in existing if max(starts[tp], bounds[tp].low) < min(ends[tp], bounds[tp].lso)}
        if not left:
            return []
        events = ClientEvents(hook.config.get("error_cb"))
        settings = {"queued.max.messages.kbytes": 8192, "fetch.max.bytes": FETCH_BYTES, "error_cb": events.on_error}
        consumer = confluent_kafka.Consumer(hook.consumer_config(**PROMPT, **settings), logger=events)
        found: list[dict[str, Any]] = []
        scanned, deadline = 0, time.monotonic() + READ_SECONDS
        try:
            consumer.assign([confluent_kafka.TopicPartition(*tp, max(starts[tp], bounds[tp].low)) for tp in left])
            while left and len(found) < self.limit and scanned < MOST_SCANNED and time.monotonic() < deadline:
                messages: list[Any] = consumer.consume(self.limit, timeout=0.1)
                for message in messages:
                    tp = TopicPartition(message.topic(), message.partition())
                    error = message.error()
                    if error is not None and error.code() != confluent_kafka.KafkaError._PARTITION_EOF:
                        raise KafkaUnavailable(hook.conn_id, f"reading {tp}", error.str())
                    if error is None and tp in left and message.offset() < left[tp] and len(found) < self.limit:
                        scanned += 1
                        if letter := self._letter(message):
                            found.append(letter)
                    if message.offset() + (error is None) >= left.get(tp, 0):
                        left.pop(tp, None)
        finally:
            consumer.close()
        return found

    def _letter(self, message: Any) -> dict[str, Any] | None:
        headers: list[tuple[str, bytes | None]] = [(str(name), value) for name, value in message.headers() or []]
        # The last ones count: a letter of a letter carries both contexts.
        said: Mapping[str, str] = {
            name.removeprefix(PREFIX): (value or b"").decode(errors="replace")
            for name, value in headers
            if name.startswith(PREFIX)
        }
        if "connector.name" in said and said["connector.name"] not in self.pipelines:
            return None
        kind, timestamp = message.timestamp()
        origin = f"{said['topic']}-{said.get('partition')}@{said.get('offset')}" if "topic" in said else None
        return {
            "topic": message.topic(),
            "partition": message.partition(),
            "offset": message.offset(),
            "timestamp": timestamp if kind and timestamp >= 0 else None,
            "key": text(message.key()),
            "value": text(message.value()),
            "headers": [[name[:HEADER_TEXT], text(value, HEADER_TEXT)] for name, value in headers[:MOST_HEADERS]],
            "reason": said.get("exception.message", "")[:TEXT] or None,
            "stage": said.get("stage") or None,
            "exception": said.get("exception.class.name") or None,
            "origin": origin,
        }
