from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sources.mysql_cdc.kit import Binlog, log_server
from tests.support.mariadb import EmbeddedMariaDB, missing


@pytest.fixture(scope="session")
def mariadb() -> Iterator[EmbeddedMariaDB]:
    if reason := missing():
        pytest.skip(reason)
    with log_server() as started:
        yield started


@pytest.fixture
def shop(mariadb: EmbeddedMariaDB) -> Iterator[Binlog]:
    """An empty database, and the log after its creation."""
    with mariadb.connect() as connection:
        yield Binlog(mariadb, connection)


@pytest.fixture
def orders(shop: Binlog) -> Binlog:
    """The log of an empty table of orders."""
    shop.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    return shop
