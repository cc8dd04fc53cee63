"""Records that Confluent's clients have registered and written are read with a real registry; errors name their cause."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import (
    AvroSchemaInvalid,
    ConnectionInvalid,
    RegistryRefused,
    RegistryUnavailable,
    ValidationError,
)
from airflow_kafka_spark.formats import Avro
from airflow_kafka_spark.formats.types import parse_ddl, to_arrow_schema
from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook
from tests.formats.contract import CHECKS, Case
from tests.support.registry import EmbeddedRegistry, guarded, serializer

CONN = "schema_registry_default"
V1 = {"type": "record", "name": "shop.Order", "fields": [{"name": "id", "type": "int"}, {"name": "old", "type": "string"}]}
V2 = {
    "type": "record",
    "name": "shop.Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": ["null", "string"], "default": None}],
}
FAST = {"max.retries": 1, "retries.wait.ms": 10}


@pytest.fixture(autouse=True)
def connection(registry: EmbeddedRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT", registry.connection())


@pytest.fixture(scope="module")
def registered(registry: EmbeddedRegistry) -> dict[str, int]:
    """Two versions of the values' schema of topic `orders`, registered by Confluent's client."""
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

    client = SchemaRegistryClient({"url": registry.url})
    return {name: client.register_schema("orders-value", Schema(json.dumps(s), "AVRO")) for name, s in (("1", V1), ("2", V2))}


def add(monkeypatch: pytest.MonkeyPatch, name: str, **fields: Any) -> None:
    monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps({"conn_type": "schema_registry", **fields}))


def serialized(
    registry: EmbeddedRegistry, schema: dict[str, Any], value: dict[str, Any], topic: str = "orders", **conf: Any
) -> bytes:
    """Return a value as Confluent's serializer writes it."""
    return serializer(registry.url, schema, **conf)(topic, value)


# --- reading -------------------------------------------------------------------------------------------------------------


def test_records_of_all_versions_come_out_as_the_latest_has_them(registry: EmbeddedRegistry, registered: dict[str, int]) -> None:
    values = [serialized(registry, V1, {"id": 1, "old": "o"}), serialized(registry, V2, {"id": 1 << 40, "note": "n"})] * 50
    format = Avro(registry=CONN).of_topics(["orders"], "value")
    assert format.validate("value") == []
    decoded = format.make_decoder().decode([*values, None])
    assert decoded.bad == ()
    assert decoded.batch.to_pylist() == [{"id": 1, "note": None}, {"id": 1 << 40, "note": "n"}] * 50 + [
        {"id": None, "note": None}
    ]


def test_single_requests_leave_no_line_in_the_log_unless_the_user_has_set_its_level(
    registry: EmbeddedRegistry, registered: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    for level, shown in ((logging.NOTSET, False), (logging.INFO, True)):
        for name in ("httpx", "httpx2"):
            caplog.set_level(level, logger=name)
        caplog.set_level("INFO")
        assert [schema.version for schema in SchemaRegistryHook(CONN).list_versions("orders-value")] == [1, 2]
        assert ("HTTP Request" in caplog.text) == shown


def test_a_version_or_a_schema_may_be_the_readers(registry: EmbeddedRegistry, registered: dict[str, int]) -> None:
    value = serialized(registry, V1, {"id": 1, "old": "o"})
    first = Avro(registry=CONN, reader_schema=1).of_topics(["orders"], "value")
    assert first.make_decoder().decode([value]).batch.to_pylist() == [{"id": 1, "old": "o"}]
    own = json.dumps({**V1, "fields": [{"name": "was", "type": "string", "aliases": ["old"]}]})
    named = Avro(registry=CONN, subject="orders-value", reader_schema=own)
    assert named.make_decoder().decode([value]).batch.to_pylist() == [{"was": "o"}]


def test_other_strategies_name_subjects_after_the_record(registry: EmbeddedRegistry) -> None:
    from confluent_kafka.schema_registry import record_subject_name_strategy, topic_record_subject_name_strategy

    strategies = {
        "RecordNameStrategy": (record_subject_name_strategy, "shop.Order"),
        "TopicRecordNameStrategy": (topic_record_subject_name_strategy, "people-shop.Order"),
    }
    for name, (strategy, subject) in strategies.items():
        conf = {"auto.register.schemas": True, "subject.name.strategy": strategy}
        value = serialized(registry, V2, {"id": 5, "note": None}, "people", **conf)
        format = Avro(registry=CONN, subject_name_strategy=name, reader_schema=json.dumps(V2)).of_topics(["people"], "value")  # type: ignore[arg-type]
        assert format.subjects == (subject,)
        assert format.make_decoder().decode([value]).batch.to_pylist() == [{"id": 5, "note": None}]


def test_a_schema_registered_after_the_columns_were_looked_at_is_known_to_the_decoder(registry: EmbeddedRegistry) -> None:
    hook = SchemaRegistryHook()
    hook.register("late-value", json.dumps(V1))
    format = Avro(registry=CONN).of_topics(["late"], "value")
    names = format.get_arrow_schema().names
    wider = {**V1, "fields": [*V1["fields"], {"name": "more", "type": "int", "default": 0}]}  # type: ignore[misc]
    value = serialized(registry, wider, {"id": 1, "old": "o", "more": 3}, "late", **{"auto.register.schemas": True})
    assert format.make_decoder().decode([value]).batch.to_pylist() == [{"id": 1, "old": "o"}]
    assert format.get_arrow_schema().names == names == ["id", "old"]


def test_schemas_that_use_others_are_read(registry: EmbeddedRegistry) -> None:
    from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient

    client = SchemaRegistryClient({"url": registry.url})
    client.register_schema("shop.Order", Schema(json.dumps(V2), "AVRO"))
    version = client.get_latest_version("shop.Order").version
    outer = {"type": "record", "name": "shop.Box", "fields": [{"name": "order", "type": "shop.Order"}]}
    uses = Schema(json.dumps(outer), "AVRO", [SchemaReference("shop.Order", "shop.Order", version)])
    number = client.register_schema("boxes-value", uses)
    format = Avro(registry=CONN).of_topics(["boxes"], "value")
    value = b"\0" + number.to_bytes(4, "big") + b"\x0e\x00"
    assert format.make_decoder().decode([value]).batch.to_pylist() == [{"order": {"id": 7, "note": None}}]


def test_what_names_no_schema_of_the_subject_is_bad(registry: EmbeddedRegistry, registered: dict[str, int]) -> None:
    good = serialized(registry, V2, {"id": 3, "note": None})
    values = [good, b"", b"\0\0\0\0", b"{" + good[1:], b"\0" + (77_777).to_bytes(4, "big") + good[5:], good]
    decoded = Avro(registry=CONN).of_topics(["orders"], "value").make_decoder().decode(values)
    reasons = dict(decoded.bad)
    assert list(reasons) == [1, 2, 3, 4]
    assert "found 0 bytes, expected at least 5" in reasons[1] and "found 4 bytes" in reasons[2]
    assert "found the first byte 0x7b, expected the magic byte 0x00" in reasons[3]
    ids = ", ".join(str(i) for i in sorted(registered.values()))
    assert f"found schema id 77777, expected one of {ids} of `orders-value` (versions 1, 2)" in reasons[4]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_contract(registry: EmbeddedRegistry, registered: dict[str, int], check: Any) -> None:
    good = (serialized(registry, V1, {"id": 1, "old": "o"}), serialized(registry, V2, {"id": 2, "note": "n"}))
    bad = (b"", good[0][:-1], good[1] + b"\0", b"\0\0\1\0\0")
    check(Case(Avro(registry=CONN).of_topics(["orders"], "value"), good, bad))


def test_a_decoder_needs_no_registry(
    registry: EmbeddedRegistry, registered: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = serialized(registry, V2, {"id": 3, "note": None})
    pickled = pickle.dumps(Avro(registry=CONN).of_topics(["orders"], "value").make_decoder())
    add(monkeypatch, CONN, host="127.0.0.1", port=1, extra=FAST)
    assert pickle.loads(pickled).decode([value]).batch.to_pylist() == [{"id": 3, "note": None}]


# --- registering ---------------------------------------------------------------------------------------------------------


def test_a_schema_that_does_not_fit_is_refused_with_the_registrys_reasons(registry: EmbeddedRegistry) -> None:
    hook = SchemaRegistryHook()
    text = json.dumps(V2)
    assert hook.find_incompatibilities("fits-value", text) == []
    number = hook.register("fits-value", text)
    assert hook.register("fits-value", text) == number == hook.get_version("fits-value").id
    hook.client.set_compatibility("fits-value", "BACKWARD")
    other = json.dumps({**V2, "fields": [{"name": "id", "type": "string"}]})
    assert hook.find_incompatibilities("fits-value", other)
    with pytest.raises(RegistryRefused, match="to register a schema for subject `fits-value`: .*HTTP 409") as caught:
        hook.register("fits-value", other)
    assert caught.value.status == 409 and not caught.value.retryable
    assert [v.version for v in hook.list_versions("fits-value")] == [1]


# --- writing -------------------------------------------------------------------------------------------------------------


COLUMNS = "id bigint, amount decimal(12,2), at timestamp, inside struct<a: string>"
ROW = {"id": 1, "amount": Decimal("-1.50"), "at": datetime(2026, 1, 2, 3, 4, 5, 678901, timezone.utc), "inside": {"a": "é"}}


def written(avro: Avro, ddl: str = COLUMNS, rows: Sequence[dict[str, Any]] = (ROW,)) -> list[bytes]:
    """Return the rows as a task writes them; the encoder is pickled for that."""
    assert avro.find_encoding_problems("value", [c.name for c in parse_ddl(ddl)]) == []
    batch = pa.RecordBatch.from_pylist(list(rows), schema=to_arrow_schema(parse_ddl(ddl)))
    encoder = pickle.loads(pickle.dumps(avro.make_struct_encoder(parse_ddl(ddl))))
    return encoder.encode(dict(zip(batch.schema.names, batch.columns, strict=True))).to_pylist()


def deserialized(registry: EmbeddedRegistry, topic: str, value: bytes, **conf: Any) -> Any:
    """Return a value as Confluent's deserializer reads it."""
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroDeserializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    read = AvroDeserializer(SchemaRegistryClient({"url": registry.url}), conf=conf)
    return read(value, SerializationContext(topic, MessageField.VALUE))


@pytest.mark.parametrize(
    ("strategy", "subject"),
    [
        ("TopicNameStrategy", "made-value"),
        ("RecordNameStrategy", "shop.Made"),
        ("TopicRecordNameStrategy", "made-shop.Made"),
    ],
)
def test_a_schema_made_of_columns_is_registered_by_each_strategy_and_read_by_confluents_deserializer(
    registry: EmbeddedRegistry, strategy: Any, subject: str
) -> None:
    avro = Avro(registry=CONN, subject_name_strategy=strategy, record_name="shop.Made").to_write("made", "value")
    nothing = dict.fromkeys(ROW)
    one, two = written(avro, rows=[ROW, nothing])
    assert deserialized(registry, "made", one) == ROW and deserialized(registry, "made", two) == nothing
    known = SchemaRegistryHook().get_version(subject)
    assert one[:5] == two[:5] == b"\0" + known.id.to_bytes(4, "big")
    written(avro)
    assert known.version == 1 and SchemaRegistryHook().get_version(subject) == known
    reader = Avro(registry=CONN, subject=subject).of_topics(["made"], "value").make_decoder()
    assert reader.decode([one, two]).batch.to_pylist() == [ROW, nothing]


def test_columns_that_are_added_make_a_version_and_others_are_refused_with_the_differences(registry: EmbeddedRegistry) -> None:
    avro, hook = Avro(registry=CONN).to_write("grown", "value"), SchemaRegistryHook()
    (first,) = written(avro, "id bigint", [{"id": 1}])
    hook.client.set_compatibility("grown-value", "BACKWARD")
    (second,) = written(avro, "id bigint, note string", [{"id": 2, "note": "x"}])
    assert first[:5] != second[:5]
    assert [deserialized(registry, "grown", v) for v in (first, second)] == [{"id": 1}, {"id": 2, "note": "x"}]
    with pytest.raises(ValidationError, match="subject `grown-value` does not take .*version 2; `id` was long, is string"):
        avro.make_struct_encoder(parse_ddl("id string, note string"))
    other = {"type": "record", "name": "grown.Value", "fields": [{"name": "id", "type": "string"}]}
    (problem,) = Avro(json.dumps(other), registry=CONN).to_write("grown", "value").find_encoding_problems("value", ["id"])
    assert problem.where == "value.schema" and "`id` was [null, long], is string; `note` is gone" in problem.what
    assert [v.version for v in hook.list_versions("grown-value")] == [1, 2]


def test_a_schema_that_is_to_be_there_is_looked_up_and_never_registered(registry: EmbeddedRegistry) -> None:
    hook = SchemaRegistryHook()
    avro = Avro(json.dumps(V2), registry=CONN, auto_register_schemas=False).to_write("there", "value")
    (problem,) = avro.find_encoding_problems("value", ["id", "note"])
    assert "not registered for subject `there-value`" in problem.what and not hook.knows("there-value")
    number = hook.register("there-value", json.dumps(V2))
    (value,) = written(avro, "id int, note string", [{"id": 7, "note": None}])
    assert value == b"\0" + number.to_bytes(4, "big") + b"\x0e\0"
    other = Avro(json.dumps(dict(reversed(V2.items()))), registry=CONN, auto_register_schemas=False).to_write("there", "value")
    assert other.find_encoding_problems("value", ["id"])
    assert replace(other, normalize_schemas=True).find_encoding_problems("value", ["id"]) == []


def test_the_latest_version_is_written_whatever_columns_there_are(registry: EmbeddedRegistry) -> None:
    hook = SchemaRegistryHook()
    avro = Avro(registry=CONN, use_latest_version=True).to_write("last", "value")
    (problem,) = avro.find_encoding_problems("value", ["id"])
    assert problem.where == "value.registry" and "`last-value`" in problem.what
    hook.register("last-value", json.dumps(V1))
    number = hook.register("last-value", json.dumps(V2))
    (value,) = written(avro, "id int", [{"id": 7}])
    assert value == b"\0" + number.to_bytes(4, "big") + b"\x0e\0"
    with pytest.raises(ValidationError, match="column `id` is string, and the schema has long"):
        avro.make_struct_encoder(parse_ddl("id string"))
    assert len(hook.list_versions("last-value")) == 2


def test_a_key_of_one_column_is_its_bare_type(registry: EmbeddedRegistry) -> None:
    avro = Avro(registry=CONN).to_write("keyed", "key")
    (value,) = written(avro, "id bigint", [{"id": 5}])
    assert SchemaRegistryHook().get_version("keyed-key").text == '"long"' and value[5:] == b"\x0a"
    assert avro.make_decoder().decode([value]).batch.to_pylist() == [{"value": 5}]
    with pytest.raises(AvroSchemaInvalid, match="of type bytes, which Confluent's clients .* write differently"):
        avro.make_struct_encoder(parse_ddl("id decimal(5,2)"))
    (pair,) = written(Avro(registry=CONN).to_write("pairs", "key"), "a bigint, b string", [{"a": 1, "b": "x"}])
    assert deserialized(registry, "pairs", pair) == {"a": 1, "b": "x"}


def test_a_registry_that_cannot_be_asked_is_a_problem_before_anything_is_written(
    registry: EmbeddedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(monkeypatch, "down", host="127.0.0.1", port=1, extra=FAST)
    with guarded(registry.url, "ann", "right") as url:
        add(monkeypatch, "bad", login="ann", password="s3cr3t", extra={"url": url})
        for name, message in (("down", "did not answer"), ("bad", "Unauthorized")):
            for avro in (Avro(registry=name), Avro(json.dumps(V2), registry=name)):
                (problem,) = avro.to_write("orders", "value").find_encoding_problems("value", ["id"])
                assert problem.where == "value.registry" and message in problem.what and "s3cr3t" not in f"{problem}"


def test_the_registry_is_asked_for_each_version_once(registry: EmbeddedRegistry, registered: dict[str, int]) -> None:
    format = Avro(registry=CONN).of_topics(["orders"], "value")
    asked: list[str] = []
    format._hook.client._rest_client.session.event_hooks["request"].append(lambda request: asked.append(request.url.path))
    assert format.validate("value") == []
    for _ in range(3):
        format.get_arrow_schema()
    format.make_decoder()
    found = [path.rpartition("/subjects/")[2] for path in asked]
    assert found == ["orders-value/versions/latest", "orders-value/versions", "orders-value/versions/1"]


# --- what goes wrong -----------------------------------------------------------------------------------------------------


def test_a_subject_that_is_not_there_is_a_problem() -> None:
    (problem,) = Avro(registry=CONN).of_topics(["nothing"], "value").validate("value")
    assert problem.where == "value.registry" and "`nothing-value`" in problem.what and "HTTP 404" in problem.what


def test_a_wrong_password_is_reported_and_never_shown(
    registry: EmbeddedRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("httpx", "httpx2"):
        caplog.set_level("INFO", logger=name)
    with caplog.at_level("INFO"), guarded(registry.url, "ann", "r@ght") as url:
        address = url.removeprefix("http://")
        add(monkeypatch, "good", login="ann", password="r@ght", extra={"url": url})
        add(monkeypatch, "right", extra={"url": f"http://ann:r%40ght@{address},{url}"})
        add(monkeypatch, "bad", login="ann", password="s3cr3t", extra={"url": url})
        add(monkeypatch, "inside", extra={"url": url, "basic.auth.user.info": "ann:s3cr3t"})
        add(monkeypatch, "before", host=f"http://ann:s3cr3t@{address}", schema="")
        assert SchemaRegistryHook("good").test_connection()[0] and SchemaRegistryHook("right").test_connection()[0]
        for name in ("bad", "inside", "before"):
            hook = SchemaRegistryHook(name)
            with pytest.raises(RegistryRefused, match="Unauthorized.*Correct login and password") as caught:
                hook.list_versions("orders-value")
            assert caught.value.status == 401
            answered, message = hook.test_connection()
            (problem,) = Avro(registry=name, subject="orders-value").validate("value")
            assert not answered and "s3cr3t" not in f"{caught.value}{message}{problem}{hook!r}{hook.url}"
    # The library of the client logs the address of each request.
    assert "HTTP Request: GET" in caplog.text and "s3cr3t" not in caplog.text and "ght@" not in caplog.text


def test_a_registry_that_is_down_is_a_problem_after_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "down", host="127.0.0.1", port=1, login="ann", password="s3cr3t", extra=FAST)
    with pytest.raises(RegistryUnavailable, match="http://127.0.0.1:1 .*did not answer.*refused") as caught:
        SchemaRegistryHook("down").list_versions("orders-value")
    assert caught.value.retryable and "s3cr3t" not in str(caught.value)
    (problem,) = Avro(registry="down").of_topics(["orders"], "value").validate("value")
    assert problem.where == "value.registry" and "did not answer" in problem.what and problem.action


def test_a_server_that_is_no_registry_is_reported(monkeypatch: pytest.MonkeyPatch, registry: EmbeddedRegistry) -> None:
    add(monkeypatch, "else", host=f"http://127.0.0.1:{registry.port}", schema="", extra=FAST)
    answered, message = SchemaRegistryHook("else").test_connection()
    assert not answered and "refused its subjects" in message


@contextmanager
def answering(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes = b"", **headers: str) -> Iterator[SchemaRegistryHook]:
    """Yield the hook of a server that gives each request the same answer."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the server's name
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        add(monkeypatch, "ill", host=f"http://127.0.0.1:{server.server_port}", schema="", extra={"max.retries": 0})
        yield SchemaRegistryHook("ill")
        server.shutdown()


def test_a_redirection_is_reported_with_the_address_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(monkeypatch, 302, Location="https://login.example.org/") as hook:
        answered, message = hook.test_connection()
    assert not answered and "HTTP 302" in message and "Give the address that it redirects to" in message


@pytest.mark.parametrize("body", [b"{}", b"", b'"x"', b"<html>", b'{"id": 5000000000, "version": 1, "schema": "x"}'])
def test_an_answer_without_what_was_asked_for_is_refused_and_makes_no_schema(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    with answering(monkeypatch, 200, body) as hook:
        for ask in (
            lambda: hook.find_id_of("orders-value", "{}"),
            lambda: hook.register("orders-value", "{}"),
            lambda: hook.get_version("orders-value"),
            lambda: hook.list_versions("orders-value"),
            lambda: hook.knows("orders-value"),
            lambda: hook.find_incompatibilities("orders-value", "{}"),
        ):
            with pytest.raises(RegistryRefused, match="its answer is not that of a schema registry"):
                ask()
        assert not hook.test_connection()[0]


def test_a_registry_that_may_answer_later_is_a_problem_that_may_be_gone_at_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(monkeypatch, 503, b'{"error_code": 50301, "message": "starting"}') as hook:
        for avro in (Avro(registry="ill"), Avro(json.dumps(V2), registry="ill"), Avro(registry="ill", use_latest_version=True)):
            (problem,) = avro.to_write("orders", "value").find_encoding_problems("value", ["id"])
            assert problem.retryable and "starting (HTTP 503, code 50301)" in problem.what
        with pytest.raises(RegistryUnavailable, match="did not answer while being asked to register a schema"):
            hook.register("orders-value", "{}")


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "registry"}, "http://registry:8081"),
        ({"host": "registry", "schema": "https", "port": 443}, "https://registry:443"),
        ({"host": "https://registry/api", "port": 8443}, "https://registry:8443/api"),
        ({"host": "https://registry/api/"}, "https://registry/api"),
        ({"host": "registry:8082"}, "http://registry:8082"),
        ({"host": "https://registry:8082/api", "port": 8082}, "https://registry:8082/api"),
        ({"host": "registry/api", "schema": "https"}, "https://registry:8081/api"),
        ({"host": "x", "extra": {"url": "https://ann:s3cr3t@a:1,http://b:2"}}, "https://a:1,http://b:2"),
    ],
)
def test_the_address_is_that_of_the_connection(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], url: str) -> None:
    add(monkeypatch, "there", **fields)
    assert SchemaRegistryHook("there").url == url


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "it has no host"),
        ({"host": "http://ann:s3cr3t@x/y@a"}, "a character before the `@` of its address has to be encoded.*`/` %2F"),
        ({"host": "a", "login": "bob", "extra": {"url": "http://ann:s3cr3t@a"}}, "one login in its address and another one"),
        ({"host": "a", "extra": {"ssl.key.password": "s3cr3t"}}, "ssl.certificate.location required"),
        ({"host": "a", "extra": {"no.such": "s3cr3t"}}, "Unrecognized properties: no.such"),
        ({"host": "a", "extra": {"timeout": "soon"}}, "`timeout` is 'soon' in its extra; expected a number"),
        ({"host": "a", "extra": {"ssl.ca.location": "/no/such"}}, "its `ssl.ca.location` is /no/such, which cannot be read on"),
    ],
)
def test_a_connection_that_cannot_be_used_is_reported(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    add(monkeypatch, "broken", **fields)
    hook = SchemaRegistryHook("broken")
    with pytest.raises(ConnectionInvalid, match=message) as caught:
        _ = hook.client
    assert "s3cr3t" not in str(caught.value) and not hook.test_connection()[0]


def test_a_connection_of_another_type_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_ODD", "http://registry")
    with pytest.raises(ConnectionInvalid, match="it is of type `http`.*Use a connection of type `schema_registry`"):
        _ = SchemaRegistryHook("odd").config
