from __future__ import annotations

import json
import pickle

from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.windows.dead_letters import (
    Batch,
    Captured,
    DeadLetters,
    OffsetSet,
    compute_digest,
    dead_letters_from_json,
    dead_letters_to_json,
    group_into_runs,
    list_run_offsets,
)
from airflow_kafka_spark.windows.memory import fold_records, make_dead_letters_record, make_key_prefix
from airflow_kafka_spark.windows.model import Landed, TopicPartition

OFFSETS = st.frozensets(st.integers(0, 2**62) | st.integers(0, 50))


@given(OFFSETS)
def test_runs_hold_exactly_the_offsets_they_were_made_of(offsets):
    runs = group_into_runs(offsets)
    assert list_run_offsets(runs) == offsets
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
            topic_id=f"id{number}",
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
            ever[tp] |= list_run_offsets(runs)
    assert dead.list_sent() == ever
    assert sum(part.records for part in dead.landed) == 2 * len(made)


def test_offsets_that_lie_together_take_little_room():
    dead = DeadLetters(1, "dead", (Batch(0, "t", {TopicPartition("t", 0): group_into_runs(range(1_000_000))}),))
    assert len(json.dumps(dead_letters_to_json(dead))) < 200


def test_a_reader_of_the_ledger_begins_before_the_dead_letters_of_remembered_windows():
    memory = fold_records("pipe", [make_dead_letters_record("pipe", DeadLetters(1, "dead"))._replace(offset=4)])
    assert memory.oldest_offset == 4


WIDE_OFFSETS = st.frozensets(st.integers(0, 2**62) | st.integers(0, 9000))


@given(WIDE_OFFSETS, WIDE_OFFSETS, WIDE_OFFSETS)
def test_it_is_a_set_however_it_was_made_and_travelled(one, other, gone):
    made = OffsetSet(one)
    made.add(OffsetSet(other))
    made.discard(gone)
    expected = (one | other) - gone
    assert made == expected and len(made) == len(expected) and list(made) == sorted(expected) and bool(made) == bool(expected)
    assert all((offset in made) == (offset in expected) for offset in one | other | gone)
    assert OffsetSet.from_text(made.to_text()) == pickle.loads(pickle.dumps(made)) == expected


@given(WIDE_OFFSETS, WIDE_OFFSETS, WIDE_OFFSETS)
def test_digests_are_the_same_for_the_same_records_only(one, other, gone):
    first, second = (TopicPartition("t", number) for number in (0, 1))
    mixed = OffsetSet(one | gone)
    mixed.discard(gone - one)
    assert compute_digest({second: OffsetSet(other), first: OffsetSet(one)}) == compute_digest(
        {first: mixed, second: OffsetSet(other)}
    )
    assert (compute_digest({first: OffsetSet(one)}) == compute_digest({first: OffsetSet(other)})) == (one == other)
    assert (compute_digest({first: OffsetSet(one)}) == compute_digest({second: OffsetSet(one)})) == (not one)


def test_half_of_a_million_scattered_offsets_are_small_on_their_way():
    made = OffsetSet(range(5_000_000, 6_000_000, 2))
    made.add(range(5_000_001, 6_000_000, 7))
    assert len(pickle.dumps(made)) < 200_000 and len(made) > 500_000


def test_what_other_sinks_take_is_remembered_and_decided_anew_by_replay():
    first, again, other = (Captured(replay, "rare", "file:///rare", 5, f"{replay}") for replay in (0, 1, 1))
    dead = DeadLetters(7, "dead").add_captured([first]).add_captured([again])
    assert dead.captured == (first, again) and dead.list_captured(0) == (first,)
    dead = dead.add_captured([other])
    assert dead.list_captured(1) == (other,) and dead.add_captured([]) == dead
    assert dead_letters_from_json(7, json.loads(json.dumps(dead_letters_to_json(dead)))) == dead
