"""Names and types of the columns in which records and rows travel through Spark.

The driver and the tasks both use them. A user's column must not have one of these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

METADATA = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
"""The metadata columns of a record, as Spark's Kafka source names them; ``key`` and ``value`` are the raw bytes."""

OFFSET = "__kafka_offset"
"""The offset of a record. For a row of a source: the number of the row in its split, from 1."""

TOMBSTONE = "__kafka_tombstone"
"""True for a record without a value, or with a value that deletes its row."""

ORIGINAL = {name: f"__kafka_original_{name}" for name in ("key", "value", "headers", "timestamp", "timestampType")}
"""The parts of a record as they were read. They are carried past the transforms if a dead letter or an option needs them."""

GIVEN = {name: f"__kafka_given_{name}" for name in ("key", "value", "timestamp", "headers")}
"""The parts of a source's row before all transforms, carried past these if a dead letter or a filter needs them. The key is bytes
if it could be encoded, otherwise a struct, like the value."""

CAPTURED = "__kafka_captured_"
"""The beginning of the names of columns that hold the rows for other sinks; the sink's number follows, from 0."""

KEY, VALUE, TIMESTAMP, HEADERS, PARTITION = (f"__kafka_{name}" for name in ("key", "value", "timestamp", "headers", "partition"))
"""The parts of a record that is copied, carried past Spark's SQL."""

END = "__kafka_end"
"""Null in all rows of a split that was read from Kafka, except the last one. That row is no record: it holds the account of the
split, or the error that ended the reading.
"""

ERROR = "__kafka_error"
"""The reason why a record could not be transformed; null otherwise."""

ROUTE = "__kafka_route"
"""The topic that a record goes to instead of the sink, and the reason, as JSON; null if it goes to the sink. Only present if a
transform of the chain routes records.
"""

LEFT_OUT = "__kafka_left_out"
"""True for a row that a filter has removed, if such rows stay in the frame to be counted. Only present where the frame is built
that way; elsewhere removed rows are gone.
"""


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
