"""Events compared with those of Debezium's engine on the same tables and changes."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_kafka_spark.sources import MySqlCdcSource
from tests.sources.mysql_cdc.kit import CONN
from tests.sources.postgres_cdc.kit import Windows
from tests.support.debezium import mariadb as tables
from tests.support.debezium.compare import differences, of_engine
from tests.support.debezium.record import change_mariadb, make_mariadb
from tests.support.mariadb import EmbeddedMariaDB

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "connect": {
        "decimal_handling_mode": "string",
        "time_precision_mode": "connect",
        "skipped_operations": (),
        "tombstones_on_delete": False,
        "bigint_unsigned_handling_mode": "precise",
    },
    "adaptive": {"decimal_handling_mode": "double"},
}


@pytest.fixture(scope="module")
def place(mariadb: EmbeddedMariaDB) -> str:
    """The place of the log behind which the changes are."""
    with mariadb.connect() as connection, connection.cursor() as cursor:
        make_mariadb(connection)
        cursor.execute("SHOW MASTER STATUS")
        file, position, *_ = cursor.fetchone()
        change_mariadb(connection)
    return f"{file}:{position}"


@pytest.mark.parametrize("options", OPTIONS)
def test_events_are_equal_to_those_of_debeziums_engine(place, options):
    keys = {f"shop.{table}": key for table, key in tables.KEYS.items()}
    given = {"message_key_columns": keys, "schemas_enable": True, "starting_position": place, **OPTIONS[options]}
    ours = Windows(MySqlCdcSource(CONN, "shop", **given)).next()
    found = differences(ours, of_engine("mariadb", options))
    print("\n".join(found))
    assert found == []
