"""Arguments of wrong types: the validation names each of them, raises no other error, and still reports other mistakes.

No server is started and no connection is defined, so checks of servers end with the look-up.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from airflow.sdk import literal

from airflow_kafka_spark import formats, sinks, sources, transforms
from airflow_kafka_spark.arguments import find_type_problems, replace_wrong_arguments, replace_wrong_types
from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats import Avro, Debezium, Json, JsonSchema, Protobuf
from airflow_kafka_spark.operators import (
    KafkaToKafkaOperator,
    KafkaToSinkOperator,
    PipelineOffsetsOperator,
    SourceToKafkaOperator,
    VerifyOperator,
)
from airflow_kafka_spark.sensors import KafkaIntervalSensor, KafkaLagSensor, KafkaWindowSensor, SourceLogSensor
from airflow_kafka_spark.sinks import FilesSink, KafkaSink, PostgresSink
from airflow_kafka_spark.sources import JdbcSource
from airflow_kafka_spark.transforms import Condition, Filter, Sql, Transform
from tests.support.runs import context

SCHEMA = "id bigint, customer string"
IMPORTING = 'syntax = "proto3"; import "money.proto"; message Order { int64 id = 1; }'
NOWHERE = {"task_id": "task", "kafka_conn_id": "nowhere", "spark_conn_id": "nowhere"}
WRONG: tuple[Any, ...] = (object(), 5, [None], {5: None})


def to_sink(**options: Any) -> KafkaToSinkOperator:
    given = {"topics": "orders", "group_id": "group", "value": Json(schema=SCHEMA), "sink": FilesSink("/table")}
    return KafkaToSinkOperator(**{**NOWHERE, **given, **options})


def test_typical_mistakes_are_named_with_what_to_write_instead(monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_HOST_AND_PORT", "kafka://broker:9092")
    monkeypatch.setenv("AIRFLOW_CONN_LISTED", '{"conn_type": "kafka", "extra": "[1]"}')
    sasl = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "SASL_PLAINTEXT"}
    monkeypatch.setenv("AIRFLOW_CONN_KERBEROS", json.dumps({"conn_type": "kafka", "extra": sasl}))
    monkeypatch.setenv("AIRFLOW_CONN_YARN", '{"conn_type": "spark", "host": "yarn"}')
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"value": Json}, r"value: .*Write `Json\(...\)`"),
        ({"value": Json(schema={"id": "bigint"})}, r'columns as a text, as "id bigint, name string"'),
        ({"value": Json()}, r"as in `id bigint, name string`"),
        ({"value": Avro(schema="schemas/order.avsc")}, "it is no JSON.*Give the text of the file, not its name"),
        ({"value": Protobuf(schema=IMPORTING, message="Order")}, r"money\.proto: File not found.*protoc --include_imports"),
        ({"kafka_conn_id": "host_and_port"}, r"its extra names no brokers. Set its extra to"),
        ({"kafka_conn_id": "listed"}, "its extra is a list; expected a JSON object"),
        ({"kafka_conn_id": "kerberos"}, "Set `sasl.mechanism` in its extra; without it, librdkafka uses GSSAPI"),
        ({"spark_conn_id": "yarn"}, r"Neither HADOOP_CONF_DIR nor YARN_CONF_DIR .*Set one of them"),
    ]
    for options, expected in cases:
        with pytest.raises(ValidationError, match=expected):
            to_sink(**options).execute(context("run"))


def test_a_template_that_is_not_rendered_is_named_where_it_stands():
    chain = [
        Filter(predicate=Condition("day = '{{ ds }}'"), to=FilesSink("/{{ ds }}", partition_by=["{{ day }}"])),
        Sql({"a": "{%x%}"}),
    ]
    wrong = {"spark_conf": {"spark.app.name": "{{ dag.dag_id }}"}, "split_records": "{{ params.n }}", "transforms": chain}
    found = complaints(to_sink(**wrong, sink=PostgresSink("{{ conn }}", "{{ table }}", windows_table="w", mode="{{ mode }}")))
    by_argument = {problem.where: f"{problem.what}. {problem.action}" for problem in found}
    rendered = "Write the value itself; PostgresSink renders templates in conn_id, table"
    assert by_argument["sink.mode"].startswith(f"`{{{{ mode }}}}` is a template, and this argument renders none. {rendered}")
    assert by_argument["transforms[0] Filter.predicate.sql"] == (
        "`{{ ds }}` is a template, and this argument renders none. Write the value itself. If it is no template: "
        "`airflow.sdk.literal(...)`"
    )
    assert {"spark_conf", "transforms[0] Filter.to.partition_by", "transforms[1] Sql.columns"} <= set(by_argument)
    assert not {"sink.table", "sink.conn_id", "transforms[0] Filter.to.path"} & {
        p.where for p in found if "is a template" in p.what
    }
    assert by_argument["split_records"].startswith("`{{ params.n }}` is a template")
    assert len(by_argument) == len(found), "each argument once"
    (wrong,) = complaints(
        KafkaLagSensor(task_id="lag", group_id="g", topics="orders", at_most_records=0, wait_for_topic="{{ x }}")
    )
    assert wrong.action == "Write the value itself: this argument renders no templates"
    # The braces of a document are no template; one in place of a document is.
    nested = json.dumps({"type": "object", "properties": {"id": {"type": "integer", "description": "as {{id}}"}}})
    assert [p for p in complaints(to_sink(value=JsonSchema(schema=nested))) if p.where.startswith("value")] == []
    assert "{{ schema }}" in next(p.what for p in complaints(to_sink(value=Json("{{ schema }}"))) if p.where == "value.schema")


def test_a_template_in_a_path_that_renders_to_nothing_names_no_directory_above():
    for template, made in (("/lake/{{ params.x }}", "/lake/"), ("s3://lake/{{ params.x }}/orders", "s3://lake//orders")):
        operator = to_sink(sink=FilesSink(template))
        operator.render_template_fields({"params": {}})
        found = next(p.what for p in complaints(operator) if p.where == "sink.path")
        assert found == f"`{template}` renders to `{made}`: a value in it is empty"
    operator = to_sink(sink=FilesSink("/lake/orders{{ params.suffix }}"))
    operator.render_template_fields({"params": {}})
    assert [p for p in complaints(operator) if "renders to" in p.what] == [], "a suffix may be empty"


def test_a_text_with_braces_that_is_no_template_is_wrapped_in_a_literal():
    chain = [
        Filter(predicate=Condition(literal("day = '{{ ds }}'")), to=FilesSink("/x", partition_by=[literal("{{ day }}")])),
        Sql({"a": literal("'{%x%}'")}),
    ]
    operator = to_sink(transforms=chain, value=Json(literal("id bigint, `{{ a }}` string")))
    assert [p for p in complaints(operator) if "template" in p.what] == []
    condition, sql = operator.transforms
    assert (condition.predicate.sql, condition.to.partition_by, sql.columns) == (
        "day = '{{ ds }}'",
        ("{{ day }}",),
        {"a": "'{%x%}'"},
    )
    assert [column.name for column in operator.value.columns] == ["id", "{{ a }}"]
    # Airflow itself removes it where templates are rendered.
    operator = to_sink(sink=PostgresSink("w", literal('"{{ t }}"')))
    operator.render_template_fields({})
    assert operator.sink.table == '"{{ t }}"'
    table, lake = JdbcSource("shop", "t", cursor=literal("{{ id }}")), FilesSink("/x", partition_by=[literal("{{ day }}")])
    verify = VerifyOperator(task_id="v", source=table, sink=lake)
    assert [p for p in complaints(verify) if "template" in p.what] == []
    assert verify.sink.partition_by == ("{{ day }}",)


def test_a_sink_of_another_operator_is_named_with_those_that_take_it():
    table, source = PostgresSink("warehouse", "orders"), JdbcSource("nowhere", "orders")
    for make, given, users in (
        (to_sink, KafkaSink(topic="b"), "A KafkaSink is for KafkaToKafkaOperator and SourceToKafkaOperator"),
        (to_kafka, table, "A PostgresSink is for KafkaToSinkOperator"),
        (from_source, table, "A PostgresSink is for KafkaToSinkOperator"),
        (to_sink, source, "A JdbcSource is for SourceToKafkaOperator"),
    ):
        assert users in [problem.action for problem in complaints(make(sink=given)) if problem.where == "sink"]


def test_an_unknown_argument_is_refused_with_the_one_that_is_meant() -> None:
    for name, meant in (
        ("topic", "topics"),
        ("max_record", "max_records"),
        ("retires", "retries"),
        ("errors_tolerence", "errors_tolerance"),
    ):
        with pytest.raises(TypeError, match=f"Did you mean `{meant}` for `{name}`"):
            to_sink(**{name: "x"})
    parts: list[tuple[Any, str, str]] = [
        (PostgresSink, "tabel", "table"),
        (JdbcSource, "tabl", "table"),
        (Json, "shema", "schema"),
    ]
    parts += [(Condition, "sqll", "sql"), (Sql, "colums", "columns"), (KafkaSink, "tpic", "topic")]
    # Required arguments are missing, too. The misspelt one explains that.
    parts += [
        (partial(KafkaToSinkOperator, task_id="task"), "group_Id", "group_id"),
        (partial(KafkaToSinkOperator.partial, task_id="task"), "group_Id", "group_id"),
        (partial(PipelineOffsetsOperator, task_id="task"), "pipelin", "pipeline"),
        (partial(KafkaLagSensor, task_id="task"), "grup_id", "group_id"),
    ]
    for part, name, meant in parts:
        with pytest.raises(TypeError, match=f"Did you mean .?{meant}.?"):
            part(**{name: "x"})
    with pytest.raises(TypeError, match="something_else") as error:
        to_sink(something_else=1, retries=3)
    assert "Did you mean" not in str(error.value)


def test_a_users_subclass_may_take_arguments_of_its_own_out_of_its_keywords() -> None:
    class Named(KafkaToSinkOperator):
        def __init__(self, **kwargs: Any) -> None:
            self.topic = kwargs.pop("topic")
            super().__init__(topics=self.topic, **kwargs)

    made = Named(task_id="task", topic="orders", group_id="g", value=Json(schema=SCHEMA), sink=FilesSink("/data/orders"))
    assert (made.topic, made.topics) == ("orders", "orders")


def to_kafka(**options: Any) -> KafkaToKafkaOperator:
    return KafkaToKafkaOperator(**{**NOWHERE, "topics": "a", "group_id": "group", "sink": KafkaSink(topic="b"), **options})


def from_source(**options: Any) -> SourceToKafkaOperator:
    source = JdbcSource(conn_id="nowhere", table="orders", cursor="id")
    return SourceToKafkaOperator(**{**NOWHERE, "source": source, "sink": KafkaSink(topic="b"), **options})


def complaints(operator: Any) -> list[Problem]:
    """Return the problems that a run reports. A run without a problem would need the connections."""
    with pytest.raises(ValidationError) as caught:
        operator.execute(context("run"))
    assert str(caught.value)
    return list(caught.value.problems)


def arguments(cls: type) -> Iterator[str]:
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD and name != "task_id":
            yield name


def refused(make: Callable[..., Any], cls: type, given: dict[str, Any], expected: str) -> None:
    """Check that each argument of a class with each wrong value is a problem under its name, or no problem, and that no other
    error is raised.

    :param make: returns the operator with an instance of the class.
    :param expected: what the name of an argument is put into.
    """
    for name in arguments(cls):
        for value in WRONG:
            found = complaints(make(cls(**{**given, name: value})))
            if value is WRONG[0] and not issubclass(cls, Transform | formats.Format):
                assert any(expected.format(name) in p.where for p in found), (cls.__name__, name, found)


@pytest.mark.parametrize("make", [to_sink, to_kafka, from_source])
def test_of_an_operator(make):
    for name in arguments(type(make())):
        for value in WRONG:
            found = complaints(make(**{name: value}))
            if value is WRONG[0]:
                assert any(name in p.where for p in found), (name, found)


def list_classes(package: ModuleType, base: type) -> list[type]:
    """Return the public classes of a package that users construct."""
    found = [getattr(package, name) for name in package.__all__]
    return [cls for cls in found if inspect.isclass(cls) and issubclass(cls, base) and not inspect.isabstract(cls)]


def require_arguments(cls: type) -> dict[str, str]:
    """Return a text for each argument that a class needs."""
    return {name: "x" for name, parameter in inspect.signature(cls).parameters.items() if parameter.default is parameter.empty}


@pytest.mark.parametrize("cls", list_classes(sinks, sinks.Sink))
def test_of_a_sink_and_of_one_that_a_filter_names(cls):
    given = require_arguments(cls)
    refused(lambda sink: to_sink(sink=sink), cls, given, "sink.{}")
    refused(lambda sink: to_sink(transforms=[Filter(predicate=Condition("id > 1"), to=sink)]), cls, given, "Filter.to.{}")


@pytest.mark.parametrize("make", [to_kafka, from_source])
def test_of_a_topic(make):
    refused(lambda sink: make(sink=sink), KafkaSink, {"topic": "b"}, "sink.{}")


@pytest.mark.parametrize("cls", list_classes(sources, sources.RowSource))
def test_of_a_source(cls):
    refused(lambda source: from_source(source=source), cls, require_arguments(cls), "source.{}")


def test_of_no_transforms():
    for make in (to_sink, to_kafka, from_source):
        assert make(transforms=None).transforms == ()


def test_of_formats_and_transforms():
    for name in set(formats.__all__) - {"Format"}:
        given = {"value": Json(schema=SCHEMA)} if name == "Debezium" else {}
        refused(lambda value: to_sink(value=value), getattr(formats, name), given, "value")
    for cls in list_classes(transforms, Transform):
        refused(lambda transform: to_sink(transforms=[transform]), cls, require_arguments(cls), "transforms")


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (KafkaLagSensor, {"group_id": "group", "topics": "orders", "at_most_records": 1}),
        (KafkaIntervalSensor, {"topics": "orders", "end": "2026-01-01T00:00:00Z"}),
        (KafkaWindowSensor, {"pipeline": "orders", "after": 1}),
    ],
)
def test_of_a_sensor(cls, given):
    for name in arguments(cls):
        for value in (object(), [None]):
            for deferrable in (False, True):
                sensor = cls(**{"task_id": "task", "deferrable": deferrable, **given, name: value})
                assert any(name in p.where for p in complaints(sensor)), name
    optional = {"at_most_seconds": "{{ x }}"} if cls is KafkaLagSensor else {}
    sensor = cls(**{"task_id": "task", **given, **optional, "kafka_conn_id": "{{ x }}"})
    sensor.render_template_fields({"x": None})
    assert {p.where: p.what for p in complaints(sensor)} == {
        "kafka_conn_id": "`{{ x }}` renders to `None`: a value in it is None"
    }
    wrong = {"retry_timeout": "long", "wait_for_topic": 1, "ledger_topic" if "pipeline" in given else "topics": 5}
    assert {p.where for p in complaints(cls(**{"task_id": "task", **given, **wrong}))} == set(wrong)


@pytest.mark.parametrize("action", ["show", "plan", "reset", "replay", "rename"])
def test_of_the_operator_of_offsets(action):
    given = {"pipeline": "orders", "why": "a test", "action": action, "new_name": "new"}
    given |= {"reset": {"to": "earliest"}, "replay": {"window": 1}}.get(action, {})
    only = {"to": ("reset",), "starting_offsets": ("plan",), "ending_offsets": ("plan",)}
    for name in arguments(PipelineOffsetsOperator):
        if action in only.get(name, (action,)):
            operator = PipelineOffsetsOperator(**{"task_id": "task", **given, name: object()})
            assert any(p.where == name for p in complaints(operator)), name


def test_other_mistakes_are_named_beside_wrong_types_and_nothing_is_made_up():
    sink = PostgresSink(conn_id="nowhere", table=5, mode="upsertt", lock_timeout="long", delete_enabled="yes", keep_windows=0)
    wrong = {"topics": 5, "group_id": ["a"], "data_loss": "maybe", "spark_conf": "x", "keep_windows": "all", "max_errors": 0.5}
    found = complaints(to_sink(sink=sink, **wrong, value=Json(schema="id bigintt"), errors_skip="no"))
    assert {p.where for p in found} == {
        *wrong, "value.schema", "errors_skip", "kafka_conn_id", "spark_conn_id", "sink.conn_id",
        *(f"sink.{name}" for name in ("table", "mode", "lock_timeout", "delete_enabled", "keep_windows")),
    }  # fmt: skip
    assert "spark_conf: it is of type str; expected a mapping (dict) with a text as key and a text as value or None." in map(
        lambda p: str(p).partition(" Correct")[0], found
    )
    found = complaints(from_source(sink="topic", transforms=["x"], errors_tolerance="some", read_with=5))
    assert {p.where.partition(" ")[0] for p in found} >= {"sink", "transforms[0]", "errors_tolerance", "read_with"}
    found = complaints(to_kafka(sink="topic", value=Debezium("json"), filter=5, max_records="many"))
    assert {p.where for p in found} >= {"sink", "value.value", "filter", "max_records"}


def test_an_entry_of_a_mapping_is_named_and_templates_and_subclasses_are_taken():
    (problem,) = find_type_problems(KafkaSink(topic="b", topic_config={"a": "1", "retention.ms": 5}))  # type: ignore[dict-item]
    expected = "its value for `'retention.ms'` is of type int; expected a mapping (dict) with a text as key and a text as value"
    assert problem.what == expected

    class Text(str):
        """A string as rendered templates are."""

    assert find_type_problems(PostgresSink(Text("a"), Text("b"), mode=Text("append"), key=[Text("c")])) == []  # type: ignore[arg-type]

    class Own(KafkaToSinkOperator):
        def __init__(self, *, pool: int = 0, **options: Any) -> None:
            super().__init__(**options)

    assert (
        replace_wrong_arguments(Own(task_id="task", topics="a", group_id="g", value=Json("id int"), sink=FilesSink("/x")))[1]
        == []
    )


def test_a_mapping_is_not_shown_and_lists_become_tuples():
    settings = KafkaSink(topic="b", producer_config=["sasl.password=secret-word"], key=["id"])  # type: ignore[arg-type]
    (problem,) = find_type_problems(settings, "sink.")
    assert problem.where == "sink.producer_config" and "secret-word" not in str(problem)
    sound, found = replace_wrong_types(settings, "sink.")
    assert found == [problem] and sound.producer_config == {} and sound.key == ["id"]
    assert JdbcSource(conn_id="a", table="b", key="id").key == ("id",)
    assert JdbcSource(conn_id="a", table="b", key=["id", "line"]).key == ("id", "line")


def test_all_that_is_wrong_with_a_sensor_of_a_log_and_with_a_verification_is_named_at_once():
    table = JdbcSource("nowhere", "orders")
    with pytest.raises(ValidationError) as caught:
        SourceLogSensor(task_id="log", source=table, pipeline=" ", at_most_bytes=-1).execute({})
    assert [problem.where for problem in caught.value.problems] == ["source", "pipeline", "at_most_bytes"]
    with pytest.raises(ValidationError) as caught:
        VerifyOperator(task_id="v", source=table, sink=FilesSink("/lake", format="csv"), where="id > 5").execute({})
    assert [problem.where for problem in caught.value.problems] == ["source.conn_id", "sink.format", "sink_where"]
