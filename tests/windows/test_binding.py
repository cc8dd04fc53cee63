"""The binding of a window: another writer, another place, and unknown facts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from airflow_kafka_spark.windows.binding import (
    Binding,
    Endpoint,
    Writer,
    add_details,
    binding_from_json,
    binding_to_json,
    compare_endpoints,
    compare_locations,
    compare_writers,
)
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.codec import window_from_json, window_to_json
from airflow_kafka_spark.windows.memory import Memory, fold_records, make_binding_record, make_control_record
from airflow_kafka_spark.windows.model import Window

TASK = Writer("dag", "task", -1, "run1", "prod")
TABLE = Endpoint(
    {"server": "a:5432", "server_id": "7", "table": "public.orders"},
    {"windows_table": "w", "splits_table": "t", "mode": "", "dead_letters": "d"},
)


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ({"run_id": "run2"}, []),
        ({"deployment": "test"}, ["deployment"]),
        ({"deployment": ""}, []),
        ({"dag_id": "other", "task_id": "x"}, ["DAG", "task"]),
        ({"map_index": 1}, ["map index"]),
        ({"map_index": 1, "run_id": "run2"}, []),
    ],
)
def test_a_writer_is_another_one_by_what_is_known_of_it_and_a_map_index_within_its_run(found, what):
    assert [d.what for d in compare_writers(TASK, replace(TASK, **found))] == what


def test_a_deployment_that_was_not_known_is_no_other_one():
    assert not compare_writers(replace(TASK, deployment=""), TASK)


@pytest.mark.parametrize(
    ("place", "details", "next_one", "open_one"),
    [
        ({}, {}, [], []),
        ({"table": "public.other"}, {}, ["table"], ["table"]),
        ({"server": "b:5432"}, {}, [], []),
        ({"server_id": "8"}, {}, [], []),
        ({"server": "b:5432", "server_id": "8"}, {}, ["server"], ["server"]),
        ({"server": "b:5432", "server_id": None}, {}, ["server"], ["server"]),
        ({}, {"splits_table": "s"}, [], ["splits_table"]),
        ({}, {"mode": "append"}, [], []),
        ({}, {"dead_letters": ""}, [], []),
        ({"more": "x"}, {"more": "y"}, [], []),
        ({}, {"windows_table": None}, [], ["windows_table"]),
    ],
)
def test_a_place_is_compared_with_every_window_and_the_details_of_one_that_is_open(place, details, next_one, open_one):
    def changed(facts, by):
        return {name: value for name, value in {**facts, **by}.items() if value is not None}

    found = Endpoint(changed(TABLE.place, place), changed(TABLE.details, details))
    assert [d.what for d in compare_locations(TABLE, found)] == next_one
    assert [d.what for d in compare_endpoints(TABLE, found)] == open_one
    both, other = (Endpoint({"path": "p"}) | end.add_prefix("filter 1") for end in (TABLE, found))
    assert [d.what for d in compare_endpoints(both, other)] == [f"filter 1 {what}" for what in open_one]


def test_it_is_written_with_the_window_and_read_again_and_a_missing_one_is_not_known():
    binding = Binding(TASK, TABLE, Endpoint(details={"group": "g"}), decided=3)
    assert binding_from_json(json.loads(json.dumps(binding_to_json(binding)))) == binding
    window = Window("p", 1, (), "run", "now", binding=binding)
    value = json.loads(json.dumps(window_to_json(window)))
    assert window_from_json(value) == window
    del value["binding"]
    assert window_from_json(value).binding is None
    later = {**binding_to_json(binding), "unheard": 1, "writer": {**vars(TASK), "unheard": 2}}
    assert binding_from_json(later) == binding
    assert fold_records("p", [make_binding_record("p", binding)]).binding == binding
    assert fold_records("p", []).binding is None


def test_a_decision_counts_for_what_was_bound_before_it_and_for_an_open_window_that_it_names():
    def decision(number, window=0):
        return make_control_record("p", Change(number, "rebind", "ann", "x", "now", window=window))

    old, new = Binding(TASK), Binding(TASK, decided=2)
    memory: Memory = fold_records("p", [decision(1), decision(2)])
    assert memory.decided == 2 and memory.find_rebind_after(new) is None
    assert memory.find_rebind_after(old).number == 2 and memory.find_rebind_after(old, window=5) is None
    memory = fold_records("p", [decision(1, window=5), decision(2)])
    assert memory.find_rebind_after(old, window=5).number == 1 and memory.find_rebind_after(old, window=6) is None


def test_an_open_window_is_bound_to_what_an_attempt_adds_and_to_what_it_had():
    def bound(**details):
        return Binding(TASK, Endpoint({"topic": "t"}, details))

    first = bound(windows_table="w", dead_letters="", mode="append")
    after = add_details(first, bound(windows_table="w", dead_letters="d", mode=""))
    assert after == bound(windows_table="w", dead_letters="d", mode="append")
