"""A topic becomes a table of a lake through Spark's tasks: killed, retried, replayed, with records that cannot be read."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

import pytest
from deltalake import DeltaTable

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from tests.support.control import replay
from tests.support.dead_letters import check_sorted_out, produce_mixed
from tests.support.oracle import wait_stable
from tests.support.pipelines import pipeline


@pytest.fixture(params=["delta", "iceberg"])
def lake(request, kafka, unique, tmp_path):
    with pipeline(request.param, kafka, lambda: None, unique, tmp_path) as made:
        yield made


@pytest.mark.faults
@pytest.mark.parametrize(
    ("lake", "point"),
    [("delta", "split.flushed"), ("delta-upsert", "sink.committed"), ("iceberg", "sink.in_transaction")],
    indirect=["lake"],
)
def test_killed_then_retried_and_cleared_every_record_is_in_the_table_exactly_once(lake, point):
    lake.produce(200)
    lake.run("run0")
    lake.produce(300)
    victim = lake.victim("run1", fault=point, split_records=70)
    victim.wait()
    assert victim.fired, victim.tail()
    assert len(lake.rows()) == (500 if point == "sink.committed" else 200), "a reader saw a part of the window"
    retried = lake.run("run1", split_records=70)
    assert lake.check() == 500
    assert lake.run("run1", split_records=70) == retried, "a cleared task does nothing and returns the same report"
    lake.produce(50)
    lake.run("run2")
    assert lake.check() == 550


def test_bad_records_go_to_a_dead_letter_topic_and_a_window_that_is_replayed_is_replaced(lake):
    dead = f"dead-{lake.topic}"
    options = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    bad = produce_mixed(lake, 100, 5)
    lake.run("run1", **options)
    assert check_sorted_out(lake, dead) == (100, bad)
    with KafkaHook() as hook:
        replay(hook, lake.name, window=1, why="spoilt rows", ledger_topic=f"ledger-{lake.name}")
    report = lake.run("run1", **options)
    assert (report["replay"], report["records_written"]) == (1, 100)
    assert check_sorted_out(lake, dead) == (100, bad)
    if lake.kind != "delta":
        return
    # Where others have rewritten its files nothing is planned, so that no later window waits for a replay that cannot end.
    DeltaTable(lake.place).optimize.compact()
    wait_stable(lake.kafka.connection_extra(), f"ledger-{lake.name}")
    with KafkaHook() as hook:
        replay(hook, lake.name, window=1, why="once more", ledger_topic=f"ledger-{lake.name}")
    with pytest.raises(ValidationError, match="OPTIMIZE"):
        lake.run("run1", **options)
    lake.produce(50)
    assert lake.run("run2", **options)["window"] == "0000000002"
    assert check_sorted_out(lake, dead) == (150, bad)


def test_the_example_lands_a_topic_in_a_catalog_of_postgresql_and_prints_its_query(
    kafka, postgres, unique, tmp_path, capsys, monkeypatch
):
    code = (Path(__file__).parents[3] / "examples" / "lake.py").read_text()
    with postgres.connect(autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{(name := unique("catalog"))}"')
    # As the page describes it: address, login and password in their own fields.
    address = f"postgresql+psycopg://{postgres.host}:{postgres.port}/{name}"
    extra = {"type": "sql", "name": "lake", "warehouse": f"file://{tmp_path}/warehouse"}
    fields = {"conn_type": "iceberg", "host": address, "login": postgres.user, "password": postgres.password, "extra": extra}
    with pipeline("iceberg", kafka, lambda: postgres, unique, tmp_path) as lake:
        monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(fields))
        code = code.replace('topics="orders"', f"topics={lake.topic!r}")
        code = code.replace('group_id="orders-iceberg"', f"group_id={lake.name!r}, ledger_topic={f'ledger-{lake.name}'!r}")
        exec(compile(code, "lake.py", "exec"), example := {"__name__": "example"})
        lake.make = lambda **_: example["load"]
        for run in ("run1", "run2"):
            lake.produce(120)
            lake.run(run, facts={"dag_id": "orders_to_iceberg", "task_id": "load"})
        capsys.readouterr()
        example["best_customers"].function()
        printed = re.findall(r"│ *(customer-\d+) *│ *(\d+) *│ *([\d.]+) *│", capsys.readouterr().out)
        uri = address.replace("://", f"://{postgres.user}:{postgres.password}@")
        of_reader = {"type": "sql", "uri": uri, "warehouse": extra["warehouse"]}
        monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps({"conn_type": "iceberg", "extra": of_reader}))
        assert lake.check() == 240
        orders = defaultdict(list)
        for _, customer, amount, _ in lake.rows():
            orders[customer].append(Decimal(amount))
        best = sorted(((sum(amounts), len(amounts)) for amounts in orders.values()), reverse=True)[:5]
        assert [(Decimal(amount), int(count)) for _, count, amount in printed] == best
