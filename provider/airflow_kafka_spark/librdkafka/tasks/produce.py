"""Queueing the records of Arrow columns in a producer of confluent-kafka, by one call of librdkafka for each partition.

``rd_kafka_produce_batch`` is called in the library that confluent-kafka has loaded, for the client that its producer has made. It
takes no timestamps and no headers, and the delivery of its records is reported to nobody.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, Producer, cimpl

OLDEST, BEFORE = (2, 10), (2, 17)
"""The releases of confluent-kafka whose producers have librdkafka's client in their first field: the oldest one, and the first
one that was not tried. Others may have it elsewhere."""

_COPY = 0x2
"""``RD_KAFKA_MSG_F_COPY``: librdkafka copies keys and values before the call returns."""

_MESSAGE = np.dtype(
    [
        ("err", np.int32),
        ("rkt", np.uintp),
        ("partition", np.int32),
        ("payload", np.uintp),
        ("payload_len", np.uintp),
        ("key", np.uintp),
        ("key_len", np.uintp),
        ("offset", np.int64),
        ("private", np.uintp),
    ],
    align=True,
)
"""``rd_kafka_message_t`` of rdkafka.h."""


@cache
def find_obstacle() -> str:
    """Return why this installation cannot send whole columns; "" if it can."""
    release = importlib.metadata.version("confluent-kafka")
    if not OLDEST <= tuple(map(int, re.findall(r"\d+", release)[:2])) < BEFORE:
        oldest, before = (".".join(map(str, of)) for of in (OLDEST, BEFORE))
        return f"confluent-kafka is {release}; expected {oldest} or newer, and older than {before}"
    try:
        _Library.load()
    except (OSError, AttributeError) as error:
        return f"librdkafka cannot be called: {error}"
    return ""


class _Library:
    """The library that confluent-kafka has loaded. Functions of a module's libraries are found through the module."""

    def __init__(self) -> None:
        library = ctypes.CDLL(cimpl.__file__)
        self.new_topic = library.rd_kafka_topic_new
        self.new_topic.restype = ctypes.c_void_p
        self.new_topic.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.destroy_topic = library.rd_kafka_topic_destroy
        self.destroy_topic.restype = None
        self.destroy_topic.argtypes = [ctypes.c_void_p]
        self.produce_batch = library.rd_kafka_produce_batch
        self.produce_batch.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        self.find_last_error = library.rd_kafka_last_error

    @classmethod
    @cache
    def load(cls) -> _Library:
        return cls()


@dataclass(frozen=True)
class QueuedRecords:
    """The result of queueing records.

    :param count: the records before the first one that was not queued.
    :param error: why that one was not queued; None if all were.
    """

    count: int
    error: KafkaError | None


class RecordArray:
    """Records in the memory of two Arrow columns. :func:`find_obstacle` has to return "".

    :param keys: binary or text, with 32-bit or 64-bit offsets. A null is a record without a key.
    :param values: the same. A null is a tombstone.
    :param order: the rows in the order in which they are sent.
    :param partitions: the partition of each of these rows, in ascending order.
    """

    def __init__(self, keys: pa.Array, values: pa.Array, order: np.ndarray, partitions: np.ndarray) -> None:
        self._columns = keys, values  # The addresses refer to their memory.
        self._partitions = partitions
        self._messages = np.zeros(len(order), _MESSAGE)
        for name, column in (("key", keys), ("payload", values)):
            addresses, lengths = _locate(column)
            self._messages[name], self._messages[f"{name}_len"] = addresses[order], lengths[order]

    def produce(self, producer: Producer, topic: str, start: int = 0) -> QueuedRecords:
        """Queue the records from a position in ``order`` on. They have the time of this call.

        :return: how many are queued: all, or those before the first one that was refused. If the queue is full (``_QUEUE_FULL``),
            no record behind that one is queued. With any other error some may be: abort the transaction.
        """
        library, client = _Library.load(), _find_client(producer)
        # The producer has its own handle of the topic. This one refers to it, and costs a search by its name.
        handle = library.new_topic(client, topic.encode(), None)
        if not handle:
            return QueuedRecords(0, KafkaError(library.find_last_error()))
        try:
            # One call for each partition. A call for many adds a partition that the client does not know yet to the transaction
            # under the number -1, which the broker refuses.
            begin = start
            for end in [*(np.flatnonzero(np.diff(self._partitions[start:])) + start + 1).tolist(), len(self._partitions)]:
                part = self._messages[begin:end]
                count = library.produce_batch(handle, int(self._partitions[begin]), _COPY, part.ctypes.data, len(part))
                if count < len(part):
                    first = int(part["err"].astype(bool).argmax())
                    return QueuedRecords(begin - start + first, KafkaError(int(part["err"][first])))
                begin = end
        finally:
            library.destroy_topic(handle)
        return QueuedRecords(len(self._partitions) - start, None)


def _locate(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses of a column's values, which are 0 for nulls, and their lengths."""
    is_large = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    if not (is_large or pa.types.is_binary(column.type) or pa.types.is_string(column.type)):
        raise TypeError(f"a column is {column.type}; expected binary or string")
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64 if is_large else np.int32)[column.offset : column.offset + len(column) + 1]
    # Without a byte in the column, any address but NULL is that of an empty value.
    start = data.address if data is not None and data.size else offsets.address
    addresses = ends[:-1].astype(np.uintp) + np.uintp(start)
    if column.null_count:
        addresses[np.asarray(column.is_null())] = 0
    return addresses, np.diff(ends)


def _find_client(producer: Producer) -> int:
    """Return the address of the ``rd_kafka_t`` of a producer: the first field behind the header of the Python object."""
    client = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__).value
    if not client:
        raise RuntimeError("the producer is closed")
    return client
