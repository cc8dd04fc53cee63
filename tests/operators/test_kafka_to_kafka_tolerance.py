"""Between topics: bad records become dead letters in the transaction of the other records, and transforms change the others."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import (
    BadRecords,
    CountMismatch,
    KafkaRefused,
    RowRejected,
    SparkJobFailed,
    TooManyBadRecords,
    TopicMissing,
    ValidationError,
)
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.transforms import (
    Cast,
    Condition,
    ExtractField,
    Filter,
    InsertField,
    InsertHeader,
    MaskField,
    RecordIsTombstone,
    RegexRouter,
    ReplaceField,
    Sql,
    TimestampRouter,
    ValueToKey,
)
from tests.support.control import resend
from tests.support.dead_letters import decode_headers, is_bad
from tests.support.lenient import Lenient
from tests.support.oracle import same_multiset
from tests.support.pipelines import SCHEMA
from tests.support.relay import decoded, relay
from tests.support.waiting import settled

ORDERS = Json(schema=SCHEMA)
FILTER = {"value": ORDERS, "filter": "id >= 0"}


@pytest.fixture
def orders(kafka, unique, tmp_path, partitions):
    with relay(kafka, unique, tmp_path, partitions=partitions) as made:
        yield made


def tolerant(topic: str, **more) -> dict:
    return {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": topic, **more}


def test_each_record_is_in_the_output_or_a_dead_letter_exactly_once_and_a_dead_letter_is_the_record_as_it_was(orders):
    dead = f"dead-{orders.output}"
    bad = orders.send_mixed(300, 10)
    options = {**FILTER, "filter": "id % 2 = 0", **tolerant(dead)}
    report = orders.run("run1", **options)
    even = lambda r: r.content if decoded(r)["id"] % 2 == 0 else None  # noqa: E731
    assert orders.check_sorted_out(dead, even) == (150, bad)
    counts = ("records_read", "records_written", "records_rejected", "records_filtered")
    assert [report[name] for name in counts] == [300 + bad, 150, bad, 150]
    assert [(part["topic"], part["records"]) for part in report["dead_letters"]] == [(dead, bad)]
    assert {part["topic"] for part in report["published"]} == {orders.output}
    facts = decode_headers(list(orders.read(dead)[0].headers))
    assert (facts["connector.name"], facts["stage"], facts["task.id"]) == (orders.name, "VALUE_CONVERTER", "0")
    assert facts["class.name"] == "airflow_kafka_spark.formats.json.format.Json" and facts["exception.message"]
    assert orders.run("run1", **options) == report, "a cleared task publishes nothing and returns the same report"
    # The next window has its own.
    more = orders.send_mixed(40, 8)
    orders.run("run2", **options)
    assert orders.check_sorted_out(dead, even) == (170, bad + more)
    # Letters that are sent again are records of the next window, each once.
    settled(orders.topic, orders.arguments["ledger_topic"], dead)
    with KafkaHook() as hook:
        request = {"window": 2, "why": "mended", "who": "ann", "ledger_topic": orders.arguments["ledger_topic"]}
        sent = resend(hook, orders.name, **request)
        assert {part.topic for part in sent.sent_again} == {orders.topic}
        assert sum(part.records for part in sent.sent_again) == more
        settled(orders.topic, orders.arguments["ledger_topic"])
        assert not resend(hook, orders.name, **request).changed
    assert orders.run("run3", **options)["records_read"] == more
    assert orders.check_sorted_out(dead, even) == (170, bad + 2 * more)


def test_a_copy_decodes_nothing_so_that_only_a_record_without_a_value_can_be_bad(orders):
    dead = f"dead-{orders.output}"
    orders.send_mixed(30, 10)
    orders.records_in([(b"gone", None, {"why": b"deleted"}), (None, None, None)])
    report = orders.run(behavior_on_null_values="fail", **tolerant(dead, max_errors=2))
    assert orders.check_sorted_out(dead, bad=lambda r: r.value is None) == (33, 2)
    assert report["records_rejected"] == 2
    orders.send_mixed(10, 10)
    report = orders.run("run2", **tolerant(dead, max_errors=0))
    assert report["records_written"] == 11 and "dead_letters" not in report, "a plain copy has no bad records, and sends none"


def test_without_context_headers_a_dead_letter_has_only_its_own_and_without_a_topic_bad_records_are_left_out_on_request(orders):
    dead = f"dead-{orders.output}"
    bad = orders.send_mixed(20, 5)
    with pytest.raises(BadRecords):
        orders.run(**FILTER)
    orders.run(**FILTER, **tolerant(dead, errors_deadletterqueue_context_headers_enable=False))
    sent = [r.content for r in orders.read(orders.topic) if ("bytes", b"\x00\xff") in r.headers]
    assert same_multiset(sent, [r.content for r in orders.read(dead)]) == bad
    more = orders.send_mixed(20, 5)
    report = orders.run("run2", **FILTER, errors_tolerance="all", errors_skip=True)
    assert (report["records_written"], report["records_rejected"]) == (20, more) and "dead_letters" not in report
    assert orders.check(lambda r: None if ("bytes", b"\x00\xff") in r.headers else r.content) == 40
    assert len(orders.read(dead)) == bad


def test_with_more_bad_records_than_allowed_nothing_is_published_and_what_an_earlier_attempt_has_published_counts(orders):
    dead = f"dead-{orders.output}"
    bad = orders.send_mixed(60, 6)
    with pytest.raises(TooManyBadRecords, match=rf"{bad} of the {60 + bad} records.*are bad") as raised:
        orders.run("run1", **FILTER, **tolerant(dead, max_errors=0.14))
    assert raised.value.count == bad and len(raised.value.samples) == 5
    assert orders.read(orders.output) == [] == orders.read(dead), "neither records nor letters"
    # This attempt publishes all partitions but one, whose records it was to send to a topic that is not there.
    astray = RegexRouter(".*", f"nowhere-{orders.output}", predicate=Condition("record.partition = 0"))
    with pytest.raises(TopicMissing):
        orders.run("run1", value=ORDERS, transforms=[astray], **tolerant(dead, max_errors=bad))
    there = len(orders.read(dead))
    assert 0 < there < bad, "some partitions are published, one is not"
    with pytest.raises(TooManyBadRecords, match=f"{bad} of the {60 + bad} records"):
        orders.run("run1", **FILTER, **tolerant(dead, max_errors=bad - 1))
    assert len(orders.read(dead)) == there
    assert orders.run("run1", **FILTER, **tolerant(dead, max_errors=bad))["records_rejected"] == bad
    assert orders.check_sorted_out(dead) == (60, bad)


def test_what_is_published_keeps_its_dead_letters_when_the_format_is_mended_before_the_retry(orders, monkeypatch):
    dead = f"dead-{orders.output}"
    bad = orders.send_mixed(60, 6)
    monkeypatch.setenv(faults.FAULT, "close.begin:raise")
    with pytest.raises(RuntimeError, match="close.begin"):
        orders.run("run1", **FILTER, **tolerant(dead))
    monkeypatch.undo()
    # A format that accepts every value.
    report = orders.run("run1", **{**FILTER, "value": Lenient(SCHEMA)}, **tolerant(dead))
    assert orders.check_sorted_out(dead) == (60, bad)
    assert (report["records_rejected"], report["dead_letters"][0]["records"]) == (bad, bad)


def test_a_split_with_more_bad_records_than_were_counted_or_kept_is_not_published(orders):
    """A split is not published if that would exceed ``max_errors`` or lose a record."""
    import pyarrow as pa

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now
    from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import SCHEMA as LETTER
    from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import Envelope, to_bytes
    from airflow_kafka_spark.sinks.kafka.tasks.publish import BadRecordPolicy, Publisher, RecordBatches
    from airflow_kafka_spark.windows.model import SourcePlan, SplitResult, Window

    dead = f"dead-{orders.output}"
    orders.kafka.create_topic(dead, 1)
    letter = {"topic": orders.topic, "partition": 0, "offset": 7, "timestamp": 5, "key": None, "value": b"x", "reason": "bad"}
    result = SplitResult(0, records=2, rejected=1, letters=to_bytes(pa.Table.from_pylist([letter], schema=LETTER)))

    def incoming(result: SplitResult) -> RecordBatches:
        rows = pa.RecordBatch.from_pydict({"key": pa.array([b"k"]), "value": pa.array([b"v"])})
        return RecordBatches(iter([rows]), result=result)

    policy = BadRecordPolicy(dead, 1, Envelope(orders.name, {}), counted={0: 0})
    with KafkaHook() as hook, Ledger(hook, orders.name, "dag/run1/task", topic=orders.arguments["ledger_topic"]) as ledger:
        ledger.plan(Window(orders.name, 1, (), "dag/run1/task", format_utc_now(), source=SourcePlan(({"n": 0},))))
        configs = hook.make_producer_config(), hook.make_consumer_config()
        publisher = Publisher(
            *configs,
            ledger.ledger_claim,
            ledger.split_prefix,
            orders.output,
            {orders.output: 4},
            60,
            bad_record_policy=policy,
        )
        with pytest.raises(SparkJobFailed, match="1 bad records, but held 0"):
            publisher.publish(0, incoming(result))
        counted = replace(publisher, bad_record_policy=replace(policy, counted={0: 1}))
        with pytest.raises(CountMismatch):
            counted.publish(0, incoming(replace(result, letters=b"")))
        assert orders.read(orders.output) == [] == orders.read(dead)
        marker = counted.publish(0, incoming(result))
        assert ledger.read_published() == {0: replace(marker, result=replace(result, letters=b""))}
    assert [(p.topic, p.first, p.records) for p in marker.dead_letters] == [(dead, 0, 1)]
    assert len(orders.read(orders.output)) == len(orders.read(dead)) == 1


# --- transforms ---


def test_transforms_make_values_keys_headers_and_dead_letters_of_what_they_cannot_transform(orders):
    dead = f"dead-{orders.output}"
    bad = orders.send_mixed(120, 10)
    orders.records_in([(b"high", json.dumps({**decoded(orders.read(orders.topic)[0]), "id": 1000}).encode(), None)])
    transforms = [
        Filter(predicate=Condition("id % 3 = 0")),
        InsertField(partition_field="part", offset_field="at"),
        InsertHeader("app", "shop"),
        Cast("id:int8"),
        ValueToKey("id"),
        ExtractField("id", of="key"),
        ReplaceField(include="id,part,at"),
    ]
    with pytest.raises(BadRecords, match="high|offset|int8|bad record"):
        orders.run(value=ORDERS, transforms=transforms)
    report = orders.run(value=ORDERS, transforms=transforms, **tolerant(dead))

    def becomes(record):
        number = decoded(record)["id"]
        if number % 3 == 0:
            return None
        value = json.dumps({"id": number, "part": record.partition, "at": record.offset}, separators=(",", ":")).encode()
        return str(number).encode(), value, record.timestamp, (*record.headers, ("app", b"shop"))

    wrong = lambda r: r.headers[:1] and r.headers[0][0] == "trace" or r.key == b"high"  # noqa: E731
    assert orders.check_sorted_out(dead, becomes, wrong) == (80, bad + 1)
    counts = ("records_read", "records_written", "records_rejected", "records_filtered")
    assert [report[name] for name in counts] == [121 + bad, 80, bad + 1, 40]
    stages = [decode_headers(list(r.headers))["stage"] for r in orders.read(dead)]
    assert stages.count("TRANSFORMATION") == 1 and stages.count("VALUE_CONVERTER") == bad
    assert orders.run("run2", value=ORDERS, transforms=transforms, **tolerant(dead))["records_read"] == 0


def test_what_no_transform_changes_keeps_its_bytes_and_records_go_where_their_topic_says(orders, unique):
    """Spaces, and fields that the schema does not name, stay. A record whose topic is unchanged goes to the pipeline's topic."""
    other = unique("other")
    orders.kafka.create_topic(other, 2)
    values = [b'{"id": %d,   "extra": [%d]}' % (n, n) for n in range(60)]
    orders.records_in([(b"%d" % n, value, None) for n, value in enumerate(values)] + [(b"gone", None, None)])
    routed = RegexRouter(".*", other, predicate=Condition("id % 4 = 0"))
    report = orders.run(value=Json(schema="id bigint"), transforms=[routed, InsertHeader("by", "router")])
    sent = {r.content[:3] for r in orders.read(orders.topic)}
    there = {topic: [(r.content[:3], r.headers) for r in orders.read(topic)] for topic in (other, orders.output)}
    assert all(headers == (("by", b"router"),) for found in there.values() for _, headers in found)
    assert same_multiset(sent, [content for found in there.values() for content, _ in found]) == 61
    assert {key for (key, *_), _ in there[other]} == {b"%d" % n for n in range(0, 60, 4)}
    assert {part["topic"]: 0 for part in report["published"]} == {other: 0, orders.output: 0}
    # A topic that is not there, or must not be written, is an error before anything of a partition is published.
    orders.records_in([(b"x", b'{"id": 1}', None)])
    with pytest.raises(TopicMissing):
        orders.run("run2", transforms=[TimestampRouter()])
    to_ledger, round_about = ([RegexRouter(".*", topic)] for topic in (f"ledger-{orders.name}", other))
    for why, options in (
        ("the ledger", {"transforms": to_ledger}),
        ("read again", {"transforms": round_about, "topics": [orders.topic, other]}),
    ):
        with pytest.raises(RowRejected, match=why):
            orders.run("run2", **options)
    assert len(orders.read(orders.output)) == 61 - 15
    # The effect of a function is unknown; a column that is still bytes keeps its bytes.
    assert orders.run("run2", transforms=[lambda frame: frame])["records_written"] == 1
    assert [r.value for r in orders.read(orders.output) if r.key == b"x"] == [b'{"id": 1}']


def test_what_a_filter_takes_out_goes_to_its_topic_as_it_was_read_and_is_no_error(orders, unique):
    """Each record is in the output, in one of two topics, or a dead letter, also if later transforms would fail on it."""
    small, gone, dead = unique("small"), unique("gone"), unique("dead")
    orders.kafka.create_topic(small, 5)
    bad = orders.send_mixed(120, 10)
    orders.records_in([(b"k", None, [("why", b"x"), ("why", None)]), (None, None, None)])
    transforms = [
        Filter(predicate=RecordIsTombstone(), to=gone, reason="it is gone"),
        Filter(predicate=Condition("id % 4 <> 0"), negate=True, to=small),
        Cast("id:int8"),
        Filter(predicate=Condition("id % 4 = 1")),
        # Not applied to records that the filter removed.
        MaskField("customer", "-"),
        Sql(columns={"id": "id", "one": "id / (id % 4 <> 0)::int"}),
    ]
    options = {"value": ORDERS, "transforms": transforms, "preserve_partitions": True, "behavior_on_null_values": "fail"}
    orders.kafka.create_topic(dead, 1)
    report = orders.run("run1", **options, **tolerant(dead, max_errors=bad))

    def number(record):
        return decoded(record)["id"]

    def stays(record):
        if record.value is None or number(record) % 4 in (0, 1):
            return None
        return record.key, json.dumps({"id": number(record), "one": float(number(record))}, separators=(",", ":")).encode()

    read = [r for r in orders.read(orders.topic) if not is_bad(r.value)]
    kept = same_multiset([what for r in read if (what := stays(r))], [r.content[:2] for r in orders.read(orders.output)])
    away = 0
    reasons = {small: "`id % 4 <> 0` does not hold", gone: "it is gone"}
    for topic, goes in ((small, lambda r: r.value and number(r) % 4 == 0), (gone, lambda r: r.value is None)):
        there = []
        for record in orders.read(topic):
            own = [h for h in record.headers if not h[0].startswith("__kafka_spark.routed.")]
            facts = {name.rpartition(".")[2]: (value or b"").decode() for name, value in record.headers[len(own) :]}
            assert (facts["pipeline"], facts["topic"], facts["reason"]) == (orders.name, orders.topic, reasons[topic])
            there.append((int(facts["partition"]), int(facts["offset"]), *record.content[:3], tuple(own)))
        away += same_multiset([(r.partition, r.offset, *r.content) for r in read if goes(r)], there)
    assert (kept, away) == (60, 32)
    names = ("read", "written", "routed", "filtered", "rejected")
    assert [report[f"records_{name}"] for name in names] == [122 + bad, 60, 32, 30, bad]
    assert sum(part["records"] for part in report["published"]) == 60 and len(orders.read(dead)) == bad
    assert {part["topic"] for part in report["routed"]} == {small, gone}
    assert sum(part["records"] for part in report["routed"]) == 32


def test_a_letter_that_its_topic_does_not_take_says_what_to_change_and_nothing_of_its_partition_is_published(orders, unique):
    dead = unique("dead")
    orders.kafka.create_topic(dead, 1, config={"max.message.bytes": "3000"})
    options = {"value": ORDERS, "columns": {"id": "id"}, **tolerant(dead)}
    orders.records_in((b"%d" % n, os.urandom(500), None) for n in range(40))
    assert orders.run(**options)["records_rejected"] == 40, "their batches are no larger than the topic takes"
    orders.records_in([(b"k", os.urandom(3000), None)])
    with pytest.raises(KafkaRefused, match=f"sending dead letters to topic `{dead}`.*max.message.bytes"):
        orders.run("run2", **options)
    assert orders.read(orders.output) == [] and len(orders.read(dead)) == 40


def test_topics_that_a_filter_must_not_send_records_to_are_refused_all_at_once(orders, unique):
    dead, away = unique("dead"), unique("away")
    orders.kafka.create_topic(away, 1, config={"cleanup.policy": "compact"})
    taken = {orders.topic: "is read", orders.output: "the topic of good records", dead: "dead letter", away: "compacted"}
    taken[f"ledger-{orders.name}"] = "its ledger"
    orders.send(3)
    with pytest.raises(ValidationError) as raised:
        orders.run(value=ORDERS, transforms=[Filter(to=topic) for topic in taken], **tolerant(dead))
    found = {problem.where: str(problem) for problem in raised.value.problems}
    for number, why in enumerate(taken.values()):
        assert why in found[f"transforms[{number}] Filter.to"]
    beside = [Filter(predicate=Condition("id = 1"), to=dead), RegexRouter(".*", dead)]
    with pytest.raises(RowRejected, match="one that a Filter sends records to"):
        orders.run(value=ORDERS, transforms=beside)
    assert orders.read(dead) == []


def test_all_problems_of_tolerance_and_transforms_come_at_once_and_nothing_is_touched(orders):
    def wrong(**options):
        with pytest.raises(ValidationError) as raised:
            orders.run(**options)
        return [problem.where for problem in raised.value.problems]

    orders.send(5)
    beside = {"filter": "id > 1", "columns": {"x": "id"}, "output_key": "id", "metadata_columns": ["offset"]}
    places = wrong(value=ORDERS, transforms=[InsertHeader("", "x")], **beside, errors_tolerance="all")
    named = ["sink.key" if name == "output_key" else name for name in beside]
    assert places == ["transforms[0] InsertHeader.header", *named, "errors_deadletterqueue_topic_name"]
    assert wrong(errors_skip=True, max_errors=3) == ["errors_skip", "max_errors"]
    for topic in (orders.output, orders.topic, f"ledger-{orders.name}"):
        assert wrong(**tolerant(topic)) == ["errors_deadletterqueue_topic_name"]
    assert wrong(value=ORDERS, transforms=[Cast("nothing:int8")]) == ["transforms[0] Cast.spec"]
    listed = Json(schema="ids array<int>")
    assert wrong(value=listed, transforms=[ExtractField("ids")]) == ["transforms"]
    assert orders.read(orders.output) == [] and f"dead-{orders.output}" not in topics(orders)


def topics(orders) -> set[str]:
    return set(AdminClient(orders.kafka.connection_extra()).list_topics(timeout=60).topics)
