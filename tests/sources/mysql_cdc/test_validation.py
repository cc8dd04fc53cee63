"""All problems of a source are reported at once, before Spark starts; each problem names the statement that helps."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from airflow_kafka_spark.errors import Unchecked
from airflow_kafka_spark.sources import JdbcSource, MySqlCdcSource
from tests.sources.mysql_cdc.kit import CONN, Binlog
from tests.sources.postgres_cdc.kit import Windows, find_problems
from tests.support.documents import list_commands, read_grants
from tests.support.mariadb import is_mysql, translate


def test_wrong_options_are_all_reported_at_once():
    wrong: dict[str, Any] = {
        "topic_prefix": "a b",
        "tables": "orders",
        "starting_position": "here",
        "max_binlog_bytes": 5,
        "skipped_operations": ("x",),
        "decimal_handling_mode": "exact",
        "time_precision_mode": "nanos",
        "bigint_unsigned_handling_mode": "short",
        "zero_date_handling_mode": "epoch",
        "snapshot": "always",
        "snapshot_chunk_rows": 0,
        "snapshot_chunks_per_window": 101,
    }
    texts = {problem.where: problem.what for problem in MySqlCdcSource("nobody", **wrong).validate()}
    assert {f"source.{name}" for name in wrong} | {"source.conn_id"} == set(texts)


def test_settings_of_the_log_are_named_with_the_statement_that_helps(orders: Binlog):
    changed = {
        "binlog_format": ("MIXED", "ROW"),
        "binlog_row_image": ("MINIMAL", "FULL"),
        "binlog_row_metadata": ("MINIMAL", "FULL"),
        **({"binlog_row_value_options": ("PARTIAL_JSON", "''")} if is_mysql() else {"log_bin_compress": ("ON", "OFF")}),
        "binlog_expire_logs_seconds": ("60", "0"),
    }
    try:
        orders.execute(*(f"SET GLOBAL {name} = {wrong}" for name, (wrong, _) in changed.items()))
        # A wrong option hides no check that does not depend on it.
        text = find_problems(orders.source(tables="orders"))["source.conn_id"]
    finally:
        orders.execute(*(f"SET GLOBAL {name} = {right}" for name, (_, right) in changed.items()))
    for part in (
        "SET GLOBAL binlog_format = 'ROW'",
        "SET GLOBAL binlog_row_image = 'FULL'",
        "SET GLOBAL binlog_row_metadata = 'FULL'",
        f"SET GLOBAL {'binlog_row_value_options' if is_mysql() else 'log_bin_compress'} = DEFAULT",
        "SET GLOBAL binlog_expire_logs_seconds",
    ):
        assert part in text, part
    assert find_problems(orders.source()) == {}


OF_MARIADB = (
    "versioned cannot be captured: its log has rows of its history",
    "column `id` of shop.typed has the type uuid",
    "column `small` of shop.typed is COMPRESSED",
)


def test_tables_that_cannot_be_captured_are_named(orders: Binlog):
    versioned, uuid, compressed = ("", "binary(16)", "") if is_mysql() else ("WITH SYSTEM VERSIONING", "uuid", "COMPRESSED")
    orders.execute(
        "CREATE TABLE keyless (a int)",
        "CREATE TABLE `or#ers` (id int PRIMARY KEY)",
        "CREATE TABLE `or_ers` (id int PRIMARY KEY)",
        "CREATE VIEW seen AS SELECT 1 AS one",
        f"CREATE TABLE versioned (id int PRIMARY KEY) {versioned}",
        f"CREATE TABLE typed (id {uuid} PRIMARY KEY, note text CHARACTER SET big5, small text {compressed})",
        "CREATE TABLE exact (at datetime(6), amount decimal(20,2), PRIMARY KEY (at, amount))",
        "CREATE TABLE child (id int PRIMARY KEY, of_order int, "
        "CONSTRAINT up FOREIGN KEY (of_order) REFERENCES orders (id) ON DELETE CASCADE)",
    )
    names = ["orders", "or_ers", '"shop"."or#ers"', "keyless", "seen", "versioned", "typed", "child", "absent", "else.where"]
    names.append("information_schema.tables")  # names of this database have no case, as others' with `lower_case_table_names`
    text = find_problems(orders.source(tables=names, message_key_columns={"orders": ["gone"], "other": ["id"]}))
    for part in (
        "'shop'.'or#ers' and 'shop'.'or_ers' would have the same topic, `p.shop.or_ers`",
        "shop.keyless has no primary key",
        "seen cannot be captured: it is a view",
        *(() if is_mysql() else OF_MARIADB),
        "the character set big5",
        *(() if is_mysql() else ("the foreign key `up` of shop.child",)),
        "there is no table shop.absent",
        "GRANT SELECT ON `else`.`where`",
        *(() if is_mysql() else ("there is information_schema.TABLES, and names are compared exactly",)),
    ):
        assert part in text["source.tables"], part
    assert "shop.orders has no column `gone`" in text["source.message_key_columns"]
    assert "shop.other is not among `tables`" in text["source.message_key_columns"]
    assert find_problems(orders.source(tables=["child", "exact"], ignore_cascades=True)) == {}
    rounding = {"time_precision_mode": "connect", "decimal_handling_mode": "double"}
    rounded = find_problems(orders.source(tables=["exact"], **rounding))["source.tables"]
    assert "`at` of the key of shop.exact is datetime(6): `time_precision_mode` cuts" in rounded
    assert "`amount` of the key of shop.exact is decimal(20,2): `decimal_handling_mode` rounds" in rounded
    if not is_mysql():
        assert "versioned cannot be captured" in find_problems(orders.source())["source.tables"], (
            "its log is read with all others"
        )


def test_a_user_needs_exactly_the_rights_that_are_documented(orders: Binlog, monkeypatch: pytest.MonkeyPatch):
    server = orders.server
    orders.execute("CREATE OR REPLACE USER reader IDENTIFIED BY 'hush'")
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN.upper()}", f"mysql://reader:hush@{server.host}:{server.port}")
    source = orders.source(tables=["shop.orders"])
    of_log, of_tables, *_ = read_grants("cdc.md", "LOCK TABLES" if is_mysql() else "BINLOG MONITOR", airflow="reader")
    text = find_problems(source)
    monitor = translate("BINLOG MONITOR")
    assert f"GRANT {monitor}, REPLICATION SLAVE ON *.* TO 'reader'@'%'" in text["source.conn_id"]
    assert "GRANT SELECT ON `shop`.`orders` TO 'reader'@'%'" in text["source.tables"]
    orders.execute("GRANT BINLOG MONITOR ON *.* TO reader", of_tables)
    assert "GRANT REPLICATION SLAVE ON *.* TO 'reader'@'%'" in find_problems(source)["source.conn_id"]
    orders.execute("REVOKE BINLOG MONITOR ON *.* FROM reader", of_log)
    assert find_problems(source) == {}
    orders.execute("INSERT INTO orders VALUES (1, 'one')")
    reader = source.make_reader(source.freeze(None).splits, None)
    assert not isinstance(reader, str)
    assert sum(batch.num_rows for batch in reader.read(0)) == 1
    snapshot = Windows(orders.source(tables=["shop.orders"], snapshot="initial", snapshot_chunk_rows=1))
    assert find_problems(snapshot.source) == {} and len(snapshot.drain()) == 1
    orders.execute(
        f"REVOKE SELECT{', LOCK TABLES' if is_mysql() else ''} ON shop.* FROM reader",
        "GRANT SELECT (id) ON shop.orders TO reader",
    )
    assert "GRANT SELECT ON `shop`.`orders` TO 'reader'@'%'" in find_problems(snapshot.source)["source.snapshot"]


def test_each_missing_right_is_named_with_the_command_that_grants_it_whatever_the_names_are(
    shop: Binlog, monkeypatch: pytest.MonkeyPatch
):
    """The account is that of one host: without it, GRANT would take, or create, the account of all hosts."""
    account, database, server = "'air-flow'@'127.0.0.1'", "`my-shop`", shop.server
    names = {"shop": database, "airflow": account}
    documented = read_grants("cdc.md", "LOCK TABLES" if is_mysql() else "BINLOG MONITOR", **names)
    shop.execute(
        f"CREATE OR REPLACE DATABASE {database}",
        f"CREATE OR REPLACE USER {account} IDENTIFIED BY 'hush'",
        f"CREATE TABLE {database}.`or-ders` (id int PRIMARY KEY, note text)",
        f"INSERT INTO {database}.`or-ders` VALUES (1, 'one')",
    )
    place = f"mysql://air-flow:hush@127.0.0.1:{server.port}"
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN.upper()}", place)
    monkeypatch.setenv("AIRFLOW_CONN_INSIDE", f"{place}/my-shop")
    options: dict[str, Any] = {"topic_prefix": "p", "tables": ["my-shop.or-ders"], "snapshot": "initial"}
    sources = [
        MySqlCdcSource(CONN, **options), MySqlCdcSource("inside", **options),
        JdbcSource(CONN, "my-shop.or-ders", cursor="id"), JdbcSource("inside", "or-ders", cursor="id"),
    ]  # fmt: skip

    def find_commands() -> list[str]:
        problems = [problem for source in sources for problem in source.validate() if not isinstance(problem, Unchecked)]
        return list(dict.fromkeys(command for problem in problems for command in list_commands(problem)))

    try:
        shop.execute(*documented)
        assert find_commands() == []
        windows = Windows(sources[0])
        assert len(windows.drain()) == 1
        shop.execute(f"INSERT INTO {database}.`or-ders` VALUES (2, 'two')")
        assert len(windows.drain()) == 1
        for grant in documented:
            rights, _, rest = grant.removeprefix("GRANT ").partition(" ON ")
            for right in rights.split(", "):
                shop.execute(f"REVOKE {right} ON {rest.replace(' TO ', ' FROM ')}")
                commands = find_commands()
                assert len(commands) and all(translate(right) in command for command in commands), (right, commands)
                while commands:
                    shop.execute(*commands)
                    assert commands != (commands := find_commands()), "the commands grant what is missing"
    finally:
        shop.execute(f"DROP USER {account}", f"DROP DATABASE {database}")


def test_a_login_whose_package_is_missing_and_another_spelling_of_the_database_are_named(orders: Binlog, monkeypatch):
    server, variable = orders.server, f"AIRFLOW_CONN_{CONN.upper()}"
    if not is_mysql():  # the only database there whose name has no case, unless the server has `lower_case_table_names`
        monkeypatch.setenv(variable, server.connection_uri().removesuffix(server.database) + "Information_Schema")
        assert "there is `information_schema`, and names are compared" in find_problems(orders.source())["source.conn_id"]
    kind, package = "VIA ed25519 USING PASSWORD('hush')", "pynacl"
    if is_mysql():
        kind, package = "WITH caching_sha2_password BY 'hush'", "cryptography"
        monkeypatch.setattr("pymysql._auth._have_cryptography", False)
    else:
        orders.execute("INSTALL SONAME 'auth_ed25519'")
        monkeypatch.setitem(sys.modules, "nacl", None)
    try:
        orders.execute(f"CREATE OR REPLACE USER signing IDENTIFIED {kind}")
        monkeypatch.setenv(variable, f"mysql://signing:hush@{server.host}:{server.port}/shop")
        for source in (orders.source(), JdbcSource(CONN, "orders")):
            text = find_problems(source)["source.conn_id"]
            assert f"'{package}' package is required" in text and "Install it where tasks run" in text
    finally:
        orders.execute("DROP USER signing", *([] if is_mysql() else ["UNINSTALL SONAME 'auth_ed25519'"]))


def test_nothing_is_looked_up_at_dag_parse_and_the_asset_has_no_credentials():
    source = MySqlCdcSource("nobody", "shop")
    assert source.asset_uri == "x-mysql-cdc://nobody/shop"
    assert source.find_columns() == ("topic", "key", "value", "timestamp")


def test_passwords_are_in_no_repr_and_no_plan(orders: Binlog):
    source = orders.source()
    orders.execute("INSERT INTO orders VALUES (0, '')")
    window = source.freeze(None)
    assert orders.server.password not in repr(
        (source, window, source.make_reader(window.splits, None), source.uri, source.find_origin())
    )
