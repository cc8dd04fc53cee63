"""Confluent's wire format: a magic byte, the id of the schema in four bytes, big-endian, and then the value. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from airflow_kafka_spark.formats.text import BadValue

HEADER = 5
_OTHERS = {
    b"\xc3\x01": "it looks like Avro's single-object encoding",
    b"Obj\x01": "it looks like an Avro file",
    b"{": "it looks like JSON without a header",
}
"""What else begins so."""
SubjectNameStrategy = Literal["TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy"]
STRATEGIES = ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")


def header(schema_id: int) -> bytes:
    """What stands before a value of this schema."""
    return b"\0" + schema_id.to_bytes(4, "big")


def schema_id(value: bytes) -> int:
    """The id that a value names.

    :raises BadValue: it has no such header.
    """
    if len(value) < HEADER:
        raise BadValue(f"found {len(value)} bytes, expected at least {HEADER}: the magic byte 0x00 and the id of a schema")
    if value[0]:
        like = next((f"; {what}" for begin, what in _OTHERS.items() if value.startswith(begin)), "")
        raise BadValue(f"found the first byte 0x{value[0]:02x}, expected the magic byte 0x00 of Confluent's wire format{like}")
    return int.from_bytes(value[1:HEADER], "big")


def subject_of(strategy: str, topic: str, part: str, record: str) -> str:
    """The subject under which a strategy keeps the schemas of a topic's keys or values.

    :param record: the full name of the record, which all strategies but the topic's use.
    """
    if strategy == "TopicNameStrategy":
        return f"{topic}-{part}"
    return record if strategy == "RecordNameStrategy" else f"{topic}-{record}"


def span(numbers: Sequence[int]) -> str:
    """Numbers for people: all of a few, the ends of many."""
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered)) if len(ordered) <= 8 else f"{ordered[0]} to {ordered[-1]}"
