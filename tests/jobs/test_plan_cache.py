"""Plans that are kept between tasks: which chains have one, and what leads to another one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.formats import Json, Raw
from airflow_kafka_spark.hooks.spark import hook as hooks
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from airflow_kafka_spark.jobs import plan_cache
from airflow_kafka_spark.jobs.chain import SinkChain, TopicChain
from airflow_kafka_spark.jobs.plan_cache import PlanFile
from airflow_kafka_spark.jobs.publish import SqlProjection, check_change
from airflow_kafka_spark.jobs.tasks.layout import RowLayout
from airflow_kafka_spark.jobs.tasks.publish import TopicRules
from airflow_kafka_spark.sinks import FilesSink
from airflow_kafka_spark.transforms import (
    Cast,
    Condition,
    Filter,
    InsertField,
    Python,
    RegexRouter,
    ReplaceField,
    Sql,
    Transform,
)
from tests.support.pipelines import SPARK

VALUE = Json("id bigint, amount decimal(16,2), name string")
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
CHAIN = SinkChain(VALUE, None, (Cast({"id": "string"}),), (("offset", "kafka_offset"),), "fail")


@pytest.fixture(autouse=True)
def plans(monkeypatch, tmp_path) -> Path:
    """Keep plans in a directory of the test, and use none of this process's sessions."""
    monkeypatch.setattr(plan_cache, "find_cache_directory", lambda: tmp_path)
    monkeypatch.setattr(hooks, "_has_session_of_others", lambda: False)
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    return tmp_path / "plans"


@pytest.fixture
def not_started(monkeypatch) -> None:
    """Let settings be those of a Spark that has not been started, and refuse to start it."""
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    refuse_sessions(monkeypatch)


def refuse_sessions(monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Spark was asked for a session")

    monkeypatch.setattr(SparkHook, "open_session", refuse)


def find(chain: SinkChain, spark: SparkHook | None = None, schema: pa.Schema = SCHEMA) -> Path | None:
    found = PlanFile.find(spark or SparkHook(), chain.definition, schema)
    return found and found.path


def chain_of(*transforms: Transform) -> SinkChain:
    return replace(CHAIN, transforms=transforms)


@pytest.mark.usefixtures("not_started")
def test_equal_chains_have_one_file_and_all_others_have_files_of_their_own():
    others = [
        replace(CHAIN, value=Json("id bigint, amount decimal(16,3), name string")),
        replace(CHAIN, key=Raw()),
        replace(CHAIN, metadata=(("offset", "at"),)),
        replace(CHAIN, null_values="ignore"),
        chain_of(),
        chain_of(Cast({"id": "int"})),
        chain_of(Cast({"id": "string"}, of="key")),
        chain_of(Cast({"id": "string"}, predicate=Condition("id > 1"))),
        chain_of(Cast({"id": "string"}, predicate=Condition("id > 2"))),
        chain_of(Cast({"id": "string"}, predicate=Condition("id > 2"), negate=True)),
        chain_of(Cast({"id": "string"}), Cast({"id": "string"})),
        chain_of(Filter(predicate=Condition("id > 1"))),
        chain_of(Filter(predicate=Condition("id > 1"), to="large")),
        chain_of(Filter(predicate=Condition("id > 1"), to=FilesSink("/lake"))),
        chain_of(InsertField(static_field="n", static_value="1")),
        chain_of(RegexRouter("a", "b")),
        chain_of(ReplaceField(include=["id", "name"])),
        chain_of(ReplaceField(include=["id,name"])),
        chain_of(ReplaceField(exclude=["id", "name"])),
        chain_of(Sql({"a": "id", "b": "name"})),
        chain_of(Sql({"b": "name", "a": "id"})),
        chain_of(Sql(filter="id > 1")),
    ]
    files = [find(CHAIN), *map(find, others), find(CHAIN, schema=SCHEMA.append(pa.field("x", pa.int8())))]
    assert None not in files
    assert len(set(files)) == len(files)
    assert find(chain_of(Cast({"id": "string"}))) == files[0]


def call(frame):
    return frame


@dataclass(frozen=True)
class OfUser(Cast):
    """A transform of a user's module: its code may change while its options do not."""


@pytest.mark.usefixtures("not_started")
@pytest.mark.parametrize(
    "transform",
    [
        call,
        Python(call),
        OfUser({"id": "string"}),
        # Spark replaces these when it parses them.
        Sql(filter="at < DATE 'today'"),
        Sql(filter="at < timestamp'NOW'"),
        Sql(filter="at < timestamp_ntz 'yesterday UTC'"),
        Sql(filter="at < date r'tomorrow'"),
        Sql(filter=r"at < date 't\oday'"),
        Sql(filter="at < date 't\\u006fday'"),
        Sql(filter=r"at < date 't\157day'"),
        Sql({"a": "${env:HOME}"}),
        Cast({"id": "string"}, predicate=Condition("name = '${spark.app.name}'")),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_a_chain_whose_results_its_text_does_not_determine_is_not_kept(transform):
    assert find(chain_of(transform)) is None


def connect(monkeypatch, extra: dict[str, object], conf: dict[str, str] | None = None, host: str = "local[2]") -> SparkHook:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": host, "extra": extra}))
    return SparkHook(conf=conf)


@pytest.mark.usefixtures("not_started")
def test_settings_and_software_lead_to_another_file(monkeypatch, tmp_path):
    spark_home = tmp_path / "spark"
    (spark_home / "jars").mkdir(parents=True)
    (tmp_path / "conf").mkdir()
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))

    def change_file(name: str) -> None:
        (tmp_path / name).write_text("spark.sql.ansi.enabled false", encoding="utf-8")

    changes: Sequence[Callable[[], object]] = [
        lambda: None,
        lambda: monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--conf spark.sql.ansi.enabled=false pyspark-shell"),
        lambda: monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Dspark.sql.ansi.enabled=false"),
        lambda: change_file("conf/spark-defaults.conf"),
        lambda: monkeypatch.setenv("SPARK_HOME", str(spark_home)),
        lambda: change_file("spark/jars/extension.jar"),
        lambda: monkeypatch.setattr(plan_cache, "_list_software", lambda: ("pyspark 5",)),
    ]
    files = []
    for change in changes:
        change()
        files.append(find(CHAIN))
    settings = [
        {"spark.sql.ansi.enabled": "false"},
        {"spark.sql.extensions": "a.B"},
        {"spark.driver.extraJavaOptions": "-Dspark.sql.caseSensitive=true"},
    ]
    files += [find(CHAIN, connect(monkeypatch, {}, conf)) for conf in settings]
    files += [find(CHAIN, connect(monkeypatch, {"spark.sql.ansi.enabled": False, "spark.sql.legacy.x": 1}))]
    assert None not in files
    assert len(set(files)) == len(files)
    # What does not concern SQL.
    same = connect(monkeypatch, {"keep_alive": "5m", "spark.executor.memory": "1g", "spark.hadoop.fs.s3a.secret.key": "geheim"})
    assert find(CHAIN, same) == find(CHAIN, connect(monkeypatch, {}))


@pytest.mark.usefixtures("not_started")
def test_a_jar_or_a_file_of_settings_that_changes_under_its_name_leads_to_another_file(monkeypatch, tmp_path):
    (tmp_path / "day=1").mkdir()
    jar, properties = tmp_path / "day=1" / "extension.jar", tmp_path / "day=1" / "spark.properties"
    named = connect(monkeypatch, {"spark.sql.extensions": "a.B", "spark.jars": f"file:{jar}"})
    files = []
    for size in (1, 2):
        jar.write_bytes(b"x" * size)
        files.append(find(CHAIN, named))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--properties-file {properties} pyspark-shell")
    for size in (1, 2):
        properties.write_bytes(b"x" * size)
        files.append(find(CHAIN, named))
    assert None not in files
    assert len(set(files)) == 4


def test_every_module_that_takes_part_in_a_plan_leads_to_another_file_when_it_changes():
    described = " ".join(plan_cache._list_software())
    assert all(name in described for name in ("jobs/arrow.py", "jobs/tasks/arrow.py", "transforms/fields.py", "json/format.py"))
    assert pa.__version__ in described and pyspark.__version__ in described


def test_plans_are_not_kept_for_a_connect_server_other_sessions_or_if_switched_off(monkeypatch):
    assert find(CHAIN, connect(monkeypatch, {"plan_cache": False})) is None
    assert find(CHAIN, connect(monkeypatch, {}, host="sc://head")) is None
    monkeypatch.setattr(hooks, "_has_session_of_others", lambda: True)
    assert find(CHAIN, connect(monkeypatch, {})) is None


def test_a_session_that_is_being_started_in_a_thread_hides_no_plan(monkeypatch):
    spark = connect(monkeypatch, {})
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    known = find(CHAIN, spark)
    # The thread sets these one after the other.
    monkeypatch.setattr(hooks, "_has_session_of_others", lambda: True)
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", object())
    monkeypatch.setattr(spark, "_early", object())
    assert find(CHAIN, spark) == known is not None


def test_a_damaged_file_and_one_of_another_user_are_not_used(plans, monkeypatch):
    file = PlanFile(plans / "a.plan")
    assert file.load() is None
    file.keep(("plan", 1))
    assert file.load() == ("plan", 1)
    assert [path.name for path in plans.iterdir()] == ["a.plan"]
    whole = file.path.read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.path.write_bytes(damaged)
        assert file.load() is None
    file.path.write_bytes(whole)
    monkeypatch.setattr(os, "getuid", lambda: file.path.stat().st_uid + 1)
    assert (file.load() is None) == (file.path.stat().st_uid != 0)


def test_a_cache_that_cannot_be_written_is_left_out_and_old_plans_are_removed(plans, monkeypatch):
    PlanFile(Path("/proc/none/a.plan")).keep("plan")
    with monkeypatch.context() as patch:
        patch.setattr(plan_cache, "find_cache_directory", lambda: Path("~nobody-of-that-name").expanduser())
        assert find(CHAIN) is None
    monkeypatch.setattr(plan_cache, "_MAX_FILES", 3)
    for number in range(5):
        file = PlanFile(plans / f"{number}.plan")
        file.keep(number)
        os.utime(file.path, (number, number))
        assert PlanFile(plans / "0.plan").load() == 0  # what is used stays
    assert sorted(path.name for path in plans.iterdir()) == ["0.plan", "3.plan", "4.plan"]


def test_spark_analyzes_an_equal_chain_once_and_the_kept_plan_is_the_same(monkeypatch, plans):
    value = (Sql({"cents": "cast(amount * 100 as bigint)", "name": "upper(name)"}, filter="amount >= 100"),)
    chain = SinkChain(VALUE, None, (*value, Filter(predicate=Condition("cents > 7"), to="large")), (), "ignore")
    topics = TopicChain(replace(chain, transforms=value), TopicRules(()), None, None)
    sql = SqlProjection(RowLayout.of(VALUE, None, (), "write"), "amount >= 100", {"cents": "amount * 100"}, Json())
    spark = SparkHook()
    with spark.open_session():  # the settings are those of the tests' context from here on
        pass
    refused = replace(sql, columns={"cents": "amount * unknown"})
    in_spark = replace(chain, transforms=(Sql({"a": "soundex(name)"}),))
    analyzed = [chain.plan(spark), check_change(topics, spark), check_change(sql, spark)]
    assert all(plan.program is not None for plan in analyzed)
    with pytest.raises(ValidationError, match="unknown"):
        check_change(refused, spark)
    assert in_spark.plan(spark).program is None
    assert len(list(plans.iterdir())) == 3  # neither what Spark refuses, nor what Spark computes

    refuse_sessions(monkeypatch)
    assert [replace(chain).plan(spark), check_change(topics, spark), check_change(sql, spark)] == analyzed
    for other in (refused, replace(sql, filter="amount >= 101")):
        with pytest.raises(AssertionError, match="asked for a session"):
            check_change(other, spark)
