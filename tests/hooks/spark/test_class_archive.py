"""The archive of Spark's classes: it saves time if it fits, and has no effect otherwise."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path

import pytest

from airflow_kafka_spark.hooks.spark import class_archive, jars
from airflow_kafka_spark.hooks.spark.class_archive import SparkClassArchive, is_whole, list_java_options, publish_archive


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, without options of Java in the environment, and without a maker started by this process."""
    class_archive._start_maker.cache_clear()
    monkeypatch.setenv(jars.CACHE_ENV, str(tmp_path / "cache"))
    for name in class_archive.JAVA_OPTION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def publish(archive: Path, content: bytes = b"classes") -> None:
    with publish_archive(archive, wait=False) as written:
        assert written is not None
        written.write_bytes(content)


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_name_changes_with_everything_that_decides_whether_an_archive_fits(tmp_path, cache, monkeypatch):
    java, jar = jars.find_java(), tmp_path / "a.jar"
    jar.write_bytes(b"1")
    names = [class_archive.make_archive_path("spark", java, [jar])]
    names.append(class_archive.make_archive_path("spark", java, [jar], "fact"))
    jar.write_bytes(b"12")
    names.append(class_archive.make_archive_path("spark", java, [jar]))
    os.utime(jar, (1, 1))
    names.append(class_archive.make_archive_path("spark", java, [jar]))
    names += [found.file for found in (SparkClassArchive.find(), SparkClassArchive.find("/more.jar")) if found]
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    names += [found.file for found in [SparkClassArchive.find()] if found]
    assert len(set(names)) == len(names) == 7
    assert {name.parent for name in names} == {cache / "archives"}


def test_an_archive_is_used_when_it_is_whole_and_not_before(tmp_path):
    archive = tmp_path / "spark-1.jsa"
    assert list_java_options(archive) == ()
    with publish_archive(archive, wait=False) as written:
        written.write_bytes(b"classes")
        assert not archive.exists() and list_java_options(archive) == ()
    assert is_whole(archive) and f"-XX:SharedArchiveFile={archive}" in list_java_options(archive)
    archive.write_bytes(b"class")
    assert list_java_options(archive) == ()


def test_one_process_makes_an_archive_and_the_others_continue_or_wait(tmp_path):
    archive, waited = tmp_path / "spark-1.jsa", []

    def wait() -> None:
        with publish_archive(archive, wait=True) as written:
            waited.append((written, is_whole(archive)))

    other = threading.Thread(target=wait)
    with publish_archive(archive, wait=False) as written:
        with publish_archive(archive, wait=False) as second:
            assert second is None
        other.start()
        written.write_bytes(b"classes")
    other.join(30)
    assert waited == [(None, True)]


def test_files_of_a_killed_maker_and_archives_unused_for_months_are_removed(tmp_path):
    left = tmp_path / "spark-1.making-77"
    left.write_bytes(b"cla")
    old, used, foreign = tmp_path / "spark-2.jsa", tmp_path / "spark-3.jsa", tmp_path / "kafka-4.jsa"
    for archive in (old, used, foreign):
        publish(archive)
    left.write_bytes(b"cla")
    for archive in (old, foreign):
        os.utime(archive, (1, 1))
    publish(tmp_path / "spark-1.jsa")
    assert {file.name for file in tmp_path.iterdir() if not file.name.startswith(".")} == {
        f"{name}{suffix}" for name in ("spark-1", "spark-3", "kafka-4") for suffix in (".jsa", ".size")
    }
    # Each build of an image has an archive of its own.
    for number in range(10, 20):
        publish(tmp_path / f"spark-{number}.jsa")
        os.utime(tmp_path / f"spark-{number}.jsa", (days := time.time() - (30 - number) * 86_400, days))
        (tmp_path / f"spark-{number}.failed").write_text("why")
        os.utime(tmp_path / f"spark-{number}.failed", (1, 1))
    publish(tmp_path / "spark-20.jsa")
    archives = ["spark-1", "spark-17", "spark-18", "spark-19", "spark-20", "spark-3"]
    assert sorted(file.stem for file in tmp_path.glob("spark-*.jsa")) == archives
    assert sorted(file.stem for file in tmp_path.glob("spark-*.size")) == archives
    assert sorted(file.stem for file in tmp_path.glob("*.failed")) == ["spark-17", "spark-18", "spark-19"]


def test_a_maker_that_fails_publishes_nothing(tmp_path):
    archive = tmp_path / "spark-1.jsa"
    with pytest.raises(RuntimeError), publish_archive(archive, wait=False) as written:
        written.write_bytes(b"half")
        raise RuntimeError
    assert not archive.exists() and not list(tmp_path.glob("*.making-*"))


def test_an_archive_that_was_cut_is_made_anew(tmp_path):
    archive = tmp_path / "spark-1.jsa"
    publish(archive)
    archive.write_bytes(b"c")
    publish(archive, b"classes again")
    assert is_whole(archive) and archive.read_bytes() == b"classes again"


# --- settings -------------------------------------------------------------------------------------------------------


def test_only_local_masters_have_an_archive_and_the_extra_switches_it_off(cache, connect):
    assert connect(host="local[2]")._find_class_archive() is not None
    assert connect(host="local[2]", extra={"class_archive": True})._find_class_archive() is not None
    assert connect(host="local[2]", extra={"class_archive": False})._find_class_archive() is None
    assert connect(host="local[2]", extra={"class_archive": "false"})._find_class_archive() is None
    for host in ("spark://head", "yarn", "sc://head"):
        assert connect(host=host)._find_class_archive() is None


def test_settings_of_the_user_that_concern_archives_win(cache, connect, monkeypatch):
    archive = connect(host="local")._find_class_archive()
    publish(archive.file)
    assert archive.make_java_options("-Xmx1g -Dx=y")
    for option in ("-Xshare:off", "-XX:SharedArchiveFile=/mine.jsa", "-XX:ArchiveClassesAtExit=/mine.jsa"):
        assert archive.make_java_options(option) == ()
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xshare:off")
    assert archive.make_java_options() == ()


def test_nothing_is_made_where_memory_is_short(cache, monkeypatch):
    monkeypatch.setattr(class_archive, "_MEMORY_NEEDED", class_archive.find_available_memory() << 10)
    SparkClassArchive.find().make_in_background()
    assert not cache.exists()


def test_nothing_is_made_where_the_disk_is_full_and_the_next_task_tries_again(cache, monkeypatch):
    archive = SparkClassArchive.find()
    monkeypatch.setattr(class_archive, "_DISK_NEEDED", 1 << 60)
    assert archive.make_in_background() is None and not cache.exists()
    with pytest.raises(OSError, match="MiB of free space"):
        archive.make()
    assert not archive.file.with_suffix(".failed").exists()


# --- Java -----------------------------------------------------------------------------------------------------------


@pytest.mark.servers
def test_a_jvm_that_cannot_make_an_archive_is_noted_and_not_tried_again_by_itself(cache):
    archive = SparkClassArchive.find()
    contradiction = "-XX:+UseSerialGC -XX:+UseParallelGC"  # Spark lets Java ignore options that it does not know
    done = subprocess.run(
        [sys.executable, "-m", class_archive.__name__], env={**os.environ, "SPARK_SUBMIT_OPTS": contradiction},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    failed = archive.file.with_suffix(".failed")
    assert done.returncode == 1 and str(failed) in done.stderr
    assert "JAVA_GATEWAY_EXITED" in failed.read_text() and not is_whole(archive.file)
    assert archive.make_in_background() is None
    os.utime(failed, (1, 1))
    maker = archive.make_in_background()
    assert maker is not None
    os.kill(maker, signal.SIGKILL)


def test_the_background_is_a_process_of_low_priority_that_a_task_does_not_take_along(cache):
    archive = SparkClassArchive.find()
    maker = archive.make_in_background()
    assert archive.make_in_background() == maker
    try:
        deadline = time.monotonic() + 300
        while os.getpriority(os.PRIO_PROCESS, maker) != 19:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert os.getsid(maker) == maker != os.getsid(0)
        assert {os.readlink(f"/proc/{maker}/fd/{number}") for number in range(3)} == {os.devnull}
    finally:
        os.kill(maker, signal.SIGKILL)


@pytest.fixture(scope="module")
def made() -> SparkClassArchive:
    """The archive that all tests use to start Spark."""
    archive = SparkClassArchive.find()
    assert archive is not None
    command = [sys.executable, "-m", class_archive.__name__]
    env = {name: value for name, value in os.environ.items() if name not in class_archive.JAVA_OPTION_VARIABLES}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and done.stdout.split()[-1:] == [str(archive.file)], done.stdout + done.stderr
    return archive


@lru_cache
def submit_version(options: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return the exit code and the output of spark-submit --version in a JVM with these options."""
    home = jars.find_pyspark_jars().parent
    path = f"{home}/conf:{home}/jars/*"
    command = [str(jars.find_java()), *options, "-XX:TieredStopAtLevel=1", "-cp", path, "org.apache.spark.deploy.SparkSubmit"]
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [*command, "--version"], env=env, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def damage(archive: Path, how: str) -> None:
    size = archive.stat().st_size
    with archive.open("r+b") as file:
        if how == "cut":
            file.truncate(size // 2)
        elif how == "foreign":
            file.write(b"\x7fELF" * 64)
        else:
            file.seek(size // 2)
            file.write(os.urandom(1 << 20))


@pytest.mark.servers
@pytest.mark.parametrize("how", ["cut", "foreign", "damaged"])
def test_java_starts_without_a_word_when_an_archive_is_no_good(made, tmp_path, how):
    archive = tmp_path / "spark-1.jsa"
    with publish_archive(archive, wait=False) as written:
        shutil.copyfile(made.file, written)
    damage(archive, how)
    assert submit_version(list_java_options(archive)) == submit_version(())


@pytest.mark.extended
@pytest.mark.servers
def test_a_session_takes_its_classes_from_the_archive_and_computes_the_same(made, tmp_path):
    code = """if True:
        import sys
        from airflow_kafka_spark.hooks.spark.hook import SparkHook
        with SparkHook("s").open_session() as session:
            print(session.range(10).selectExpr("sum(id * id) AS s", "from_json('{\\"n\\": 1}', 'n int').n AS n").collect())
    """
    outputs = []
    for switch in (True, False):
        log = tmp_path / f"{switch}.log"
        # Without the second compiler, which does not matter here.
        options = f"-Xlog:class+load:file={log} -XX:TieredStopAtLevel=1"
        extra = {"class_archive": switch, "spark.driver.extraJavaOptions": options}
        env = {name: value for name, value in os.environ.items() if name not in class_archive.JAVA_OPTION_VARIABLES}
        env["AIRFLOW_CONN_S"] = json.dumps({"conn_type": "spark", "host": "local[1]", "extra": extra})
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(re.sub(r"(?m)^\S+Z |^\d\S+ \S+ ", "", done.stdout + done.stderr))  # without the time of day
        spark = [line for line in log.read_text().splitlines() if "org.apache.spark.SparkContext " in line]
        assert ["shared objects file" in line for line in spark] == [switch]
    assert outputs[0] == outputs[1] and "285" in outputs[0]
