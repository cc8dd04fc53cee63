from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sinks.postgres.kit import Place
from tests.sources.postgres_cdc.kit import Log, log_of


@pytest.fixture
def orders(place: Place) -> Iterator[Log]:
    """The log of an empty table of orders."""
    place.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    with log_of(place, "orders") as made:
        yield made
