"""Jars: each is fetched once, completely, by one process. Later lookups take milliseconds."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from airflow_kafka_spark.errors import JarsUnavailable, JavaMissing
from airflow_kafka_spark.hooks.spark import jars
from airflow_kafka_spark.testing._processes import wait_until

THING = "org.example:thing:1.0"
CHILD = """
import logging, sys
from airflow_kafka_spark.hooks.spark.jars import resolve_jars
logging.basicConfig(level=logging.INFO)
resolve_jars(sys.argv[1:])
"""


class Repository:
    """A small Maven repository on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, coordinate: str, *needs: str, packaging: str = "jar") -> None:
        org, module, revision = coordinate.split(":")
        home = self.root / org.replace(".", "/") / module / revision
        home.mkdir(parents=True)
        dependencies = "".join(
            "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>".format(
                *need.split(":")
            )
            for need in needs
        )
        (home / f"{module}-{revision}.pom").write_text(
            f"<project><modelVersion>4.0.0</modelVersion><groupId>{org}</groupId><artifactId>{module}</artifactId>"
            f"<version>{revision}</version><packaging>{packaging}</packaging><dependencies>{dependencies}</dependencies></project>"
        )
        with zipfile.ZipFile(home / f"{module}-{revision}.jar", "w") as jar:
            jar.writestr("hello", coordinate)


@pytest.fixture(autouse=True)
def quick_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set options for a JVM that starts quickly. Ivy runs for two seconds, too short to profit from the better compiler."""
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    root = tmp_path / "repository"
    root.mkdir()
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="here"/><resolvers>'
        f'<ibiblio name="here" m2compatible="true" root="{root.as_uri()}"/></resolvers></ivysettings>'
    )
    monkeypatch.setenv("AIRFLOW_KAFKA_SPARK_IVY_SETTINGS", str(settings))
    monkeypatch.setenv("AIRFLOW_KAFKA_SPARK_CACHE", str(tmp_path / "cache"))
    return Repository(root)


@pytest.fixture
def without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    def hide() -> None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))

    return hide


def names(paths: tuple[Path, ...]) -> list[str]:
    return [path.name for path in paths]


def test_the_jars_of_a_coordinate_and_of_everything_it_needs(repository: Repository) -> None:
    repository.add("org.example:deep:3.0")
    repository.add("org.example:part:2.0", "org.example:deep:3.0", packaging="bundle")
    repository.add(THING, "org.example:part:2.0")
    found = jars.resolve_jars([THING])
    assert names(found) == ["org.example_deep-3.0.jar", "org.example_part-2.0.jar", "org.example_thing-1.0.jar"]
    assert all(path.is_absolute() and path.is_file() for path in found)


def test_several_coordinates_are_one_set_in_any_order(repository: Repository) -> None:
    repository.add(THING)
    repository.add("org.example:other:1.0")
    found = jars.resolve_jars([THING, "org.example:other:1.0"])
    assert len(found) == 2
    assert jars.resolve_jars(["org.example:other:1.0", THING, THING]) == found


def test_a_cached_set_costs_milliseconds_and_needs_no_java(repository: Repository, without_java: Callable[[], None]) -> None:
    repository.add(THING)
    fetched = jars.resolve_jars([THING])
    without_java()
    began = time.thread_time()
    for _ in range(20):
        assert jars.resolve_jars([THING]) == fetched
    assert (time.thread_time() - began) / 20 < 0.01


@pytest.mark.extended
def test_a_read_only_cache_that_is_filled_is_enough(repository: Repository, tmp_path: Path) -> None:
    repository.add(THING)
    fetched = jars.resolve_jars([THING])
    (tmp_path / "cache" / ".lock").unlink()
    (tmp_path / "cache").chmod(0o555)
    try:
        assert jars.resolve_jars([THING]) == fetched
        assert not (tmp_path / "cache" / ".lock").exists()
    finally:
        (tmp_path / "cache").chmod(0o755)


def test_a_damaged_set_is_fetched_again(repository: Repository) -> None:
    repository.add(THING)
    (jar,) = jars.resolve_jars([THING])
    jar.unlink()
    assert jars.resolve_jars([THING]) == (jar,)
    assert jar.is_file()


@pytest.mark.extended
def test_parallel_processes_fetch_once(repository: Repository) -> None:
    repository.add(THING)
    children = [subprocess.Popen([sys.executable, "-c", CHILD, THING], stderr=subprocess.PIPE, text=True) for _ in range(4)]
    logs = [child.communicate(timeout=400)[1] for child in children]
    assert [child.returncode for child in children] == [0] * 4, logs
    assert sum(text.count("Fetching") for text in logs) == 1, logs


def test_a_fetch_that_is_killed_publishes_nothing_and_the_next_one_succeeds(repository: Repository, tmp_path: Path) -> None:
    repository.add(THING)
    sets, home, go = tmp_path / "cache" / "jars", tmp_path / "slow", tmp_path / "go"
    # This Java fetches nothing before a signal. Otherwise it might have ended before it is killed.
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    slow = f'while [ "$1" != -version ] && [ ! -e "{go}" ]; do sleep 0.05; done'
    java.write_text(f'#!/bin/sh\n{slow}\nexec "{jars.find_java().resolve()}" "$@"\n')
    java.chmod(0o755)
    env = {**os.environ, "JAVA_HOME": str(home)}
    child = subprocess.Popen([sys.executable, "-c", CHILD, THING], stderr=subprocess.DEVNULL, env=env)
    assert wait_until(lambda: bool(list(sets.glob(".fetching-*"))) or child.poll() is not None, 300)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    go.touch()
    assert [path for path in sets.iterdir() if not path.name.startswith(".fetching-")] == []
    assert len(jars.resolve_jars([THING])) == 1
    assert list(sets.glob(".fetching-*")) == []


@pytest.mark.extended
def test_progress_is_one_line_before_and_one_after(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    repository.add(THING)
    with caplog.at_level(logging.INFO):
        jars.resolve_jars([THING])
        jars.resolve_jars([THING])
    before, after = (record.getMessage() for record in caplog.records if record.name == jars.log.name)
    assert before.startswith(f"Fetching {THING} and what they need into ") and before.endswith(", once")
    assert after.startswith("Fetched 1 jars, 0 MB, in ")


@pytest.mark.extended
def test_exclude_bundled_leaves_out_and_does_not_fetch_what_pyspark_ships(repository: Repository) -> None:
    # Neither is in the repository: asking for them would fail.
    repository.add(THING, "org.lz4:lz4-java:9.9", "org.scala-lang:scala-library:9.9", "org.example:part:2.0")
    repository.add("org.example:part:2.0")
    assert names(jars.resolve_jars([THING], exclude_bundled=True)) == ["org.example_part-2.0.jar", "org.example_thing-1.0.jar"]
    with pytest.raises(JarsUnavailable):
        jars.resolve_jars([THING])


def test_what_remains_of_the_spark_connector() -> None:
    found = names(jars.resolve_jars([jars.find_spark_kafka_connector()], exclude_bundled=True))
    assert [name.split("_", 1)[1].rsplit("-", 1)[0] for name in found] == [
        "commons-pool2",
        "kafka-clients",
        "spark-sql-kafka-0-10_2.13",
        "spark-token-provider-kafka-0-10_2.13",
    ]


def test_the_connector_is_of_the_installed_pyspark() -> None:
    import pyspark

    assert jars.find_spark_kafka_connector() == f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"


def test_an_unknown_coordinate_is_named_with_the_last_words_of_ivy(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(JarsUnavailable) as caught:
        jars.resolve_jars([THING])
    assert "org.example#thing;1.0: not found" in str(caught.value)
    assert caught.value.coordinates == (THING,)
    assert list((tmp_path / "cache" / "jars").iterdir()) == []


@pytest.mark.parametrize("coordinate", ["", "kafka", "a:b", "a:b:c:d", "a:b:../../c", "-settings:b:c d"])
def test_a_malformed_coordinate_is_refused(coordinate: str) -> None:
    with pytest.raises(JarsUnavailable, match="organisation:module:revision"):
        jars.resolve_jars([coordinate])


def test_an_ivy_settings_file_that_does_not_exist_is_named(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_KAFKA_SPARK_IVY_SETTINGS", "/nowhere/ivysettings.xml")
    with pytest.raises(JarsUnavailable, match="/nowhere/ivysettings.xml"):
        jars.resolve_jars([THING])


def test_a_cache_that_cannot_be_written_is_named(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JarsUnavailable, match="cannot be written"):
        jars.resolve_jars([THING], cache=tmp_path / "file" / "cache")


def test_without_java_and_without_a_cached_set_there_is_one_clear_sentence(
    repository: Repository, without_java: Callable[[], None]
) -> None:
    without_java()
    with pytest.raises(JavaMissing, match="JAVA_HOME is not set and there is no java on the PATH"):
        jars.resolve_jars([THING])


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AIRFLOW_KAFKA_SPARK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert jars.find_cache_directory() == Path.home() / ".cache" / "airflow-kafka-spark"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jars.find_cache_directory() == tmp_path / "airflow-kafka-spark"
    monkeypatch.setenv("AIRFLOW_KAFKA_SPARK_CACHE", str(tmp_path / "mine"))
    assert jars.find_cache_directory() == tmp_path / "mine"


def test_java_is_the_one_of_java_home_else_of_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    on_path = jars.find_java()
    assert str(on_path) == shutil.which("java")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(on_path.resolve())
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert jars.find_java() == tmp_path / "bin" / "java"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'openjdk version \"11.0.21\" 2023-10-17' >&2", "is Java 11"),
        ("echo 'java version \"1.8.0_392\"' >&2", "is Java 8"),
        ("echo 'no runtime' >&2; exit 1", "no runtime"),
    ],
)
def test_a_java_that_is_too_old_or_does_not_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, message: str
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match=message):
        jars.find_java()


@pytest.mark.parametrize(
    ("version", "message"), [("17.0.15", ""), ("21", ""), ("11.0.21", "is Java 11"), ("1.8.0_392", "is Java 8")]
)
def test_the_version_of_a_java_is_that_of_its_installation_which_starts_no_jvm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, message: str
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'it was run' >&2; exit 1\n")
    java.chmod(0o755)
    (tmp_path / "release").write_text(f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if not message:
        assert jars.find_java() == java
        return
    with pytest.raises(JavaMissing, match=message):
        jars.find_java()


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match="JAVA_HOME is"):
        jars.find_java()


def test_importing_it_imports_no_pyspark() -> None:
    imports = "import sys; from airflow_kafka_spark.hooks.spark import jars"
    code = f"{imports}; jars.find_spark_kafka_connector(); sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


def test_a_spark_home_of_another_release_than_pyspark_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    assert jars.find_spark_home_problem() == ""
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert jars.find_spark_home_problem() == f"`SPARK_HOME` is `{tmp_path}`, which has no `bin/spark-submit`"
    for name in ("bin/spark-submit", "jars/spark-core_2.12-3.5.7.jar"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert f"has Spark 3.5.7, and pyspark here is {metadata.version('pyspark')}" in jars.find_spark_home_problem()
    monkeypatch.setenv("SPARK_HOME", str(jars.find_pyspark_jars().parent))
    assert jars.find_spark_home_problem() == ""
