"""The parts of a report's times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

PARTS = ("session", "workers", "read", "decode", "write", "wait")


def check_move(report: Mapping[str, Any], *parts: str) -> None:
    """Check that the parts of ``move`` add up to its time.

    :param parts: the parts that must take some time.
    """
    timings = report["timings"]
    assert sum(timings[part] for part in PARTS) == pytest.approx(timings["move"], abs=0.01)
    assert not [part for part in parts if not timings[part] > 0], timings
