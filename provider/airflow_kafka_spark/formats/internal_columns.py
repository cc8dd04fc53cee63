"""Columns that mark rows on their way through Spark: driver and tasks have to mean the same."""

from __future__ import annotations

END = "__kafka_end"
"""Null in every row but one more at the end of a split that was read from Kafka: that is no record, but holds the account of what
was read, or the error that ended it."""

ERROR = "__kafka_error"
"""Why a record could not be transformed; null where all is well."""

ROUTE = "__kafka_route"
"""Where a record goes instead of the sink, and why, as JSON; null where it goes on. Only there where a transform of the chain
routes."""

LEFT_OUT = "__kafka_left_out"
"""Whether a row is left out, where those that are stay in the frame to be counted: it is no record any more. Only there where
whoever made the frame wants that; elsewhere rows that are left out are gone."""
