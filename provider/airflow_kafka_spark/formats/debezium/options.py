"""What may become of Debezium's events that are no rows."""

from __future__ import annotations

from typing import Literal

DeleteHandling = Literal["tombstone", "drop", "rewrite", "rewrite-with-tombstone", "delete-to-tombstone"]
Truncates = Literal["fail", "ignore"]

REWRITING = ("rewrite", "rewrite-with-tombstone")
"""Those that make a row of a deletion."""
