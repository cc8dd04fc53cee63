"""Resolve Maven coordinates to local jar files, which are fetched once and cached.

The jars are fetched by the Ivy that pyspark ships, so only Java and pyspark are needed. Every set of coordinates has a directory
of its own in the cache. It is created by one rename, so that it is complete or missing. A file lock lets concurrent tasks and
processes fetch a set once. Finding a cached set takes a few milliseconds and starts no Java.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.sax.saxutils import quoteattr

from airflow_kafka_spark.errors import JarsUnavailable, JavaMissing

log = logging.getLogger(__name__)

KAFKA_BROKER = "org.apache.kafka:kafka_2.13:4.2.0"
"""The broker that `airflow_kafka_spark.testing.EmbeddedKafka` runs."""

OLDEST_JAVA = 17
CACHE_ENV = "AIRFLOW_KAFKA_SPARK_CACHE"
IVY_SETTINGS_ENV = "AIRFLOW_KAFKA_SPARK_IVY_SETTINGS"

_PATTERN = "[organization]_[artifact]-[revision](-[classifier]).[ext]"
# Ivy gives jars that Maven's bundle plugin has packed (scala-logging, HdrHistogram, snappy-java) another type.
_TYPES = ("jar", "bundle")
_MANIFEST = "MANIFEST"
_TIMEOUT = 900.0
# Used in a log line only.
_MEGABYTES = {
    ("org.apache.kafka:kafka_2.13", False): 42,
    ("org.apache.spark:spark-sql-kafka-0-10_2.13", False): 68,
    ("org.apache.spark:spark-sql-kafka-0-10_2.13", True): 11,
}


def find_java() -> Path:
    """Return the `java` that this package starts: ``JAVA_HOME/bin/java`` if JAVA_HOME is set, else `java` on the PATH.

    Its version is read from the file ``release`` of its installation. Without that file it is run once per process.

    :return: the executable.
    :raises JavaMissing: no Java was found, its version cannot be determined, or it is older than Java 17.
    """
    return _check_java(os.environ.get("JAVA_HOME", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=4)
def _check_java(java_home: str, path: str) -> Path:
    if java_home:
        java = Path(java_home) / "bin" / "java"
        if not java.is_file():
            raise JavaMissing(f"JAVA_HOME is {java_home}, but {java} does not exist")
    else:
        found = shutil.which("java", path=path)
        if not found:
            raise JavaMissing("JAVA_HOME is not set and there is no java on the PATH")
        java = Path(found)
    major = _read_release_major(java) or _read_reported_major(java)
    if major < OLDEST_JAVA:
        raise JavaMissing(f"{java} is Java {major}")
    return java


def _read_release_major(java: Path) -> int:
    """Return the major version in the file ``release`` of an installation; 0 without that file. This starts no JVM."""
    try:
        release = (java.resolve().parents[1] / "release").read_text(encoding="utf-8")
    except (OSError, IndexError):
        return 0
    return _parse_major(re.search(r'^JAVA_VERSION="(\d+)(?:\.(\d+))?', release, re.MULTILINE))


def _read_reported_major(java: Path) -> int:
    """Return the major version that a `java` reports when it runs.

    :raises JavaMissing: it does not run, or reports no version.
    """
    try:
        ran = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaMissing(f"{java} could not be run: {error}") from error
    version = re.search(r'version "(\d+)(?:\.(\d+))?', ran.stderr + ran.stdout)
    if ran.returncode or not version:
        raise JavaMissing(f"`{java} -version` did not report a version: {_get_last_lines(ran.stderr + ran.stdout)}")
    return _parse_major(version)


def _parse_major(version: re.Match[str] | None) -> int:
    # Java 8 and older report 1.8.
    return 0 if version is None else int(version[2] or 0) if version[1] == "1" else int(version[1])


def find_cache_directory() -> Path:
    """Return the directory of cached jars: ``AIRFLOW_KAFKA_SPARK_CACHE``, else ``airflow-kafka-spark`` in ``XDG_CACHE_HOME``
    (``~/.cache``).
    """
    if own := os.environ.get(CACHE_ENV):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg and os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "airflow-kafka-spark"


def find_pyspark_jars() -> Path:
    """Return the directory of the jars that pyspark ships, without importing pyspark.

    :raises JarsUnavailable: pyspark is not installed, or only `pyspark-client`, which ships none.
    """
    jars = _find_pyspark() / "jars"
    if not jars.is_dir():
        raise JarsUnavailable(["pyspark"], f"{jars} does not exist; the full `pyspark` ships it, `pyspark-client` does not")
    return jars


def find_spark_jars() -> Path:
    """Return the directory of Spark's jars: that of ``SPARK_HOME``, else that of pyspark.

    :raises JarsUnavailable: as :func:`find_pyspark_jars`.
    """
    home = os.environ.get("SPARK_HOME")
    return Path(home) / "jars" if home else find_pyspark_jars()


def find_spark_kafka_connector() -> str:
    """Return the coordinate of Spark's Kafka connector for the release and the Scala version of the installed pyspark."""
    version = read_pyspark_version()
    core = next(find_pyspark_jars().glob("spark-core_*.jar"), None)
    scala = core.name.removeprefix("spark-core_").split("-")[0] if core else "2.13"
    return f"org.apache.spark:spark-sql-kafka-0-10_{scala}:{version}"


def read_pyspark_version() -> str:
    """Return the version of the installed pyspark, without importing it.

    :raises JarsUnavailable: pyspark is not installed, or does not state its version.
    """
    text = (_find_pyspark() / "version.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__[^=]*=\s*[\'"]([^\'"]+)', text, re.MULTILINE)
    if not version:
        raise JarsUnavailable(["pyspark"], "the installed pyspark does not state its version")
    return version[1]


def find_spark_home_problem() -> str:
    """Return the reason why pyspark cannot start the Spark in ``SPARK_HOME``; "" if it may, or if the variable is not set.

    Most jobs without SQL work with another release, and SQL fails with errors that name objects of Java.

    :raises JarsUnavailable: pyspark is not installed.
    """
    home = os.environ.get("SPARK_HOME")
    if home is None:
        return ""
    if not Path(home, "bin", "spark-submit").is_file():
        return f"`SPARK_HOME` is `{home}`, which has no `bin/spark-submit`"
    core = next(Path(home, "jars").glob("spark-core_*.jar"), None)
    release = re.match(r"spark-core_[\d.]+-((\d+\.\d+)\..+)\.jar", core.name) if core else None
    version = read_pyspark_version()
    if release is None or version.startswith(f"{release[2]}."):
        return ""
    return f"`SPARK_HOME` is `{home}`, which has Spark {release[1]}, and pyspark here is {version}"


def resolve_jars(coordinates: Sequence[str], *, exclude_bundled: bool = False, cache: Path | None = None) -> tuple[Path, ...]:
    """Return the jar files of Maven coordinates and of all their dependencies at run time.

    The first call fetches them (one log line before, one after); later calls, of any process, find them in the cache. If
    several processes call it concurrently, one fetches and the others wait for it.

    :param coordinates: ``organisation:module:revision``, in any order.
    :param exclude_bundled: True to leave out artifacts that pyspark ships itself, in any version, because they must not be on
        Spark's class path twice.
    :param cache: the cache's directory; default `find_cache_directory()`.
    :return: absolute paths, sorted.
    :raises JavaMissing: the jars are not cached and there is no Java to fetch them with.
    :raises JarsUnavailable: a coordinate is malformed, or Ivy could not fetch it; the message has the end of Ivy's output.
    """
    wanted = tuple(sorted(set(coordinates)))
    for coordinate in wanted:
        if not re.fullmatch(r"[\w.-]+:[\w.-]+:[\w.+-]+", coordinate):
            raise JarsUnavailable(wanted, f"`{coordinate}` is not of the form organisation:module:revision")
    root = (cache or find_cache_directory()).absolute()
    bundled = _list_bundled_artifacts(str(find_pyspark_jars())) if exclude_bundled else frozenset()
    directory = root / "jars" / _make_directory_name(wanted, bundled)
    jars = _find_published(directory)
    if jars is None:
        with _lock_directory(root, wanted) as lock:
            # Another process may have fetched them while this one waited for the lock.
            jars = _find_published(directory)
            if jars is None:
                _fetch(wanted, bundled, root, directory, lock)
                jars = _find_published(directory)
    if jars is None:
        raise JarsUnavailable(wanted, f"{directory} does not hold what was just fetched into it")
    return jars


def _find_pyspark() -> Path:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise JarsUnavailable(["pyspark"], "pyspark is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _make_directory_name(wanted: tuple[str, ...], bundled: frozenset[str]) -> str:
    digest = hashlib.sha256("\n".join([_PATTERN, *_TYPES, *wanted, "without", *sorted(bundled)]).encode()).hexdigest()[:12]
    _, module, revision = wanted[0].split(":")
    return f"{module}-{revision}-{digest}"


def _find_published(directory: Path) -> tuple[Path, ...] | None:
    """Return the jars of a cached set; None if there is no such set or some of its files were removed."""
    try:
        names = (directory / _MANIFEST).read_text(encoding="utf-8").split()
        present = set(os.listdir(directory))
    except OSError:
        return None
    return tuple(directory / name for name in names) if present.issuperset(names) else None


@contextmanager
def lock_file(path: Path, *, wait: bool = True) -> Iterator[int | None]:
    """Hold an exclusive lock on a file, which is created if it does not exist. The lock ends with the process.

    :param wait: True (default) to wait while another process holds the lock.
    :return: the descriptor of the file; None if another process holds the lock.
    :raises OSError: the file cannot be written.
    """
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        yield file.fileno()


@contextmanager
def _lock_directory(root: Path, wanted: tuple[str, ...]) -> Iterator[int]:
    with ExitStack() as stack:
        # One lock for all sets, because they share Ivy's own cache, which allows one writer only.
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(lock_file(root / ".lock"))
        except OSError as error:
            raise JarsUnavailable(wanted, f"the jar cache {root} cannot be written: {error.strerror}") from error
        assert lock is not None
        yield lock


def _fetch(wanted: tuple[str, ...], bundled: frozenset[str], root: Path, directory: Path, lock: int) -> None:
    java = find_java()
    directory.parent.mkdir(parents=True, exist_ok=True)
    # This process holds the lock, so an existing part was left by a process that was killed.
    for left in directory.parent.glob(".fetching-*"):
        shutil.rmtree(left, ignore_errors=True)
    megabytes = sum(_MEGABYTES.get((coordinate.rpartition(":")[0], bool(bundled)), 0) for coordinate in wanted)
    size = f", about {megabytes} MB" if megabytes else ""
    log.info("Fetching %s and what they need into %s, once%s", ", ".join(wanted), directory, size)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=directory.parent) as temporary:
        into = Path(temporary) / "set"
        into.mkdir()
        ivy_file = Path(temporary) / "ivy.xml"
        ivy_file.write_text(_make_ivy_xml(wanted, bundled), encoding="utf-8")
        _run_ivy(java, wanted, root / "ivy", ivy_file, into, lock)
        jars = sorted(into.glob("*.jar"))
        missing = [c for c in wanted if not any(jar.name.startswith("{}_{}-{}".format(*c.split(":"))) for jar in jars)]
        if missing:
            raise JarsUnavailable(wanted, f"Ivy reported success but brought no jar of {', '.join(missing)}")
        (into / _MANIFEST).write_text("".join(f"{jar.name}\n" for jar in jars), encoding="utf-8")
        size_in_bytes = sum(jar.stat().st_size for jar in jars)
        # A rename does not replace a directory that is not empty, and only a damaged set can be there.
        if directory.exists():
            directory.rename(Path(temporary) / "damaged")
        into.rename(directory)
    # Ivy's copy is only needed to continue after a failed attempt.
    shutil.rmtree(root / "ivy", ignore_errors=True)
    log.info("Fetched %d jars, %.0f MB, in %.0f s", len(jars), size_in_bytes / 1e6, time.monotonic() - began)


def _make_ivy_xml(wanted: tuple[str, ...], bundled: frozenset[str]) -> str:
    dependencies = "".join(
        f'<dependency org={quoteattr(org)} name={quoteattr(name)} rev={quoteattr(rev)} conf="default->default"/>'
        for org, name, rev in (coordinate.split(":") for coordinate in wanted)
    )
    asked_for = {coordinate.split(":")[1] for coordinate in wanted}
    excludes = "".join(f"<exclude module={quoteattr(name)}/>" for name in sorted(bundled - asked_for))
    return (
        '<ivy-module version="2.0"><info organisation="airflow_kafka_spark" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{dependencies}{excludes}</dependencies></ivy-module>"
    )


def _run_ivy(java: Path, wanted: tuple[str, ...], ivy_cache: Path, ivy_file: Path, into: Path, lock: int) -> None:
    command = [str(java), "-cp", f"{find_pyspark_jars()}/*", "org.apache.ivy.Main"]
    if settings := os.environ.get(IVY_SETTINGS_ENV):
        if not Path(settings).is_file():
            raise JarsUnavailable(wanted, f"{IVY_SETTINGS_ENV} names {settings}, which is not a file")
        command += ["-settings", settings]
    command += ["-cache", str(ivy_cache), "-ivy", str(ivy_file), "-confs", "default"]
    command += ["-retrieve", f"{into}/{_PATTERN}", "-types", *_TYPES, "-warn"]
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT,
            check=False,
            # Java inherits the lock: if this process is killed, no other one may write to Ivy's cache before Java ends.
            pass_fds=(lock,),
        )
    except subprocess.TimeoutExpired as error:
        raise JarsUnavailable(wanted, f"not done after {_TIMEOUT:.0f} s") from error
    if ran.returncode:
        raise JarsUnavailable(wanted, f"Ivy said: {_get_last_lines(ran.stdout)}")


def _get_last_lines(output: str, count: int = 12) -> str:
    # Ivy prints dots for progress, and lines of colons and equal signs around its warnings.
    lines = (line.strip(" \t:=") for line in output.splitlines())
    reported = [line for line in lines if re.search(r"\w", line) and not re.fullmatch(r"\.*\s*\(?\d+kB\)", line)]
    return "; ".join(reported[-count:]) or "nothing"


@functools.lru_cache(maxsize=2)
def _list_bundled_artifacts(directory: str) -> frozenset[str]:
    """Return the names of the artifacts in a directory of jars: ``lz4-java`` for ``lz4-java-1.8.0.jar``."""
    names = (name.removesuffix(".jar") for name in os.listdir(directory) if name.endswith(".jar"))
    return frozenset(re.sub(r"-\d[^-]*(-(SNAPSHOT|[a-z]+\d*))?$", "", name) for name in names)
