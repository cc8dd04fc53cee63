"""Queueing the records of Arrow columns in a producer of confluent-kafka.

Functions of librdkafka are called in the library that confluent-kafka has loaded, for the client that its producer has made:
``rd_kafka_produce_batch`` for records that have the time of sending, and ``rd_kafka_produceva`` for those with timestamps, which
the former does not take. The delivery of these records is reported to nobody, and they have no headers.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from operator import length_hint

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, Producer, cimpl

OLDEST, BEFORE = (2, 6), (2, 17)
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

_ARGUMENT = np.dtype(
    {"names": ["vtype", "u", "size"], "formats": [np.int32, np.int64, np.int64], "offsets": [0, 8, 16], "itemsize": 72}
)
"""``rd_kafka_vu_t`` of rdkafka.h: the kind of an argument, and its value, which may be an address and a size."""

_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _TIMESTAMP = range(6)
_ARGUMENTS = [2, 3, 4, 5, 7, 8]
"""``rd_kafka_vtype_t`` of these arguments, in this order."""

_PIECE = 512
"""Records whose arguments are in memory together: they stay in the processor's cache."""


@cache
def find_obstacle() -> str:
    """Return why this installation cannot send whole columns; "" if it can."""
    release = importlib.metadata.version("confluent-kafka")
    if not OLDEST <= tuple(map(int, re.findall(r"\d+", release)[:2])) < BEFORE:
        oldest, before = (".".join(map(str, of)) for of in (OLDEST, BEFORE))
        return f"confluent-kafka is {release}; expected {oldest} or newer, and older than {before}"
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return "this Python has no addresses of 64 bits"
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
        self.find_error_code = library.rd_kafka_error_code
        self.find_error_code.argtypes = [ctypes.c_void_p]
        self.destroy_error = library.rd_kafka_error_destroy
        self.destroy_error.restype = None
        self.destroy_error.argtypes = [ctypes.c_void_p]
        self.find_last_error = library.rd_kafka_last_error
        # Called for each record, with arguments that need no conversion. It returns soon, and calls nothing of Python, so that
        # the interpreter's lock is kept.
        self.produce = ctypes.PyDLL(cimpl.__file__)["rd_kafka_produceva"]
        self.produce.restype = ctypes.c_void_p

    @classmethod
    @cache
    def load(cls) -> _Library:
        return cls()


@dataclass(frozen=True)
class QueuedRecords:
    """How far a producer has queued records.

    :param count: the records before the first one that was not queued.
    :param error: why that one was not queued; None if all were.
    """

    count: int
    error: KafkaError | None


class RecordArray:
    """Records in the memory of Arrow columns. :func:`find_obstacle` has to return "".

    :param keys: binary or text, with 32-bit or 64-bit offsets. A null is a record without a key.
    :param values: the same. A null is a tombstone.
    :param timestamps: ``int64``, milliseconds since 1970, without nulls; 0 is the time of sending. None: all records have that.
    :param order: the rows in the order in which they are sent.
    :param partitions: the partition of each of these rows, in ascending order.
    """

    def __init__(
        self, keys: pa.Array, values: pa.Array, timestamps: pa.Array | None, order: np.ndarray, partitions: np.ndarray
    ) -> None:
        self._columns = keys, values  # The addresses refer to their memory.
        self._keys, self._values = ([part[order] for part in _locate(column)] for column in self._columns)
        self._times = None if timestamps is None else np.asarray(timestamps)[order]
        self._partitions = partitions

    def produce(self, producer: Producer, topic: str, start: int = 0) -> QueuedRecords:
        """Queue the records from a position in ``order`` on.

        :return: how many are queued: all, or those before the first one that was refused. If the queue is full (``_QUEUE_FULL``),
            no record behind that one is queued. With any other error some may be: abort the transaction.
        """
        if start == len(self._partitions):
            return QueuedRecords(0, None)
        library, client = _Library.load(), _find_client(producer)
        # The producer has its own handle of the topic. This one refers to it, and costs a search by its name.
        handle = library.new_topic(client, topic.encode(), None)
        if not handle:
            return QueuedRecords(0, KafkaError(library.find_last_error()))
        try:
            if self._times is None:
                return self._produce_parts(library, handle, start)
            return self._produce_each(library, client, handle, start, self._times)
        finally:
            library.destroy_topic(handle)

    def _produce_parts(self, library: _Library, handle: int, start: int) -> QueuedRecords:
        """Queue all records of a partition by one call."""
        messages = np.zeros(len(self._partitions) - start, _MESSAGE)
        for name, (addresses, lengths) in (("key", self._keys), ("payload", self._values)):
            messages[name], messages[f"{name}_len"] = addresses[start:], lengths[start:]
        partitions = self._partitions[start:]
        ends = [*(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(partitions)]
        begin = 0
        for end in ends:
            part = messages[begin:end]
            if library.produce_batch(handle, int(partitions[begin]), _COPY, part.ctypes.data, len(part)) < len(part):
                first = int(part["err"].astype(bool).argmax())
                return QueuedRecords(begin + first, KafkaError(int(part["err"][first])))
            begin = end
        return QueuedRecords(len(partitions), None)

    def _produce_each(self, library: _Library, client: int, handle: int, start: int, times: np.ndarray) -> QueuedRecords:
        """Queue each record by a call, because that of many takes no timestamps."""
        arguments = np.zeros((_PIECE, len(_ARGUMENTS)), _ARGUMENT)
        arguments["vtype"] = _ARGUMENTS
        values, sizes = arguments["u"], arguments["size"]
        values[:, _TOPIC], values[:, _FLAGS] = handle, _COPY
        row = arguments.strides[0]
        addresses = [ctypes.c_void_p(arguments.ctypes.data + row * at) for at in range(_PIECE)]
        others = repeat(ctypes.c_void_p(client)), repeat(ctypes.c_size_t(len(_ARGUMENTS)))
        for begin in range(start, len(self._partitions), _PIECE):
            piece = slice(begin, min(begin + _PIECE, len(self._partitions)))
            count = piece.stop - begin
            values[:count, _PARTITION], values[:count, _TIMESTAMP] = self._partitions[piece], times[piece]
            for at, (places, lengths) in ((_KEY, self._keys), (_VALUE, self._values)):
                values[:count, at], sizes[:count, at] = places[piece], lengths[piece]
            left = iter(addresses[:count])
            # map() and filter() run no Python code per record except the call, which returns an error or NULL.
            error = next(filter(None, map(library.produce, others[0], left, others[1])), None)
            if error is not None:
                code = library.find_error_code(error)
                library.destroy_error(error)
                return QueuedRecords(begin - start + count - length_hint(left) - 1, KafkaError(code))
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
    addresses = ends[:-1].astype(np.int64) + start
    if column.null_count:
        addresses[np.asarray(column.is_null())] = 0
    return addresses, np.diff(ends).astype(np.int64)


def _find_client(producer: Producer) -> int:
    """Return the address of the ``rd_kafka_t`` of a producer: the first field behind the header of the Python object."""
    client = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__).value
    if not client:
        raise RuntimeError("the producer is closed")
    return client
