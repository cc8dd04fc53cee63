"""Options of operators in a DAG file: groups, templates, mapped tasks and what Airflow serializes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from datetime import timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG

try:
    from airflow.serialization.serialized_objects import DagSerialization
except ImportError:  # Airflow 3.0 and 3.1
    from airflow.serialization.serialized_objects import SerializedDAG as DagSerialization

from airflow_kafka_spark.bad_records.options import ErrorOptions
from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.formats import Json, Raw
from airflow_kafka_spark.operators import (
    KafkaToKafkaOperator,
    KafkaToSinkOperator,
    PipelineOffsetsOperator,
    SourceToKafkaOperator,
    VerifyOperator,
)
from airflow_kafka_spark.operators.binding import Run
from airflow_kafka_spark.operators.options import FollowOptions, ReadOptions, WindowOptions
from airflow_kafka_spark.operators.publishing import find_cluster_problems, find_sink_problems
from airflow_kafka_spark.sensors import KafkaLagSensor, SourceLogSensor
from airflow_kafka_spark.sinks import FilesSink, KafkaSink
from airflow_kafka_spark.sources import FilesSource, JdbcSource, PostgresCdcSource
from airflow_kafka_spark.sources.kafka.topics import Subscription
from airflow_kafka_spark.transforms import Condition, Filter

RUN = Run("d", "r", "t")


def to_files(**options):
    given = {"task_id": "t", "topics": "a", "group_id": "g", "value": Raw(), "sink": FilesSink("/tmp/x"), **options}
    return KafkaToSinkOperator(**given)


def test_a_rendered_template_is_in_the_group_of_its_option():
    names = {"group_id": "g-{{ x }}", "pipeline": "{{ x }}", "follows": "{{ x }}", "spark_conn_id": "spark-{{ x }}"}
    made = to_files(topics=["{{ x }}-1"], max_records="{{ 6 * 7 }}", **names)
    made.render_template_fields({"x": "orders"})
    assert made.read_options.subscription.topics == ("orders-1",)
    assert made.read_options.group_id == made.group_id == "g-orders"
    assert made.read_options.record_limit == 42
    assert made.ledger_options.pipeline == made.pipeline == "orders"
    assert made.follow_options.follows == "orders"
    assert made.spark.spark_conn_id == "spark-orders"


def test_a_dead_letter_topic_that_renders_to_nothing_is_none():
    made = to_files(errors_deadletterqueue_topic_name="{{ none_given }}")
    made.render_template_fields({"none_given": ""})
    assert made.errors.topic is None


def test_names_of_dag_and_task_that_are_too_long_for_a_pipeline_say_how_to_give_another_name():
    (problem,) = to_files().find_pipeline_problems(Run("d" * 150, "r", "t" * 60))
    assert (problem.where, problem.action.endswith("`pipeline=` gives it another one")) == ("pipeline", True)


def test_groups_are_frozen():
    with pytest.raises(FrozenInstanceError):
        to_files().read_options.group_id = "other"


def test_options_that_exclude_each_other_are_found_without_a_server():
    read = ReadOptions("a", None, "g", max_records=5, ending_offsets="2026-01-01T00:00:00Z")
    assert [p.where for p in FollowOptions("up").find_problems(read)] == ["max_records", "ending_offsets"]
    window = WindowOptions("interval", timedelta(seconds=-1))
    assert {p.where for p in window.find_problems(read, FollowOptions("up"))} == {
        "grace",
        "max_records",
        "follows",
        "ending_offsets",
    }
    assert [p.where for p in ReadOptions(None, None, "", read_with="x").find_problems()] == ["topics", "read_with", "group_id"]


@pytest.mark.parametrize(
    "make",
    [
        lambda sink, **o: KafkaToKafkaOperator(task_id="t", topics="a", group_id="g", sink=sink, **o),
        lambda sink, **o: SourceToKafkaOperator(task_id="t", source=FilesSource("/tmp/x", "json"), sink=sink, **o),
    ],
)
class TestSinkOfAnOperatorThatPublishes:
    def test_it_takes_the_operators_connection(self, make):
        made = make(KafkaSink(topic="b"), kafka_conn_id="second")
        assert made.sink.conn_id == "second"
        assert [outlet.uri for outlet in made.outlets] == ["kafka://second/b"]

    def test_another_connection_is_refused(self, make):
        made = make(KafkaSink(topic="b", conn_id="third"), kafka_conn_id="second")
        assert [p.where for p in find_cluster_problems(made.sink, made.kafka_conn_id)] == ["sink.conn_id"]

    def test_a_template_of_the_connection_is_rendered_for_both(self, make):
        made = make(KafkaSink(topic="b-{{ x }}"), kafka_conn_id="{{ x }}")
        made.render_template_fields({"x": "second"})
        assert (made.kafka_conn_id, made.sink.conn_id, made.sink.topic) == ("second", "second", "b-second")
        assert not find_cluster_problems(made.sink, made.kafka_conn_id)

    def test_another_kind_of_sink_is_a_problem(self, make):
        made = make(FilesSink("/tmp/x"))
        assert [p.where for p in find_sink_problems(made.sink)] == ["sink"]


def test_a_key_is_a_column_or_several():
    assert KafkaSink("t").key_columns == ()
    assert KafkaSink("t", key="id").key_columns == ("id",)
    assert KafkaSink("t", key=["a", "b"]).key_columns == ("a", "b")


def test_following_takes_everything_that_was_published():
    options = {"task_id": "t", "topics": "a", "group_id": "g", "sink": KafkaSink("b")}
    assert KafkaToKafkaOperator(**options).max_records == 10_000_000
    assert KafkaToKafkaOperator(**options, follows="up").max_records is None
    assert KafkaToKafkaOperator(**options, max_records=None).max_records is None


def test_mapped_tasks_are_made_of_a_serialized_dag():
    with DAG("d", schedule=None) as dag:
        names = ["a", "b"]
        KafkaToSinkOperator.partial(task_id="files", group_id="g", value=Json(schema="id bigint"), sink=FilesSink("/x")).expand(
            topics=names
        )
        KafkaToKafkaOperator.partial(task_id="copy", topics="a", group_id="g").expand(sink=[KafkaSink(name) for name in names])
        SourceToKafkaOperator.partial(task_id="publish", source=FilesSource("/x", "json"), kafka_conn_id="second").expand_kwargs(
            [{"sink": KafkaSink(name), "pipeline": f"to-{name}"} for name in names]
        )
    read = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    assert {task.task_id for task in read.tasks} == {"files", "copy", "publish"}
    made = dag.get_task("copy").unmap({"sink": KafkaSink("b")})
    assert (made.sink.topic, made.sink.conn_id, made.read_options.group_id) == ("b", "kafka_default", "g")
    made = dag.get_task("publish").unmap({"sink": KafkaSink("b"), "pipeline": "to-b"})
    assert (made.sink.conn_id, made.ledger_options.pipeline) == ("second", "to-b")
    made = dag.get_task("files").unmap({"topics": "b"})
    made.render_template_fields({})
    assert made.subscription.topics == ("b",)


def test_sinks_sources_and_sensors_of_mapped_tasks_have_their_templates_rendered_and_checked():
    with DAG("d", schedule=None, params={"x": None}) as dag:
        path, routed = "/x/{{ ti.map_index }}", Filter(predicate=Condition("id > 0"), to=FilesSink("/y/{{ params.x }}"))
        common = {"group_id": "g", "value": Json(schema="id bigint"), "sink": FilesSink(path)}
        KafkaToSinkOperator.partial(task_id="sink", transforms=[routed], **common).expand(topics=["a", "b"])
        SourceToKafkaOperator.partial(task_id="source", sink=KafkaSink("t-{{ ti.map_index }}")).expand(
            source=[FilesSource(path, "json")]
        )
        VerifyOperator.partial(task_id="verify", sink=FilesSink(path)).expand(
            source=[JdbcSource("{{ params.x }}", "t", cursor="id")]
        )
        KafkaLagSensor.partial(task_id="sensor", topics="a").expand(group_id=["g-{{ params.x }}"])
        SourceLogSensor.partial(task_id="log", pipeline="{{ params.x }}").expand(
            source=[PostgresCdcSource("{{ params.x }}", slot="s", publication="p", topic_prefix="t", tables="a")]
        )
        PipelineOffsetsOperator.partial(task_id="rename", action="rename", why="w", pipeline="p").expand(
            new_name=["{{ params.x }}"]
        )
    made, none = {}, {}
    for task in dag.tasks:
        ti = SimpleNamespace(map_index=0, task=task)
        context = {"ti": ti, "dag": dag, "dag_run": SimpleNamespace(conf={}), "expanded_ti_count": 1}
        task.render_template_fields(context)
        made[task.task_id] = ti.task
        none[task.task_id] = [problem.where for problem in ti.task.rendered_none]
    assert (made["sink"].sink.path, made["source"].source.path, made["source"].sink.topic) == ("/x/0", "/x/0", "t-0")
    assert made["verify"].sink.path == "/x/0"
    assert none == {
        "sink": ["transforms[0] Filter.to.path"],
        "source": [],
        "verify": ["source.conn_id"],
        "sensor": ["group_id"],
        "log": ["pipeline", "source.conn_id"],
        "rename": ["new_name"],
    }
    for task in ("log", "rename"):
        with pytest.raises(ValidationError, match="renders to `None`"):
            made[task].execute({})


def test_an_option_from_another_task_makes_this_one_depend_on_it():
    from airflow.providers.standard.operators.empty import EmptyOperator

    with DAG("d", schedule=None):
        before = EmptyOperator(task_id="before")
        after = to_files(starting_offsets=before.output, upstream_counts=before.output)
    assert after.upstream_task_ids == {"before"}


def test_default_args_reach_every_option():
    with DAG("d", schedule=None, default_args={"kafka_conn_id": "second", "errors_tolerance": "all", "keep_windows": 7}):
        made = to_files()
    assert (made.kafka_conn_id, made.errors.tolerance, made.ledger_options.keep_windows) == ("second", "all", 7)


def test_names_that_no_topic_may_have_are_named_without_a_server_and_beside_other_mistakes():
    errors = ErrorOptions(tolerance="all", topic="bad topic!", most=5.5).find_problems()
    assert [problem.where for problem in errors] == ["errors_deadletterqueue_topic_name", "max_errors"]
    sink = KafkaSink(topic="no where", auto_create=True, transaction_timeout=0).find_problems(None)
    assert [problem.where for problem in sink] == ["sink.topic", "sink.transaction_timeout"]
    (topics,) = Subscription.of(5, None).validate()  # type: ignore[arg-type]
    assert "`5 (int)` cannot be a topic's name" in topics.what
    for given, action in (
        ("orders-*", "as `topics_pattern`"),
        ("['a', 'b']", "`topics=task.output`"),
        ("a b", "letters, digits"),
    ):
        assert all(action in problem.action for problem in Subscription.of(given, None).validate())
    (pattern,) = Subscription.of(None, "*").validate()
    assert "nothing to repeat" in pattern.what and "`.*` stands for any text" in pattern.action
    files = FilesSink("relative", format="parquett").find_target_problems()  # type: ignore[arg-type]
    assert [problem.where for problem in files] == ["sink.path", "sink.format"]
