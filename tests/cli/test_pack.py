"""The archive of packages for executors, unpacked and used by a bare Python."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
from importlib import metadata

import pytest

from airflow_kafka_spark.cli import pack
from airflow_kafka_spark.cli.definition import main, make_parser


def test_executors_need_what_their_tasks_import_and_what_that_requires(capsys, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(pack, "write_archive", lambda target, names: (written.append((target, names)), target.write_bytes(b"")))
    target = tmp_path / "env.tar.gz"
    assert main(["pack", "--sink", "postgres", "--format", "avro", "json", "-o", str(target), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert written == [(target, list(said["packages"]))]
    assert {"pyarrow", "pandas", "confluent-kafka", "polars", "adbc-driver-postgresql", "numpy"} <= set(said["packages"])
    assert "apache-airflow" not in said["packages"] and "pyspark" not in said["packages"]
    assert all(metadata.version(name) == version for name, version in said["packages"].items())
    for directory, shown in ((tmp_path, str(tmp_path)), (tmp_path / "a b", f"file://{tmp_path}/a%20b")):
        directory.mkdir(exist_ok=True)
        assert main(["pack", "-o", str(directory / "env.tar.gz")]) == 0
        assert f'"spark.archives": "{shown}/env.tar.gz#environment"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, needed",
    [
        (["--sink", "iceberg"], "pyiceberg"),
        (["--source", "mysql_cdc", "--sink", "kafka"], "pymysql"),
        (["--source", "cdc", "--sink", "kafka", "--format", "avro"], "authlib"),
        (["--source", "cdc", "--sink", "kafka", "--format", "protobuf"], "grpcio-tools"),
        # Executors may have no libpq, without which psycopg itself cannot be imported.
        (["--source", "cdc", "--sink", "kafka"], "psycopg-binary"),
        (["--sink", "postgres"], "psycopg-binary"),
        (["--source", "jdbc", "--sink", "kafka"], "adbc-driver-postgresql"),
        (["--source", "mysql_cdc", "--sink", "kafka"], "cryptography"),
        (["--sink", "files"], "obstore"),
        (["--sink", "delta"], "pyarrow"),
    ],
)
def test_each_source_and_sink_names_what_its_tasks_import(arguments, needed):
    args = make_parser().parse_args(["pack", *arguments])
    assert needed in pack.list_distributions(pack._list_parts(args))


def test_an_archive_gives_a_bare_python_this_package_and_the_packages_of_this_one(tmp_path):
    target = tmp_path / "env.tar.gz"
    pack.write_archive(target, ["msgspec", "confluent-kafka"])
    assert [path.name for path in tmp_path.iterdir()] == ["env.tar.gz"]
    with tarfile.open(target) as archive:
        # Python before 3.11.4 and 3.10.12 has no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "environment")
    code = (
        "import airflow_kafka_spark.hooks.spark.tasks.executor_check, confluent_kafka, msgspec;"
        "print(confluent_kafka.__version__, msgspec.__version__, msgspec.__file__)"
    )
    # An interpreter without any of these packages.
    bare = {"PATH": "/usr/bin:/bin", "AIRFLOW_KAFKA_SPARK_PYTHON": sys._base_executable}
    done = subprocess.run(
        [tmp_path / "environment/bin/python", "-c", code], env=bare, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    confluent, msgspec, file = done.stdout.split()
    assert (confluent, msgspec) == (metadata.version("confluent-kafka"), metadata.version("msgspec"))
    assert file.startswith(str(tmp_path))


def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.setattr(pack, "is_installed", lambda name: name != "polars")
    args = argparse.Namespace(source=["kafka"], sink=["kafka"], format=["avro"], output=str(tmp_path / "x.tar.gz"))
    with pytest.raises(ValueError, match=r"`polars`.*for avro.*airflow-provider-kafka-spark\[avro\]"):
        pack.pack(args)
    assert not list(tmp_path.iterdir())
