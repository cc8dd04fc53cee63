"""The packages that an executor needs for a task, and the error of an executor without them. No Spark is started.

tests/faults/test_cluster.py has a Spark cluster whose executors lack packages.
"""

from __future__ import annotations

import importlib.util
import pickle
from dataclasses import dataclass, replace
from importlib import metadata

import pytest
from pyspark import cloudpickle

from airflow_kafka_spark.hooks.spark.tasks import executor_check
from airflow_kafka_spark.hooks.spark.tasks.executor_check import CheckedOnExecutors, ExecutorLacks, Requirements, explain
from airflow_kafka_spark.sinks.files.tasks.write import ObjectsSplitWriter, UploadsSplitWriter
from airflow_kafka_spark.sinks.storage.store import TableLocation, open_objects, open_store


@dataclass(frozen=True)
class Task(CheckedOnExecutors):
    number: int
    inner: CheckedOnExecutors | None = None

    @property
    def needs(self):
        return ("kafka",)


@pytest.fixture
def elsewhere(monkeypatch):
    """Make this process an executor with its own environment, without some modules."""
    monkeypatch.setattr(executor_check, "describe_host_and_prefix", lambda: ("executor-1", "/opt/python"))
    find = importlib.util.find_spec

    def lacks(*modules):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else find(name))

    return lacks


def needs(*parts):
    # The driver's environment is another one than that of the fixture.
    return replace(Requirements.of(parts), environment=("driver", "/usr"))


def test_a_task_is_the_same_behind_the_check():
    task = Task(1, Task(2))
    assert pickle.loads(pickle.dumps(task)) == task


def test_a_task_asks_for_what_its_modules_and_it_itself_need():
    _, (found, _) = Task(1).__reduce__()
    assert {package.name for package in found.packages} == {"pyarrow", "pandas", "confluent-kafka"}
    confluent = next(package for package in found.packages if package.part == "kafka")
    assert confluent.driver == metadata.version("confluent-kafka")
    assert confluent.minimum


def test_the_modules_that_a_task_refers_to_say_which_formats_and_sinks_it_needs():
    named = b"cairflow_kafka_spark.formats.avro.tasks.decode\nAvroDecoder\nairflow_kafka_spark.sinks.postgres.tasks.write"
    assert executor_check.find_parts(named) == {"avro", "postgres"}
    assert executor_check.find_parts(b"cairflow_kafka_spark.hooks.tasks.registry_client\nRegistryClient") == {"registry"}
    assert executor_check.find_parts(b"cairflow_kafka_spark.hooks.tasks.registry_client\nRegisteredSchema") == set()
    assert executor_check.find_parts(b"cairflow_kafka_spark.sinks.iceberg.tasks.write\nIcebergSplitWriter") == {"iceberg"}


def test_a_writer_of_an_object_store_needs_its_client_on_executors_and_one_of_a_directory_does_not():
    def find_parts(place, writer=ObjectsSplitWriter, opened=open_store):
        store = opened(TableLocation.parse(place, ("s3",)), None)
        return executor_check.find_parts(cloudpickle.dumps(writer(store)))

    assert find_parts("s3://lake/orders", opened=open_objects) == {"object-stores"}
    assert find_parts("s3://lake/orders", UploadsSplitWriter, open_objects) == {"object-stores", "uploads"}
    assert find_parts("/lake/orders") == set()
    (obstore,) = [package for package in Requirements.of({"object-stores"}).packages if package.name == "obstore"]
    assert (obstore.driver, obstore.minimum, obstore.below) == (metadata.version("obstore"), "0.11", "1")


def test_an_executor_names_all_that_it_lacks_in_one_sentence_before_the_task_is_made(elsewhere, monkeypatch):
    monkeypatch.setattr(
        Requirements, "of", classmethod(lambda cls, parts, of=Requirements.of: replace(of(parts), environment=("d", "/usr")))
    )
    pickled = pickle.dumps(Task(1))
    elsewhere("pyarrow", "confluent_kafka")
    with pytest.raises(ExecutorLacks) as raised:
        pickle.loads(pickled)
    said = str(raised.value)
    assert "\n" not in said
    assert said.startswith("on executor ")
    assert f"pyarrow is missing (driver: {metadata.version('pyarrow')})" in said
    assert f"confluent-kafka is missing (driver: {metadata.version('confluent-kafka')})" in said


def test_a_version_that_is_too_old_is_compared_with_the_drivers(elsewhere):
    elsewhere()
    found = needs("kafka")
    old = replace(next(p for p in found.packages if p.part == "kafka"), minimum="99.1", driver="99.2")
    assert replace(found, packages=(old,)).find_obstacles() == [
        f"confluent-kafka is {metadata.version('confluent-kafka')}, older than 99.1 (driver: 99.2)"
    ]
    assert executor_check._parse_version("16.1") == executor_check._parse_version("16.1.0")


def test_a_version_that_is_too_new_is_compared_with_the_drivers(elsewhere):
    elsewhere()
    needed = needs("avro", "kafka")
    assert {p.name: (p.minimum, p.below) for p in needed.packages if p.part != "spark"} == {
        "polars": ("2.0", "3"),
        "confluent-kafka": ("2.10.1", ""),
    }
    new = replace(next(p for p in needed.packages if p.part == "kafka"), below="2", driver="1.9")
    assert replace(needed, packages=(new,)).find_obstacles() == [
        f"confluent-kafka is {metadata.version('confluent-kafka')}, not older than 2 (driver: 1.9)"
    ]


def test_another_release_of_this_package_is_named(elsewhere):
    elsewhere()
    assert replace(needs(), version="0.0.1").find_obstacles() == [
        f"{executor_check.DISTRIBUTION} is {executor_check.__version__} (driver: 0.0.1)"
    ]


def test_one_of_two_clients_of_postgresql_is_enough(elsewhere):
    elsewhere("adbc_driver_postgresql")
    assert needs("postgres").find_obstacles() == []
    elsewhere("psycopg")
    assert needs("postgres").find_obstacles() == []
    elsewhere("adbc_driver_postgresql", "psycopg")
    assert len(needs("postgres").find_obstacles()) == 1


def test_the_drivers_own_environment_is_not_checked(elsewhere):
    elsewhere("pyarrow")
    replace(needs(), environment=("executor-1", "/opt/python")).check()


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "x\nairflow_kafka_spark.tasks.ExecutorLacks: on executor a, polars is missing\n\tat x",
            "on executor a, polars is missing",
        ),
        (
            "Python in worker has different version: 3.11 than that in driver: 3.12, PySpark cannot",
            "an executor has Python 3.11 (driver: 3.12)",
        ),
        ('java.io.IOException: Cannot run program "/opt/py": error=2', "an executor has no Python at `/opt/py`"),
        (
            "Error from python worker:\n  ./environment/bin/python: 6: exec: python3.12: not found\nPYTHONPATH was:",
            "an executor has no Python `python3.12`, which the archive of `spark.archives` starts",
        ),
        (
            "ImportError: no pq wrapper available.\n- couldn't import psycopg 'c' implementation: No module named 'psycopg_c'",
            "psycopg finds no library `libpq` on an executor (`psycopg-binary` has one)",
        ),
        ("ModuleNotFoundError: No module named 'pandas'", "a Python worker of an executor finds no module `pandas`"),
        ("java.lang.OutOfMemoryError", ""),
    ],
)
def test_errors_of_spark_that_come_from_an_executors_packages_are_explained(text, said):
    assert explain(text) == said
