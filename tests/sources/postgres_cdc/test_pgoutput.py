"""Messages of pgoutput, byte by byte; truncated and unknown messages are refused."""

from __future__ import annotations

import struct

import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.postgres_cdc.tasks.events import PostgresEventForm, PostgresEventWriter
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import (
    UNCHANGED,
    BeginMessage,
    ChangeMessage,
    NotPgoutput,
    RelationColumn,
    RelationMessage,
    TruncateMessage,
    decode,
)


def values(*given: object) -> bytes:
    out = struct.pack(">H", len(given))
    for value in given:
        if isinstance(value, bytes):
            out += b"t" + struct.pack(">i", len(value)) + value
        else:
            out += b"n" if value is None else b"u"
    return out


RELATION = (
    b"R" + struct.pack(">I", 77) + b"sch\0tab\0d" + struct.pack(">H", 2)
    + b"\x01id\0" + struct.pack(">Ii", 23, -1) + b"\0note\0" + struct.pack(">Ii", 1043, 24)
)  # fmt: skip
MESSAGES = {
    RELATION: RelationMessage(
        77, "sch", "tab", "d", (RelationColumn("id", True, 23, -1), RelationColumn("note", False, 1043, 24))
    ),
    b"B" + struct.pack(">qqI", 5 << 32, 1_500_000, 4_000_000_000): BeginMessage(5 << 32, 946_684_801_500_000, 4_000_000_000),
    b"I" + struct.pack(">I", 77) + b"N" + values(b"1", None): ChangeMessage("I", 77, None, False, [b"1", None]),
    b"U" + struct.pack(">I", 77) + b"N" + values(b"1", UNCHANGED): ChangeMessage("U", 77, None, False, [b"1", UNCHANGED]),
    b"U" + struct.pack(">I", 77) + b"K" + values(b"1", None) + b"N" + values(b"2", b"x"): ChangeMessage(
        "U", 77, [b"1", None], False, [b"2", b"x"]
    ),
    b"U" + struct.pack(">I", 77) + b"O" + values(b"1", b"y") + b"N" + values(b"1", b"x"): ChangeMessage(
        "U", 77, [b"1", b"y"], True, [b"1", b"x"]
    ),
    b"D" + struct.pack(">I", 77) + b"K" + values(b"1", None): ChangeMessage("D", 77, [b"1", None], False, None),
    b"T" + struct.pack(">IBII", 2, 1, 77, 78): TruncateMessage((77, 78)),
}


@pytest.mark.parametrize("data", MESSAGES)
def test_every_message_is_read_and_none_that_is_cut_off(data):
    assert decode(data) == MESSAGES[data]
    for end in range(1, len(data)):
        with pytest.raises(NotPgoutput):
            decode(data[:end])


def test_a_text_that_is_not_utf8_names_its_column():
    """A database with the encoding SQL_ASCII may hold such a text."""
    writer = PostgresEventWriter(PostgresEventForm(prefix="p"), 0, 10, {})
    for message in (RELATION, b"B" + struct.pack(">qqI", 5, 0, 7)):
        found = decode(message)
        assert found is not None
        assert list(writer.write(5, found)) == []
    with pytest.raises(SourceRejected, match="column `note` cannot be written: it is no text in UTF-8"):
        list(writer.write(5, ChangeMessage("I", 77, None, False, [b"1", b"\xe4"])))


def test_messages_without_changes_are_left_out_and_unknown_ones_refused():
    for kind in b"YOM":
        assert decode(bytes([kind]) + b"...") is None
    for data in (b"", b"S1234", b"I\0\0\0\1N\0\1x"):
        with pytest.raises(NotPgoutput):
            decode(data)
