"""Reading from a replica of PostgreSQL, waiting for replicas that are behind, and a failover: with a primary and a replica that
streams."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from airflow_kafka_spark.errors import LogLost, SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources import JdbcSource, PostgresCdcSource
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sources.postgres_cdc.kit import Windows
from tests.support.waiting import eventually

BEHIND = "SELECT count(*) FROM pg_stat_replication WHERE replay_lag > interval '0.2 s'"
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'DO $lag$%' AND wait_event = 'PgSleep'"


class Replicated(NamedTuple):
    primary: EmbeddedPostgres
    replica: EmbeddedPostgres

    def ask(self, server: EmbeddedPostgres, *statements: str) -> list[tuple]:
        with server.connect(autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    directory = tmp_path_factory.mktemp("replica")
    with EmbeddedPostgres(settings={"wal_level": "logical"}) as primary:
        primary.run_client(
            "pg_basebackup", "-D", str(directory / "pgdata"), "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"
        )
        (directory / "password").write_text(primary.password)
        _give_to_owner(directory, primary)
        settings = {"wal_level": "logical", "wal_receiver_status_interval": "1s", "hot_standby_feedback": True}
        with EmbeddedPostgres(directory, settings) as replica, pytest.MonkeyPatch.context() as patched:
            patched.setenv("AIRFLOW_CONN_PRIMARY", primary.connection_uri())
            patched.setenv("AIRFLOW_CONN_REPLICA", replica.connection_uri())
            yield Replicated(primary, replica)
    shutil.rmtree(directory, ignore_errors=True)


def _give_to_owner(directory: Path, primary: EmbeddedPostgres) -> None:
    """Give a copy of the primary's files to the user that runs it."""
    owner = primary._data.stat()
    for path in (directory, *directory.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    for path in directory.parents[:2]:  # which pytest makes for its own user only
        path.chmod(path.stat().st_mode | 0o011)


def stands_behind(servers: Replicated, table: str) -> None:
    """Stop the replica from replaying, and let it fall behind."""
    servers.ask(
        servers.primary, f"CREATE TABLE {table} (id int PRIMARY KEY)", f"INSERT INTO {table} SELECT generate_series(1, 9)"
    )
    assert eventually(lambda: servers.ask(servers.replica, f"SELECT to_regclass('{table}') IS NOT NULL") == [(True,)])
    assert eventually(lambda: servers.ask(servers.replica, f"SELECT count(*) FROM {table}") == [(9,)])
    servers.ask(servers.replica, "SELECT pg_wal_replay_pause()")
    servers.ask(servers.primary, "CREATE TABLE more AS SELECT generate_series(1, 1000)", "DROP TABLE more")


def waits_until_replayed(servers: Replicated, at: EmbeddedPostgres, read: Callable[[], int], *resume: str) -> int:
    """Return the rows that a task reads, which begins only when the replica goes on.

    :param resume: the statements with which it does. Default: it replays again.
    """
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(read)
        try:
            assert eventually(lambda: rows.done() or servers.ask(at, WAITING)[0][0] > 0)
            assert not rows.done()
        finally:
            servers.ask(servers.replica, *(resume or ["SELECT pg_wal_replay_resume()"]))
        return rows.result(60)


@pytest.mark.parametrize("conn", ["primary", "replica"])
def test_tasks_wait_while_a_replica_is_too_far_behind(servers, conn):
    stands_behind(servers, f"bulk_{conn}")
    source = JdbcSource(conn, f"bulk_{conn}", max_replica_lag=0.2)
    assert source.validate() == []
    reader = source.make_reader(source.freeze(None).splits, None)
    assert isinstance(reader, SplitReader)
    assert eventually(lambda: servers.ask(servers.primary, BEHIND)[0][0] > 0)
    at = servers.replica if conn == "replica" else servers.primary
    assert waits_until_replayed(servers, at, lambda: sum(batch.num_rows for batch in reader.read(0))) == 9
    assert eventually(lambda: servers.ask(servers.primary, BEHIND) == [(0,)])
    assert sum(batch.num_rows for batch in reader.read(0)) == 9
    if conn == "replica":  # it has replayed all that it has, and does not know what its primary has
        ((primary,),) = servers.ask(at, "SELECT quote_literal(current_setting('primary_conninfo'))")
        servers.ask(at, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
        assert eventually(lambda: servers.ask(at, "SELECT count(*) FROM pg_stat_wal_receiver") == [(0,)])
        connect = (f"ALTER SYSTEM SET primary_conninfo = {primary}", "SELECT pg_reload_conf()")
        assert waits_until_replayed(servers, at, lambda: sum(batch.num_rows for batch in reader.read(0)), *connect) == 9


def test_a_cursor_is_refused_on_a_replica_which_does_not_show_what_is_being_written(servers):
    """Row 1 is committed behind row 2, so that a window that has ended with row 2 has missed it."""
    servers.ask(servers.primary, "CREATE TABLE late (id int PRIMARY KEY)")
    source, blind = JdbcSource("replica", "late", cursor="id"), JdbcSource("replica", "late", cursor="id", writers_timeout=0)
    with servers.primary.connect() as writing:
        writing.execute("INSERT INTO late VALUES (1)")
        servers.ask(servers.primary, "INSERT INTO late VALUES (2)")
        assert eventually(lambda: servers.ask(servers.replica, "SELECT to_regclass('late') IS NOT NULL") == [(True,)])
        assert eventually(lambda: servers.ask(servers.replica, "SELECT count(*) FROM late") == [(1,)])
        assert [problem.where for problem in source.validate()] == ["source.writers_timeout"]
        with pytest.raises(SourceRejected, match="the server is a standby"):
            source.freeze(None)
        assert blind.validate() == []
        first = blind.freeze(None)
        assert first.rows == 1
        writing.commit()
    assert eventually(lambda: servers.ask(servers.replica, "SELECT count(*) FROM late") == [(2,)])
    assert blind.freeze(first.position).splits == (), "row 1 is never read"
    assert JdbcSource("replica", "late").validate() == []


def _address_subscriber(uri: str) -> str:
    """Return the URI of a server's database, with the database that subscribes instead."""
    return f"{uri.rpartition('/')[0]}/subscriber"


@pytest.fixture
def subscriber(servers: Replicated) -> Iterator[Callable[[str], list[tuple]]]:
    """A function that runs a statement in a database that subscribes to the table ``sent`` of the primary."""
    servers.ask(
        servers.primary,
        "CREATE TABLE sent (id int PRIMARY KEY)",
        "CREATE PUBLICATION sent FOR TABLE sent",
        "SELECT pg_create_logical_replication_slot('sent', 'pgoutput')",
        "CREATE DATABASE subscriber",
    )

    def ask(statement: str) -> list[tuple]:
        with psycopg.connect(_address_subscriber(servers.primary.dsn), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    ask("CREATE TABLE sent (id int PRIMARY KEY)")
    options = "WITH (create_slot = false, slot_name = sent)"
    ask(f"CREATE SUBSCRIPTION sent CONNECTION '{servers.primary.dsn}' PUBLICATION sent {options}")
    # The first copy of the table waits for all transactions that are open at the publisher, and a test opens one.
    assert eventually(lambda: ask("SELECT DISTINCT srsubstate FROM pg_subscription_rel") == [("r",)])
    yield ask
    ask("DROP SUBSCRIPTION sent")
    servers.ask(servers.primary, "DROP DATABASE subscriber (FORCE)", "DROP PUBLICATION sent", "DROP TABLE sent")


def test_a_cursor_is_refused_on_a_table_that_a_subscription_writes(servers, subscriber, monkeypatch):
    """Row 1 is committed behind row 2 at the publisher, so that a window that has ended with row 2 has missed it."""
    monkeypatch.setenv("AIRFLOW_CONN_SUBSCRIBER", _address_subscriber(servers.primary.connection_uri()))
    source, blind = (JdbcSource("subscriber", "sent", cursor="id", writers_timeout=wait) for wait in (60, 0))
    subscriber("CREATE TABLE own (id int PRIMARY KEY)")
    for own in (JdbcSource("subscriber", "own", cursor="id"), JdbcSource("subscriber", query="TABLE own", cursor="id")):
        assert own.freeze(None).rows == 0
    with servers.primary.connect() as writing:
        writing.execute("INSERT INTO sent VALUES (1)")
        servers.ask(servers.primary, "INSERT INTO sent VALUES (2)")
        assert eventually(lambda: subscriber("SELECT count(*) FROM sent") == [(1,)])
        assert [problem.where for problem in source.validate()] == ["source.writers_timeout"]
        of_query = JdbcSource("subscriber", query="SELECT s.id FROM sent s LEFT JOIN own o USING (id)", cursor="id")
        for refused in (source, of_query):
            with pytest.raises(SourceRejected, match="a subscription writes"):
                refused.freeze(None)
        first = blind.freeze(None)
        assert first.rows == 1
        writing.commit()
    assert eventually(lambda: subscriber("SELECT count(*) FROM sent") == [(2,)])
    assert blind.freeze(first.position).splits == (), "row 1 is never read"
    assert JdbcSource("subscriber", "sent").validate() == []


def test_chunks_of_a_snapshot_wait_while_a_replica_is_too_far_behind(servers):
    stands_behind(servers, "changed")
    servers.ask(servers.primary, "CREATE PUBLICATION changed FOR TABLE changed")
    source = PostgresCdcSource("primary", "changed", "changed", "shop", snapshot="initial", max_replica_lag=0.2)
    assert source.validate() == []
    window = source.freeze(None)
    reader = source.make_reader(window.splits, None)
    assert isinstance(reader, SplitReader)
    assert eventually(lambda: servers.ask(servers.primary, BEHIND)[0][0] > 0)
    assert waits_until_replayed(servers, servers.primary, lambda: sum(batch.num_rows for batch in reader.read(0))) == 9
    servers.ask(servers.primary, "SELECT pg_drop_replication_slot('changed')")


def test_the_error_of_a_role_that_does_not_see_the_lag_names_the_missing_right(servers, monkeypatch):
    primary = servers.primary
    servers.ask(primary, "CREATE TABLE seen (id int PRIMARY KEY)", "CREATE ROLE reader LOGIN REPLICATION PASSWORD 'reader'")
    servers.ask(primary, "GRANT SELECT ON seen TO reader", "CREATE PUBLICATION seen FOR TABLE seen")
    monkeypatch.setenv("AIRFLOW_CONN_READER", f"postgres://reader:reader@{primary.host}:{primary.port}/{primary.database}")
    sources = (
        JdbcSource("reader", "seen", max_replica_lag=1),
        PostgresCdcSource("reader", "seen", "seen", "shop", max_replica_lag=1),
    )
    for source in sources:
        problem = source.validate()[0]
        assert (problem.where, problem.action) == ("source.max_replica_lag", 'GRANT pg_read_all_stats TO "reader"')
    servers.ask(primary, "GRANT pg_read_all_stats TO reader")
    assert [source.validate() for source in sources] == [[], []]
    assert JdbcSource("reader", "seen", max_replica_lag=-1).validate()[0].where == "source.max_replica_lag"
    assert (
        PostgresCdcSource("reader", "seen", "seen", "shop", max_replica_lag=True).validate()[0].where == "source.max_replica_lag"
    )


def read_keys(windows: Windows) -> list[tuple[str, int]]:
    """Return the operations and keys of all events that are left."""
    return [(r["value"]["op"], r["key"]["id"]) for r in windows.drain()]


def test_a_promoted_replica_is_refused_also_with_its_copy_of_the_slot_until_the_tables_are_read_again(servers, monkeypatch):
    """The last test, because the primary is dead and the replica promoted after it."""
    primary, replica = servers
    create = "SELECT pg_create_logical_replication_slot('moved', 'pgoutput', false, false, true)"  # a slot that replicas copy
    servers.ask(
        primary,
        "CREATE TABLE moved (id int PRIMARY KEY)",
        "CREATE PUBLICATION moved FOR TABLE moved",
        "SELECT pg_create_physical_replication_slot('of_replica')",
        create,
    )
    for name, value in (("primary_conninfo", primary.dsn), ("primary_slot_name", "of_replica")):
        servers.ask(replica, f"ALTER SYSTEM SET {name} = '{value}'")
    servers.ask(replica, "SELECT pg_reload_conf()")
    windows = Windows(PostgresCdcSource("primary", "moved", "moved", "shop"))
    assert windows.next() == []
    servers.ask(primary, "INSERT INTO moved VALUES (1)")
    assert read_keys(windows) == [("c", 1)]
    copied = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'moved' AND synced"

    def is_copied() -> bool:
        """A replica copies a slot once the slot has moved over the log that the replica has."""
        servers.ask(primary, "SELECT pg_log_standby_snapshot()")
        assert windows.next() == []
        servers.ask(replica, "SELECT pg_sync_replication_slots()")
        return servers.ask(replica, copied) == [(1,)]

    eventually(is_copied, 30)
    servers.ask(primary, "INSERT INTO moved VALUES (2)")
    position, window = windows.position, windows.freeze()
    eventually(lambda: servers.ask(replica, "SELECT count(*) FROM moved") == [(2,)], 30)
    monkeypatch.setenv("AIRFLOW_CONN_PRIMARY", replica.connection_uri())
    assert [problem.where for problem in windows.source.validate()] == ["source.conn_id"]
    for refused in (windows.freeze, lambda: windows.read(window)):
        with pytest.raises(SourceUnavailable, match="the server is a standby"):
            refused()
    primary.kill()
    assert servers.ask(replica, "SELECT pg_promote()", "INSERT INTO moved VALUES (3)", copied) == [(1,)]
    assert windows.source.validate() == []
    for refused in (windows.freeze, lambda: windows.read(window)):
        with pytest.raises(LogLost, match="it is on timeline 2, .* on timeline 1: a standby was promoted"):
            refused()
    # The window was frozen, and nothing of it published: a new pipeline, or `when_needed`, reads its rows.
    fresh = Windows(PostgresCdcSource("primary", "moved", "another", "shop", snapshot="initial"))
    again = Windows(PostgresCdcSource("primary", "moved", "moved", "shop", snapshot="when_needed"))
    again.position = position
    for found in (fresh, again):
        assert read_keys(found) == [("r", 1), ("r", 2), ("r", 3)]
    servers.ask(replica, "INSERT INTO moved VALUES (4)")
    for found in (fresh, again):
        assert read_keys(found) == [("c", 4)]
    assert servers.ask(replica, "SELECT slot_name FROM pg_replication_slots WHERE synced") == []
