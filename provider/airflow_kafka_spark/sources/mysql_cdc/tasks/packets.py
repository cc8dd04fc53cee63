"""The packets of a server's answer, many at a time: the rows of a query, and the events of the log.

PyMySQL reads each packet by itself, with two reads of the socket's buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pymysql.connections import Connection

Packets = tuple[bytearray, list[int]]
"""Some packets: bytes, and where each of them begins behind its header; then where another packet would begin."""

_RECEIVED_BYTES = 1 << 18
"""Bytes that are taken from the network at once."""

_LONGEST = 0xFFFFFF
"""The size of a packet behind which another one continues it."""

_ERROR = 0xFF
"""First byte of the packet of an error."""
_END, _END_BYTES = 0xFE, 9
"""First byte of the packet that ends the answer, and the size that it does not have."""
_SERVER_LOST = 2013
"""The driver's error for a connection that ends."""


def receive_packets(connection: Connection, most_bytes: int, most_packets: int, *, is_eager: bool = False) -> Iterator[Packets]:
    """Yield the packets of the answer to a command, up to the packet that ends it.

    :param most_bytes: approximate size in bytes of those that are yielded together.
    :param most_packets: their maximum number.
    :param is_eager: True: packets that have arrived do not wait for others.
    :raises pymysql.Error: the server sends an error, or ends the connection.
    """
    unpack, number = struct.Struct("<I").unpack_from, connection._next_seq_id
    data, starts, at = bytearray(), list[int](), 0
    while True:
        data += _receive(connection)
        while len(data) - at > 4:
            (header,) = unpack(data, at)
            size, packets = header & _LONGEST, 1
            if at + 4 + size > len(data):
                break
            if size == _LONGEST:
                size, packets = _join_packets(data, at)
                if not packets:
                    break
            if (header >> 24 != number or data[at + 4] >= _END) and _is_end(bytes(data[at : at + 4 + size]), number):
                if starts:
                    yield data, [*starts, at + 4]
                return
            number = (number + packets) % 256
            starts.append(at + 4)
            at += 4 + size
            if at >= most_bytes or len(starts) >= most_packets:
                yield data[:at], [*starts, at + 4]
                del data[:at]
                starts, at = [], 0
        if is_eager and starts:
            yield data[:at], [*starts, at + 4]
            del data[:at]
            starts, at = [], 0


def _receive(connection: Connection) -> bytes:
    from pymysql import err

    found: bytes = connection._rfile.read1(_RECEIVED_BYTES)
    if not found:
        raise err.OperationalError(_SERVER_LOST, "Lost connection to MySQL server during query")
    return found


def _is_end(packet: bytes, number: int) -> bool:
    """Return True if a packet ends the answer.

    :param number: the number that it should have.
    :raises pymysql.Error: it is an error, or has another number.
    """
    from pymysql import err

    if packet[4] == _ERROR:
        err.raise_mysql_exception(packet[4:])
    if packet[3] != number:
        raise err.InternalError(f"Packet sequence number wrong - got {packet[3]} expected {number}")
    return packet[4] == _END and len(packet) < 4 + _END_BYTES


def _join_packets(data: bytearray, at: int) -> tuple[int, int]:
    """Remove the headers within an answer of several packets, and return its size and the number of packets; 0 and 0 if they have
    not arrived.

    :param at: where the header of the first one begins.
    """
    headers, end = [at], at
    while True:
        size = int.from_bytes(data[end : end + 3], "little")
        end += 4 + size
        if end > len(data):
            return 0, 0
        if size < _LONGEST:
            break
        headers.append(end)
    for header in reversed(headers[1:]):
        del data[header : header + 4]
    return end - at - 4 * len(headers), len(headers)
