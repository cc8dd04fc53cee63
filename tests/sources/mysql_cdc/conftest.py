from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.sources.mysql_cdc.kit import CONN, Binlog
from tests.support.mariadb import EmbeddedMariaDB, missing

LOG = ("--log-bin=bin", "--server-id=7", "--binlog-format=ROW", "--binlog-row-metadata=FULL", "--sync-binlog=0")


@pytest.fixture(scope="session")
def mariadb() -> Iterator[EmbeddedMariaDB]:
    if reason := missing():
        pytest.skip(reason)
    with EmbeddedMariaDB(*LOG, "--innodb-flush-log-at-trx-commit=0") as started:
        os.environ[f"AIRFLOW_CONN_{CONN.upper()}"] = started.connection_uri()
        yield started
        del os.environ[f"AIRFLOW_CONN_{CONN.upper()}"]


@pytest.fixture
def shop(mariadb: EmbeddedMariaDB) -> Iterator[Binlog]:
    """An empty database, and the log behind its creation."""
    with mariadb.connect() as connection:
        yield Binlog(mariadb, connection)


@pytest.fixture
def orders(shop: Binlog) -> Binlog:
    """The log of an empty table of orders."""
    shop.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    return shop
