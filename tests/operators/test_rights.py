"""The rights that docs/connections.md documents are enough, and a missing right is an error that names it.

One broker with an authorizer. Its ACLs are the commands in docs/connections.md, which are read from the page, so page and test
cannot differ.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from airflow_kafka_spark.cli.definition import COMMANDS, main
from airflow_kafka_spark.control.base import ChangeRequest
from airflow_kafka_spark.control.preview import preview_window
from airflow_kafka_spark.control.replay import resend_dead_letters
from airflow_kafka_spark.errors import RightMissing, ValidationError
from airflow_kafka_spark.formats import Json, Raw
from airflow_kafka_spark.hooks.kafka.config import make_consumer_config
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.topic import LedgerTopic
from airflow_kafka_spark.operators import (
    KafkaToKafkaOperator,
    KafkaToSinkOperator,
    PipelineOffsetsOperator,
    SourceToKafkaOperator,
)
from airflow_kafka_spark.operators.control import ACTIONS
from airflow_kafka_spark.operators.visibility.operator import convert_argument
from airflow_kafka_spark.sensors import KafkaIntervalSensor, KafkaLagSensor, KafkaWindowSensor, SourceLogSensor
from airflow_kafka_spark.sinks import DeltaSink, FilesSink, IcebergSink, KafkaSink
from airflow_kafka_spark.sources import FilesSource, JdbcSource, PostgresCdcSource
from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader
from airflow_kafka_spark.testing import EmbeddedKafka, KafkaSecurity
from airflow_kafka_spark.transforms import Condition, Filter
from airflow_kafka_spark.triggers import KafkaIntervalTrigger, KafkaLagTrigger, KafkaWindowTrigger
from airflow_kafka_spark.ui.actions import ACTIONS as UI_ACTIONS
from airflow_kafka_spark.ui.actions import ActionContext, ActionRequest, perform_action
from airflow_kafka_spark.ui.airflow_metadata import LedgerName
from airflow_kafka_spark.ui.previews import DeadLetterReader, RecordReader, TopicFormats
from airflow_kafka_spark.ui.watcher import LedgerWatch
from airflow_kafka_spark.windows.model import Landed, OffsetRange, TopicPartition
from tests.support.clients import find_admin_client
from tests.support.documents import read_grants
from tests.support.intervals import hour
from tests.support.oracle import wait_stable
from tests.support.pipelines import SCHEMA, SPARK, order
from tests.support.runs import context, run
from tests.support.triggers import fire
from tests.support.waiting import eventually

pytestmark = pytest.mark.servers

LEDGER, READ, GROUP, TARGET, DEAD = "airflow-windows", "orders", "orders-warehouse", "orders-eu", "orders-dead"
USERS = {"admin": "a", "airflow": "b", "viewer": "c"}
RESOURCES = {
    "--topic": ResourceType.TOPIC,
    "--group": ResourceType.GROUP,
    "--transactional-id": ResourceType.TRANSACTIONAL_ID,
    "--cluster": ResourceType.BROKER,
}
PAGE = Path(__file__).parents[2] / "docs" / "connections.md"


def documented() -> list[list[AclBinding]]:
    """Return the ACLs of each block of commands in the section about rights."""
    section = PAGE.read_text().partition("\n### Rights\n")[2].partition("\n## ")[0]
    return [list(bindings(block)) for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)]


def bindings(commands: str) -> Iterator[AclBinding]:
    user = (re.findall(r"KAFKA_USER=(\w+)", commands) or ["airflow"])[0]
    for line in commands.splitlines():
        if not line.startswith("acls --"):
            continue
        words = shlex.split(line)[1:]
        kind = RESOURCES[words[0]]
        name = "kafka-cluster" if words[0] == "--cluster" else words[1]
        pattern = ResourcePatternType.PREFIXED if "prefixed" in words else ResourcePatternType.LITERAL
        operations = [words[at + 1] for at, word in enumerate(words) if word == "--operation"]
        assert operations, line
        for operation in operations:
            name_of = re.sub(r"(?<!^)([A-Z])", r"_\1", operation).upper()
            yield AclBinding(kind, name, pattern, f"User:{user}", "*", AclOperation[name_of], AclPermissionType.ALLOW)


class Cluster:
    """The broker, and the user who may change its ACLs."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self.kafka = kafka
        self.admin = find_admin_client(kafka.connection_extra("admin"))

    def there(self) -> set[str]:
        every = AclBindingFilter(
            ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
        )
        return set(map(repr, self.admin.describe_acls(every).result(60)))

    def grant(self, acls: list[AclBinding]) -> None:
        for future in self.admin.create_acls(acls).values():
            future.result(60)
        eventually(lambda: self.there() >= set(map(repr, acls)))

    def revoke(self, acls: list[AclBinding]) -> None:
        filters = [
            AclBindingFilter(a.restype, a.name, a.resource_pattern_type, a.principal, a.host, a.operation, a.permission_type)
            for a in acls
        ]
        for future in self.admin.delete_acls(filters).values():
            future.result(60)
        eventually(lambda: not self.there() & set(map(repr, acls)))

    @contextmanager
    def without(self, kind: str, name: str, group: str, *operations: str) -> Iterator[None]:
        """Remove these rights of the user ``airflow`` during the block.

        :param group: the group that has the rights of the page's example.
        """
        lacking = [
            renamed(acl, group) if name == GROUP else acl
            for acl in documented()[0]
            if (acl.restype, acl.name) == (RESOURCES[kind], name) and acl.operation.name.title() in operations
        ]
        assert len(lacking) == len(operations)
        self.revoke(lacking)
        try:
            yield
        finally:
            self.grant(lacking)

    def produce(self, *values: bytes) -> None:
        producer = Producer({**self.kafka.connection_extra("admin"), "log_level": 0})
        for number, value in enumerate(values):
            producer.produce(READ, value, str(number).encode())
        assert producer.flush(60) == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A broker that refuses everything that the page does not grant, and has the topics of its examples."""
    security = KafkaSecurity("SASL_PLAINTEXT", USERS, ("PLAIN",))
    authorizer = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:admin",
    }
    with pytest.MonkeyPatch.context() as patch, EmbeddedKafka(security=security, properties=authorizer) as kafka:
        made = Cluster(kafka)
        for user in USERS:
            patch.setenv(f"AIRFLOW_CONN_{user.upper()}", kafka.connection_json(user))
        patch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
        for topic in (READ, TARGET):
            kafka.create_topic(topic, 2)
        needed, _optional, looking = documented()
        made.grant([*needed, *looking])
        made.produce(*map(order, range(40)), b"{")
        yield made


def to_files(directory: Path, **options: Any) -> KafkaToSinkOperator:
    given = {"topics": READ, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": DEAD, "value": Json(schema=SCHEMA)}
    given |= {"sink": FilesSink(path=str(directory)), "kafka_conn_id": "airflow"}
    return KafkaToSinkOperator(task_id="task", **{**given, **options})


def to_topic(**options: Any) -> KafkaToKafkaOperator:
    given = {"topics": READ, "sink": KafkaSink(topic=TARGET), "value": Json(schema=SCHEMA), "filter": "id >= 0"}
    given |= {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": DEAD, "kafka_conn_id": "airflow"}
    return KafkaToKafkaOperator(task_id="task", **{**given, **options})


def from_files(directory: Path, **options: Any) -> SourceToKafkaOperator:
    given = {"source": FilesSource(str(directory), glob="*.parquet", recursive=True), "sink": KafkaSink(topic=TARGET, key="id")}
    return SourceToKafkaOperator(task_id="task", kafka_conn_id="airflow", **{**given, **options})


def from_table(table: str, **options: Any) -> SourceToKafkaOperator:
    source, sink = JdbcSource("shop", table, cursor="id"), KafkaSink(topic_column="topic", key="id")
    return SourceToKafkaOperator(task_id="task", kafka_conn_id="airflow", source=source, sink=sink, **options)


def moved(cluster: Cluster, directory: Path, name: str, runs: int = 2, **options: Any) -> dict[str, Any]:
    """Move windows of a new pipeline into files; return the last report. The group has the rights of the page's example."""
    cluster.grant([renamed(acl, name) for acl in documented()[0] if acl.name == GROUP])
    cluster.grant([renamed(acl, name) for acl in documented()[2] if acl.name == GROUP])
    report = {}
    for number in range(runs):
        report = run(to_files, {"directory": directory / name, "pipeline": name, "group_id": name, **options}, f"run{number}")
        cluster.produce(order(1000 + number))
    stable(cluster)
    return report


def renamed(acl: AclBinding, name: str) -> AclBinding:
    return AclBinding(acl.restype, name, acl.resource_pattern_type, acl.principal, acl.host, acl.operation, acl.permission_type)


def rights_of_resend() -> list[AclBinding]:
    """Return the optional rights for sending dead letters again: Write on their topics, Read on the dead letter topic."""
    wanted = {(READ, AclOperation.WRITE), (DEAD, AclOperation.READ)}
    found = [acl for acl in documented()[1] if (acl.name, acl.operation) in wanted]
    assert len(found) == 2
    return found


@contextmanager
def may_resend(cluster: Cluster) -> Iterator[None]:
    """Grant these rights during the block. Write includes Describe, which other tests remove."""
    cluster.grant(rights_of_resend())
    try:
        yield
    finally:
        cluster.revoke(rights_of_resend())


def stable(cluster: Cluster) -> None:
    wait_stable(cluster.kafka.connection_extra("admin"), LEDGER)


# --- what works with these rights -------------------------------------------------------------------------------------------


def test_each_operator_moves_windows_with_exactly_the_documented_rights(cluster, tmp_path):
    report = moved(cluster, tmp_path, "files")
    assert report["records_written"] == 1, "the second window is planned from the ledger"
    by_spark = moved(cluster, tmp_path, "by-spark", runs=1, read_with="spark")
    assert by_spark["records_rejected"] == 1
    routing = {"transforms": [Filter(predicate=Condition("id < 3"), to=DEAD)], "errors_deadletterqueue_topic_name": None}
    assert moved(cluster, tmp_path, "routed", runs=1, errors_skip=True, **routing)["records_routed"] == 3
    moved(cluster, tmp_path, "hourly", runs=0)
    hourly = {"directory": tmp_path / "hourly", "pipeline": "hourly", "group_id": "hourly", "window": "interval", "grace": 0}
    for number in (1, 2):
        assert run(to_files, hourly, f"hour{number}", interval=hour(number))["records_read"] == 0

    moved(cluster, tmp_path, "relay", runs=0)
    assert run(to_topic, {"pipeline": "relay", "group_id": "relay"}, "run1")["records_rejected"] == 1
    cluster.produce(order(60))
    assert run(to_topic, {"pipeline": "relay", "group_id": "relay"}, "run2")["records_written"] == 1

    rows = {"directory": tmp_path / "files", "pipeline": "source"}
    assert run(from_files, rows, "run1")["records_written"] > 40
    assert run(from_files, rows, "run2")["records_written"] == 0


def test_a_table_is_published_by_column_and_followed_into_delta_with_exactly_the_documented_rights(
    cluster, postgres, unique, tmp_path, monkeypatch
):
    table, name, target = unique("shop"), unique("by-column"), unique(TARGET)
    cluster.kafka.create_topic(target, 2)
    # Only this test uses the topic: a pipeline that follows another one counts its records.
    cluster.grant([renamed(acl, target) for acl in documented()[0] if acl.name == TARGET])
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", postgres.connection_uri())
    with postgres.connect(autocommit=True) as connection:
        connection.execute(
            f"CREATE TABLE \"{table}\" AS SELECT n::bigint AS id, 'ann' AS customer, '{target}' AS topic "
            "FROM generate_series(1, 20) AS n"
        )
        connection.execute(f'ALTER TABLE "{table}" ADD PRIMARY KEY (id)')
    published = run(from_table, {"table": table, "pipeline": name}, "run1")
    assert published["records_written"] == 20

    # The next pipeline reads the topic that a pipeline has published to, with that pipeline's group.
    follower, reading = unique("follower"), []
    for acl in documented()[0]:
        reading += [renamed(acl, target)] if acl.name == READ else [renamed(acl, follower)] if acl.name == GROUP else []
    cluster.grant(reading)
    stable(cluster)
    follows = {"topics": target, "pipeline": follower, "group_id": follower, "follows": name}
    sink = {
        "sink": DeltaSink(str(tmp_path / "delta"), auto_create=True, mode="upsert", key=["id"]),
        "value": Json(schema="id bigint, customer string"),
    }
    read = run(to_files, {"directory": tmp_path / "unused", **follows, **sink}, "run1")
    assert (read["records_read"], read["records_written"]) == (20, 20)


def test_rows_and_changes_of_postgresql_become_topics_and_a_topic_an_iceberg_table_with_exactly_the_documented_rights(
    cluster, postgres, unique, tmp_path, monkeypatch
):
    role = unique("rights").replace("-", "_")
    with postgres.connect(autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {role}")
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'hush'")
    place = f"{postgres.connection_uri().rpartition('@')[2].partition('/')[0]}/{role}"
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", f"postgres://{role}:hush@{place}")
    lake = {"conn_type": "iceberg", "host": f"postgresql+psycopg://{place}", "login": role, "password": "hush"}
    lake["extra"] = {"type": "sql", "warehouse": f"file://{tmp_path}/lake"}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(lake))
    sink = KafkaSink(topic=TARGET, key="key", key_format=Raw(), value_columns=["value"], value=Raw())
    source = PostgresCdcSource("shop", publication=role, slot=role, topic_prefix="shop", tables=["public.orders"])
    capture = {"directory": tmp_path, "source": source, "sink": sink, "pipeline": unique("capture")}
    with postgres.connect(dbname=role, autocommit=True) as owner:

        def grant(page: str, containing: str) -> None:
            for statement in read_grants(page, containing, airflow=role):
                owner.execute(statement.encode())

        owner.execute("CREATE TABLE orders (id bigint PRIMARY KEY, customer text, topic text)")
        owner.execute("CREATE TABLE customers (id bigint PRIMARY KEY)")
        grant("cdc.md", "CREATE PUBLICATION")
        try:
            assert run(from_files, capture, "run1")["records_written"] == 0
            owner.execute(f"INSERT INTO orders SELECT n, 'ann', '{TARGET}' FROM generate_series(1, 7) AS n")
            assert run(from_files, capture, "run2")["records_written"] == 7
            watched = {"source": source, "pipeline": capture["pipeline"], "at_most_bytes": 1 << 40}
            seen = SourceLogSensor(task_id="task", kafka_conn_id="viewer", **watched).poke({})
            assert seen.is_done and seen.xcom_value["window"] == 2
            grant("cdc.md", "ON orders, customers TO")
            initial = replace(source, slot=f"{role}_s", snapshot="initial")
            snapshot = run(from_files, {**capture, "source": initial, "pipeline": unique("snapshot")}, "run1")
            assert snapshot["records_written"] == 7
        finally:
            owner.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name ^@ %s", [role])
        owner.execute(f"REVOKE ALL ON orders, customers FROM {role}".encode())
        grant("sources.md", "GRANT SELECT")
        assert run(from_table, {"table": "orders", "pipeline": unique("rows")}, "run1")["records_written"] == 7
        grant("lakes.md", "iceberg_tables")
    iceberg = {"sink": IcebergSink("shop.orders", "lake", mode="upsert", key=["id"])}
    assert moved(cluster, tmp_path, unique("iceberg"), **iceberg)["records_written"] == 1


COMMANDS_IN_ORDER = {
    "list": {},
    "show": {},
    "plan": {},
    "windows": {},
    "pause": {},
    "resume": {},
    "rebind": {},
    "replay": {"window": "2"},
    "resend": {"window": "1"},
    "skip": {},
    "reset": {"to": "earliest"},
    "unblock": {},
    "rename": {"to": "renamed"},
    "forget": {},
}
"""Command -> its arguments; each finds something to do."""
LOOKING = ("list", "show", "plan", "windows", "unblock")
WITHOUT_KAFKA = ("pack",)


def test_each_command_works_with_exactly_the_documented_rights(cluster, tmp_path):
    assert {command.name for command in COMMANDS} == {*COMMANDS_IN_ORDER, *WITHOUT_KAFKA}
    moved(cluster, tmp_path, "by-cli")
    name = "by-cli"
    with may_resend(cluster):
        for command, given in COMMANDS_IN_ORDER.items():
            why = [] if command in LOOKING else ["--why", "a test"]
            words = [word for option, value in given.items() for word in (f"--{option}", value)]
            named = [] if command == "list" else [name]
            assert main([command, *named, *words, *why, "--kafka-conn-id", "airflow"]) == 0, command
            stable(cluster)
            name = given["to"] if command == "rename" else name

    moved(cluster, tmp_path, "deleted", runs=1)
    cluster.grant([renamed(acl, "deleted") for acl in documented()[1] if acl.name == GROUP])
    assert main(["forget", "deleted", "--delete-group", "--why", "a test", "--kafka-conn-id", "airflow"]) == 0


def test_each_action_of_the_operator_of_offsets_works_with_exactly_the_documented_rights(cluster, tmp_path):
    moved(cluster, tmp_path, "by-operator")
    name = "by-operator"
    with may_resend(cluster):
        for action in [command for command in COMMANDS_IN_ORDER if command in ACTIONS]:
            given = {"new_name": "renamed-by-operator"} if action == "rename" else COMMANDS_IN_ORDER[action]
            operator = PipelineOffsetsOperator(
                task_id="task", action=action, pipeline=name, why="a test", kafka_conn_id="airflow", **given
            )
            assert operator.execute(context("run1")), action
            stable(cluster)
            name = given.get("new_name", name)


def test_each_action_of_a_page_works_with_exactly_the_documented_rights(cluster, tmp_path):
    moved(cluster, tmp_path, "by-page")
    with may_resend(cluster), KafkaHook("airflow") as hook:
        for action in ("pause", "resume", "replay", "resend", "skip", "reset"):
            assert action in UI_ACTIONS
            to = "earliest" if action == "reset" else None
            window = 1 if action == "resend" else 2
            asked = ActionRequest(action, f"airflow/{LEDGER}", "by-page", "a test", False, to=to, window=window)
            assert perform_action(hook, asked, ActionContext(LEDGER, "ann", running=False)).done
            stable(cluster)


def test_a_user_that_only_reads_needs_no_more_rights_than_documented(cluster, unique, tmp_path):
    report = moved(cluster, tmp_path, "seen")
    for command in (["list"], ["show", "seen"], ["plan", "seen"], ["windows", "seen"]):
        assert main([*command, "--kafka-conn-id", "viewer"]) == 0, command
    common = {"kafka_conn_id": "viewer", "deferrable": False, "retry_timeout": 0, "timeout": 0, "poke_interval": 0.1}
    interval = SimpleNamespace(data_interval_start=hour(1)[0], data_interval_end=hour(1)[1])
    seen = {**context("run1"), "dag_run": interval}
    sensors = [
        KafkaWindowSensor(task_id="a", pipeline="seen", after=0, **common),
        KafkaLagSensor(task_id="b", pipeline="seen", at_least_records=1, **common),
        KafkaLagSensor(task_id="c", group_id="seen", topics=READ, at_least_records=1, **common),
        KafkaIntervalSensor(task_id="d", topics=READ, grace=0, **common),
    ]
    for sensor in sensors:
        sensor.execute(seen)
    # A deferred sensor's trigger needs the same rights.
    common = {"kafka_conn_id": "viewer", "poll_interval": 0.1, "retry_timeout": 0.0}
    triggers = [
        KafkaWindowTrigger(pipeline="seen", after=0, **common),
        KafkaLagTrigger(pipeline="seen", at_least_records=1, once=True, **common),
        KafkaLagTrigger(group_id="seen", topics=READ, at_least_records=1, once=True, **common),
        KafkaIntervalTrigger(topics=READ, end=hour(1)[1], grace=0, **common),
    ]
    for trigger in triggers:
        assert "error" not in (payload := fire(trigger, 120)), payload

    # A pipeline whose topic and group the viewer may not see hides no other one.
    hidden = unique("hidden")
    cluster.kafka.create_topic(hidden, 1)
    granted = [(READ, hidden), (GROUP, hidden)]
    own = [renamed(acl, to) for acl in documented()[0] for name, to in granted if acl.name == name]
    cluster.grant(own)
    run(to_files, {"directory": tmp_path / hidden, "topics": hidden, "pipeline": hidden, "group_id": hidden}, "run1")

    watch = LedgerWatch(LedgerName("viewer", LEDGER), KafkaHook)
    watch.start()
    try:
        watch.mark_interest(hidden)
        watch.mark_interest("seen")
        eventually(lambda: watch.state[0] == "ok" and "seen" in watch.lag_trackers)
        measured = watch.lag_trackers["seen"].measured
        assert measured is not None and measured.lag is not None and not measured.problem
        unseen = watch.lag_trackers[hidden].measured
        assert unseen is not None and unseen.lag is None and f"right Describe on topic `{hidden}`" in unseen.problem
    finally:
        watch.stop()
    with KafkaHook("viewer") as hook:
        assert hook.test_connection()[0]
        assert preview_window(hook, "seen").offsets > 0
        landed = Landed(DEAD, 0, 0, 0, 1)
        names = frozenset(record["topic"] for record in DeadLetterReader(frozenset({"files", "seen"}), [landed], 5).read(hook))
        assert names <= {DEAD}
        shown = RecordReader(TopicPartition(READ, 0), 0, 5, TopicFormats(convert_argument(Json(schema=SCHEMA)))).read(hook)
        assert len(shown["records"]) == 5 and not shown["problem"]
    assert report["group_id"] == "seen"


def test_sending_dead_letters_again_names_each_right_that_is_missing_and_works_with_both(cluster, tmp_path):
    moved(cluster, tmp_path, "again", runs=1)
    request = ChangeRequest("again", "a test")
    with KafkaHook("airflow") as hook:
        for acl in sorted(rights_of_resend(), key=lambda acl: acl.name, reverse=True):
            with pytest.raises(RightMissing) as refused:
                resend_dead_letters(hook, request, window=1)
            assert (refused.value.name, refused.value.rights) == (acl.name, (acl.operation.name.title(),))
            cluster.grant([acl])
        assert resend_dead_letters(hook, request, window=1).sent_again
        stable(cluster)
        assert not resend_dead_letters(hook, request, window=1).changed
    cluster.revoke(rights_of_resend())


# --- what is said without one of them ---------------------------------------------------------------------------------------

WITHOUT = [
    ("files", "--topic", LEDGER, ("Read",), "topic", "Read"),
    ("files", "--topic", LEDGER, ("Write",), "topic", "Write"),
    ("files", "--topic", LEDGER, ("Describe", "Read", "Write"), "topic", "Describe"),
    ("files", "--transactional-id", f"{LEDGER}.", ("Describe", "Write"), "transactional id", "Write"),
    ("files", "--transactional-id", f"{LEDGER}.", ("Write",), "transactional id", "Write"),
    ("files", "--topic", READ, ("Read",), "topic", "Read"),
    ("files", "--topic", READ, ("Describe", "Read"), "topic", "Describe"),
    ("spark", "--topic", READ, ("Read",), "topic", "Read"),
    ("files", "--group", GROUP, ("Read",), "group", "Read"),
    ("files", "--group", GROUP, ("Describe", "Read"), "group", "Describe"),
    ("files", "--topic", DEAD, ("Write",), "topic", "Write"),
    ("topic", "--topic", TARGET, ("Write",), "topic", "Write"),
    ("topic", "--group", GROUP, ("Read",), "group", "Read"),
    ("topic", "--topic", LEDGER, ("Read",), "topic", "Read"),
]


@pytest.mark.parametrize("kind, option, name, operations, resource, right", WITHOUT)
def test_a_missing_right_is_named_with_connection_and_resource_and_no_retry_is_advised(
    cluster, tmp_path, kind, option, name, operations, resource, right
):
    group = tmp_path.name
    moved(cluster, tmp_path, group, runs=0)
    options: dict[str, Any] = {"pipeline": group, "group_id": group}
    make = to_topic if kind == "topic" else to_files
    if kind != "topic":
        options |= {"directory": tmp_path / "rows", "read_with": "spark" if kind == "spark" else "auto"}
    with cluster.without(option, name, group, *operations), pytest.raises((RightMissing, ValidationError)) as raised:
        run(make, options, "run1")
    said = str(raised.value)
    named = f"{resource} `{group if name == GROUP else name}"
    assert "`airflow`" in said and f"right {right} on {named}" in said and "_AUTHORIZATION_FAILED" in said
    assert "retr" not in said.lower() and not raised.value.retryable
    # Less than the time after which the brokers would abort a transaction that was left open.
    assert wait_stable(cluster.kafka.connection_extra("admin"), LEDGER, seconds=10)


def test_a_task_that_may_not_see_its_topic_any_more_says_so_within_seconds(cluster):
    config = make_consumer_config(cluster.kafka.connection_extra("airflow"), **{"group.id": "task"})
    reader = KafkaSplitReader(config, OffsetRange(READ, 0, 0, 10), patience=60)
    begun = time.monotonic()
    with (
        cluster.without("--topic", READ, GROUP, "Describe", "Read"),
        pytest.raises(RightMissing, match=f"Read on topic `{READ}`"),
    ):
        list(reader)
    assert time.monotonic() - begun < 30


def test_all_missing_rights_are_named_before_a_window_with_the_commands_of_the_page(cluster, tmp_path):
    granted = documented()[0]
    own_groups = [acl for acl in granted if acl.name == f"{LEDGER}." and acl.restype == ResourceType.GROUP]
    group = tmp_path.name
    moved(cluster, tmp_path, group, runs=0)
    with KafkaHook("admin") as hook:
        LedgerTopic(hook).ensure()
    lacking = [
        ("--topic", LEDGER, ("Read", "Write")),
        ("--topic", TARGET, ("Write",)),
        ("--topic", READ, ("Describe", "Read")),
        ("--topic", DEAD, ("Describe", "Write")),
        ("--group", GROUP, ("Read",)),
    ]
    said: dict[str, str] = {}
    cluster.revoke(own_groups)
    try:
        with ExitStack() as without:
            for option, name, operations in lacking:
                without.enter_context(cluster.without(option, name, group, *operations))
            for make, options in ((from_files, {"directory": tmp_path}), (to_topic, {"group_id": group})):
                with pytest.raises(ValidationError) as raised:
                    run(make, {"pipeline": group, **options}, "run1")
                said |= {problem.where: str(problem) for problem in raised.value.problems}
    finally:
        cluster.grant(own_groups)
    commands = {
        where: re.findall("`kafka-acls.sh .* --allow-principal User:airflow (--.*)`", text) for where, text in said.items()
    }
    of_page: dict[tuple[ResourceType, str], set[AclOperation]] = {}
    for acl in granted:
        of_page.setdefault((acl.restype, {GROUP: group}.get(acl.name, acl.name)), set()).add(acl.operation)
    of_page[ResourceType.GROUP, f"{LEDGER}.{group}"] = of_page.pop((ResourceType.GROUP, f"{LEDGER}."))
    for (command,) in commands.values():
        acls = list(bindings(f"acls {command}"))
        assert {acl.operation for acl in acls} == of_page.pop((acls[0].restype, acls[0].name))
    assert of_page.keys() == {(ResourceType.TRANSACTIONAL_ID, f"{LEDGER}.")}, "brokers do not say what a user may do with an id"
    assert f"rights Read, Write on topic `{LEDGER}`" in said["ledger_topic"]
    assert f"right Read on group `{group}`" in said["group_id"]
    assert f"right Describe on group `{LEDGER}.{group}`" in said["consumer group"]
