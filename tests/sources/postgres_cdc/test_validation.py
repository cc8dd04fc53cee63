"""All problems of a source are reported at once, before Spark starts; a warning names its remedy."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_kafka_spark.sources import ExtractNewRecordState, PostgresCdcSource
from tests.sources.postgres_cdc.kit import find_problems, log_of


def test_wrong_options_are_all_reported_at_once():
    wrong: dict[str, Any] = {
        "publication": "",
        "slot": "Not-a-slot",
        "topic_prefix": "a b",
        "tables": "orders",
        "snapshot": "some",
        "snapshot_chunk_rows": 0,
        "snapshot_chunks_per_window": 101,
        "max_wal_bytes": 5,
        "skipped_operations": ("x",),
        "decimal_handling_mode": "exact",
        "time_precision_mode": "nanos",
    }
    texts = {problem.where: problem.what for problem in PostgresCdcSource("nobody", **wrong).validate()}
    assert {f"source.{name}" for name in wrong} | {"source.conn_id"} == set(texts)


def test_options_that_do_not_fit_rows_in_place_of_events_are_reported():
    mode: Any = "none"
    unwrap = ExtractNewRecordState(mode, ["op", "gtid", "transaction.id", "source.op:op"])
    refused: dict[str, Any] = {"tombstones_on_delete": False, "skipped_operations": (), "provide_transaction_metadata": True}
    source = PostgresCdcSource("nobody", "p", "s", "shop", unwrap=unwrap, **refused)
    found = {problem.where: problem.what for problem in source.find_option_problems()}
    assert {f"source.{name}" for name in refused} < found.keys()
    assert found.keys() - {f"source.{name}" for name in refused} == {
        "source.unwrap.add_fields",
        "source.unwrap.delete_tombstone_handling_mode",
    }
    of_fields = [problem.what for problem in source.find_option_problems() if problem.where == "source.unwrap.add_fields"]
    assert [what.partition(" ")[0] for what in of_fields] == ["`gtid`", "`transaction.id`", "`source.op:op`", "2"]
    wrong: Any = {"mode": "rewrite"}
    assert "ExtractNewRecordState" in str(
        list(PostgresCdcSource("nobody", "p", "s", "shop", unwrap=wrong).find_option_problems())
    )
    deleted = ExtractNewRecordState("rewrite", ["op:deleted"])
    [problem] = PostgresCdcSource("nobody", "p", "s", "shop", unwrap=deleted).find_option_problems()
    assert "`__deleted`" in problem.what


def test_what_is_missing_on_the_server_is_named_with_the_statement_that_helps(orders):
    place = orders.place
    place.execute("CREATE TABLE keyless (a int); CREATE TABLE apart (id int PRIMARY KEY); CREATE VIEW seen AS SELECT 1 AS one")
    place.execute("CREATE TABLE nothing (id int PRIMARY KEY); ALTER TABLE nothing REPLICA IDENTITY NOTHING")
    names = [f'{place.quoted}."{name}"' for name in ("keyless", "nothing")]
    place.execute(f"ALTER PUBLICATION {orders.name} ADD TABLE {', '.join(names)}")
    tables = [*orders.tables, *names, *(f'{place.quoted}."{name}"' for name in ("apart", "seen", "absent"))]
    text = find_problems(orders.source(tables=tables, message_key_columns={orders.tables[0]: ["note", "gone"]}))
    for part in (
        "keyless has no replica identity",
        "nothing has no replica identity",
        "does not publish " + place.schema + ".apart",
        "seen is no table",
        "there is no table " + place.schema + ".absent",
    ):
        assert part in text["source.tables"], part
    assert "does not hold column `note`" in text["source.message_key_columns"]
    assert "has no column `gone`" in text["source.message_key_columns"]
    create = "CREATE PUBLICATION nowhere FOR TABLE"
    assert f"{create} <the tables>" in find_problems(orders.source(publication="nowhere", tables=None))["source.publication"]
    assert f"{create} a, b.c" in find_problems(orders.source(publication="nowhere", tables=["a", "b.c"]))["source.publication"]
    # A wrong option hides no check that does not depend on it, and what depends on it is listed.
    hidden = find_problems(orders.source(slot="Not-a-slot", publication="nowhere"))
    assert "CREATE PUBLICATION" in hidden["source.publication"] and "Not-a-slot" in hidden["source.slot"]
    hidden = find_problems(orders.source(publication="nowhere", message_key_columns={"a.b.c": ["id"]}))
    assert all("source.message_key_columns" in hidden[f"source.{name}"] for name in ("tables", "publication"))
    assert find_problems(orders.source()) == {}


def test_a_publication_without_updates_is_refused_unless_they_are_skipped(orders):
    orders.place.execute(f"ALTER PUBLICATION {orders.name} SET (publish = 'insert, delete')")
    assert "does not publish update" in find_problems(orders.source())["source.publication"]
    assert find_problems(orders.source(skipped_operations=("u", "t"))) == {}


def test_a_key_with_a_generated_column_is_refused_because_the_log_does_not_hold_it(place):
    place.execute("CREATE TABLE t (a int, b int, g int GENERATED ALWAYS AS (a * 2) STORED, PRIMARY KEY (b, g))")
    place.execute("CREATE TABLE u (a int, i interval, g int GENERATED ALWAYS AS (a * 2) STORED, PRIMARY KEY (a) INCLUDE (i, g))")
    with log_of(place, "t", "u") as log:
        [problem] = log.source().validate()
        assert problem.where == "source.tables" and "column `g` of the key of" in problem.what and ".t is" in problem.what
        place.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        assert log.source(message_key_columns={log.tables[0]: ["a", "b"]}).validate() == []
        assert "does not hold column `i`" in find_problems(log.source(tables=log.tables[1:], message_key_columns={
            log.tables[1]: ["i"]
        }))["source.message_key_columns"]  # fmt: skip


def test_a_replica_identity_whose_columns_may_hold_nulls_is_refused(place):
    """A snapshot would not have these rows, and the log no key of them."""
    place.execute("CREATE TABLE t (code int); INSERT INTO t VALUES (NULL); CREATE UNIQUE INDEX i ON t (code)")
    if place.connection.info.server_version < 180000:
        pytest.skip("it has no NOT NULL that is not valid")
    place.execute("ALTER TABLE t ADD CONSTRAINT there NOT NULL code NOT VALID; ALTER TABLE t REPLICA IDENTITY USING INDEX i")
    with log_of(place, "t") as log:
        [problem] = log.source().validate()
        assert "may hold nulls" in problem.what and problem.action.endswith("VALIDATE CONSTRAINT there")
        place.execute("DELETE FROM t; ALTER TABLE t VALIDATE CONSTRAINT there")
        assert log.source().validate() == []


def test_keys_whose_values_may_have_the_same_form_are_refused(place):
    """With Debezium, too, B'1' and B'10' have one form, and so have two instants of a timetz."""
    place.execute("CREATE DOMAIN zeros AS varbit")
    kinds = ("zeros", "timetz", "interval", "timestamp", "timestamp(3)", "numeric(20,2)", "bit(3)", "timestamptz")
    columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(kinds))
    place.execute(f"CREATE TABLE t ({columns}, PRIMARY KEY ({', '.join(f'c{n}' for n in range(len(kinds)))}))")
    with log_of(place, "t") as log:
        for options, wrong in (
            ({}, (0, 1, 2)),
            ({"time_precision_mode": "connect", "decimal_handling_mode": "double"}, range(6)),
        ):
            text = find_problems(log.source(**options))["source.tables"]
            expected = [f"`c{n}`" in text for n in range(len(kinds))]
            assert expected == [n in wrong and n != 4 for n in range(len(kinds))], text


def test_tables_that_would_share_a_topic_and_keys_that_rows_may_exchange_are_refused(place):
    place.execute('CREATE TABLE "a b" (id int PRIMARY KEY); CREATE TABLE "a_b" (id int PRIMARY KEY DEFERRABLE, n int)')
    with log_of(place, "a b", "a_b") as log:
        text = find_problems(log.source())["source.tables"]
        assert "would have the same topic" in text and "a_b has no replica identity" in text
        place.execute("ALTER TABLE a_b REPLICA IDENTITY FULL")
        assert "a_b has no primary key, or a deferrable one" in find_problems(log.source(tables=[log.tables[1]]))["source.tables"]
        place.execute("ALTER TABLE a_b DROP CONSTRAINT a_b_pkey, ADD PRIMARY KEY (id); ALTER TABLE a_b REPLICA IDENTITY DEFAULT")
        assert find_problems(log.source(tables=[log.tables[1]])) == {}
        if place.connection.info.server_version >= 150000:
            place.execute(f"ALTER PUBLICATION {log.name} SET TABLE a_b (n)")
            assert "a_b without `id`, which its key has" in find_problems(log.source(tables=None))["source.publication"]


def test_a_slot_of_another_plugin_or_database_is_refused(orders):
    place = orders.place
    place.execute(f"SELECT pg_create_physical_replication_slot('{orders.name}')")
    assert "physical" in find_problems(orders.source())["source.slot"]
    place.execute(f"SELECT pg_drop_replication_slot('{orders.name}')")
    place.execute(f"SELECT pg_create_logical_replication_slot('{orders.name}', 'pgoutput', false, true)")
    assert "two_phase" in find_problems(orders.source())["source.slot"]
    place.execute(f"SELECT pg_drop_replication_slot('{orders.name}')")
    other = f"other_{orders.name}"
    place.execute(f'CREATE DATABASE "{other}"')
    try:
        import psycopg

        parts = {**conninfo_to_dict(place.server.dsn), "dbname": other}
        with psycopg.connect(**parts, autocommit=True) as connection:  # type: ignore[arg-type]
            connection.execute("SELECT pg_create_logical_replication_slot(%s::name, 'pgoutput'::name)", [orders.name])
        assert f"belongs to database `{other}`" in find_problems(orders.source())["source.slot"]
        with psycopg.connect(**parts, autocommit=True) as connection:  # type: ignore[arg-type]
            connection.execute("SELECT pg_drop_replication_slot(%s::name)", [orders.name])
    finally:
        place.execute(f'DROP DATABASE "{other}"')


def test_a_role_without_replication_is_refused(orders):
    place, role = orders.place, f"role_{orders.name}"
    place.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'a password of it'")
    try:
        parts = place.server
        place.connect_with(f"postgres://{role}:a%20password%20of%20it@{parts.host}:{parts.port}/{parts.database}")
        text = find_problems(orders.source())["source.conn_id"]
        assert "may not use replication slots" in text and f'ALTER ROLE "{role}" REPLICATION' in text
        place.execute(f"ALTER ROLE {role} REPLICATION")
        assert find_problems(orders.source()) == {}
    finally:
        place.execute(f"DROP ROLE {role}")


def test_windows_larger_than_what_the_server_keeps_for_a_slot_are_refused(orders):
    place = orders.place
    place.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '100MB'")
    place.execute("SELECT pg_reload_conf()")
    try:
        from tests.support.waiting import eventually

        eventually(lambda: place.one("SHOW max_slot_wal_keep_size") == "100MB")
        assert "104,857,600" in find_problems(orders.source())["source.max_wal_bytes"]
        assert find_problems(orders.source(max_wal_bytes=50 << 20)) == {}
    finally:
        place.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")
        place.execute("SELECT pg_reload_conf()")


def test_nothing_is_looked_up_at_dag_parse_and_the_asset_has_no_credentials():
    source = PostgresCdcSource("nobody", publication="p", slot="s", topic_prefix="shop")
    assert source.asset_uri == "x-postgres-cdc://nobody/s"
    assert source.find_columns() == ("topic", "key", "value", "timestamp")


def test_passwords_are_in_no_repr_and_no_plan(orders):
    source = orders.source()
    orders.place.execute("INSERT INTO orders VALUES (0, '')")
    window = source.freeze(None)
    reader = source.make_reader([{"start": "0/0", "end": "0/1", "log": {}}], None)
    assert orders.place.server.password not in repr((source, window, reader, source.uri, source.find_origin()))


def test_log_that_is_removed_makes_the_slot_lost_and_windows_are_refused(orders):
    from airflow_kafka_spark.errors import SourceRejected

    source, place = orders.source(), orders.place
    window = source.freeze(None)
    place.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    place.execute("SELECT pg_reload_conf()")
    try:
        for _ in range(3):
            place.execute("INSERT INTO orders SELECT n, repeat('z', 900) FROM generate_series(1, 20000) n")
            place.execute("DELETE FROM orders")
            place.execute("SELECT pg_switch_wal()")
        place.execute("CHECKPOINT")
        assert "is lost" in find_problems(orders.source(max_wal_bytes=1 << 20))["source.slot"]
        with pytest.raises(SourceRejected, match="grew beyond `max_slot_wal_keep_size`"):
            source.freeze(window.position)
    finally:
        place.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")
        place.execute("SELECT pg_reload_conf()")
