"""Spark sessions from the official ``spark`` and ``spark_connect`` connections."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.providers.common.compat.sdk import BaseHook

import airflow_kafka_spark
from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, SparkJobFailed, SparkUnavailable
from airflow_kafka_spark.hooks.connections import format_setting, look_up
from airflow_kafka_spark.hooks.spark import python_daemon
from airflow_kafka_spark.hooks.spark.class_archive import JAVA_OPTION_VARIABLES, SparkClassArchive
from airflow_kafka_spark.hooks.spark.health import (
    call_driver,
    discard,
    discard_ended,
    find_connect_end,
    find_first_line,
    get_java_session_class,
    is_local_master,
)
from airflow_kafka_spark.hooks.spark.jars import find_spark_jars
from airflow_kafka_spark.hooks.spark.warm import client as warm
from airflow_kafka_spark.hooks.spark.warm.process import (
    WarmSettings,
    WarmUnavailable,
    list_changes,
    list_file_changes,
    parse_duration,
)

if TYPE_CHECKING:
    from airflow.sdk import Connection
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

STOP_SECONDS = 60.0
"""Maximum number of seconds to wait until a context is stopped, or the session of a Connect server is released."""

CONNECT_RETRIES = 7
"""Maximum number of repetitions of a request that a Connect server does not answer. The pauses add up to two minutes. With the
default of Spark's client, an attempt would wait twice ten minutes after the end of its server."""

CONNECT_SILENT_SECONDS = 60.0
"""Seconds for which a Connect server that accepts connections may answer nothing: before a session, and between two signs of life
of a job, however long that takes. gRPC asks for these signs by itself. Servers of gRPC close connections on which they are asked
often while nothing else is sent: at this interval, the streams of Connect, which last two minutes, are asked too seldom."""

_JAVA = "spark.driver.extraJavaOptions"
_CLASS_PATH = "spark.driver.extraClassPath"
_PYTHON = "spark.pyspark.python"
_DAEMON = "spark.python.daemon.module"
_WITH_PORT = re.compile(r"[^\[\]:/,]+:[0-9]+(,[^\[\]:/,]+:[0-9]+)*")
"""One host or several, each with its port."""
_ANALYSIS_SETTINGS = re.compile(
    r"spark\.(sql\.(?!artifact\.|redaction\.|warehouse\.dir=)|jars|plugins=|driver\.(extraClassPath|userClassPathFirst)=)"
)
"""Settings that may change how Spark analyzes SQL. Those that are left out are written differently once a context runs."""
_JAVA_PROPERTIES = re.compile(r"-D(spark\.\S+)")
_INCUBATOR = b"WARNING: Using incubator modules: "

_QUICK_START = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
"""Java options that multiply the thresholds of Java's second compiler (C2) by ten. The start of Spark runs much code a few times,
and compiling it took a third of the CPU time of the start. Code that works on records reaches the thresholds within a second."""

SECRETS = "(?i)secret|password|passphrase|token|jaas|credential|access[.]?key|keystore[.]key|dsn"
"""Pattern of the names of settings whose values Spark does not show."""


class SparkHook(BaseHook):
    """A Spark session for one task.

    The type of the connection decides where Spark runs: ``spark`` runs the driver in the task (the host is the master:
    ``local[*]``, ``spark://…``, ``yarn``, ``k8s://…``), ``spark_connect`` (or a host that begins with ``sc://``) connects to a
    server. Keys of the extra that begin with ``spark.`` are Spark settings. An existing session of the process is used with its
    own settings: successive windows in one process share it, which saves the seconds of a start.

    The JVM of a local master starts from an archive of its classes, and compiles less while it starts. The first session of a
    host starts a background process that makes the archive (`airflow_kafka_spark.hooks.spark.class_archive`).
    ``"class_archive": false`` in the extra switches both off.

    ``"keep_alive": "10m"`` in the extra keeps the Spark of a local master between tasks, for tasks of one user with equal
    settings (`airflow_kafka_spark.hooks.spark.warm`).

    :param spark_conn_id: the Airflow connection; default ``spark_default``.
    :param conf: Spark settings that take precedence over the connection's; default none.
    :param app_name: name of the application in Spark; default ``airflow-kafka-spark``.
    """

    conn_name_attr = "spark_conn_id"
    default_conn_name = "spark_default"
    conn_type = "spark"
    hook_name = "Spark session"

    def __init__(
        self,
        spark_conn_id: str = default_conn_name,
        *,
        conf: Mapping[str, str] | None = None,
        app_name: str = "airflow-kafka-spark",
    ) -> None:
        super().__init__()
        self.spark_conn_id = spark_conn_id
        self.conf = dict(conf or {})
        self.app_name = app_name
        self._early: EarlyStart | None = None

    @cached_property
    def connection(self) -> Connection:
        """The Airflow connection.

        :raises ConnectionInvalid: it is not defined or of another type.
        """
        return look_up(
            self.spark_conn_id,
            "spark",
            "spark_connect",
            option="spark_conn_id",
            hint="host: the master, `local[*]` to begin with",
            get=self.get_connection,
        )

    @property
    def is_connect(self) -> bool:
        """True if the session is a client of a Spark Connect server, so that no JVM is started here."""
        return self.connection.conn_type == "spark_connect" or self.master.startswith("sc://")

    @property
    def is_local(self) -> bool:
        """True if driver and executors are one process on this machine."""
        return is_local_master(self.master)

    @property
    def master(self) -> str:
        """The master, or the address of a Spark Connect server without its credentials."""
        connection = self.connection
        scheme = "sc" if connection.conn_type == "spark_connect" else "spark"
        host = self._split_host()[0] if connection.host else ("" if scheme == "sc" else "local[*]")
        if is_local_master(host) or host.startswith("yarn"):
            return host
        if host.startswith(("k8s://", "sc://", "spark://", "mesos://")):
            return f"{host}:{connection.port}" if connection.port else host
        if not connection.port and _WITH_PORT.fullmatch(host):
            return f"{scheme}://{host}"
        default_port = 15002 if scheme == "sc" else 7077
        return f"{scheme}://{host}:{connection.port or default_port}"

    def _split_host(self) -> tuple[str, str]:
        """Return the host of the connection, and the options of a Spark Connect address in it, of which ``token`` is a secret."""
        host, _, options = (self.connection.host or "").partition("/;")
        return host, options

    @property
    def _remote(self) -> str:
        """The Spark Connect address with its credentials. In them, `;` and `=` would end a part of the address."""
        connection, given = self.connection, self._split_host()[1]
        options = f";{given}" if given else ""
        if connection.login:
            options += f";user_id={quote(connection.login, safe='')}"
        if connection.password:
            options += f";token={quote(connection.password, safe='')}"
        if str(connection.extra_dejson.get("use_ssl", "")).lower() == "true":
            options += ";use_ssl=true"
        return f"{self.master}/{options}" if options else self.master

    def make_settings(self) -> dict[str, str]:
        """Return the Spark settings of a new session: this package's, overridden by the connection's, overridden by ``conf``."""
        ours = {
            "spark.sql.session.timeZone": "UTC",
            "spark.redaction.regex": SECRETS,
            "spark.sql.redaction.options.regex": SECRETS,
            "spark.ui.showConsoleProgress": "false",
            # A plan is built in hundreds of small steps. Recording the Python stack of each one takes several times as long as
            # the steps themselves, and serves no purpose here.
            "spark.python.sql.dataFrameDebugging.enabled": "false",
            # No speculative execution: a concurrent second attempt at a split would write its rows for nothing.
            "spark.speculation": "false",
        }
        if self.is_local:
            ours |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}
        if not self.is_connect:
            log4j = files("airflow_kafka_spark.hooks.spark").joinpath("log4j2.properties")
            ours[_JAVA] = f"-Dlog4j2.configurationFile=file:{log4j}"
        theirs = {
            key: format_setting(value) for key, value in self.connection.extra_dejson.items() if key.startswith("spark.")
        } | self.conf
        if _JAVA in theirs:
            theirs[_JAVA] = f"{ours.get(_JAVA, '')} {theirs[_JAVA]}".strip()
        return ours | theirs

    def find_analysis_facts(self) -> list[str] | None:
        """Return the settings and the installed files on which Spark's analysis of SQL depends. Spark is not started.

        :return: one text for each; None if they are unknown: on a Connect server, or if other code of this process has made a
            session, which may have functions of its own. Also None if the extra has ``"plan_cache": false``.
        """
        if self.is_connect or format_setting(self.connection.extra_dejson.get("plan_cache", True)).lower() == "false":
            return None
        try:
            # A session that is just being started in a thread is this package's, and the first one of this process.
            if self._early is None and _has_session_of_others():
                return None
            installed = [*list_changes(find_spark_jars(), "*.jar"), *list_changes(_find_configuration_directory(), "spark-*")]
            settings = [*self._list_analysis_settings(), arguments := os.environ.get("PYSPARK_SUBMIT_ARGS", "")]
            # A jar with an extension of Spark's SQL may be replaced under its name, and a file of settings edited.
            values = (re.sub(r"^[\w.-]+=", "", text) for text in [*settings, *arguments.split()])
            return sorted([*settings, *installed, *list_file_changes(values)])
        except Exception:  # Spark is not installed, or has ended
            return None

    def _list_analysis_settings(self) -> Iterator[str]:
        """Yield the settings of SQL: those of the running context of this process, else those of a new one."""
        pyspark = sys.modules.get("pyspark") if self._early is None else None
        active = pyspark.SparkContext._active_spark_context if pyspark is not None else None
        if active is not None:
            yield from filter(_ANALYSIS_SETTINGS.match, active._jsc.sc().conf().toDebugString().splitlines())
            return
        settings = self.make_settings()
        given = (settings.get(_JAVA, ""), *(os.environ.get(name, "") for name in JAVA_OPTION_VARIABLES))
        yield from filter(_ANALYSIS_SETTINGS.match, (f"{name}={value}" for name, value in settings.items()))
        yield from filter(_ANALYSIS_SETTINGS.match, (found for options in given for found in _JAVA_PROPERTIES.findall(options)))

    @cached_property
    def keep_alive(self) -> float | None:
        """Seconds for which a local Spark waits for the next task; None if each task has a Spark of its own.

        :raises ConnectionInvalid: the value is no duration of 1 second to 24 hours, or the master is not local.
        """
        value = self.connection.extra_dejson.get("keep_alive")
        if value is None or value is False or value == "":
            return None
        if not self.is_local:
            action = "Remove `keep_alive` from the extra, or use a local master; for other masters run a Spark Connect server"
            raise ConnectionInvalid(self.spark_conn_id, f"`keep_alive` is set, and the master is `{self.master}`", action)
        seconds = parse_duration(value)
        if seconds is None:
            action = "Use a number with s, m or h, from `1s` to `24h`: `10m`"
            raise ConnectionInvalid(self.spark_conn_id, f"`keep_alive` is {value!r}, which is no such duration", action)
        return seconds

    def start_early(self, is_needed: Callable[[], bool]) -> None:
        """Start the session of a local master in a thread, if it is needed. :meth:`open_session` waits for the thread, and raises
        its error.

        Nothing happens for other masters, whose executors other applications may need, or if this process has a session.

        :param is_needed: called in the thread; an error counts as False.
        :raises ConnectionInvalid: the connection is not defined or of another type.
        """
        if not self.is_local or self.is_connect or self._early is not None:
            return
        pyspark = sys.modules.get("pyspark")
        if pyspark is None or pyspark.SparkContext._active_spark_context is None:
            self._early = EarlyStart(lambda: self._start_context(()), is_needed)

    def give_up_early_start(self) -> None:
        """Cancel :meth:`start_early`, unless the session is being started already."""
        if self._early is not None:
            self._early.give_up()

    @contextmanager
    def open_session(self, *, jars: tuple[str, ...] = ()) -> Iterator[SparkSession]:
        """Yield a session that is ready to use.

        On leaving, a session that was made here is stopped, so that its executors are released. A local session is kept for later
        windows, and ends with the task's process.

        A session of this process that has ended (its JVM was killed, or its master went away) is replaced by a new one.

        :param jars: local jar files for a new session.
        :raises SparkUnavailable: the session cannot be started, or it ends while it is used.
        """
        if self.is_connect:
            with self._open_connect_session() as session:
                yield session
            return
        with self._open_context(jars) as context:
            yield _get_session(context)

    def open_without_sql(self) -> AbstractContextManager[SparkContext | SparkSession]:
        """Return a context manager that yields a Spark for a job without SQL: a context, or a session of a Connect server, which
        has no contexts.

        Making a first session takes a JVM more than a CPU second, because it loads the settings and the functions of SQL. In all
        other respects, this is :meth:`open_session`.
        """
        return self._open_connect_session() if self.is_connect else self._open_context(())

    @contextmanager
    def _open_connect_session(self) -> Iterator[SparkSession]:
        """Yield a session of a Connect server; one that is made here is stopped on leaving.

        :raises SparkUnavailable: it cannot be started, or the server has ended it.
        """
        from pyspark.sql import SparkSession

        _silence_clients()
        warm.detach_if_ended()
        active = SparkSession.getActiveSession()
        if active is not None:
            yield active
            return
        session = self._start_connect_session()
        try:
            yield session
        except Exception as error:
            reason = find_connect_end(error)
            if reason and not (isinstance(error, SparkJobFailed) and error.cancelled):
                raise SparkUnavailable(self.spark_conn_id, self.master, reason) from error
            raise
        finally:
            if not call_driver(session.stop, STOP_SECONDS):
                log.warning("The Spark Connect server has not answered for %.0f s: its session was not released", STOP_SECONDS)

    @contextmanager
    def _open_context(self, jars: tuple[str, ...]) -> Iterator[SparkContext]:
        """Yield a context whose driver runs here, or in a warm process; one that is made here is stopped on leaving, unless it is
        local.

        :param jars: local jar files for a new context.
        :raises SparkUnavailable: it cannot be started, or it ends while it is used.
        """
        from pyspark import SparkContext

        _silence_clients()
        early, self._early = self._early, None
        made = early.wait_for_result() if early is not None else None
        warm.detach_if_ended()
        if reason := _discard_ended():
            made = None
            log.warning("The Spark session of an earlier window cannot be used: %s. A new one is started", reason)
        active = SparkContext._active_spark_context if made is None else None
        if active is not None:
            with self._explain_errors():
                yield active
            return
        context = made or self._start_context(jars)
        try:
            with self._explain_errors(), nullcontext() if self.is_local else _send_package(context):
                yield context
        finally:
            if not self.is_local:
                # It may have been discarded.
                if SparkContext._active_spark_context is not None and not call_driver(context.stop, STOP_SECONDS):
                    log.warning("Spark's driver has not answered for %.0f s: its context was not stopped", STOP_SECONDS)
            elif (archive := self._find_class_archive()) is not None:
                archive.make_in_background()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Raise :class:`SparkUnavailable` if the context or its JVM has ended, instead of errors that name objects of the JVM."""
        try:
            yield
        except Exception as error:
            reason = _discard_ended()
            if reason and not (isinstance(error, SparkJobFailed) and error.cancelled):
                raise SparkUnavailable(self.spark_conn_id, self.master, reason) from error
            raise

    def _find_class_archive(self) -> SparkClassArchive | None:
        """Return the archive of the classes of a local session; None if it is switched off or impossible."""
        if not self.is_local or format_setting(self.connection.extra_dejson.get("class_archive", True)).lower() == "false":
            return None
        return SparkClassArchive.find(self.make_settings().get(_CLASS_PATH, ""))

    def _make_quick_start_options(self, given: str) -> tuple[str, ...]:
        """Return Java options for a faster start of a local JVM; none if ``class_archive`` is false, or without Java 17 to 23.

        :param given: the Java options of the settings.
        """
        archive = self._find_class_archive()
        return () if archive is None else (*_QUICK_START, *archive.make_java_options(given))

    def _start_connect_session(self) -> SparkSession:
        """Return a new session of a Connect server.

        :raises SparkUnavailable: it cannot be started.
        """
        settings = self._prepare_settings()
        with self._announce_start():
            self._await_connect_server()
            return self._make_session(settings)

    def _await_connect_server(self) -> None:
        """Wait until the Connect server answers. Spark's client would wait for many minutes.

        :raises TimeoutError: the server accepts connections and does not answer, or no server listens at the address.
        """
        deadline = time.monotonic() + CONNECT_SILENT_SECONDS
        while reason := self.find_unreachable_reason(refuse_silent=True):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{reason}, for {CONNECT_SILENT_SECONDS:g} s")
            time.sleep(1)

    def _start_context(self, jars: tuple[str, ...]) -> SparkContext:
        """Return a new context, or the one of a warm process.

        :param jars: local jar files for a new context.
        :raises SparkUnavailable: it cannot be started.
        """
        _avoid_pandas()
        settings = self._prepare_settings()
        if jars:
            settings["spark.jars"] = ",".join(filter(None, [settings.get("spark.jars", ""), *jars]))
        if self.is_local:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings = {_DAEMON: python_daemon.__name__} | settings
            if self.keep_alive is not None and (kept := self._open_warm(settings)) is not None:
                return kept.sparkContext
            # Before the user's options: of equal names, the last one takes effect.
            settings[_JAVA] = " ".join([*self._make_quick_start_options(settings[_JAVA]), settings[_JAVA]])
        with self._announce_start("" if self.is_local else settings.get(_PYTHON, "")):
            return self._make_context(settings)

    def _prepare_settings(self) -> dict[str, str]:
        # Without it, workers run whatever `python3` is found, with other packages than this process. Warm processes inherit it.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        return self.make_settings()

    @contextmanager
    def _announce_start(self, python: str = "") -> Iterator[None]:
        """Log that Spark is started, and raise its errors as :class:`SparkUnavailable`.

        :param python: the Python of executors; "" for this process's one.
        """
        log.info("Starting Spark on %s", self.master)
        try:
            with _use_executor_python(python), _redirect_errors_to_output():
                yield
        except Exception as error:
            reason = find_first_line(error)
            if not self.is_connect:
                reason = discard_ended() or reason
                discard()
            raise SparkUnavailable(self.spark_conn_id, self.master, self._remove_secrets(reason)) from error

    def _make_session(self, settings: Mapping[str, str]) -> SparkSession:
        from pyspark.sql import SparkSession

        _ask_for_signs_of_life()
        builder: Any = SparkSession.builder.appName(self.app_name).remote(self._remote)
        for key, value in settings.items():
            if key.startswith("spark.sql."):
                builder = builder.config(key, value)
        made: Any = builder.getOrCreate()
        if hasattr(made.client, "set_retry_policies"):  # not in Spark 3.5
            from pyspark.sql.connect.client.retries import DefaultPolicy

            made.client.set_retry_policies([DefaultPolicy(max_retries=CONNECT_RETRIES)])
        session: SparkSession = made
        return session

    def _make_context(self, settings: Mapping[str, str]) -> SparkContext:
        from pyspark import SparkConf, SparkContext

        conf = SparkConf().setAppName(self.app_name).setMaster(self.master).setAll(list(settings.items()))
        return SparkContext.getOrCreate(conf)

    def _open_warm(self, settings: Mapping[str, str]) -> SparkSession | None:
        """Return a session in the warm process; None if that cannot be used, after a line in the log with the reason."""
        from pyspark import SparkContext

        assert self.keep_alive is not None
        # The retry of a task that was killed waits until the Python workers of its cancelled jobs have ended.
        ours = {"spark.python.task.killTimeout": "100ms"}
        wanted = WarmSettings(
            self.master, {**ours, **settings}, self.keep_alive, java_options=self._make_quick_start_options(settings[_JAVA]),
        )  # fmt: skip
        try:
            if SparkContext._active_spark_context is not None and not warm.is_attached():
                raise WarmUnavailable("this process has a Spark of its own already")
            return warm.open_warm_session(wanted, self.app_name)
        except WarmUnavailable as error:
            log.warning("The warm Spark process cannot be used, so that this task starts its own: %s", error)
            return None

    def begin_jobs(self, context: SparkContext, group: str, description: str) -> None:
        """Put the jobs that this thread starts from now on into a group, after ending jobs of the group that an earlier attempt
        has left in a warm process.

        :param context: the context of the jobs.
        :param group: name of the group, for :meth:`pyspark.SparkContext.cancelJobGroup`.
        :param description: description of the jobs on Spark's pages.
        :raises KafkaSparkError: the jobs of an earlier attempt did not end.
        """
        try:
            warm.end_leftovers(context, group)
        except (OSError, WarmUnavailable) as error:
            raise SparkJobFailed(description, str(error)) from error
        context.setJobGroup(group, description, interruptOnCancel=True)

    def test_connection(self) -> tuple[bool, str]:
        """Start a session, run a job, and return True and Spark's version, or False and the reason, for Airflow's UI.

        The session runs in a process of its own, so that no JVM is left in Airflow's. An address at which nothing answers, or a
        server of another protocol, is reported within ten seconds; the whole test takes at most 90 seconds.
        """
        from airflow_kafka_spark.hooks.spark.health import find_master_problem, probe_spark
        from airflow_kafka_spark.hooks.spark.jars import find_java, find_spark_home_problem

        try:
            _ = self.keep_alive
            if not self.is_connect:
                find_java()
                if reason := find_spark_home_problem():
                    return False, reason
            if reason := find_master_problem(self.master) or self.find_unreachable_reason(refuse_silent=True):
                return False, reason
            settings = self.make_settings()
            if self.is_connect:
                settings = {key: value for key, value in settings.items() if key.startswith("spark.sql.")}
            done, outcome = probe_spark(self._remote if self.is_connect else self.master, settings, is_connect=self.is_connect)
        except KafkaSparkError as error:
            return False, str(error)
        if done:
            return True, f"Connected to Spark {outcome} at {self.master}."
        return False, f"Spark at {self.master}: {self._remove_secrets(outcome)}"

    def find_unreachable_reason(self, *, refuse_silent: bool = False) -> str:
        """Return the reason why the master cannot be reached; "" if it can, or if that cannot be checked.

        :param refuse_silent: True to return a reason for a server that answers nothing within two seconds, too.
        """
        from airflow_kafka_spark.hooks.spark.health import find_unreachable_reason

        connection = self.connection
        use_ssl = str(connection.extra_dejson.get("use_ssl", "")).lower() == "true"
        uses_tls = use_ssl or (bool(connection.password) and not self.master.startswith("sc://localhost"))
        return find_unreachable_reason(self.master, uses_tls=uses_tls, refuse_silent=refuse_silent)

    def _remove_secrets(self, text: str) -> str:
        given = self._split_host()[1].split(";")
        in_host = [part.partition("=")[2] for part in given if part.startswith("token=")]
        for secret in filter(None, (self.connection.password, *in_host)):
            text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
        return text


class SparkConnectHook(SparkHook):
    """Spark sessions on connections of type ``spark_connect``."""

    conn_type = "spark_connect"
    hook_name = "Spark Connect session"


class EarlyStart:
    """Starts a session in a thread if the window will need one.

    :param start: starts Spark, and returns its context.
    :param is_needed: called in the thread; returns True if the window will have records. An error counts as False, because the
        task itself will raise it, too.
    """

    def __init__(self, start: Callable[[], SparkContext], is_needed: Callable[[], bool]) -> None:
        self._start, self._is_needed = start, is_needed
        self._deciding = threading.Lock()
        self._is_given_up = self._has_begun = False
        self._context: SparkContext | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spark start", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Cancel the start of the session, unless it has begun already."""
        with self._deciding:
            self._is_given_up = True

    def wait_for_result(self) -> SparkContext | None:
        """Return the context as soon as it is ready. If its start has not begun, cancel it and return None.

        :raises SparkUnavailable: it could not be started.
        """
        self.give_up()
        if not self._has_begun:
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._context

    def _run(self) -> None:
        try:
            is_needed = self._is_needed()
        except Exception:
            log.debug("Whether the window will have records is not known yet", exc_info=True)
            return
        with self._deciding:
            if self._is_given_up or not is_needed:
                return
            self._has_begun = True
        try:
            self._context = self._start()
        except BaseException as error:
            self._error = error


def _ask_for_signs_of_life() -> None:
    """Let new clients of Connect servers find out that a connection is dead. By default, a job waits for a stopped server for
    ever."""
    from pyspark.sql.connect.client import ChannelBuilder

    ours = {
        "grpc.keepalive_time_ms": round(CONNECT_SILENT_SECONDS * 1000),
        "grpc.keepalive_timeout_ms": round(CONNECT_SILENT_SECONDS * 1000 / 3),
        # Of the pings with which gRPC measures the connection, behind which no other one is sent.
        "grpc.http2.ping_timeout_ms": round(CONNECT_SILENT_SECONDS * 1000 / 3),
        # By default, two pings are sent between two requests, and others of gRPC have been sent before.
        "grpc.http2.max_pings_without_data": 0,
    }
    # The builder of sessions takes either an address or a builder of channels, to which it would not pass the address's settings.
    options = ChannelBuilder.GRPC_DEFAULT_OPTIONS
    options[:] = [*(pair for pair in options if pair[0] not in ours), *ours.items()]


def _silence_clients() -> None:
    """Keep lines out of a task's log that are of no use there: each connection that py4j closes; the Java stack trace of an error
    in SQL, which Spark logs before it raises the error; pyspark's warning about pandas 3, which is not used here; and requests of
    a Connect client that its closed session does not answer."""
    logging.getLogger("py4j").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    try:
        from pyspark.logger import PySparkLogger
    except ImportError:  # Spark 3.5 logs no such error
        return
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    if "SPARK_CONNECT_LOG_LEVEL" not in os.environ:
        # pyspark does the same when it is imported, but Airflow enables all loggers that exist when it configures logging.
        PySparkLogger.getLogger("pyspark.sql.connect.logging").disabled = True


def _avoid_pandas() -> None:
    """Let calls of Java recognise NumPy's values without ``pyspark.testing``, which Spark 4 imports for that at the first call.

    It imports pandas and unittest: a third of the CPU time of a small window in a warm process, whose driver uses neither.
    """
    import numpy as np
    from py4j.protocol import INPUT_CONVERTER
    from pyspark.sql.types import NumpyArrayConverter, NumpyScalarConverter

    class ScalarConverter(NumpyScalarConverter):
        """Converts NumPy's scalars as PySpark does."""

        def can_convert(self, obj: object) -> bool:
            """Return True for a scalar of NumPy."""
            return isinstance(obj, np.generic)

    class ArrayConverter(NumpyArrayConverter):
        """Converts NumPy's arrays as PySpark does."""

        def can_convert(self, obj: object) -> bool:
            """Return True for an array of one dimension."""
            return isinstance(obj, np.ndarray) and obj.ndim == 1

    ours = {NumpyScalarConverter: ScalarConverter(), NumpyArrayConverter: ArrayConverter()}
    INPUT_CONVERTER[:] = [ours.get(type(known), known) for known in INPUT_CONVERTER]


def _get_session(context: SparkContext) -> SparkSession:
    """Return the session of a context, a new one if it has none, and make it active in this thread."""
    from pyspark.sql import SparkSession

    if (attached := warm.get_session()) is not None:
        return attached
    if (active := SparkSession.getActiveSession()) is not None:
        return active
    session = SparkSession(context)
    _own_sessions.append(session)
    # Spark has one active session per thread.
    get_java_session_class(session._jvm).setActiveSession(session._jsparkSession)
    return session


_own_sessions: list[SparkSession] = []


def _has_session_of_others() -> bool:
    """Return True if this process has a session that this package has not made."""
    module = sys.modules.get("pyspark.sql.session")
    made = module and module.SparkSession._instantiatedSession
    return made is not None and not any(made is own for own in (warm.get_session(), *_own_sessions))


def _find_configuration_directory() -> Path:
    """Return the directory of Spark's configuration files."""
    own = os.environ.get("SPARK_CONF_DIR")
    return Path(own) if own else find_spark_jars().parent / "conf"


def _discard_ended() -> str:
    """Discard the session of this process if it no longer works, also that of a warm process.

    :return: the reason, as the end of a sentence; "" if it works.
    """
    reason = discard_ended()
    # The server of a warm process closes the connection only after it has noticed the end of its JVM.
    if reason and (warm_log := warm.detach()):
        return f"{reason}; {warm_log} may contain the reason"
    return reason


@contextmanager
def _use_executor_python(path: str) -> Iterator[None]:
    """Set the Python of the executors of a session that is started in this block; an empty path changes nothing.

    PySpark reads only the environment variable, not the setting ``spark.pyspark.python``.
    """
    before = os.environ["PYSPARK_PYTHON"]
    os.environ["PYSPARK_PYTHON"] = path or before
    try:
        yield
    finally:
        os.environ["PYSPARK_PYTHON"] = before


@contextmanager
def _redirect_errors_to_output() -> Iterator[None]:
    """Redirect the standard error of a JVM that is started in this block to standard output, as long as the JVM lives.

    Airflow shows lines on the standard error of a task's processes as errors. Each JVM of Spark 4 begins with a warning about an
    incubator module that Spark itself uses, and that no Java option switches off. This line is left out.
    """
    try:
        saved = os.dup(2)
    except OSError:  # this process has no standard error
        yield
        return
    reading, writing = os.pipe()
    threading.Thread(target=_copy_lines, args=(reading, os.dup(1)), name="kafka-spark-jvm-output", daemon=True).start()
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _copy_lines(reading: int, writing: int) -> None:
    """Copy lines without :data:`_INCUBATOR` until the pipe ends. Reading continues if writing fails: the JVM must not block."""
    with open(reading, "rb") as lines, open(writing, "wb", buffering=0) as output:
        for line in lines:
            if _INCUBATOR not in line:
                with suppress(OSError):
                    output.write(line)


@contextmanager
def _send_package(context: SparkContext) -> Iterator[None]:
    """Send this package to the executors, so that only confluent-kafka and pyarrow have to be installed there.

    Executors fetch the file from this process, also those that join later. It is removed when the block ends.
    """
    package = Path(airflow_kafka_spark.__file__).parent
    with tempfile.TemporaryDirectory(prefix="airflow-kafka-spark-", ignore_cleanup_errors=True) as directory:
        target = Path(directory) / "airflow_kafka_spark"
        context.addPyFile(shutil.make_archive(str(target), "zip", package.parent, package.name))
        yield
