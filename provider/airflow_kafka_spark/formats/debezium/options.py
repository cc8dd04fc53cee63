"""Options for Debezium's delete and truncate events."""

from __future__ import annotations

from typing import Literal

DeleteHandling = Literal["tombstone", "drop", "rewrite", "rewrite-with-tombstone", "delete-to-tombstone"]
"""Handling of delete events; Debezium's ``delete.tombstone.handling.mode``."""
Truncates = Literal["fail", "ignore"]
"""Handling of truncate events."""

REWRITING = ("rewrite", "rewrite-with-tombstone")
"""The modes in which a delete event becomes a row."""
