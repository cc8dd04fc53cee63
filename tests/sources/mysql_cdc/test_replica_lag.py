"""Chunks of a snapshot that wait for a replica of MariaDB."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources import MySqlCdcSource
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.sources.mysql_cdc.tasks import session
from tests.sources.mysql_cdc.kit import LOG, Binlog
from tests.support.mariadb import EmbeddedMariaDB, is_mysql, translate
from tests.support.waiting import eventually

REPLICA = "maria_replica"


@pytest.fixture
def replica(shop: Binlog) -> Iterator[EmbeddedMariaDB]:
    """A replica that follows the shop's server from now on, two seconds behind."""
    updates = "--log-replica-updates" if is_mysql() else "--log-slave-updates"
    with EmbeddedMariaDB(*LOG, "--server-id=8", updates) as started, started.connect() as connection:
        os.environ[f"AIRFLOW_CONN_{REPLICA.upper()}"] = started.connection_uri()
        file, position = shop.place.split(":")
        server = shop.server
        with connection.cursor() as cursor:
            key = ", GET_SOURCE_PUBLIC_KEY=1" if is_mysql() else ""  # for the password, which is sent encrypted
            cursor.execute(
                translate(
                    f"CHANGE MASTER TO MASTER_HOST='{server.host}', MASTER_PORT={server.port}, MASTER_USER='{server.user}', "
                    f"MASTER_PASSWORD='{server.password}', MASTER_LOG_FILE='{file}', MASTER_LOG_POS={position}, "
                    f"MASTER_DELAY=2{key}"
                )
            )
            cursor.execute(translate("START SLAVE"))
        yield started
        del os.environ[f"AIRFLOW_CONN_{REPLICA.upper()}"]


def test_a_chunk_waits_while_the_replica_is_too_far_behind_or_has_stopped(orders, replica, monkeypatch):
    orders.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
    source = orders.source(snapshot="initial", max_replica_lag=0, replica_conn_ids=[REPLICA])
    server = session.LogServer(source.find_replicas()[0])
    reader = source.make_reader(source.freeze(None).splits, None)
    assert isinstance(reader, SplitReader)
    seen: list[float] = []
    look = session.read_replica_lag
    monkeypatch.setattr(session, "read_replica_lag", lambda *given: seen.append(look(*given)) or seen[-1])

    def read() -> int:
        return sum(batch.num_rows for batch in reader.read(0))

    with replica.connect() as connection, connection.cursor() as cursor, ThreadPoolExecutor(1) as pool:
        cursor.execute(translate("STOP SLAVE"))
        assert source.validate() == []
        rows = pool.submit(read)
        assert eventually(lambda: rows.done() or math.inf in seen)
        assert not rows.done()
        for statement in ("CHANGE MASTER TO MASTER_DELAY=0", "START SLAVE"):
            cursor.execute(translate(statement))
        assert rows.result(60) == 2
        with JdbcSource(REPLICA, "orders").find_database().open_session("asking for writers") as reading:
            assert "the server is a replica" in reading.find_hidden_writers(reading.query("SELECT 1 AS id", "a query"))
        for statement in ("STOP SLAVE", "CHANGE MASTER TO MASTER_DELAY=3600", "START SLAVE"):
            cursor.execute(translate(statement))
        orders.execute("INSERT INTO orders VALUES (3, 'c')")
        assert eventually(lambda: 0 < look(server, connection) < math.inf)
        seen.clear()
        rows = pool.submit(read)
        assert eventually(lambda: rows.done() or max(seen, default=0) > 0)
        assert not rows.done()
        for statement in ("STOP SLAVE", "CHANGE MASTER TO MASTER_DELAY=0", "START SLAVE"):
            cursor.execute(translate(statement))
        assert rows.result(60) == 3
    windows = orders.windows()
    windows.next()
    windows.source = MySqlCdcSource(REPLICA, topic_prefix="p", starting_position="latest")
    assert windows.source.validate() == []
    with pytest.raises(SourceRejected, match="its server_id is `8`.*`7`"):
        windows.freeze()


def test_options_that_belong_together_and_servers_that_are_no_replicas_are_reported(orders):
    lonely = orders.source(snapshot="initial", max_replica_lag=5)
    assert [problem.where for problem in lonely.validate()] == ["source.replica_conn_ids"]
    itself = orders.source(snapshot="initial", max_replica_lag=5, replica_conn_ids=["maria_log"])
    found = itself.validate()
    assert [problem.where for problem in found] == ["source.replica_conn_ids"] and "it is no replica" in found[0].what
    wrong = orders.source(max_replica_lag=-1, replica_conn_ids=["missing"])
    assert [problem.where for problem in wrong.validate()][:2] == ["source.max_replica_lag", "source.replica_conn_ids"]
