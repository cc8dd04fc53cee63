from __future__ import annotations

import pytest

from tests.support.clients import open_hook


@pytest.fixture(scope="module")
def hook(kafka):
    with open_hook(kafka, "kafka_ledger") as hook:
        yield hook
