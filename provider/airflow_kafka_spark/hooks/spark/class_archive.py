"""Archives of the classes that a JVM loads when it starts (Java's class data sharing, CDS), for local Spark masters.

With an archive the JVM of a Spark session maps its classes from one file instead of reading, parsing and verifying some ten
thousand of them from jars. An archive only saves time: what Spark computes does not depend on it, and Java starts without one
that does not fit.

The archives lie below ``archives`` in the cache of jars (`find_cache_directory`), about 140 MB each. The name of an archive is a
digest of everything that Java compares before it uses one (its own build, the jars and the rest of the class path), so that a
change of any of these leads to another archive. `SparkClassArchive.make_in_background` makes a missing one in a process of its
own, at the lowest priority.

``python -m airflow_kafka_spark.hooks.spark.class_archive`` makes the archive of this environment now, for instance while an
image is built.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks.spark.jars import find_cache_directory, find_java, find_spark_jars, lock_file

log = logging.getLogger(__name__)

# Newer releases of Java rename the log messages that `list_java_options` switches off.
_JAVA_RELEASES = range(17, 24)
# Environment variables from which Spark's scripts build the class path of the JVM.
_CLASS_PATH_VARIABLES = (
    "HADOOP_CONF_DIR",
    "SPARK_CONF_DIR",
    "SPARK_DIST_CLASSPATH",
    "SPARK_HOME",
    "SPARK_SCALA_VERSION",
    "YARN_CONF_DIR",
)
JAVA_OPTION_VARIABLES = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
"""Environment variables with options of Java."""

_TRAINING = "from_json('{\"n\": 1}', 'n int').n AS n"
_TRAINED = "SQL and an RDD"
"""The expression of the job during which an archive's classes are loaded, and a text that changes with the other jobs."""
_MAKING_SECONDS = 600.0
"""Maximum seconds to wait until a JVM has written its archive."""
_UNUSED_SECONDS = 60 * 24 * 3600.0
_RECENT_SECONDS = 24 * 3600.0
_MAX_ARCHIVES = 6
"""See :func:`_remove_unused`."""
_TRY_AGAIN_SECONDS = 7 * 24 * 3600.0
"""Seconds after which an archive that could not be made is tried again."""
_MEMORY_NEEDED = 2 << 30
_DISK_NEEDED = 300 << 20
"""Bytes of memory and disk that have to be free."""
_FAILED, _SIZE = ".failed", ".size"
"""Suffixes of the files beside an archive: the reason why it could not be made, and its length."""


def make_archive_path(software: str, java: Path, jars: Iterable[Path], *facts: str) -> Path:
    """Return the path of the archive of a class path in the cache. The archive need not exist.

    :param software: the first part of the file name.
    :param java: the executable.
    :param jars: the class path. Size and modification time of each file are part of the archive's name.
    :param facts: further facts that an archive has to match.
    """
    home = java.resolve().parents[1]
    files = [home / "lib" / "server" / "libjvm.so", *jars]
    known = [str(java.resolve()), *facts]
    for file in files:
        with contextlib.suppress(OSError):
            known.append(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}")
    name = hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
    return find_cache_directory() / "archives" / f"{software}-{name}.jsa"


def is_whole(archive: Path) -> bool:
    """Return True if an archive exists and has its original length."""
    try:
        return archive.stat().st_size == int(archive.with_suffix(_SIZE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False


def list_java_options(archive: Path) -> tuple[str, ...]:
    """Return the options with which Java uses an archive; no options if it does not exist or is damaged.

    Java verifies the checksums of an archive before it uses it (0.1 s), and logs nothing if it does not use it.
    """
    # Java ends with SIGBUS when it reads beyond the end of a truncated file, even if it verifies checksums.
    if not is_whole(archive):
        return ()
    return (f"-XX:SharedArchiveFile={archive}", "-XX:+VerifySharedSpaces", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")


@contextlib.contextmanager
def publish_archive(archive: Path, *, wait: bool) -> Iterator[Path | None]:
    """Let one process of this host make an archive, and publish it by a rename when the block ends.

    :param archive: path of the archive.
    :param wait: True to wait while another process makes an archive of this software.
    :return: the file to write; None if the whole archive exists, or if another process makes one and ``wait`` is false.
    :raises OSError: the cache cannot be written.
    """
    software = archive.name.partition("-")[0]
    archive.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(archive.parent / f".{software}.lock", wait=wait) as lock:
        if lock is None or is_whole(archive):
            yield None
            return
        # This process holds the lock, so existing parts were left by a process that was killed.
        for left in archive.parent.glob(f"{software}-*.making-*"):
            left.unlink(missing_ok=True)
        _remove_unused(archive)
        written = archive.with_suffix(f".making-{os.getpid()}")
        try:
            yield written
            if written.exists():
                # The size is written last, because an archive without its size is not used.
                size = written.with_name(f"{written.name}.size")
                size.write_text(str(written.stat().st_size), encoding="ascii")
                archive.unlink(missing_ok=True)
                size.rename(archive.with_suffix(_SIZE))
                written.rename(archive)
        finally:
            written.unlink(missing_ok=True)


def _remove_unused(archive: Path) -> None:
    """Remove archives of this software that no start has used for two months, and all but the newest :data:`_MAX_ARCHIVES` of
    those that no start has used for a day: each new build of an image has an archive of its own."""
    software = archive.name.partition("-")[0]
    by_age = sorted((compute_age(other), other) for other in archive.parent.glob(f"{software}-*.jsa"))
    for number, (age, other) in enumerate(by_age, 1):
        # The archive that is going to be made counts, too.
        if age > (_RECENT_SECONDS if number >= _MAX_ARCHIVES else _UNUSED_SECONDS):
            for part in (other, other.with_suffix(_SIZE)):
                part.unlink(missing_ok=True)
    for part in (*archive.parent.glob(f"{software}-*{_SIZE}"), *archive.parent.glob(f"{software}-*{_FAILED}")):
        if not part.with_suffix(".jsa").exists() and compute_age(part) > _UNUSED_SECONDS:
            part.unlink(missing_ok=True)


def compute_age(file: Path) -> float:
    """Return the seconds since a file was modified; infinity if it does not exist."""
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return float("inf")


@dataclass(frozen=True)
class SparkClassArchive:
    """The archive for the JVMs that pyspark starts in this environment.

    :param file: path of the archive, which need not exist.
    :param extra_class_path: Spark's setting ``spark.driver.extraClassPath``.
    """

    file: Path
    extra_class_path: str = ""

    @classmethod
    def find(cls, extra_class_path: str = "") -> SparkClassArchive | None:
        """Return the archive of this environment, which need not exist; None without Java 17 to 23 or pyspark's jars."""
        try:
            java = find_java()
            release = (java.resolve().parents[1] / "release").read_text(encoding="utf-8")
            version = re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE)
            if version is None or int(version[1]) not in _JAVA_RELEASES:
                return None
            jars = sorted(find_spark_jars().iterdir())
        except (KafkaSparkError, OSError):
            return None
        variables = [f"{name}={os.environ.get(name, '')}" for name in _CLASS_PATH_VARIABLES]
        return cls(
            make_archive_path("spark", java, jars, release, extra_class_path, _TRAINING, _TRAINED, *variables), extra_class_path
        )

    def make_java_options(self, others: str = "") -> tuple[str, ...]:
        """Return the options with which Java uses this archive; none if it does not exist, or if other options concern archives.

        :param others: the user's Java options.
        """
        given = " ".join([others, *(os.environ.get(name, "") for name in JAVA_OPTION_VARIABLES)])
        if re.search("-Xshare|SharedArchiveFile|ArchiveClassesAtExit|-Xlog:disable", given):
            return ()
        options = list_java_options(self.file)
        if options:
            with contextlib.suppress(OSError):  # a cache that others fill
                os.utime(self.file)
        return options

    def make(self, *, wait: bool = True) -> bool:
        """Start a Spark session in this process, run a small job in it and end it; its JVM then writes the archive.

        :param wait: True to wait for another process that makes the archive.
        :return: True if the archive exists now.
        :raises OSError: the cache cannot be written, or its disk is full.
        """
        with publish_archive(self.file, wait=wait) as written:
            if written is not None:
                failed = self.file.with_suffix(_FAILED)
                failed.unlink(missing_ok=True)
                if problem := self._find_disk_problem():
                    raise OSError(problem)
                try:
                    _train_archive(written, self.extra_class_path)
                    if not written.exists():
                        raise RuntimeError("Java wrote none: the disk is full, or the class path has directories with files")
                except Exception as error:
                    failed.write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
        return is_whole(self.file)

    def make_in_background(self) -> int | None:
        """Start a process that makes the archive, unless it exists, could not be made in the last week, or cannot be
        written, or memory or disk space is short.

        The process has the lowest priority, outlives this one, and is the first that Linux kills if memory runs out. Call this
        when the work of a task is done. If several processes call it concurrently, one makes the archive.

        :return: the id of the process; None if none was started.
        """
        if is_whole(self.file) or compute_age(self.file.with_suffix(_FAILED)) < _TRY_AGAIN_SECONDS:
            return None
        if find_available_memory() < _MEMORY_NEEDED or self._find_disk_problem():
            return None
        return _start_maker(self)

    def _find_disk_problem(self) -> str:
        """Return the reason why the archive cannot be written; "" if it can."""
        directory = next(parent for parent in self.file.parents if parent.is_dir())
        if not os.access(directory, os.W_OK | os.X_OK):
            return f"{directory} cannot be written"
        free = shutil.disk_usage(directory).free
        if free < _DISK_NEEDED:
            return f"{directory} has {free >> 20} MiB of free space, and {_DISK_NEEDED >> 20} MiB are needed"
        return ""


@functools.lru_cache(maxsize=1)
def _start_maker(archive: SparkClassArchive) -> int | None:
    """Start the process that makes an archive, at most once in this process, and return its id; None if it cannot be started."""
    command = [sys.executable, "-m", __name__, "--idle", "--extra-class-path", archive.extra_class_path]
    try:
        maker = subprocess.Popen(
            command, cwd=tempfile.gettempdir(), env=_make_environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return None
    # The process is not waited for; setting the return code suppresses Python's warning about that.
    maker.returncode = 0
    log.info("Making an archive of Spark's classes in the background, for later sessions: %s", archive.file)
    return maker.pid


def _make_environment() -> dict[str, str]:
    """Return the environment of the process that makes an archive: this process's, without variables that would connect it to a
    running session or make it use other jars.
    """
    left_out = re.compile(
        "AIRFLOW_CTX_|AIRFLOW_CONN_|AIRFLOW_VAR_|PYSPARK_GATEWAY_|PYSPARK_SUBMIT_ARGS|SPARK_REMOTE|SPARK_CONNECT_|SPARK_LOCAL_REMOTE"
    )
    kept = {name: value for name, value in os.environ.items() if not left_out.match(name)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def find_available_memory() -> int:
    """Return the bytes of memory that a new process may use: those available in the machine or in its container, if fewer."""
    found = [1 << 62]
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        if available := re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE):
            found.append(int(available[1]) << 10)
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        group = re.search("^0::(.*)", Path("/proc/self/cgroup").read_text(encoding="utf-8"), re.MULTILINE)
        directory = Path("/sys/fs/cgroup") / (group[1].strip("/") if group else "")
        while True:
            found.append(_find_memory_left_in_group(directory))
            if directory == Path("/sys/fs/cgroup"):
                break
            directory = directory.parent
    return min(found)


def _find_memory_left_in_group(directory: Path) -> int:
    try:
        limit = (directory / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return 1 << 62
        used = int((directory / "memory.current").read_text(encoding="ascii"))
        # Minus the page cache of inactive files, which the system reclaims if memory is needed.
        cached = re.search(r"^inactive_file (\d+)", (directory / "memory.stat").read_text(encoding="ascii"), re.MULTILINE)
        return int(limit) - used + (int(cached[1]) if cached else 0)
    except (OSError, ValueError):
        return 1 << 62


def _train_archive(written: Path, extra_class_path: str) -> None:
    """Run jobs like those of windows in Spark, and wait until the JVM has written the classes that it has loaded.

    :raises Exception: Spark did not start, or the job failed.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-XX:ArchiveClassesAtExit={written} -XX:TieredStopAtLevel=1 -Xlog:disable",
    }
    if extra_class_path:
        settings["spark.driver.extraClassPath"] = extra_class_path
    builder = SparkSession.builder.master("local[2]").appName("class archive")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    try:
        rows = session.range(0, 100, 1, 2).selectExpr("id", _TRAINING, "cast(id AS string) AS text")
        rows.filter("id > 2").mapInArrow(lambda batches: batches, "id long, n int, text string").collect()
        # A job of a window that needs no SQL.
        session.sparkContext.parallelize([], 2).mapPartitionsWithIndex(lambda number, rows: [str(number)]).collect()
        session.stop()
    finally:
        assert SparkContext._gateway is not None
        process = SparkContext._gateway.proc
        # Closing its standard input ends the JVM.
        process.stdin.close()
        try:
            process.wait(_MAKING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _lower_priority() -> None:
    """Give this process the lowest priority, and make it the first that Linux kills if memory runs out."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the archive of this environment, and return the exit code.

    :param arguments: of the command line; default: those of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description="Make the archive of Spark's classes.")
    parser.add_argument("--extra-class-path", default="", help="Spark's setting spark.driver.extraClassPath")
    parser.add_argument("--idle", action="store_true", help="run at the lowest priority; do not wait for another maker")
    options = parser.parse_args(arguments)
    if options.idle:
        _lower_priority()
    archive = SparkClassArchive.find(options.extra_class_path)
    if archive is None:
        print("no archive is possible here: it takes Java 17 to 23 and pyspark with its jars", file=sys.stderr)
        return 1
    try:
        made = archive.make(wait=not options.idle)
    except OSError as error:
        print(f"the archive cannot be written: {error}", file=sys.stderr)
        return 1
    if not made:
        print(f"the archive could not be made; {archive.file.with_suffix(_FAILED)} may contain the reason", file=sys.stderr)
        return 1
    print(archive.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
