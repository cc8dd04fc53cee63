from __future__ import annotations

import json
import pickle

from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.windows.dead_letters import (
    Captured,
    DeadLetters,
    OffsetSet,
    compute_digest,
    dead_letters_from_json,
    dead_letters_to_json,
)
from airflow_kafka_spark.windows.model import TopicPartition

OFFSETS = st.frozensets(st.integers(0, 2**62) | st.integers(0, 9000))


@given(OFFSETS, OFFSETS, OFFSETS)
def test_it_is_a_set_however_it_was_made_and_travelled(one, other, gone):
    made = OffsetSet(one)
    made.add(OffsetSet(other))
    made.discard(gone)
    expected = (one | other) - gone
    assert made == expected and len(made) == len(expected) and list(made) == sorted(expected) and bool(made) == bool(expected)
    assert all((offset in made) == (offset in expected) for offset in one | other | gone)
    assert OffsetSet.from_text(made.to_text()) == pickle.loads(pickle.dumps(made)) == expected


@given(OFFSETS, OFFSETS, OFFSETS)
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
    dead = DeadLetters(7, "dead").with_captured([first]).with_captured([again])
    assert dead.captured == (first, again) and dead.captures(0) == (first,)
    dead = dead.with_captured([other])
    assert dead.captures(1) == (other,) and dead.with_captured([]) == dead
    assert dead_letters_from_json(7, json.loads(json.dumps(dead_letters_to_json(dead)))) == dead
