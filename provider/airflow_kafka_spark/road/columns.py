"""Names and types of the columns in which records travel through Spark, and the options that name some of them.

The driver and the tasks both use them. No column of a user's may have one of these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pyarrow as pa

NullValues = Literal["fail", "ignore", "write", "delete"]

METADATA = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
"""The metadata columns of a record, as Spark's Kafka source names them; ``key`` and ``value`` are the raw bytes."""

OFFSET = "__kafka_offset"
"""Where a record was read. For a row of a source it is the row's place in its split, from 1."""

TOMBSTONE = "__kafka_tombstone"
"""True for a record without a value, or with a value that deletes its row."""

ORIGINAL = {name: f"__kafka_original_{name}" for name in ("key", "value", "headers", "timestamp", "timestampType")}
"""The parts of a record as they were read. They are carried past the transforms where a dead letter or an option needs them."""

GIVEN = {name: f"__kafka_given_{name}" for name in ("key", "value", "timestamp", "headers")}
"""The parts of a source's row as the source has it, carried past the transforms where a dead letter or a filter needs them.
The key is bytes if it could be written, otherwise a struct, like the value."""

KEY, VALUE, TIMESTAMP, HEADERS, PARTITION = (f"__kafka_{name}" for name in ("key", "value", "timestamp", "headers", "partition"))
"""The parts of a record that is copied, carried past Spark's SQL."""


def metadata_type(name: str) -> pa.DataType:
    """Return the Arrow type of one of :data:`METADATA`."""
    import pyarrow as pa

    return {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestampType": pa.int32(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    }[name]
