"""Reads of Kafka for a request: the next window, dead letters, and records around an offset. Time and size are limited."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.hooks.kafka.log import read_records
from airflow_kafka_spark.ui.responses import RequestRefused, find_status, redact_text
from airflow_kafka_spark.windows.dead_letters import CONNECT_ERROR_PREFIX
from airflow_kafka_spark.windows.model import Landed, TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.formats.base import Format
    from airflow_kafka_spark.hooks.kafka.client import ConsumedMessage
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

T = TypeVar("T")

MAX_THREADS = 4
"""Maximum number of requests that read Kafka at the same time."""
TIMEOUT_SECONDS = 30.0
"""Seconds after which a request is answered with an error."""
MAX_READ_SECONDS = 10.0
"""Maximum seconds for reading records."""
MAX_DEAD_LETTERS = 100
"""Maximum number of dead letters that one request returns."""
MAX_RECORDS = 50
"""Maximum number of records around an offset that one request returns."""
MAX_SCANNED = 2_000
"""Maximum number of records that one request reads. A topic may contain dead letters of several pipelines."""
MAX_TEXT = 4096
"""Maximum number of characters of a key, a value or a reason that are shown."""
MAX_HEADER_TEXT = 512
"""Maximum number of characters of a header that are shown."""
MAX_HEADERS = 50
"""Maximum number of headers of a record that are shown."""


_pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kafka-spark-ui-ask")


def run_with_timeout(work: Callable[[], T], doing: str, seconds: float = TIMEOUT_SECONDS) -> T:
    """Run ``work`` in another thread, and return its result.

    :param work: the function to run.
    :param doing: its description, for the error message.
    :param seconds: maximum time to wait.
    :raises RequestRefused: 503 if it takes longer. The thread continues, so that a change may still be made.
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


def make_window_preview(work: Callable[[], Preview], unread: Sequence[str] = ()) -> dict[str, Any]:
    """Return the next window of a pipeline, or the reason why planning it would fail.

    :param work: plans the window.
    :param unread: arguments of the task that only its run knows. Their defaults were used.
    :raises KafkaSparkError: Kafka does not answer.
    """
    try:
        found = run_with_timeout(work, "Planning the next window")
    except KafkaSparkError as error:
        if find_status(error) == 503:
            raise
        return {"refused": redact_text(str(error))}
    except ValueError as error:
        return {"refused": redact_text(str(error))}
    facts = {name: getattr(found, name) for name in ("number", "begins", "run", "offsets", "bytes", "age", "held_back")}
    warnings = list(found.warnings)
    if unread and found.run is None:
        names = quote_names(unread)
        warnings.append(f"Only the run knows {names}: the defaults are used here")
    facts["warnings"] = warnings
    return {"next": {**facts, "ranges": [asdict(r) for r in found.ranges], "gaps": [vars(g) for g in found.gaps]}}


# --- dead letters -------------------------------------------------------------------------------------------------------


def format_bytes_preview(value: bytes | None, most: int = MAX_TEXT) -> dict[str, Any] | None:
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
                if record := self._decode_dead_letter(message):
                    found.append(record)
                if len(found) == self.limit:
                    break
        return found

    def _decode_dead_letter(self, message: ConsumedMessage) -> dict[str, Any] | None:
        headers = message.headers() or []
        # Of equal headers the last one counts, because a dead letter of a dead letter has the headers of both.
        context: Mapping[str, str] = {
            name.removeprefix(CONNECT_ERROR_PREFIX): (value or b"").decode(errors="replace")
            for name, value in headers
            if name.startswith(CONNECT_ERROR_PREFIX)
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
            "key": format_bytes_preview(message.key()),
            "value": format_bytes_preview(message.value()),
            "headers": [
                [name[:MAX_HEADER_TEXT], format_bytes_preview(value, MAX_HEADER_TEXT)] for name, value in headers[:MAX_HEADERS]
            ],
            "reason": context.get("exception.message", "")[:MAX_TEXT] or None,
            "stage": context.get("stage") or None,
            "exception": context.get("exception.class.name") or None,
            "origin": origin,
        }


# --- records around an offset -------------------------------------------------------------------------------------------

Described = Mapping[str, Any]
"""Description of a format in the configuration of a task: ``{"class": name, "arguments": {...}}``."""


@dataclass(frozen=True)
class TopicFormats:
    """The formats in which the records of a topic are shown; None to show bytes.

    :param value: that of the values.
    :param key: that of the keys.
    """

    value: Described | None = None
    key: Described | None = None


def find_topic_formats(configuration: Mapping[str, Any], topics: Sequence[str]) -> dict[str, TopicFormats]:
    """Return the topics of a pipeline whose records can be shown, with their formats.

    :param configuration: the configuration of its task; empty if it is unknown.
    :param topics: the topics that it reads.
    """
    arguments = configuration.get("arguments") or {}
    sink = arguments.get("sink") or {}
    options = (sink.get("arguments") or {}) if isinstance(sink, Mapping) else {}
    found: dict[str, TopicFormats] = {}
    if isinstance(topic := options.get("topic"), str) and sink.get("class") == "KafkaSink" and "{{" not in topic:
        found[topic] = TopicFormats(options.get("value"), options.get("key_format"))
    read = TopicFormats(arguments.get("value"), arguments.get("key"))
    dead = arguments.get("errors_deadletterqueue_topic_name")
    if isinstance(dead, str) and "{{" not in dead:
        found[dead] = TopicFormats()
    return {**found, **dict.fromkeys(topics, read)}


def make_format(described: Described) -> Format:
    """Return the format that a configuration describes.

    :raises ValueError: it is not a format of this package, or has an argument that a configuration cannot contain.
    """
    from airflow_kafka_spark import formats

    name, arguments = described.get("class"), described.get("arguments")
    if name not in formats.__all__ or name == "Format" or not isinstance(arguments, Mapping):
        raise ValueError(f"{name} is no format of this package")
    given = {key: make_format(value) if _is_object(value) else value for key, value in arguments.items()}
    if any("{{" in value for value in given.values() if isinstance(value, str)):
        raise ValueError(f"only a run knows the arguments of {name}")
    try:
        made: Format = getattr(formats, name)(**given)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return made


def _is_object(value: object) -> TypeGuard[Described]:
    return isinstance(value, Mapping) and value.keys() == {"class", "arguments"}


@dataclass(frozen=True)
class RecordReader:
    """Reads records around an offset, without a consumer group.

    :param partition: where they are.
    :param offset: the offset around which to read; None for the last records.
    :param limit: number of offsets to read.
    :param formats: in which keys and values are shown.
    """

    partition: TopicPartition
    offset: int | None
    limit: int
    formats: TopicFormats

    def read(self, hook: KafkaHook) -> dict[str, Any]:
        """Return the records, and the bounds of the partition.

        :raises RequestRefused: 404 if there is no such partition.
        :raises KafkaSparkError: Kafka does not answer.
        """
        tp = self.partition
        described = hook.describe_topics([tp.topic], missing="omit").get(tp.topic)
        if described is None or tp.partition not in described.partitions:
            raise RequestRefused(404, f"There is no partition {tp.topic}-{tp.partition}", action="Choose another one")
        bounds = hook.read_offsets([tp])[tp]
        wanted = bounds.lso if self.offset is None else self.offset
        start = max(bounds.low, min(wanted - self.limit // 2, bounds.lso - self.limit))
        end = min(bounds.lso, start + self.limit)
        with closing(read_records(hook, {tp: (start, end)}, f"reading {tp}", seconds=MAX_READ_SECONDS)) as messages:
            found = list(messages)
        values, problem = decode_columns(self.formats.value, "value", tp.topic, [message.value() for message in found])
        keys, key_problem = decode_columns(self.formats.key, "key", tp.topic, [message.key() for message in found])
        return {
            "topic": tp.topic,
            "partition": tp.partition,
            "partitions": list(described.partitions),
            "low": bounds.low,
            "lso": bounds.lso,
            "start": start,
            "end": end,
            "value_format": self.formats.value and self.formats.value.get("class"),
            "problem": problem or key_problem or None,
            "records": [_make_record(*record) for record in zip(found, keys, values, strict=True)],
        }


DecodedColumns = Mapping[str, Any]
PreviewPart = tuple["DecodedColumns | None", "str | None"]
"""The columns of a key or a value, and the reason why it cannot be decoded."""


def decode_columns(
    described: Described | None, part: Literal["key", "value"], topic: str, values: Sequence[bytes | None]
) -> tuple[list[PreviewPart], str]:
    """Return keys or values as columns, and the reason if none of them can be decoded.

    :param described: the format; None to decode nothing.
    """
    nothing: list[PreviewPart] = [(None, None)] * len(values)
    if described is None or not values:
        return nothing, ""
    if described.get("class") == "Json" and not (described.get("arguments") or {}).get("schema"):
        # The Json of a sink has no schema: the columns of its rows decide.
        return [_decode_object(value) for value in values], ""
    try:
        decoder = make_format(described).of_topics((topic,), part).make_decoder()
        found = decoder.decode(values)
    except (KafkaSparkError, ValueError, ImportError) as error:
        return nothing, redact_text(f"The {part}s are shown as bytes: {error}")
    bad, rows = dict(found.bad), found.batch.to_pylist()
    return [
        (None, bad.get(at)) if at in bad or value is None else ({n: _to_plain(v) for n, v in rows[at].items()}, None)
        for at, value in enumerate(values)
    ], ""


def _decode_object(value: bytes | None) -> PreviewPart:
    """Return the fields of a JSON object; None for another value, which is shown as text."""
    if value is None:
        return None, None
    try:
        found = json.loads(value, parse_float=Decimal)
    except ValueError as error:
        return None, f"it is no JSON: {error}"
    return ({name: _to_plain(each) for name, each in found.items()} if isinstance(found, dict) else None), None


def _to_plain(value: object) -> Any:
    """Return a value as JSON. Numbers that JavaScript would round become texts with all digits."""
    if isinstance(value, (bytes, bytearray)):
        return (format_bytes_preview(bytes(value)) or {}).get("text")
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _make_record(message: ConsumedMessage, key: PreviewPart, value: PreviewPart) -> dict[str, Any]:
    kind, timestamp = message.timestamp()
    headers = message.headers() or []
    return {
        "offset": message.offset(),
        "timestamp": timestamp if kind and timestamp >= 0 else None,
        "key": format_bytes_preview(message.key()),
        "value": format_bytes_preview(message.value()),
        "key_columns": _format_columns(key[0]),
        "value_columns": _format_columns(value[0]),
        "reason": value[1] or key[1],
        "headers": [
            [name[:MAX_HEADER_TEXT], format_bytes_preview(found, MAX_HEADER_TEXT)] for name, found in headers[:MAX_HEADERS]
        ],
    }


def _format_columns(columns: DecodedColumns | None) -> str | None:
    return None if columns is None else json.dumps(columns, ensure_ascii=False, indent=2)[:20_000]
