"""Events compared with those of Debezium's engine on the same tables and changes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_kafka_spark.sources import ExtractNewRecordState, PostgresCdcSource
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sources.postgres_cdc.kit import ROW_FIELDS, Windows
from tests.support.debezium import postgres as shop
from tests.support.debezium.compare import differences, of_engine, unexplained
from tests.support.debezium.record import change_postgres, postgres_database

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "connect": {
        "decimal_handling_mode": "string",
        "time_precision_mode": "connect",
        "skipped_operations": (),
        "tombstones_on_delete": False,
        "provide_transaction_metadata": True,
    },
    "adaptive": {"decimal_handling_mode": "double", "time_precision_mode": "adaptive_time_microseconds"},
    # The rows of the engine have placeholders for values of `changes`, which are refused here.
    "rows": {
        "unwrap": ExtractNewRecordState("rewrite-with-tombstone", ROW_FIELDS),
        "tables": ["types", "whole", "keyed", '"odd näme"', "finish"],
    },
}


@pytest.fixture(scope="module")
def windows(postgres: EmbeddedPostgres) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The records of the changes, by set of options."""
    name = "shop"  # as in the recording
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


KNOWN = {
    r"schema\.fields\..*default: missing": "the log does not hold defaults",
    r"value\.schema\.fields\..*\.optional: True, expected False": "nor whether a column may be null",
    r"odd_n_|public\.odd n": "the engine takes the bytes of a name for characters",
    r"<numeric\(3,-2\)>": "the engine does not know negative scales",
    r"<name>: 'a name', expected None": "the engine writes null",
    r"<bit\(3\)\[\]>": "the engine takes the array for bits, and writes null",
    r"<date>: -?214748364\d, expected -21474726": "the engine's days of infinite dates overflow",
    r"<numeric>(\.scale|\.value)": "the engine drops the zeros at the end of a number that has no scale",
    r"<(money\[\]|interval\[\]|pair|int4multirange|point\[\]|line|lseg|box|path|polygon|circle|pg_lsn|xid|regclass|tsquery)>"
    r": superfluous": "the engine leaves out columns of these types",
}
"""Differences that stay, and why."""


def test_events_are_equal_to_those_of_debeziums_engine(windows):
    found = []
    for options in OPTIONS:
        expected = of_engine("postgres", options)
        if options == "rows":
            expected = [record for record in expected if record["topic"] != "shop.public.changes"]
        found += differences(windows[options], expected)
    assert unexplained(found, KNOWN, shop.TYPES) == []


@pytest.mark.parametrize("options", ["default", "connect", "adaptive"])
def test_a_snapshot_reads_the_values_and_schemas_that_the_log_has(windows, options):
    changes = {record["key"]["payload"]["id"]: record for record in windows[options] if record["topic"] == "shop.public.types"}
    source = PostgresCdcSource(
        "debezium", "everything", f"read_{options}", "shop", tables=["public.types"], snapshot="only", schemas_enable=True,
        **{name: value for name, value in OPTIONS[options].items() if name.endswith("_mode")},
    )  # fmt: skip
    found = {record["key"]["payload"]["id"]: record for record in Windows(source).drain()}
    assert len(found) == len(changes) > 7
    for number, record in found.items():
        (row, schema), (of_log, schema_of_log) = (
            (json.dumps(part["value"]["payload"]["after"]), part["value"]["schema"]) for part in (record, changes[number])
        )
        assert (row, schema, record["key"]) == (of_log, schema_of_log, changes[number]["key"])
