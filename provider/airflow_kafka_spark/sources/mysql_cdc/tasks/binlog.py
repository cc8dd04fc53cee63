"""The events of a binary log, MariaDB's and MySQL's: headers, transactions, tables and rows. Pure functions of bytes."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

QUERY, STOP, ROTATE, FORMAT, XID, TABLE_MAP, INCIDENT, HEARTBEAT, XA_PREPARE = 2, 3, 4, 15, 16, 19, 26, 27, 38
BEGIN_LOAD_QUERY, EXECUTE_LOAD_QUERY = 17, 18
PAYLOAD = 40
"""The events of a transaction of MySQL, compressed (``binlog_transaction_compression``)."""
WRITE_ROWS, UPDATE_ROWS, DELETE_ROWS = (23, 30), (24, 31), (25, 32)
ROWS = frozenset({*WRITE_ROWS, *UPDATE_ROWS, *DELETE_ROWS})
ROWS_WITH_EXTRA = frozenset({30, 31, 32})
GTID_MYSQL, ANONYMOUS_GTID, GTID_TAGGED, GTID_MARIADB = 33, 34, 42, 162
GTIDS = frozenset({GTID_MYSQL, ANONYMOUS_GTID, GTID_TAGGED, GTID_MARIADB})

_COMPRESSED = "it is compressed (`log_bin_compress`)"
UNREADABLE = {26: "the server lost events (an incident)", 165: _COMPRESSED}
"""Types of events that are not read, and the reason."""
UNREADABLE_ROWS = {
    39: "it has partial updates of JSON (`binlog_row_value_options`)",
    **dict.fromkeys(range(166, 172), _COMPRESSED),
}
"""Types of events of rows that are not read, and the reason. Those of tables that are not captured are left out."""

STANDALONE = 1
"""Flag of MariaDB's GTID event: the transaction is a single statement, and has no event of its end."""

_ARTIFICIAL = 0x20
_HEADER = struct.Struct("<IBIIIH")
_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")


class LogUnreadable(ValueError):
    """Raised for bytes of a log that cannot be decoded."""


class LogEvent(NamedTuple):
    """An event.

    :param kind: its type.
    :param seconds: the time in its header, seconds since 1970.
    :param server_id: of the server that has made it.
    :param log_pos: the position after it in its file, modulo 2^32; 0 if it is in no file.
    :param body: the bytes after the header, without the checksum.
    """

    kind: int
    seconds: int
    server_id: int
    log_pos: int
    body: bytes


def parse_event(data: bytes, checked: bool) -> LogEvent:
    """Return an event.

    :param data: the event, from its header on.
    :param checked: True: it ends with a CRC32 checksum.
    :raises LogUnreadable: the checksum is wrong.
    """
    seconds, kind, server_id, _, log_pos, flags = _HEADER.unpack_from(data)
    if kind == ROTATE and (log_pos == 0 or flags & _ARTIFICIAL):
        # It comes before the event that says whether there are checksums.
        checked = len(data) > 31 and zlib.crc32(data[:-4]) == _U32.unpack(data[-4:])[0]
    elif kind == FORMAT:
        return LogEvent(kind, seconds, server_id, 0 if flags & _ARTIFICIAL else log_pos, data[19:-4])
    if checked:
        if zlib.crc32(data[:-4]) != _U32.unpack(data[-4:])[0]:
            raise LogUnreadable(f"the checksum of an event before {log_pos:,} is wrong")
        data = data[:-4]
    return LogEvent(kind, seconds, server_id, 0 if flags & _ARTIFICIAL else log_pos, data[19:])


_ZSTD, _PLAIN = 0, 255


def read_payload(body: bytes) -> Iterator[LogEvent]:
    """Yield the events that a PAYLOAD event holds. They are decompressed one by one.

    :raises LogUnreadable: it is compressed by an unknown method, or cut off.
    """
    import pyarrow as pa

    fields, data = dict[int, int](), _Bytes(body)
    while kind := data.read_number():  # their end is the field 0
        value = _Bytes(data.read_text())
        fields[kind] = value.read_number()
    method, packed = fields.get(2, _PLAIN), pa.BufferReader(pa.py_buffer(body)[data.at :])
    if method not in (_ZSTD, _PLAIN):
        raise LogUnreadable(f"a transaction is compressed by the unknown method {method}")
    stream = pa.CompressedInputStream(packed, "zstd") if method == _ZSTD else packed
    while header := stream.read(_HEADER.size):
        (size,) = _U32.unpack_from(header, 9) if len(header) == _HEADER.size else (0,)
        event = header + stream.read(size - _HEADER.size) if size >= _HEADER.size else header
        if len(event) < max(size, _HEADER.size):
            raise LogUnreadable("a compressed transaction is cut off")
        yield parse_event(event, checked=False)


def has_checksums(body: bytes) -> bool:
    """Return True if the events after a FORMAT event end with checksums."""
    return body[-1] == 1


def parse_rotate(body: bytes) -> tuple[str, int]:
    """Return the file and the position at which the log continues after a ROTATE event."""
    return body[8:].decode(), int(_U64.unpack_from(body)[0])


def parse_query(body: bytes) -> tuple[str, str]:
    """Return the default database and the statement of a QUERY event."""
    size, _, status = struct.unpack_from("<BHH", body, 8)
    at = 13 + status
    return body[at : at + size].decode("utf-8", "replace"), body[at + size + 1 :].decode("utf-8", "replace")


def parse_gtid(event: LogEvent) -> str:
    """Return the GTID of a transaction; "" if it has none."""
    body = event.body
    if event.kind == GTID_MARIADB:
        number, domain = struct.unpack_from("<QI", body)
        return f"{domain}-{event.server_id}-{number}"
    if event.kind == GTID_TAGGED:
        return _parse_tagged_gtid(body)
    if event.kind != GTID_MYSQL:
        return ""
    return f"{UUID(bytes=body[1:17])}:{_U64.unpack_from(body, 17)[0]}"


def _parse_tagged_gtid(body: bytes) -> str:
    """Return the GTID of a transaction of MySQL that has a tag.

    The event is a sequence of numbered fields, which begins with the flags, the server's UUID, the number and the tag.

    :raises LogUnreadable: it does not begin so.
    """
    at = 0

    def read() -> int:
        """Return the next number: the lowest bits of its first byte tell how many bytes follow."""
        nonlocal at
        first = body[at]
        more = (~first & first + 1).bit_length() - 1
        value = int.from_bytes(body[at : at + 1 + more], "little") >> min(more + 1, 8)
        at += 1 + more
        return value

    _version, _size, _last, *flags = (read() for _ in range(5))
    found = [read() for _ in range(21)]
    if flags[0] != 0 or found[0] != 1 or found[17] != 2 or found[19] != 3:
        raise LogUnreadable("a GTID with a tag has another form")
    tag = body[at : at + found[20]].decode()
    return f"{UUID(bytes=bytes(found[1:17]))}:{tag}:{found[18] >> 1}"


class Transactions:
    """Tracks, event by event, whether a transaction is open.

    :ivar is_open: True between the first and the last event of a transaction.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._ends_with_statement: bool | None = False

    def enter(self, event: LogEvent) -> str:
        """Take the next event of the log.

        :return: ``begin`` if it begins a transaction; ``commit``, ``rollback``, ``prepare`` or ``abandon`` (the server has not
            finished it, because it crashed) if it ends one; else "".
        """
        kind = event.kind
        if kind in GTIDS:
            found = "abandon" if self.is_open else "begin"
            self.is_open = True
            # MySQL: known from the first statement.
            self._ends_with_statement = bool(event.body[12] & STANDALONE) if kind == GTID_MARIADB else None
            return found
        if kind in (ROTATE, FORMAT, STOP) and event.log_pos and self.is_open:
            self.is_open = False
            return "abandon"
        if kind == XID:
            return self._end("commit")
        if kind == XA_PREPARE:
            return self._end("commit" if event.body[0] else "prepare")
        return self._track_statement(parse_query(event.body)[1]) if kind == QUERY else ""

    def _track_statement(self, text: str) -> str:
        words = text[:40].upper().split()
        first, second = [*words, "", ""][:2]
        if first == "COMMIT" or (first == "XA" and second == "COMMIT"):
            return self._end("commit")
        if (first == "ROLLBACK" and second != "TO") or (first == "XA" and second == "ROLLBACK"):
            return self._end("rollback")
        if first == "BEGIN" or (first == "XA" and second == "START"):
            found, self.is_open = ("" if self.is_open else "begin"), True
            self._ends_with_statement = False
            return found
        return self._end("commit") if self._ends_with_statement is not False else ""

    def _end(self, how: str) -> str:
        found, self.is_open = (how if self.is_open else ""), False
        self._ends_with_statement = False
        return found


# --- tables -------------------------------------------------------------------------------------------------------------

TINY, SHORT, LONG, FLOAT, DOUBLE, LONGLONG, INT24 = 1, 2, 3, 4, 5, 8, 9
DATE, YEAR, VARCHAR, BIT, TIMESTAMP2, DATETIME2, TIME2 = 10, 13, 15, 16, 17, 18, 19
VECTOR, JSON, NEWDECIMAL, ENUM, SET, BLOB, VAR_STRING, STRING, GEOMETRY = 242, 245, 246, 247, 248, 252, 253, 254, 255

_ONE_BYTE = frozenset({FLOAT, DOUBLE, BLOB, GEOMETRY, JSON, TIMESTAMP2, DATETIME2, TIME2, 140, VECTOR, 249, 250, 251})
_TWO_BYTES = frozenset({VARCHAR, BIT, NEWDECIMAL, ENUM, SET, VAR_STRING, STRING, 141})
_NUMBERS = frozenset({TINY, SHORT, INT24, LONG, LONGLONG, NEWDECIMAL, FLOAT, DOUBLE, YEAR})


@dataclass
class LogColumn:
    """A column, as the log describes it.

    :param kind: its type.
    :param meta: the bytes of the type's sizes.
    :param name: its name.
    :param is_unsigned: True for a number without a sign.
    :param collation: the number of the collation of a text, or of an enumeration.
    :param values: of an ENUM or SET.
    :param geometry: the number of the kind of a geometry; 0 for any.
    :param is_nullable: True if it may be null.
    """

    kind: int
    meta: bytes = b""
    name: str = ""
    is_unsigned: bool = False
    collation: int = 0
    values: tuple[bytes, ...] = ()
    geometry: int = 0
    is_nullable: bool = True

    @property
    def width(self) -> int:
        """The maximum size in bytes of a value of CHAR, VARCHAR, BINARY or VARBINARY."""
        if self.kind == VARCHAR:
            return int.from_bytes(self.meta, "little")
        high, low = self.meta
        return low if high & 0x30 == 0x30 else low | (high & 0x30 ^ 0x30) << 4


@dataclass
class LogTable:
    """A table, as it was when its rows were changed.

    :param id: the number by which events of rows name it.
    :param database: its database.
    :param name: its name.
    :param columns: its columns.
    :param key: the columns of its primary key, by index.
    """

    id: int
    database: str
    name: str
    columns: list[LogColumn] = field(default_factory=list)
    key: tuple[int, ...] = ()

    @property
    def visible(self) -> int:
        """The number of columns that users see. MariaDB has further ones after them, one for each unique key of long texts or
        bytes.
        """
        count = len(self.columns)
        while count and _HIDDEN.fullmatch(self.columns[count - 1].name):
            count -= 1
        return count

    @property
    def is_sequence(self) -> bool:
        """True if it is the table in which MariaDB keeps a sequence, whose changes the log holds as those of a row."""
        return not self.key and tuple(column.name for column in self.columns) == _OF_SEQUENCE


_HIDDEN = re.compile(r"DB_ROW_HASH_\d+")
_OF_SEQUENCE = (
    "next_not_cached_value", "minimum_value", "maximum_value", "start_value", "increment", "cache_size", "cycle_option",
    "cycle_count",
)  # fmt: skip


class _Bytes:
    """Reads values one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def read_number(self) -> int:
        """Return a length-encoded number."""
        first = self.take(1)[0]
        size = {252: 2, 253: 3, 254: 8}.get(first)
        return first if size is None else int.from_bytes(self.take(size), "little")

    def read_text(self) -> bytes:
        return self.take(self.read_number())

    def read_numbers(self) -> list[int]:
        found = []
        while self.at < len(self.data):
            found.append(self.read_number())
        return found


def parse_table_names(body: bytes) -> tuple[int, str, str]:
    """Return number, database and name of the table of a TABLE_MAP event."""
    size = body[8]
    other = body[10 + size]
    return (
        int.from_bytes(body[:6], "little"),
        body[9 : 9 + size].decode(),
        body[11 + size : 11 + size + other].decode(),
    )


def parse_table_map(body: bytes, is_mariadb: bool) -> LogTable:
    """Return the table of a TABLE_MAP event.

    :raises LogUnreadable: the log does not name the columns.
    """
    number, database, name = parse_table_names(body)
    found = LogTable(number, database, name)
    data = _Bytes(body)
    data.at = 12 + len(database.encode()) + len(name.encode())
    kinds = data.take(data.read_number())
    sizes = _Bytes(data.read_text())
    for kind in kinds:
        meta = sizes.take(1 if kind in _ONE_BYTE else 2 if kind in _TWO_BYTES else 0)
        if kind == STRING and meta[0] in (ENUM, SET):
            kind = meta[0]
        found.columns.append(LogColumn(kind, meta))
    nullable = int.from_bytes(data.take((len(kinds) + 7) // 8), "little")
    for index, column in enumerate(found.columns):
        column.is_nullable = bool(nullable >> index & 1)
    _describe(found, data, is_mariadb)
    if any(not column.name for column in found.columns):
        raise LogUnreadable(f"it does not name the columns of {database}.{name}: `binlog_row_metadata` was not FULL")
    return found


def _describe(table: LogTable, data: _Bytes, is_mariadb: bool) -> None:  # noqa: C901 - one branch for each kind of part
    """Add names, signs, character sets, values and the key to a table's columns."""
    columns = table.columns
    # MariaDB treats geometries as texts here, MySQL vectors.
    as_text = GEOMETRY if is_mariadb else VECTOR
    texts = [c for c in columns if c.kind in (STRING, VAR_STRING, VARCHAR, BLOB, 140, 141, as_text)]
    chosen = [c for c in columns if c.kind in (ENUM, SET)]
    while data.at < len(data.data):
        kind = data.take(1)[0]
        part = _Bytes(data.read_text())
        if kind == 1:
            numbers = [c for c in columns if c.kind in _NUMBERS]
            for index, column in enumerate(numbers):
                column.is_unsigned = bool(part.data[index // 8] & (0x80 >> index % 8))
        elif kind in (2, 10):
            default, *pairs = part.read_numbers()
            others = dict(zip(pairs[::2], pairs[1::2], strict=True))
            for index, column in enumerate(texts if kind == 2 else chosen):
                column.collation = others.get(index, default)
        elif kind in (3, 11):
            for column, collation in zip(texts if kind == 3 else chosen, part.read_numbers(), strict=True):
                column.collation = collation
        elif kind == 4:
            for column in columns:
                column.name = part.read_text().decode()
        elif kind in (5, 6):
            for column in (c for c in columns if c.kind == (SET if kind == 5 else ENUM)):
                column.values = tuple(part.read_text() for _ in range(part.read_number()))
        elif kind == 7:
            for column, geometry in zip((c for c in columns if c.kind == GEOMETRY), part.read_numbers(), strict=True):
                column.geometry = geometry
        elif kind in (8, 9):  # with 9, the length of a prefix follows each column
            table.key = tuple(part.read_numbers()[:: kind - 7])


# --- rows ---------------------------------------------------------------------------------------------------------------


ROWS_HEADER = 8
"""The bytes of the number of the table, and of flags, at the beginning of an event of rows."""


def parse_rows_table(body: bytes) -> int:
    """Return the number of the table of an event of rows."""
    return int.from_bytes(body[:6], "little")


def find_first_row(event: LogEvent, columns: int) -> int:
    """Return the index of the first row in the body of an event of rows.

    :param columns: the number of columns of the table.
    :raises LogUnreadable: rows do not have all columns.
    """
    data = _Bytes(event.body)
    data.at = ROWS_HEADER
    if event.kind in ROWS_WITH_EXTRA:
        data.at += _U16.unpack_from(event.body, ROWS_HEADER)[0]
    width = data.read_number()
    size = (width + 7) // 8
    every = (1 << width) - 1
    for _ in range(2 if event.kind in UPDATE_ROWS else 1):
        present = int.from_bytes(data.take(size), "little") & every
        if width != columns or present != every:
            raise LogUnreadable("rows do not have all columns: `binlog_row_image` was not FULL")
    return data.at
