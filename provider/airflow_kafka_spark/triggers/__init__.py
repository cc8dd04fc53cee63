"""The asynchronous halves of the sensors: they only look, they never consume or commit."""

from __future__ import annotations
