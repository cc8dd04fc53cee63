from __future__ import annotations

import pytest

from tests.support.pipelines import pipeline


@pytest.fixture
def flow(kafka, unique, tmp_path, request):
    """A pipeline into the sink of the test's parameter ``kind``."""
    kind = request.node.callspec.params["kind"]
    with pipeline(kind, kafka, lambda: request.getfixturevalue("postgres"), unique, tmp_path) as made:
        yield made
