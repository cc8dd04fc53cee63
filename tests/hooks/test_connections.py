"""Lookups of Airflow connections: one error for a connection that is missing or of another type; and the connection tests of
Airflow's UI.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_kafka_spark.errors import ConnectionInvalid
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook
from airflow_kafka_spark.hooks.spark.hook import SparkConnectHook, SparkHook
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.sinks.iceberg.hooks import IcebergHook
from airflow_kafka_spark.sources import JdbcSource
from airflow_kafka_spark.sources.jdbc.hooks import MySqlHook, PostgresHook
from airflow_kafka_spark.testing import EmbeddedKafka, KafkaSecurity

LOOKS: dict[str, Callable[[str], Any]] = {
    "kafka": lambda conn_id: KafkaHook(conn_id).config,
    "spark": lambda conn_id: SparkHook(conn_id).connection,
    "sink": lambda conn_id: PostgresSink(conn_id, "t").find_server(),
    "source": lambda conn_id: JdbcSource(conn_id, "t").find_database(),
}
TYPES = {"kafka": "`kafka`", "spark": "`spark`", "sink": "`postgres`", "source": "`postgres` or `mysql`"}
OPTIONS = {"kafka": "kafka_conn_id", "spark": "spark_conn_id"}


@pytest.mark.parametrize("who", LOOKS)
def test_one_that_is_not_defined_is_named_with_what_to_add(who: str) -> None:
    add = f"Add a connection `nowhere` of type {TYPES[who]}.*, or correct `{OPTIONS.get(who, 'conn_id')}`"
    with pytest.raises(ConnectionInvalid, match=f"`nowhere`: it is not defined.*{add}"):
        LOOKS[who]("nowhere")
    with pytest.raises(ConnectionInvalid, match=f"its name in `{OPTIONS.get(who, 'conn_id')}` is empty"):
        LOOKS[who]("")


@pytest.mark.parametrize(
    "text", ['{"conn_type": "kafka", ', '{"conn_type": "kafka", "port": "s3cr3t"}', "kafka://u:s3cr3t/t@b:9092"]
)
def test_an_environment_variable_that_is_no_connection_is_named_without_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_BROKEN", text)
    with pytest.raises(ConnectionInvalid, match="`AIRFLOW_CONN_BROKEN` is neither the JSON nor the URI") as caught:
        LOOKS["kafka"]("broken")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("who", ["spark", "sink", "source"])
def test_one_of_another_type_is_named_with_its_type(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_ELSEWHERE", "http://u:s3cr3t@example.org")
    with pytest.raises(ConnectionInvalid, match=f"it is of type `http`.*Use a connection of type {TYPES[who]}") as caught:
        LOOKS[who]("elsewhere")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "address"),
    [("postgresql", "postgres://db:5432/shop"), ("postgres", "postgres://db:5432/shop"), ("mariadb", "mysql://db:3306/shop")],
)
def test_a_type_goes_by_several_names(monkeypatch: pytest.MonkeyPatch, kind: str, address: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", f'{{"conn_type": "{kind}", "host": "db", "schema": "shop"}}')
    assert re.fullmatch(f"{address}.*", JdbcSource("shop", "orders").uri)


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra": "[1]"}, "its extra is a list; expected a JSON object"),
        ({"extra": "s3cr3t"}, "its extra is no JSON: Expecting value. Write"),
        ({"host": "https://db.example.org"}, "its host is `https://db.example.org`; expected the name or the address"),
        ({"host": "db:5432"}, "its host is `db:5432`.*The connection has a field of its own for the port"),
    ],
)
def test_an_address_or_an_extra_of_another_form_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, str], message: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", json.dumps({"conn_type": kind, "host": "db", "schema": "shop", **fields}))
    with pytest.raises(ConnectionInvalid, match=f"`shop`: {message}"):
        JdbcSource("shop", "orders").find_database()


def test_numbers_of_a_database_connection_that_are_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, extra, message in (
        ("postgres", {"port": "5432,5433"}, "its port is `5432,5433`; expected a number"),
        ("mysql", {"connect_timeout": "10s"}, "`connect_timeout` in its extra is `10s`; expected seconds"),
    ):
        monkeypatch.setenv("AIRFLOW_CONN_SHOP", json.dumps({"conn_type": kind, "host": "db", "extra": extra}))
        with pytest.raises(ConnectionInvalid, match=message):
            JdbcSource("shop", "orders").find_database()


# --- the test of a connection, as Airflow's button and `airflow connections test` run it ---

PASSWORD = "ann's s3cr3t"


@pytest.fixture(scope="module")
def secured() -> Iterator[EmbeddedKafka]:
    """A broker that requires a password and TLS."""
    with EmbeddedKafka(security=KafkaSecurity("SASL_SSL", {"ann": PASSWORD}, ("SCRAM-SHA-512",))) as server:
        yield server


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, str]]:
    """``tested(conn_type=..., host=...)``: return the result of Airflow's test of such a connection. It takes at most half a
    minute and never contains a password.
    """

    def test(**facts: Any) -> tuple[bool, str]:
        from airflow.models.connection import Connection

        if isinstance(extra := facts.get("extra"), dict):
            facts["extra"] = json.dumps(extra)
        connection = Connection(conn_id="tested", **facts)
        # As a URI, like the button of the page.
        monkeypatch.setenv("AIRFLOW_CONN_TESTED", connection.get_uri())
        begun = time.monotonic()
        done, message = connection.test_connection()
        assert time.monotonic() - begun < 90 or facts["conn_type"] == "spark"
        assert "s3cr3t" not in message
        return done, message

    return test


def test_airflow_makes_our_hooks_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.models.connection import Connection

    made = {kind: type(Connection(conn_id="made", conn_type=kind).get_hook()) for kind in ("kafka", "schema_registry", "spark")}
    assert made == {"kafka": KafkaHook, "schema_registry": SchemaRegistryHook, "spark": SparkHook}
    assert type(Connection(conn_id="made", conn_type="spark_connect").get_hook()) is SparkConnectHook
    # The official providers of databases are not installed here.
    assert type(Connection(conn_id="made", conn_type="postgres").get_hook()) is PostgresHook
    assert type(Connection(conn_id="made", conn_type="mysql").get_hook()) is MySqlHook
    assert type(Connection(conn_id="made", conn_type="iceberg").get_hook()) is IcebergHook


def test_forms_of_connections_are_there_without_importing_a_hook(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from airflow.providers_manager import ProvidersManager
        manager = ProvidersManager()
        forms = manager.field_behaviours
        assert forms["kafka"]["relabeling"] == {"extra": "Config Dict"}
        assert forms["schema_registry"]["relabeling"]["host"] == "Address"
        assert forms["spark"]["relabeling"] == {"host": "Master"}
        widgets = manager.connection_form_widgets
        assert {"extra__schema_registry__url", "extra__spark_connect__use_ssl"} <= set(widgets)
        assert "pyspark" not in sys.modules
    """
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_kafka_that_answers_is_reported_with_its_brokers(secured: EmbeddedKafka, tested: Any) -> None:
    done, message = tested(conn_type="kafka", extra=secured.connection_extra())
    assert done, message
    assert re.fullmatch(rf"Connected to Kafka cluster \S+, brokers: {secured.bootstrap_servers}\.", message)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"sasl.password": "other s3cr3t"}, "did not accept user `ann`.*[Aa]uthentication failed"),
        ({"security.protocol": "SASL_PLAINTEXT"}, "another `security.protocol`|closed by peer|Disconnected"),
        ({"ssl.ca.location": None}, "certificate verify failed|self-signed|unable to get"),
        ({"bootstrap.servers": "127.0.0.1:1"}, "Connection refused"),
        ({"ssl.ca.location": "/no/such/ca.pem"}, "`ssl.ca.location` is /no/such/ca.pem, which cannot be read on .*No such file"),
    ],
    ids=["password", "protocol", "certificate", "address", "file"],
)
def test_problems_of_a_kafka_connection_are_reported(
    secured: EmbeddedKafka, tested: Any, wrong: dict[str, str | None], reason: str
) -> None:
    extra = {key: value for key, value in {**secured.connection_extra(), **wrong}.items() if value is not None}
    done, message = tested(conn_type="kafka", extra=extra)
    assert not done
    assert re.search(reason, message), message


def test_a_schema_registry_that_is_down_is_reported_at_once(tested: Any) -> None:
    # test_schema_registry.py has a registry that answers, and one that refuses a password.
    done, message = tested(conn_type="schema_registry", host="127.0.0.1", port=1, login="me", password="s3cr3t")
    assert not done
    assert "Connection refused" in message


def test_a_spark_runs_a_job_in_a_process_of_its_own(tested: Any) -> None:
    done, message = tested(conn_type="spark", host="local[1]", extra={"spark.driver.memory": "512m"})
    assert done, message
    assert re.fullmatch(r"Connected to Spark 4\.\S+ at local\[1\]\.", message)


def test_an_unreachable_spark_is_reported_within_seconds(tested: Any) -> None:
    for kind, host, place in (("spark", "spark://127.0.0.1", "127.0.0.1:1"), ("spark_connect", "127.0.0.1", "127.0.0.1:1")):
        assert tested(conn_type=kind, host=host, port=1, password="s3cr3t") == (
            False,
            f"Nothing answers at {place}: Connection refused",
        )


def test_a_database_that_answers_and_one_that_does_not_or_refuses_the_password_are_reported(postgres: Any, tested: Any) -> None:
    right = {"host": postgres.host, "port": postgres.port, "schema": postgres.database}
    address = f"{postgres.host}:{postgres.port}/{postgres.database}"
    password = urllib.parse.unquote(urllib.parse.urlparse(postgres.connection_uri()).password or "")
    assert tested(conn_type="postgres", **right, login="postgres", password=password) == (True, f"Connected to {address}.")
    done, message = tested(conn_type="postgres", **right, login="postgres", password="s3cr3t")
    assert not done and "password authentication failed" in message
    for kind in ("postgres", "mysql"):
        done, message = tested(conn_type=kind, host="127.0.0.1", port=1, login="me", password="s3cr3t", schema="shop")
        assert not done and "127.0.0.1:1" in message and "refused" in message


# --- connections that lead to another kind of server ---


class _Page(http.server.BaseHTTPRequestHandler):
    server_version = "Shop/1.0"

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def others(kafka: Any, postgres: Any) -> Iterator[dict[str, int]]:
    """Ports of servers, by kind; that of ``silent`` accepts connections, and answers nothing."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as web, socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        of_kafka = int(kafka.bootstrap_servers.rpartition(":")[2])
        yield {"http": web.server_port, "silent": silent.getsockname()[1], "kafka": of_kafka, "postgres": postgres.port}
        web.shutdown()


FOUND = {
    "http": r"an HTTP server \(Shop/1.0\)",
    "silent": "a server that accepts connections and does not answer",
    "kafka": "a Kafka broker",
    "postgres": "PostgreSQL",
}
WRONG = {
    "kafka": ("http", "silent", "postgres"),
    "postgres": ("http", "silent", "kafka"),
    "mysql": ("http", "silent", "kafka", "postgres"),
    "schema_registry": ("silent", "kafka", "postgres"),
    "iceberg": ("silent", "kafka", "postgres"),
    "spark": ("http", "silent", "kafka", "postgres"),
    "spark_connect": ("http", "silent", "kafka", "postgres"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_kind_of_server_is_named_within_seconds(
    tested: Any, others: dict[str, int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module in ("hooks.kafka.hook", "hooks.schema_registry", "sources.jdbc.hooks", "sinks.iceberg.hooks"):
        monkeypatch.setattr(f"airflow_kafka_spark.{module}.TEST_SECONDS", 1.0)
    monkeypatch.setattr("airflow_kafka_spark.hooks.connections.ANSWER_SECONDS", 0.5)
    for other in WRONG[kind]:
        address: dict[str, Any] = {"host": "127.0.0.1", "port": others[other]}
        if kind == "kafka":
            address = {"extra": {"bootstrap.servers": f"127.0.0.1:{others[other]}"}}
        elif kind == "iceberg":
            address = {"host": f"http://127.0.0.1:{others[other]}", "extra": {"type": "rest"}}
        elif kind == "spark":
            address["host"] = "spark://127.0.0.1"
        begun = time.monotonic()
        done, message = tested(conn_type=kind, **address)
        assert not done and re.search(rf"127.0.0.1:{others[other]} (there )?is {FOUND[other]}", message), (other, message)
        assert time.monotonic() - begun < 30, message


def test_a_task_names_another_kind_of_server_of_its_database(others: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_kafka_spark.hooks.connections.ANSWER_SECONDS", 0.5)
    for kind, other in (("postgres", "kafka"), ("mysql", "postgres")):
        astray = {"conn_type": kind, "host": "127.0.0.1", "port": others[other], "login": "u", "password": "p", "schema": "d"}
        monkeypatch.setenv("AIRFLOW_CONN_ASTRAY", json.dumps({**astray, "extra": {"connect_timeout": 2}}))
        problems = [str(problem) for problem in JdbcSource("astray", "t").validate()]
        problems += [str(problem) for problem in PostgresSink("astray", "t").find_target_problems()] if kind == "postgres" else []
        named = [text for text in problems if f"At 127.0.0.1:{others[other]} there is {FOUND[other]}. Correct the" in text]
        assert len(named) == (2 if kind == "postgres" else 1), problems
