from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.windows.dead_letters import (
    Batch,
    DeadLetters,
    dead_letters_from_json,
    dead_letters_to_json,
    group_into_runs,
    list_offsets,
)
from airflow_kafka_spark.windows.memory import fold_records, make_dead_letters_record, make_key_prefix
from airflow_kafka_spark.windows.model import Landed, TopicPartition

OFFSETS = st.frozensets(st.integers(0, 2**62) | st.integers(0, 50))


@given(OFFSETS)
def test_runs_hold_exactly_the_offsets_they_were_made_of(offsets):
    runs = group_into_runs(offsets)
    assert list_offsets(runs) == offsets
    assert all(start < end for start, end in runs)
    assert all(end < start for (_, end), (start, _) in zip(runs, runs[1:], strict=False)), "neighbours are one run"


@given(st.lists(st.tuples(st.integers(0, 3), st.dictionaries(st.integers(0, 4), OFFSETS, max_size=3)), max_size=3))
def test_dead_letters_are_remembered_as_they_were(batches):
    made = tuple(
        Batch(
            replay,
            f"t{number}",
            {TopicPartition("t", p): group_into_runs(o) for p, o in parts.items()},
            (Landed("dead", 0, 1, 2, 2),),
        )
        for number, (replay, parts) in enumerate(batches)
    )
    dead = DeadLetters(7, "dead", made)
    assert dead_letters_from_json(7, json.loads(json.dumps(dead_letters_to_json(dead)))) == dead
    record = make_dead_letters_record("pipe", dead)
    assert record.key.startswith(make_key_prefix("pipe"))
    assert fold_records("pipe", [record._replace(offset=3)]).dead[7].batches == made
    ever = {tp: set() for batch in made for tp in batch.offsets}
    for batch in made:
        for tp, runs in batch.offsets.items():
            ever[tp] |= list_offsets(runs)
    assert dead.sent() == ever
    assert sum(part.records for part in dead.landed) == 2 * len(made)


def test_offsets_that_lie_together_take_little_room():
    dead = DeadLetters(1, "dead", (Batch(0, "t", {TopicPartition("t", 0): group_into_runs(range(1_000_000))}),))
    assert len(json.dumps(dead_letters_to_json(dead))) < 200


def test_a_reader_of_the_ledger_begins_before_the_dead_letters_of_remembered_windows():
    memory = fold_records("pipe", [make_dead_letters_record("pipe", DeadLetters(1, "dead"))._replace(offset=4)])
    assert memory.oldest_offset == 4
