"""Triggers of the sensors. They only read metadata and offsets; they join no group and commit nothing."""

from __future__ import annotations
