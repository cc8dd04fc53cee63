"""A real S3 API for tests: moto's server on the loopback interface, and the packages that a process needs to use S3.

The packages are not among the tested set, because botocore asks for an older ``python-dateutil``. They are installed once into a
separate directory, which has to be on the ``PYTHONPATH`` of a process when the process starts. ``python -m
tests.support.s3`` installs them and prints this directory.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from airflow_kafka_spark.hooks.spark import jars
from airflow_kafka_spark.testing import _processes as processes

PAGE = 50
"""Objects in one answer to a listing; Amazon's have a thousand."""
PACKAGES = Path(__file__).with_name("s3_packages.txt")
HADOOP = "org.apache.hadoop:hadoop-aws:3.4.1"
# Hadoop names 2.24.6, of which there is no transfer manager; and all of it in one jar of 500 MB, for what takes 9.
SDK = tuple(
    f"software.amazon.awssdk:{module}:2.24.5"
    for module in ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")
)
EVERYTHING = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}


def packages() -> Path | None:
    """Return the directory of the packages; the first call fetches them. None if they are installed anyway."""
    if all(importlib.util.find_spec(name) for name in ("moto", "s3fs")):
        return None
    wanted = f"{sys.implementation.cache_tag}-{hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:12]}"
    target = jars.find_cache_directory() / "test-packages" / wanted
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as temporary:
            command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
            if importlib.util.find_spec("uv") is None:
                command = [sys.executable, "-m", "pip", "install"]
            made = [*command, "--quiet", "--no-deps", "--target", f"{temporary}/made", "--requirement", str(PACKAGES)]
            subprocess.run(made, check=True, timeout=400)
            if not target.is_dir():  # nobody else was quicker
                Path(temporary, "made").rename(target)
    return target


def spark_jars() -> tuple[Path, ...]:
    """Return the jars with which Spark opens ``s3a://``, and which Spark does not include."""
    wanted = tuple(sorted((HADOOP, *SDK)))
    without = jars._list_bundled_artifacts(str(jars.find_pyspark_jars())) | {"bundle"}
    root = jars.find_cache_directory()
    directory = root / "jars" / jars._make_directory_name(wanted, without)
    if jars._find_published(directory) is None:
        with jars._lock_directory(root, wanted) as lock:
            if jars._find_published(directory) is None:
                jars._fetch(wanted, without, root, directory, lock)
    found = jars._find_published(directory)
    assert found
    return found


@dataclass(frozen=True)
class Bucket:
    """A new bucket, and boto3's client for the user who has all rights."""

    client: Any
    name: str

    def objects(self) -> list[str]:
        """Return the names of the bucket's objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]


class EmbeddedS3:
    """A server that ends with this process. It has the users that :meth:`user` made, and checks their signatures."""

    def __enter__(self) -> EmbeddedS3:
        directory = processes.make_own_directory("s3")
        self._supervisor = processes.SupervisorClient("S3")
        self._supervisor.own(directory)
        self.log = directory / "log"
        (port,) = processes.find_free_ports(1)
        self.url = f"http://{processes.LOOPBACK}:{port}"
        # This many calls need no signature: those that make the first user.
        env = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "3", "PYTHONUNBUFFERED": "1", "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
        command = [sys.executable, "-m", "tests.support.moto_server", processes.LOOPBACK, str(port)]
        self._process = self._supervisor.spawn(command, log=self.log, env=env)
        assert processes.wait_until(lambda: "Running on" in self.log.read_text(), 180), processes.read_tail(self.log)
        self._first: tuple[str, str] = ("nobody", "nothing")
        self._first = self.user("everybody", EVERYTHING)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._supervisor.close()

    def client(self, service: str = "s3") -> Any:
        """Return boto3's client for the user who has all rights."""
        import boto3

        key, secret = self._first
        return boto3.client(
            service, endpoint_url=self.url, region_name="us-east-1", aws_access_key_id=key, aws_secret_access_key=secret
        )

    def create_bucket(self, name: str) -> Bucket:
        bucket = Bucket(self.client(), name)
        bucket.client.create_bucket(Bucket=name)
        return bucket

    def user(self, name: str, policy: dict[str, Any]) -> tuple[str, str]:
        """Create a user; return their access key and secret."""
        iam = self.client("iam")
        iam.create_user(UserName=name)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        iam.put_user_policy(UserName=name, PolicyName="may", PolicyDocument=json.dumps(policy))
        return made["AccessKeyId"], made["SecretAccessKey"]

    @property
    def credentials(self) -> tuple[str, str]:
        return self._first

    def connection_json(self, credentials: tuple[str, str] | None = None) -> str:
        """Return the Airflow connection of type ``aws``."""
        key, secret = credentials or self._first
        extra = {"endpoint_url": self.url, "region_name": "us-east-1"}
        return json.dumps({"conn_type": "aws", "login": key, "password": secret, "extra": extra})

    def spark_settings(self) -> dict[str, str]:
        """Return the extra of a Spark connection."""
        key, secret = self._first
        return {
            "spark.hadoop.fs.s3a.endpoint": self.url,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.access.key": key,
            "spark.hadoop.fs.s3a.secret.key": secret,
        }


def remember_data_files() -> None:
    """Let botocore parse each of its files once. Each session parses those that it needs, one of a megabyte among them: a sixth
    of the CPU time of these cases."""
    from botocore.loaders import JSONFileLoader

    load = functools.lru_cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda loader, path: load(path)  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def s3() -> Iterator[EmbeddedS3]:
    """One server for all cases of a process, and the Airflow connection `lake` to it (``-p tests.support.s3``)."""
    remember_data_files()
    with EmbeddedS3() as server:
        os.environ["AIRFLOW_CONN_LAKE"] = server.connection_json()
        Path(os.environ["S3_SECRET_FILE"]).write_text(server.credentials[1])
        yield server


if __name__ == "__main__":
    print(packages() or "")
