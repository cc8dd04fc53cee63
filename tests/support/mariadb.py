"""A real MariaDB or MySQL for tests, in a temporary directory, on a free port of the loopback interface.

MariaDB is found on the PATH. MySQL is used in its place by the tests of ``make mysql``: the environment variable ``MYSQLD`` names
its server, or the directory into which the packages of the server and of its libraries were unpacked.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

from airflow_kafka_spark.testing import _processes as processes


def missing() -> str:
    """Return the reason why there is no server; an empty text if there is one."""
    if is_mysql():
        return "" if Path(_list_mysql_command()[0]).exists() else f"MYSQLD={os.environ['MYSQLD']} is no server"
    programs = [name for name in ("mariadbd", "mariadb-install-db") if _found(name) is None]
    return f"{' and '.join(programs)} not on the PATH" if programs else ""


def is_mysql() -> bool:
    """Return True if the tests use MySQL in place of MariaDB."""
    return bool(os.environ.get("MYSQLD"))


def translate(statement: str) -> str:
    """Return a statement in the dialect of the server that the tests use; they are written in MariaDB's."""
    if not is_mysql():
        return statement
    for pattern, replacement in _TRANSLATIONS:
        statement = pattern.sub(replacement, statement)
    return statement


_TRANSLATIONS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (
            r"\bseq_(\d+)_to_(\d+)\b",
            r"(WITH RECURSIVE s (seq) AS (SELECT \1 UNION ALL SELECT seq + 1 FROM s WHERE seq < \2) "
            r"SELECT seq FROM s) AS numbers",
        ),
        (r"^RESET MASTER$", "RESET BINARY LOGS AND GTIDS"),
        (r"^SET STATEMENT \w+ = \d+ FOR ", ""),
        (r"^ALTER TABLE (\w+) NOWAIT ", r"ALTER TABLE \1 "),
        (r"^(START|STOP) SLAVE$", r"\1 REPLICA"),
        (r"^CHANGE MASTER ", "CHANGE REPLICATION SOURCE "),
        (r"\bMASTER_([A-Z]\w+=)", r"SOURCE_\1"),
        (r"utf8mb4_uca1400_ai_ci", "utf8mb4_0900_ai_ci"),
        (r"(ST_GeomFromText\('[^']*', 4326)\)", r"\1, 'axis-order=long-lat')"),
        (r"ENGINE=Aria", "ENGINE=MyISAM"),
        (r"BINLOG MONITOR", "REPLICATION CLIENT"),
    )
]


def _list_mysql_command() -> list[str]:
    """Return the beginning of the command line of MySQL's server."""
    given = Path(os.environ["MYSQLD"]).absolute()
    if not given.is_dir():
        return [str(given)]
    # The packages may be of another release of the distribution: the server needs the libraries beside it, and their loader.
    share, libraries = given / "usr/share/mysql", given / f"usr/lib/{os.uname().machine}-linux-gnu"
    loader = next(iter(sorted((given / "usr/lib64").glob("ld-linux*"))), given / "usr/lib64/ld-linux.so")
    places = {"basedir": given / "usr", "lc-messages-dir": share, "character-sets-dir": share / "charsets"}
    places["plugin-dir"] = given / "usr/lib/mysql/plugin"
    command = [str(loader), "--library-path", f"{libraries}:{given}/usr/lib/mysql/private", str(given / "usr/sbin/mysqld")]
    return [*command, "--no-defaults", *(f"--{name}={place}" for name, place in places.items())]


def _found(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


class EmbeddedMariaDB:
    """A MariaDB, or a MySQL if ``MYSQLD`` names one. It ends with this process, even if that is killed. If root starts it, it
    runs as the user ``nobody``.

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
        assert not missing(), missing()
        data = [f"--datadir={directory}/data", f"--tmpdir={directory}"]
        server, install = self._list_commands()
        made = self._supervisor.spawn([*install, *data], log=self.log, user=ids)
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
        if is_mysql():
            options += [
                "--mysqlx=OFF",
                "--secure-file-priv=NULL",
                "--cte-max-recursion-depth=1000000",
                f"--pid-file={directory}/pid",
            ]
        command = [*server, *data, *options, *self.options]
        process = self._supervisor.spawn(command, log=self.log, user=ids, exit_signal=signal.SIGKILL)
        processes.wait_until(lambda: self._accepts() or not process.running, 300, every=0.2)
        assert self._accepts(), processes.read_tail(self.log, 30)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._supervisor.close()

    def _list_commands(self) -> tuple[list[str], list[str]]:
        """Return the beginnings of the command lines of the server, and of what makes its directory."""
        if is_mysql():
            command, *rest = _list_mysql_command()
            server = [command, *(rest or ["--no-defaults"])]
            return server, [*server, "--initialize-insecure"]
        install, server_path = _found("mariadb-install-db"), _found("mariadbd")
        assert install and server_path
        made = [install, "--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        return [server_path, "--no-defaults"], made

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
