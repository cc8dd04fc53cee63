"""Every sink keeps the contract of sinks/base.py."""

from __future__ import annotations

from tests.sinks.contract import SinkContract


class TestContract(SinkContract):
    """Run over every sink in conftest.py."""
