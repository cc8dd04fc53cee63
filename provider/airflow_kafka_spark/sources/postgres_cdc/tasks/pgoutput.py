"""The messages of PostgreSQL's plugin ``pgoutput``, protocol version 1.

Neither a driver nor a maintained package of PyPI decodes them without a replication connection, so this module does. See
"Logical Replication Message Formats" in PostgreSQL's documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

POSTGRES_EPOCH_US = 946_684_800_000_000
"""Microseconds from 1970 to 2000, the origin of PostgreSQL's clock."""

UNCHANGED = object()
"""A value that the server has not sent: it is stored out of line (TOAST), and the update has not changed it."""

Tuple = list[object]
"""The values of a row in the order of its relation's columns: bytes of the text, None, or :data:`UNCHANGED`."""

_BEGIN = struct.Struct(">qqI")
_RELATION_COLUMN = struct.Struct(">Ii")
_LENGTH = struct.Struct(">i")
_OID = struct.Struct(">I")


class RelationColumn(NamedTuple):
    """A column of a relation.

    :param name: its name.
    :param is_key: True if it is part of the replica identity.
    :param type_oid: the OID of its type.
    :param modifier: the type's modifier (precision, length); -1 for none.
    """

    name: str
    is_key: bool
    type_oid: int
    modifier: int


@dataclass(frozen=True)
class RelationMessage:
    """A table, as it was when the changes after this message were made.

    :param oid: its OID, by which changes name it.
    :param identity: its replica identity: ``d`` (default), ``n`` (nothing), ``f`` (full), ``i`` (index).
    """

    oid: int
    schema: str
    table: str
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True)
class BeginMessage:
    """The beginning of a transaction.

    :param commit_lsn: the LSN at which the record of its commit begins.
    :param commit_us: the time of its commit, microseconds since 1970.
    :param xid: its 32-bit id.
    """

    commit_lsn: int
    commit_us: int
    xid: int


@dataclass(frozen=True)
class CommitMessage:
    """The end of a transaction."""


_COMMIT = CommitMessage()


class ChangeMessage(NamedTuple):
    """A change of a row.

    :param op: ``I``, ``U`` or ``D``.
    :param relation: the OID of its table.
    :param old: the old row: the columns of the replica identity, or all of them; None if the server has not sent it.
    :param is_full: True if ``old`` has all columns.
    :param new: the new row; None for a delete.
    """

    op: str
    relation: int
    old: Tuple | None
    is_full: bool
    new: Tuple | None


@dataclass(frozen=True)
class TruncateMessage:
    """A TRUNCATE of tables.

    :param relations: their OIDs.
    """

    relations: tuple[int, ...]


Message = RelationMessage | BeginMessage | CommitMessage | ChangeMessage | TruncateMessage


class NotPgoutput(ValueError):
    """Raised for bytes that are no message of the protocol's version 1."""


def decode(data: bytes) -> Message | None:
    """Return a message; None for those that change no row: Type, Origin, logical messages.

    :raises NotPgoutput: the bytes are not a message of pgoutput.
    """
    try:
        return _decode(data)
    except (struct.error, IndexError, ValueError) as error:
        raise NotPgoutput(f"a message that begins with {data[:16].hex()} ({len(data)} bytes): {error}") from error


def _decode(data: bytes) -> Message | None:
    kind = data[0]
    if kind == 73:  # I
        return ChangeMessage("I", _read_oid(data, 1), None, False, _read_tuple(data, 6)[0])
    if kind == 85:  # U
        old, at, is_full = None, 5, False
        if data[at] != 78:  # K or O before N
            is_full = data[at] == 79
            old, at = _read_tuple(data, at + 1)
        return ChangeMessage("U", _read_oid(data, 1), old, is_full, _read_tuple(data, at + 1)[0])
    if kind == 68:  # D
        return ChangeMessage("D", _read_oid(data, 1), _read_tuple(data, 6)[0], data[5] == 79, None)
    if kind == 66:  # B
        lsn, clock, xid = _BEGIN.unpack_from(data, 1)
        return BeginMessage(lsn, clock + POSTGRES_EPOCH_US, xid)
    if kind == 67:  # C
        return _COMMIT
    if kind == 82:  # R
        return _parse_relation(data)
    if kind == 84:  # T
        count = _read_oid(data, 1)
        return TruncateMessage(struct.unpack_from(f">{count}I", data, 6))
    if kind in b"YOM":
        return None
    raise ValueError(f"`{chr(kind)}` is no kind of message")


def _read_oid(data: bytes, at: int) -> int:
    return int(_OID.unpack_from(data, at)[0])


def _read_tuple(data: bytes, at: int) -> tuple[Tuple, int]:
    """Return the values of a row, and the index after them."""
    count = data[at] << 8 | data[at + 1]
    at += 2
    values: Tuple = []
    for _ in range(count):
        kind = data[at]
        if kind == 116:  # t
            length = _LENGTH.unpack_from(data, at + 1)[0]
            at += 5
            values.append(data[at : at + length])
            at += length
            continue
        if kind not in (110, 117):  # n, u
            raise ValueError(f"`{chr(kind)}` is no kind of value")
        values.append(None if kind == 110 else UNCHANGED)
        at += 1
    if at > len(data):
        raise ValueError("it is cut off")
    return values, at


def _parse_relation(data: bytes) -> RelationMessage:
    schema, at = _read_text(data, 5)
    table, at = _read_text(data, at)
    identity = chr(data[at])
    return RelationMessage(_read_oid(data, 1), schema or "pg_catalog", table, identity, tuple(_read_columns(data, at + 1)))


def _read_columns(data: bytes, at: int) -> Iterator[RelationColumn]:
    count = data[at] << 8 | data[at + 1]
    at += 2
    for _ in range(count):
        flags = data[at]
        name, at = _read_text(data, at + 1)
        yield RelationColumn(name, bool(flags & 1), *_RELATION_COLUMN.unpack_from(data, at))
        at += _RELATION_COLUMN.size


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(), end + 1
