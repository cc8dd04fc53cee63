"""Records that do not meet a condition go to a topic instead of the sink, in the same window, each exactly once."""

from __future__ import annotations

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import TooManyDeadLetters, TooManyRouted, ValidationError
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToKafkaOperator
from airflow_kafka_spark.sinks import FilesSink, KafkaSink
from airflow_kafka_spark.sinks.kafka.tasks import dead_letters
from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import ROUTED, DeadLetterBuffer
from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import SCHEMA as LETTER
from airflow_kafka_spark.transforms import Cast, Condition, Filter, RecordIsTombstone, Sql
from tests.support.dead_letters import decode_headers, is_bad, letters, produce_mixed
from tests.support.oracle import same_multiset
from tests.support.pipelines import SCHEMA, Pipeline, row_of
from tests.support.runs import context

PREFIX = "__kafka_spark.routed."


def refused(topic: str, condition: str = "id % 5 <> 0", **options) -> Filter:
    return Filter(predicate=Condition(condition), negate=True, to=topic, **options)


def facts(headers: list[tuple[str, bytes | None]]) -> dict[str, str]:
    return {name.removeprefix(PREFIX): (value or b"").decode() for name, value in headers if name.startswith(PREFIX)}


def sorted_out(flow: Pipeline, away, *topics: str, since: int = 0) -> tuple[int, int]:
    """Assert that records are in the sink or in the topics by the condition, each exactly once; return both counts."""
    events = [e for e in flow.events() if e[3] is not None and not is_bad(e[3])]
    good = same_multiset([row_of(v) for *_, v in events if not away(row_of(v)[0])], flow.rows())
    there = []
    for topic in topics:
        for key, value, _, headers in letters(flow.kafka.connection_extra(), topic):
            found = facts(headers)
            assert found["topic"] == flow.topic and found["pipeline"] == flow.name
            there.append((int(found["partition"]), int(found["offset"]), key, value))
    return good, same_multiset([e for e in events if away(row_of(e[3])[0])], there)


def test_records_that_do_not_meet_a_condition_are_in_their_topic_as_they_were_and_the_others_in_the_sink(files: Pipeline):
    small, odd, dead = (f"{name}-{files.topic}" for name in ("small", "odd", "dead"))
    bad = produce_mixed(files, 200, 10)
    producer = Producer(files.kafka.connection_extra())
    producer.produce(files.topic, None, b"gone", headers=[("why", b"x")], timestamp=1_700_000_000_123)
    assert producer.flush(60) == 0
    transforms = [
        Filter(predicate=RecordIsTombstone(), to=odd),
        refused(small, "id >= 20", reason="it is too small"),
        # Not computed for records that the filter removed: `try_divide` is not needed for them.
        Sql(
            columns={
                "id": "id",
                "customer": "customer",
                "amount": "amount",
                "placed_at": "placed_at",
                "n": "id / (id >= 20)::int",
            }
        ),
        Cast("n:int64"),
        Filter(predicate=Condition("n % 7 = 3")),
        Filter(predicate=Condition("n % 7 = 4"), to=odd),
    ]
    options = {"transforms": transforms, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead, "max_errors": bad}
    report = files.run("run1", **options)
    events = [row_of(v) for *_, v in files.events() if v is not None and not is_bad(v)]
    kept = [row for row in events if row[0] >= 20 and row[0] % 7 not in (3, 4)]
    assert same_multiset(kept, files.rows()) == len(kept) > 100
    there = letters(files.kafka.connection_extra(), small)
    assert same_multiset([row for row in events if row[0] < 20], [row_of(value) for _, value, *_ in there]) == 20
    assert {facts(headers)["reason"] for *_, headers in there} == {"it is too small"}
    oddities = letters(files.kafka.connection_extra(), odd)
    fours = [row for row in events if row[0] >= 20 and row[0] % 7 == 4]
    assert same_multiset(fours, [row_of(value) for _, value, *_ in oddities if value is not None]) == len(fours)
    ((key, _, timestamp, headers),) = [letter for letter in oddities if letter[1] is None]
    assert (key, timestamp, headers[0]) == (b"gone", 1_700_000_000_123, ("why", b"x"))
    assert facts(headers)["reason"] == "it meets RecordIsTombstone()"
    assert {facts(h)["reason"] for _, value, _, h in oddities if value} == {"`n % 7 = 4` holds"}
    assert report["records_routed"] == 20 + 1 + len(fours) == sum(part["records"] for part in report["routed"])
    assert report["records_rejected"] == bad == sum(part["records"] for part in report["dead_letters"])
    threes = len(events) - 20 - len(kept) - len(fours)
    assert (report["records_read"], report["records_filtered"], report["records_written"]) == (201 + bad, threes, len(kept))
    assert {decode_headers(headers)["stage"] for *_, headers in letters(files.kafka.connection_extra(), dead)} == {
        "VALUE_CONVERTER"
    }
    assert files.committed() == {r["partition"]: r["end"] for r in report["ranges"]}


@pytest.mark.parametrize("point", ["dead.committed", "sink.committed"])
def test_what_went_elsewhere_stays_there_when_the_condition_or_the_format_is_another_at_the_retry_and_too_much_does_not_go(
    files: Pipeline, monkeypatch, point
):
    small = f"small-{files.topic}"
    files.produce(100)
    if point == "dead.committed":
        # All records would pass through the driver.
        monkeypatch.setattr(dead_letters, "LIMIT_BYTES", 300)
        with pytest.raises(TooManyRouted, match="pipeline of their own"):
            files.run("run1", transforms=[refused(small)])
        monkeypatch.undo()
        assert files.rows() == [] and set(files.committed().values()) == {-1001}
        assert small not in AdminClient(files.kafka.connection_extra()).list_topics(timeout=60).topics
    monkeypatch.setenv(faults.FAULT, f"{point}:raise")
    with pytest.raises(RuntimeError, match=point):
        files.run("run1", transforms=[refused(small)])
    monkeypatch.undo()
    if point == "dead.committed":
        with pytest.raises(ValidationError, match="Keep such a Filter"):
            files.run("run1")
        # No record meets the condition any more, and the removed records cannot even be decoded. Both have no effect.
        report = files.run("run1", transforms=[refused(small, "true")], value=Json(schema=f"{SCHEMA}, more int"))
        assert report["records_written"] == 80
    report = files.run("run1", transforms=[refused(small)])
    assert sorted_out(files, lambda number: number % 5 == 0, small) == (80, 20)
    assert (report["records_read"], report["records_routed"], report["routed"][0]["records"]) == (100, 20, 20)


@pytest.mark.parametrize(("schema", "error"), [(LETTER, TooManyDeadLetters), (ROUTED, TooManyRouted)], ids=["dead", "routed"])
def test_a_task_collects_no_more_than_may_pass_through_the_driver(schema, error):
    record = {**dict.fromkeys(schema.names), "topic": "t", "partition": 0, "offset": 1, "timestamp": 5, "value": b"x" * 200}
    batch = pa.RecordBatch.from_pylist([{**record, "to": "away", "reason": "why"}], schema=schema)
    collected = DeadLetterBuffer(limit=2 * batch.nbytes, schema=schema)
    collected.add(batch)
    collected.add(batch)
    with pytest.raises(error, match="away" if schema is ROUTED else "t"):
        collected.add(batch)


def test_topics_that_would_go_round_or_lose_records_and_wrong_options_are_refused_all_at_once(files: Pipeline):
    files.kafka.create_topic(f"compacted-{files.topic}", 1, config={"cleanup.policy": "compact"})
    topics = (files.topic, f"ledger-{files.name}", f"compacted-{files.topic}", "dead", "no topic!")
    options = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": "dead"}
    with pytest.raises(ValidationError) as raised:
        files.run("run1", transforms=[*(refused(topic) for topic in topics), Filter(reason="x")], **options)
    found = {problem.where: str(problem) for problem in raised.value.problems}
    says = ("is read", "its ledger", "compacted", "dead letter topic", "expected a sink, or a topic's name")
    for number, text in enumerate(says):
        assert text in found[f"transforms[{number}] Filter.to"]
    assert "Give `to`" in found["transforms[5] Filter.reason"]
    lake = Filter(to=FilesSink(path="/nowhere"))
    operator = KafkaToKafkaOperator(
        task_id="task",
        topics=files.topic,
        sink=KafkaSink(topic="out"),
        group_id=files.name,
        value=Json(schema=SCHEMA),
        transforms=[lake],
    )
    with pytest.raises(ValidationError, match="Name a topic, and take it to the sink with a KafkaToSinkOperator"):
        operator.execute(context("run1"))
