"""A real MariaDB for tests: the server found on the PATH, in a temporary directory, on a free port of the loopback interface."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

from airflow_kafka_spark.testing import _processes as processes


def missing() -> str:
    """Return the reason why there is no server; an empty text if there is one."""
    programs = [name for name in ("mariadbd", "mariadb-install-db") if _found(name) is None]
    return f"{' and '.join(programs)} not on the PATH" if programs else ""


def _found(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


class EmbeddedMariaDB:
    """A server that ends with this process, even if that is killed. If root starts it, it runs as the user ``nobody``.

    :param options: further options of the server's command line.
    """

    host = processes.LOOPBACK
    user = "shop"
    database = "shop"

    def __init__(self, *options: str) -> None:
        self.options = options
        self.password = secrets.token_hex(8)

    def __enter__(self) -> EmbeddedMariaDB:
        directory = processes.make_own_directory("mariadb")
        self._supervisor = processes.SupervisorClient("MariaDB")
        self._supervisor.own(directory)
        account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        ids = (account.pw_uid, account.pw_gid) if account else None
        if ids:
            os.chown(directory, *ids)
        self.log = directory / "log"
        install, server = _found("mariadb-install-db"), _found("mariadbd")
        assert install and server, missing()
        data = [f"--datadir={directory}/data", f"--tmpdir={directory}"]
        made = self._supervisor.spawn(
            [install, "--no-defaults", *data, "--auth-root-authentication-method=normal", "--skip-test-db"],
            log=self.log,
            user=ids,
        )
        assert made.wait(300) == 0, processes.read_tail(self.log, 30)
        # With its first words it makes the user that tests connect as, for who can connect at all is decided by the password.
        first = directory / "init.sql"
        statements = (
            f"CREATE DATABASE IF NOT EXISTS {self.database} CHARACTER SET utf8mb4",
            f"CREATE USER '{self.user}'@'%' IDENTIFIED BY '{self.password}'",
            f"GRANT ALL ON *.* TO '{self.user}'@'%' WITH GRANT OPTION",
        )
        first.write_text("".join(f"{statement};\n" for statement in statements))
        if ids:
            os.chown(first, *ids)
        (self.port,) = processes.find_free_ports(1)
        options = [f"--port={self.port}", f"--bind-address={self.host}", f"--socket={directory}/socket", f"--init-file={first}"]
        # Zero dates are allowed: tables of earlier times hold them.
        options += ["--skip-name-resolve", "--innodb-buffer-pool-size=64M", "--sql-mode="]
        command = [server, "--no-defaults", *data, *options, *self.options]
        process = self._supervisor.spawn(command, log=self.log, user=ids, exit_signal=signal.SIGKILL)
        processes.wait_until(lambda: self._accepts() or not process.running, 300, every=0.2)
        assert self._accepts(), processes.read_tail(self.log, 30)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._supervisor.close()

    def _accepts(self) -> bool:
        import pymysql

        try:
            self.connect().close()
        except pymysql.Error:
            return False
        return True

    def connect(self, **options: Any) -> Any:
        import pymysql

        known = {"host": self.host, "port": self.port, "user": self.user, "password": self.password, "database": self.database}
        return pymysql.connect(**{**known, "autocommit": True, "charset": "utf8mb4", **options})

    def connection_uri(self) -> str:
        """Return the Airflow connection of type ``mysql``."""
        return f"mysql://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"

    @property
    def directory(self) -> Path:
        return self.log.parent
