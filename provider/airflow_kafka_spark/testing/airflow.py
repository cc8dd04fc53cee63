"""A real Airflow, embedded: api-server and scheduler on SQLite with the LocalExecutor, for demos and end-to-end tests."""

from __future__ import annotations

import hashlib
import importlib.metadata
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
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from airflow_kafka_spark.errors import ServerFailed
from airflow_kafka_spark.hooks.jars import cache_directory
from airflow_kafka_spark.testing._embedded import Embedded
from airflow_kafka_spark.testing._processes import LOOPBACK, Server, free_ports, tail, wait_until

_START_SECONDS = 300.0
_ASK_AGAIN_SECONDS = 60.0
_DATABASE = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
_OF_DATABASE = ("AIRFLOW__DATABASE__", "AIRFLOW__CORE__AUTH_MANAGER")
_FINAL = frozenset({"success", "failed"})

# On a machine that has too much to do nobody is to be given up who is only slow.
_PATIENCE = {
    # Longer than the api-server waits for SQLite: a task that asks for the same once more is told that it is another one.
    "WORKERS__EXECUTION_API_TIMEOUT": 60,
    "CORE__DAGBAG_IMPORT_TIMEOUT": 300,
    "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": 120,
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": 120,
    "TRIGGERER__RUNNER_HEALTH_CHECK_THRESHOLD": 120,
}


class EmbeddedAirflow(Embedded):
    """A real Airflow 3 with its own home, database and ports. A context manager, or ``start`` and ``stop``.

    It ends with this process.

    :param dags_folder: the DAG files.
    :param connections: connection id -> URI or JSON, as in ``AIRFLOW_CONN_<ID>``; default none.
    :param variables: name -> value, as in ``AIRFLOW_VAR_<NAME>``; default none.
    :param env: further environment of Airflow and its tasks; default none.
    :param home: AIRFLOW_HOME; default: a temporary directory, removed by ``stop``.
    :param parallelism: task processes at once; default 2.
    :param components: further processes, as ``("triggerer",)``; default none.
    :raises ServerFailed: (by ``start``) when it does not come up.
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
    ) -> None:
        super().__init__(home)
        self.dags_folder = Path(dags_folder).absolute()
        self._extra = {
            **{f"AIRFLOW_CONN_{name.upper()}": value for name, value in (connections or {}).items()},
            **{f"AIRFLOW_VAR_{name.upper()}": value for name, value in (variables or {}).items()},
            **(env or {}),
        }
        self._parallelism = parallelism
        self._components = components
        self._servers: dict[str, Server] = {}
        self.home = Path()
        self.port = 0

    # --- life ---

    def _prepare(self) -> None:
        self.home = self._files
        self.port, *log_ports = free_ports(3)
        self.env = self._environment(log_ports)
        self._migrate()
        self.cli("dags", "reserialize")

    def _begin(self, *, last_attempt: bool) -> bool:
        for component in ("api-server", "scheduler", *self._components):
            self._launch(component)
        if not wait_until(self._healthy, _START_SECONDS, every=0.2):
            logs = "\n".join(f"{name}:\n{tail(self.log(name))}" for name in self._servers)
            raise ServerFailed("Airflow", f"it is not healthy after {_START_SECONDS:.0f} s; its logs end with:\n{logs}\n")
        return True

    def _end_politely(self) -> None:
        # The scheduler and the triggerer end their tasks and triggers. The api-server takes seconds to exit, for nothing.
        last = signal.SIGTERM if self._given_directory is not None else signal.SIGKILL
        for name in ("scheduler", *self._components, "api-server"):
            if name in self._servers:
                self._servers[name].end(polite=last if name == "api-server" else signal.SIGTERM, seconds=20)

    # --- what a person would do ---

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def trigger(self, dag_id: str, **body: Any) -> str:
        """Start a DAG run; its run id.

        :param body: of the REST request, as ``logical_date`` or ``conf``.
        """
        run: dict[str, Any] = self.api("POST", f"/dags/{dag_id}/dagRuns", {"logical_date": None, **body})
        return str(run["dag_run_id"])

    def wait(self, dag_id: str, run_id: str, seconds: float = 300.0) -> str:
        """Wait until a DAG run has ended; ``success`` or ``failed``.

        :raises ServerFailed: when it takes longer; the message has the ``account`` of the run.
        """
        state: list[str] = [""]

        def ended() -> bool:
            state[0] = self.api("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"]
            return state[0] in _FINAL

        if not wait_until(ended, seconds, every=0.2):
            account = self.account(dag_id, run_id)
            raise ServerFailed("Airflow", f"run {run_id} of {dag_id} is still {state[0]} after {seconds:.0f} s:\n{account}\n")
        return state[0]

    def run(self, dag_id: str, seconds: float = 300.0, **body: Any) -> tuple[str, str]:
        """``trigger`` and ``wait``: (run id, state)."""
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
        """The task instance, with ``state`` and ``try_number``."""
        return self.api("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}")

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """A task's XCom: what the operator returned."""
        return self.api("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}?deserialize=true")[
            "value"
        ]

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """A task's log as lines of text."""
        answer = self.api("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}?full_content=true")
        content = answer["content"]
        if isinstance(content, str):
            return content
        return "\n".join(str(line.get("event", line)) if isinstance(line, dict) else str(line) for line in content)

    def account(self, dag_id: str, run_id: str) -> str:
        """What became of a run, for the message of a test that fails.

        The states of its tasks, what the scheduler complains of, and the end of each task's log.
        """
        try:
            parts = [self.cli("tasks", "states-for-dag-run", dag_id, run_id, "--output", "plain")]
        except ServerFailed as error:
            parts = [str(error)]
        said = self.log("scheduler").read_text(encoding="utf-8", errors="replace").splitlines()
        parts += [line[:1000] for line in said if run_id in line and ("[error" in line or "[warning" in line)][-20:]
        folder = self.home / "logs" / f"dag_id={dag_id}" / f"run_id={run_id}"
        for log in sorted(folder.rglob("*.log")):
            parts.append(f"{log.relative_to(folder)}:\n{tail(log, 12)}")
        return "\n".join(parts)

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """Airflow's REST API (``/api/v2``); everybody is an administrator here.

        A question (``GET``) that a busy server does not answer, or by a status of 500 and above, is asked again for a minute.

        :raises ServerFailed: for an answer that is no success, and for none.
        """
        deadline = time.monotonic() + (_ASK_AGAIN_SECONDS if method == "GET" else 0.0)
        while True:
            try:
                return self._ask(method, path, body)
            except urllib.error.HTTPError as error:
                failure = f"{method} {path} answered {error.code}: {error.read().decode()[:500]}"
                if error.code < 500 or time.monotonic() > deadline:
                    raise ServerFailed("Airflow", failure) from None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ServerFailed("Airflow", f"{method} {path} got no answer: {error}") from None
            time.sleep(0.5)

    def cli(self, *args: str) -> str:
        """The ``airflow`` command in this environment; what it printed.

        :raises ServerFailed: when it fails.
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
        """The process of a component, as ``scheduler``: with the LocalExecutor tasks run below that one."""
        return self._servers[component].pid

    def log(self, component: str) -> Path:
        return self.home / f"{component}.log"

    # --- inside ---

    def _migrate(self) -> None:
        """Make the database; an SQLite as a copy of one that the same Airflow with the same providers has made before."""
        database = self.home / "airflow.db"
        if database.exists() or self.env[_DATABASE] != self._sqlite:
            self.cli("db", "migrate")
            return
        made = cache_directory() / "airflow" / f"{_migrations(self.env)}.db"
        if made.exists():
            shutil.copyfile(made, database)
            return
        self.cli("db", "migrate")
        made.parent.mkdir(parents=True, exist_ok=True)
        mine = made.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        # Not a copy of the file: some of it may be in SQLite's log yet.
        with closing(sqlite3.connect(database)) as migrated, closing(sqlite3.connect(mine)) as copy:
            migrated.backup(copy)
        mine.rename(made)

    @property
    def _sqlite(self) -> str:
        # SQLite has one writer at a time: the others wait, half a minute if need be.
        return f"sqlite:///{self.home}/airflow.db?timeout=30"

    def _environment(self, log_ports: list[int]) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW__", "AIRFLOW_HOME"))}
        settings = {
            "CORE__DAGS_FOLDER": self.dags_folder,
            "CORE__LOAD_EXAMPLES": False,
            "DATABASE__SQL_ALCHEMY_CONN": self._sqlite,
            "CORE__DAGS_ARE_PAUSED_AT_CREATION": False,
            "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": True,
            "CORE__PARALLELISM": self._parallelism,
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "API__HOST": LOOPBACK,
            "API__PORT": self.port,
            "API__BASE_URL": self.url,
            "API__WORKERS": 1,
            "API_AUTH__JWT_SECRET": secrets.token_hex(40),
            "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": 0.2,
            **_PATIENCE,
            "LOGGING__WORKER_LOG_SERVER_PORT": log_ports[0],
            "LOGGING__TRIGGER_LOG_SERVER_PORT": log_ports[1],
        }
        return {
            **inherited,
            **{f"AIRFLOW__{name}": str(value) for name, value in settings.items()},
            "AIRFLOW_HOME": str(self.home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")]),
            **self._extra,
        }

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
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
        assert self._keeper is not None
        command = [sys.executable, "-m", "airflow", component]
        self._servers[component] = self._keeper.spawn(command, log=self.log(component), env=self.env, farewell=signal.SIGTERM)

    def _healthy(self) -> bool:
        ended = [name for name, server in self._servers.items() if not server.running]
        if ended:
            raise ServerFailed("Airflow", f"{ended[0]} ended; its log ends with:\n{tail(self.log(ended[0]), 20)}\n")
        try:
            health = self._ask("GET", "/monitor/health")
        except OSError:
            return False
        wanted = ["scheduler", *(c for c in self._components if c == "triggerer")]
        return all(health[name]["status"] == "healthy" for name in wanted)


def _migrations(env: Mapping[str, str]) -> str:
    """A name for all that decides what is in a new database: Airflow, what may bring migrations of its own, and settings."""
    found = {f"{d.name} {d.version}" for d in importlib.metadata.distributions() if d.name.startswith("apache-airflow")}
    settings = {f"{k}={v}" for k, v in env.items() if k.startswith(_OF_DATABASE) and k != _DATABASE}
    return hashlib.sha256("\n".join([sys.version, *sorted(found), *sorted(settings)]).encode()).hexdigest()[:16]
