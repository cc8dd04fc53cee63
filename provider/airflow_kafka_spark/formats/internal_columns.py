"""Names of the columns that this package adds to rows on their way through Spark. The driver and the tasks both use them."""

from __future__ import annotations

END = "__kafka_end"
"""Null in all rows but the last one of a split that was read from Kafka. That row is no record: it holds the counts of what was
read, or the error that ended it.
"""

ERROR = "__kafka_error"
"""Why a record could not be transformed; null otherwise."""

ROUTE = "__kafka_route"
"""Where a record goes instead of the sink, and why, as JSON; null if it goes to the sink. Only present if a transform of the
chain routes records.
"""

LEFT_OUT = "__kafka_left_out"
"""True for a row that a filter has removed, if such rows stay in the frame to be counted. Only present where the frame is built
that way; elsewhere removed rows are gone.
"""
