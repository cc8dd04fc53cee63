"""Headers of many records at once are equal to headers made one by one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import EXCEPTION, SCHEMA, Envelope, make_routed_records
from airflow_kafka_spark.sinks.kafka.tasks.encode import HEADERS, extend_headers, list_pairs
from airflow_kafka_spark.sources.kafka.tasks.read import make_header_column
from airflow_kafka_spark.windows.dead_letters import CONNECT_ERROR_PREFIX

TEXT = st.text(max_size=5)
PAIRS = st.none() | st.lists(st.tuples(TEXT, st.none() | st.binary(max_size=4)), max_size=3)


def as_lists(rows: list[list[tuple[str, bytes | None]] | None]) -> pa.ListArray:
    return pa.array([None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows], HEADERS)


@given(st.lists(PAIRS))
def test_a_column_of_headers_has_the_headers_of_each_record(rows):
    made = make_header_column(rows)
    made.validate(full=True)
    assert made.type == HEADERS and made.equals(as_lists(rows))


@given(st.lists(st.tuples(PAIRS, TEXT, st.integers(-5, 5))), st.integers(0, 3), st.booleans())
def test_facts_stand_behind_the_headers_of_their_own_record(rows, skipped: int, together: bool):
    own = as_lists([pairs for pairs, _, _ in rows])
    facts: dict[str, Any] = {
        "text": pa.array([text for _, text, _ in rows], pa.string()),
        "number": pa.array([number for *_, number in rows], pa.int64()),
    }
    if together:
        facts["same"] = 7
    made = extend_headers(own, facts)
    made.validate(full=True)
    last = [("same", b"7")] if together else []
    expected = [[*(pairs or ()), ("text", text.encode()), ("number", b"%d" % number), *last] for pairs, text, number in rows]
    assert made.type == HEADERS and list_pairs(made) == expected
    assert list_pairs(made.slice(skipped)) == expected[skipped:], "of a part they are those of the part"
    assert list_pairs(own) == [list(pairs or ()) for pairs, _, _ in rows]


def test_letters_of_several_stages_carry_each_its_own_reason():
    rows: list[dict[str, Any]] = [
        {"topic": "t", "partition": n % 2, "offset": n, "timestamp": n - 1, "key": None, "value": b"%d" % n, "stage": stage,
         "reason": f"reason {n}", "headers": [{"key": "own", "value": None}] if n % 3 else None}
        for n, stage in enumerate(["VALUE_CONVERTER", "TASK_PUT", "KEY_CONVERTER"] * 5)
    ]  # fmt: skip
    table = pa.concat_tables([pa.Table.from_pylist(rows[:4], SCHEMA), pa.Table.from_pylist(rows[4:], SCHEMA)])
    sent = Envelope("pipe", {"VALUE_CONVERTER": "a.B", "TASK_PUT": "c.D"}).make_records(table)
    assert sent.column("timestamp").to_pylist() == [None, *range(14)]
    for row, headers in zip(rows, list_pairs(sent.column("headers")), strict=True):
        own = len(row["headers"] or ())
        assert headers[:own] == [("own", None)] * own
        facts = {name.removeprefix(CONNECT_ERROR_PREFIX): (value or b"").decode() for name, value in headers[own:]}
        assert facts == {
            "topic": "t", "partition": str(row["partition"]), "offset": str(row["offset"]), "connector.name": "pipe",
            "task.id": "0", "stage": row["stage"],
            "class.name": {"VALUE_CONVERTER": "a.B", "TASK_PUT": "c.D"}.get(row["stage"], ""),
            "exception.class.name": EXCEPTION, "exception.message": row["reason"],
            "exception.stacktrace": f"{EXCEPTION}: {row['reason']}",
        }  # fmt: skip
    routed = make_routed_records(table, "pipe")
    counts = [len(headers) for headers in list_pairs(routed.column("headers"))]
    assert counts == [len(row["headers"] or ()) + 5 for row in rows]
