"""The parts of a report's times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

PARTS = ("session", "workers", "read", "decode", "write", "wait")


def check_move(report: Mapping[str, Any], *parts: str) -> None:
    """Check that the parts of ``move`` add up to its time.

    :param parts: the parts that must take some time. One of them may take less than the report shows, half a millisecond.
    """
    timings = report["timings"]
    assert sum(timings[part] for part in PARTS) == pytest.approx(timings["move"], abs=0.01)
    assert len([part for part in parts if timings[part] > 0]) >= len(parts) - 1, timings
