from __future__ import annotations

import pytest

from tests.support.clients import open_hook
from tests.support.piped import Piped, fill


@pytest.fixture(scope="module")
def hook(kafka):
    with open_hook(kafka, "kafka_control") as hook:
        yield hook


@pytest.fixture
def piped(kafka, hook, unique):
    """A pipeline of two partitions of 20 records, a second apart; the first two records of partition 0 are deleted."""
    return fill(Piped(kafka, hook, unique("pipe"), unique("orders"), unique("ledger")))


@pytest.fixture
def moved(piped):
    """Return the pipeline after a window up to offset 10 of both partitions."""
    piped.move(10, 10)
    return piped
