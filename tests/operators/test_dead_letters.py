"""Bad records: they fail the window, are dropped and counted, or go to a dead letter topic, each exactly once."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark import faults
from airflow_kafka_spark.bad_records.options import ErrorOptions
from airflow_kafka_spark.errors import (
    KafkaRefused,
    ResendRefused,
    SparkJobFailed,
    TooManyBadRecords,
    TooManyDeadLetters,
    ValidationError,
)
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from tests.support.control import rebind, resend
from tests.support.dead_letters import BAD, check_sorted_out, decode_headers, is_bad, letters, produce_mixed
from tests.support.lenient import Lenient
from tests.support.oracle import same_multiset
from tests.support.pipelines import SCHEMA, Pipeline, order, row_of
from tests.support.waiting import settled


def tolerant(topic: str, **more) -> dict:
    return {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": topic, **more}


def fail_at(monkeypatch, point: str) -> None:
    monkeypatch.setenv(faults.FAULT, f"{point}:raise")


def test_bad_records_become_dead_letters_as_they_were_with_connects_headers_and_the_others_rows_each_exactly_once(
    files: Pipeline,
):
    dead = f"dead-{files.topic}"
    # Each letter is smaller, and all of them are larger.
    files.kafka.create_topic(dead, 1, config={"max.message.bytes": 3000})
    bad = produce_mixed(files, 300, 10)
    report = files.run("run1", **tolerant(dead))
    assert check_sorted_out(files, dead) == (300, bad)
    assert (report["records_read"], report["records_written"], report["records_rejected"]) == (300 + bad, 300, bad)
    assert [(p["topic"], p["records"]) for p in report["dead_letters"]] == [(dead, bad)]
    assert files.committed() == {r["partition"]: r["end"] for r in report["ranges"]}
    found = letters(files.kafka.connection_extra(), dead)
    assert {value for _, value, *_ in found} == set(BAD)
    for key, _, timestamp, headers in found:
        number = int(key.removeprefix(b"bad-"))
        assert timestamp == 1_700_000_000_000 + number, "its time is the record's own"
        assert headers[:3] == [("trace", b"%d" % number), ("trace", None), ("bytes", b"\x00\xff")], "headers are untouched"
        facts = decode_headers(headers)
        assert facts["topic"] == files.topic and facts["connector.name"] == files.name and facts["task.id"] == "0"
        assert facts["stage"] == "VALUE_CONVERTER" and facts["class.name"] == "airflow_kafka_spark.formats.json.format.Json"
        assert facts["exception.class.name"] == "airflow_kafka_spark.errors.BadRecords"
        assert facts["exception.message"] and facts["exception.stacktrace"].endswith(facts["exception.message"])
    reasons = {value: decode_headers(headers)["exception.message"] for _, value, _, headers in found}
    assert "id" in reasons[b'{"id": "seven"}']
    # The next window has its own; one without bad records sends none.
    bad += produce_mixed(files, 50, 7, first=300)
    files.run("run2", **tolerant(dead))
    report = files.run("run3", **tolerant(dead))
    assert check_sorted_out(files, dead) == (350, bad) and "dead_letters" not in report


def test_a_bad_key_is_distinguished_from_a_bad_value(files: Pipeline):
    produce_mixed(files, 9, 4)
    files.run("run1", **tolerant(f"keys-{files.topic}", key=Json(schema="id bigint")))
    stages = [decode_headers(headers)["stage"] for *_, headers in letters(files.kafka.connection_extra(), f"keys-{files.topic}")]
    # The keys of the good records are numbers, no objects; the problem of a bad value is reported first.
    assert sorted(stages) == ["KEY_CONVERTER"] * 9 + ["VALUE_CONVERTER"] * 2


def test_a_large_record_becomes_a_dead_letter_where_the_topic_takes_it(files: Pipeline):
    dead = f"dead-{files.topic}"
    for topic in (dead, f"large-{files.topic}"):
        files.kafka.create_topic(topic, 1, config={"max.message.bytes": 4_000_000})
    producer = Producer({**files.kafka.connection_extra(), "message.max.bytes": 4_000_000})
    value = b"x" * 3_000_000
    producer.produce(f"large-{files.topic}", value)
    assert producer.flush(60) == 0
    report = files.run("run1", topics=f"large-{files.topic}", **tolerant(dead))
    assert [(letter[1] == value) for letter in letters(files.kafka.connection_extra(), dead)] == [True]
    assert report["records_rejected"] == 1


def test_sparks_own_source_makes_the_same_dead_letters(files: Pipeline):
    dead = f"dead-{files.topic}"
    bad = produce_mixed(files, 40, 5)
    files.run("run1", **tolerant(dead, read_with="spark"))
    assert check_sorted_out(files, dead) == (40, bad)
    for key, _, timestamp, headers in letters(files.kafka.connection_extra(), dead):
        assert headers[:3] == [("trace", key.removeprefix(b"bad-")), ("trace", None), ("bytes", b"\x00\xff")]
        assert timestamp == 1_700_000_000_000 + int(key.removeprefix(b"bad-"))


def test_more_bad_records_than_allowed_or_too_many_bytes_of_them_fail_the_window_and_no_letter_is_sent(
    files: Pipeline, monkeypatch
):
    from airflow_kafka_spark.sinks.kafka.tasks import dead_letters

    dead = f"dead-{files.topic}"
    bad = produce_mixed(files, 100, 10)

    def check_nothing_was_sent() -> None:
        assert files.rows() == [] and set(files.committed().values()) == {-1001}
        assert dead not in AdminClient(files.kafka.connection_extra()).list_topics(timeout=60).topics

    with pytest.raises(TooManyBadRecords, match=rf"{bad} of the {100 + bad} records.*are bad") as raised:
        files.run("run1", **tolerant(dead, max_errors=0.09))
    assert raised.value.count == bad and len(raised.value.samples) == 5
    check_nothing_was_sent()
    # The limit of what may pass through the driver counts all splits: each split has less.
    monkeypatch.setattr(dead_letters, "LIMIT_BYTES", 300)
    with pytest.raises(TooManyDeadLetters, match=dead):
        files.run("run1", **tolerant(dead))
    monkeypatch.undo()
    check_nothing_was_sent()
    files.run("run1", **tolerant(dead, max_errors=0.1))
    assert check_sorted_out(files, dead) == (100, bad)


def test_a_share_is_exact_as_it_is_written():
    """As binary floats, 0.29 of 100 is less than 29."""
    for count, records in ((29, 100), (0, 0), (58, 200)):
        assert not ErrorOptions("all", "dead", most=0.29).has_too_many(count, records)
    assert ErrorOptions("all", "dead", most=0.29).has_too_many(30, 100) and ErrorOptions("all", "dead", most=0).has_too_many(1, 1)


def test_an_error_of_the_users_own_sql_fails_the_window_and_says_what_spark_says(files: Pipeline):
    """The error does not depend on a record, so no record becomes a dead letter."""
    from airflow_kafka_spark.transforms import Sql

    produce_mixed(files, 20, 5)
    columns = {"id": "id", "customer": "customer", "amount": "amount", "placed_at": "timestamp_seconds(100 div (id - 7))"}
    with pytest.raises(SparkJobFailed, match=r"DIVIDE_BY_ZERO.* by zero"):
        files.run("run1", **tolerant(f"dead-{files.topic}"), transforms=[Sql(columns)])
    assert files.rows() == []
    assert f"dead-{files.topic}" not in AdminClient(files.kafka.connection_extra()).list_topics(timeout=60).topics


def test_a_letter_that_its_topic_does_not_take_fails_the_window_and_says_what_to_change_for_example_its_headers(files: Pipeline):
    (dead, past), config = (f"{name}-{files.topic}" for name in ("dead", "past")), files.kafka.connection_extra()
    files.kafka.create_topic(dead, 1, config={"max.message.bytes": 1500})
    files.kafka.create_topic(past, 1, config={"message.timestamp.before.max.ms": 1000})
    producer = Producer(config)
    for value, partition in ((b"x" * 1200, 1), (order(1), 0)):
        producer.produce(files.topic, value, b"key", partition, timestamp=1_700_000_000_000, headers=[("own", b"1")])
    assert producer.flush(60) == 0
    for topic, said in ((dead, rf"{files.topic}-1@0, of 1,[0-9]+ bytes.*max.message.bytes"), (past, "before.max.ms")):
        with pytest.raises(KafkaRefused, match=said) as raised:
            files.run("run1", **tolerant(topic))
        assert f"`{topic}`" in str(raised.value) and letters(config, topic) == [] == files.rows()
        # The window stays open, and its letters may be in the topic that it was planned with: another one has to be decided.
        ledger = files.arguments["ledger_topic"]
        settled(ledger)
        with KafkaHook() as hook:
            rebind(hook, files.name, why="the topic takes no letters", ledger_topic=ledger, running=False)
    report = files.run("run1", **tolerant(dead, errors_deadletterqueue_context_headers_enable=False))
    assert len(files.rows()) == report["records_rejected"] == 1
    assert [headers for *_, headers in letters(config, dead)] == [[("own", b"1")]], "no headers but its own"


def test_without_a_topic_bad_records_are_left_out_when_that_is_said_and_the_ledger_knows_how_many_before_the_sink_has_the_others(
    files: Pipeline, monkeypatch
):
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import Ledger

    bad, skip = produce_mixed(files, 20, 5), {"errors_tolerance": "all", "errors_skip": True}

    def remembered() -> int:
        with KafkaHook() as hook, Ledger(hook, files.name, "dag/other/task", topic=files.arguments["ledger_topic"]) as ledger:
            return ledger.read().dead[1].count_skipped(0)

    fail_at(monkeypatch, "sink.in_transaction")
    with pytest.raises(RuntimeError):
        files.run("run1", **skip)
    assert remembered() == bad
    # As long as the sink has nothing, each attempt decides which records are bad.
    with pytest.raises(RuntimeError):
        files.run("run1", **skip, value=Lenient(SCHEMA))
    assert remembered() == 0
    monkeypatch.undo()
    # Once the sink has the other records, only the ledger has the number of the bad ones.
    fail_at(monkeypatch, "close.begin")
    with pytest.raises(RuntimeError):
        files.run("run1", **skip)
    monkeypatch.undo()
    report = files.run("run1", **skip)
    assert (report["records_rejected"], report["records_written"], report["records_read"]) == (bad, 20, 20 + bad)
    assert report["records_rejected"] == remembered() and "dead_letters" not in report


def test_what_was_dead_stays_dead_when_the_format_is_mended_before_the_retry(files: Pipeline, monkeypatch):
    """The attempt dies after its dead letters are sent and before the sink has taken the rest. To the retry nothing is bad, and
    records without a value are to be ignored: each counts once, as what it was."""
    dead, config = f"dead-{files.topic}", files.kafka.connection_extra()
    produce_mixed(files, 30, 10)
    producer = Producer(config)
    for partition in (0, 0, 1):
        producer.produce(files.topic, None, b"gone", partition)
    assert producer.flush(60) == 0
    fail_at(monkeypatch, "dead.committed")
    with pytest.raises(RuntimeError, match="dead.committed"):
        files.run("run1", **tolerant(dead))
    monkeypatch.undo()
    # Without the topic, what was sent to it would become rows, too.
    with pytest.raises(ValidationError, match=f"has sent bad records to topic `{dead}`"):
        files.run("run1", value=Lenient(SCHEMA))
    assert files.rows() == []
    report = files.run("run1", **tolerant(dead, value=Lenient(SCHEMA), behavior_on_null_values="ignore"))
    events = files.events()
    good = [row_of(value) for *_, value in events if value is not None and not is_bad(value)]
    bad = [event for event in events if event[3] is None or is_bad(event[3])]
    places = [
        (int(decode_headers(h)["partition"]), int(decode_headers(h)["offset"]), key, value)
        for key, value, _, h in letters(config, dead)
    ]
    assert (same_multiset(good, files.rows()), same_multiset(bad, places)) == (30, 6)
    assert [report[f"records_{name}"] for name in ("read", "written", "ignored", "rejected")] == [36, 30, 0, 6]
    assert report["dead_letters"][0]["records"] == 6


def test_a_window_or_replay_that_the_sink_had_taken_reports_its_own_bad_records_and_no_letter_is_sent_twice(
    table: Pipeline, monkeypatch
):
    """Bad records of earlier replays do not count: a former dead letter may be a row now, and a record that is bad again is sent
    once.
    """
    from airflow_kafka_spark.sinks import PostgresSink

    dead = f"dead-{table.topic}"
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{table.place}" ADD COLUMN "window" text')
    sink = PostgresSink(conn_id="warehouse", table=table.place, window_column="window")
    options = {**tolerant(dead), "sink": sink, "on_rerun": "replay"}
    produce_mixed(table, 40, 10)
    strict = Json(schema=SCHEMA)
    for replay, (value, bad) in enumerate(((strict, 4), (Lenient(SCHEMA), 0), (strict, 4))):
        again = {"facts": {"max_tries": replay}, **options, "value": value}
        fail_at(monkeypatch, "close.begin")
        with pytest.raises(RuntimeError):
            table.run("run1", **again)
        monkeypatch.undo()
        report = table.run("run1", **again)
        assert [report.get(name, 0) for name in ("replay", "records_read", "records_rejected")] == [replay, 44, bad]
        assert len(table.rows()) == report["records_written"] == 44 - bad
        if not replay:
            assert report["dead_letters"][0]["records"] == 4, "the first attempt has sent them"
    report = table.run("run1", facts={"max_tries": 3}, **options)
    assert (report["replay"], report["records_rejected"]) == (3, 4), "a replay that does not fail"
    assert check_sorted_out(table, dead) == (40, 4)


def test_a_dead_letter_that_was_sent_again_or_became_a_row_in_a_replay_is_a_row_once(table: Pipeline):
    """A window is replayed with a corrected format after its dead letters were sent again; another one before."""
    from airflow_kafka_spark.sinks import PostgresSink

    dead, config = f"dead-{table.topic}", table.kafka.connection_extra()
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{table.place}" ADD COLUMN "window" text')
    sink = PostgresSink(conn_id="warehouse", table=table.place, window_column="window")
    options = {**tolerant(dead), "sink": sink, "on_rerun": "replay", "value": Json(schema=SCHEMA)}
    mended = {**options, "value": Lenient(SCHEMA)}
    cleared = {"facts": {"max_tries": 1}}

    def send_again(window: int):
        settled(table.topic, f"ledger-{table.name}", dead)
        with KafkaHook() as hook:
            return resend(hook, table.name, window=window, why="mended", who="ann", ledger_topic=f"ledger-{table.name}")

    produce_mixed(table, 20, 10)
    assert table.run("run1", **options)["records_rejected"] == 2
    assert sum(part.records for part in send_again(1).sent_again) == 2
    settled(table.topic)
    assert table.run("run2", **mended)["records_written"] == 2
    # The originals were sent again, so a replay of their window leaves them out.
    again = table.run("run1", **cleared, **mended)
    assert [again[name] for name in ("records_read", "records_written", "records_rejected")] == [22, 20, 2]
    assert len(table.rows()) == 22 and not send_again(1).changed

    produce_mixed(table, 20, 10, first=20)
    assert table.run("run3", **options)["records_rejected"] == 2
    assert table.run("run3", **cleared, **mended)["records_written"] == 22
    # They are rows since the replay, so there is nothing to send.
    with pytest.raises(ResendRefused, match="replay"):
        send_again(3)
    assert table.run("run4", **mended)["records_read"] == 0
    assert len(table.rows()) == 44 and len(letters(config, dead)) == 4


def test_dead_letters_sent_through_a_mended_pipeline_are_in_the_sink_once(files: Pipeline):
    """The recipe of docs/dead_letters.md: ids were written as texts for a while."""
    from airflow_kafka_spark.transforms import Cast

    dead, again = f"dead-{files.topic}", f"again-{files.topic}"
    producer, expected = Producer(files.kafka.connection_extra()), []
    for number in range(60):
        value = order(number)
        expected.append(row_of(value))
        if number % 4 == 0:
            value = value.replace(b'"id":%d' % number, b'"id":"%d"' % number)
        producer.produce(files.topic, value if number != 30 else b"lost for good", b"%d" % number)
    assert producer.flush(60) == 0
    del expected[30]
    files.run("run1", **tolerant(dead))
    mended = {
        "topics": dead, "group_id": f"mended-{files.name}", "pipeline": f"mended-{files.name}",
        "value": Json(schema=SCHEMA.replace("id bigint", "id string")), "transforms": [Cast(spec="id:int64")],
    }  # fmt: skip
    report = files.run("mend1", **mended, **tolerant(again))
    assert (report["records_written"], report["records_rejected"]) == (15, 1)
    files.run("mend1", **mended, **tolerant(again))
    files.run("mend2", **mended, **tolerant(again))
    assert same_multiset(expected, files.rows()) == 59
    ((_, value, _, headers),) = letters(files.kafka.connection_extra(), again)
    assert value == b"lost for good"
    topics = [text.decode() for name, text in headers if name == "__connect.errors.topic"]
    assert topics == [files.topic, dead], "the headers of the first failure are kept"


def test_letters_of_several_pipelines_in_one_topic_never_overwrite_newer_rows(table: Pipeline):
    """The other recipes of docs/dead_letters.md: for letters of one of them, and for a table that upserts."""
    from airflow_kafka_spark.sinks import PostgresSink
    from airflow_kafka_spark.transforms import Cast, Condition, Filter, Sql

    dead, producer = f"dead-{table.topic}", Producer(table.kafka.connection_extra())
    for number, customer, is_text in (
        (5, "old", True),
        (5, "new", False),
        (6, "old", False),
        (6, "new", True),
        (7, "only", True),
    ):
        value = {**json.loads(order(number)), "customer": customer, "id": str(number) if is_text else number}
        producer.produce(table.topic, json.dumps(value).encode(), b"%d" % number, 0)
    assert producer.flush(60) == 0
    options = {"mode": "upsert", "key": ["id"], "auto_create": True, "offset_columns": True}
    sink, other = (PostgresSink(conn_id="warehouse", table=f'"{table.place} {name}"', **options) for name in ("own", "other"))
    table.run("run1", sink=sink, **tolerant(dead))
    second = {"pipeline": f"other-{table.name}", "group_id": f"other-{table.name}"}
    table.run("run1", sink=other, **second, **tolerant(dead))
    assert len(letters(table.kafka.connection_extra(), dead)) == 6

    def first(name: str) -> str:
        return f"CAST(element_at(filter(record.headers, h -> h.key = '__connect.errors.{name}'), 1).value AS string)"

    own = f"h.key = '__connect.errors.connector.name' AND CAST(h.value AS string) = '{table.name}'"
    columns = {
        **{name: name for name in ("id", "customer", "amount", "placed_at")},
        "__connect_topic": first("topic"),
        "__connect_partition": f"CAST({first('partition')} AS int)",
        "__connect_offset": f"CAST({first('offset')} AS bigint)",
    }
    report = table.run(
        "mend1",
        topics=dead,
        pipeline=f"mend-{table.name}",
        group_id=f"mend-{table.name}",
        value=Json(schema=SCHEMA.replace("id bigint", "id string")),
        transforms=[
            Filter(predicate=Condition(f"exists(record.headers, h -> {own})"), negate=True),
            Cast("id:int64"),
            Sql(columns=columns),
        ],
        sink=sink,
        **tolerant(f"again-{dead}"),
    )
    assert (report["records_read"], report["records_filtered"], report["records_rejected"]) == (6, 3, 0)
    with table.postgres.connect(autocommit=True) as connection:
        rows = connection.execute(f'SELECT id, customer, __connect_offset FROM "{table.place} own"').fetchall()
    assert same_multiset([(5, "new", 1), (6, "new", 3), (7, "only", 4)], rows) == 3


CONTRADICTIONS = [
    ({"errors_tolerance": "some"}, ["errors_tolerance"]),
    ({"errors_tolerance": "all"}, ["errors_deadletterqueue_topic_name"]),
    ({"errors_deadletterqueue_topic_name": "dead", "max_errors": 3}, ["errors_deadletterqueue_topic_name", "max_errors"]),
    (tolerant("dead", errors_skip=True, max_errors=1.5), ["errors_skip", "max_errors"]),
    (tolerant("dead", max_errors=True), ["max_errors"]),
    (tolerant("dead", max_errors=-1), ["max_errors"]),
    (tolerant("dead", max_errors="1%"), ["max_errors"]),
    (tolerant("no name!"), ["errors_deadletterqueue_topic_name"]),
    (tolerant("dead", errors_deadletterqueue_topic_replication_factor=0), ["errors_deadletterqueue_topic_replication_factor"]),
]


def test_options_that_contradict_each_other_texts_for_switches_and_topics_that_would_lose_letters_are_refused(files: Pipeline):
    def problems(**options) -> dict[str, str]:
        with pytest.raises(ValidationError) as raised:
            files.run("run1", **options)
        return {problem.where: problem.what for problem in raised.value.problems}

    for options, places in CONTRADICTIONS:
        assert list(problems(**options)) == places, options
    # As a switch "false" would be True: records left out for good, letters with headers.
    given = {"errors_deadletterqueue_context_headers_enable": "false", "errors_skip": "no"}
    found = problems(**tolerant("", **given))
    assert {name: found[name] for name in given} == {
        name: f"it is `{value!r}` (str); expected True or False" for name, value in given.items()
    }
    files.kafka.create_topic(f"compacted-{files.topic}", 1, config={"cleanup.policy": "compact"})
    for topic, why in ((files.topic, "is read"), (f"ledger-{files.name}", "ledger"), (f"compacted-{files.topic}", "compacted")):
        assert why in problems(**tolerant(topic))["errors_deadletterqueue_topic_name"]
