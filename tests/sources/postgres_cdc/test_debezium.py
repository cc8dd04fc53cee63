"""Events compared with those of Debezium's engine on the same tables and changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_kafka_spark.sources import PostgresCdcSource
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sources.postgres_cdc.kit import Windows
from tests.support.debezium import postgres as shop
from tests.support.debezium.compare import differences, of_engine
from tests.support.debezium.record import change_postgres, postgres_database

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "connect": {
        "decimal_handling_mode": "string",
        "time_precision_mode": "connect",
        "skipped_operations": (),
        "tombstones_on_delete": False,
    },
    "adaptive": {"decimal_handling_mode": "double"},
}


@pytest.fixture(scope="module")
def windows(postgres: EmbeddedPostgres) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The records of the changes, by set of options."""
    name = "debezium_all_types"
    os.environ["AIRFLOW_CONN_DEBEZIUM"] = postgres.connection_uri().rsplit("/", 1)[0] + f"/{name}"
    with postgres_database(postgres, name) as connection:
        connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        made = {}
        for options, given in OPTIONS.items():
            keys = {f"public.{table}": key for table, key in shop.KEYS.items()}
            more = {"message_key_columns": keys, "schemas_enable": True, **given}
            made[options] = Windows(PostgresCdcSource("debezium", "everything", f"debezium_{options}", "shop", **more))
            made[options].next()
        change_postgres(connection)
        yield {options: window.next() for options, window in made.items()}


@pytest.mark.parametrize("options", OPTIONS)
def test_events_are_equal_to_those_of_debeziums_engine(windows, options):
    found = differences(windows[options], of_engine("postgres", options))
    print("\n".join(found))
    assert found == []
