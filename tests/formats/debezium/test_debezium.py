"""Debezium's change events as rows, plain and with schemas, in the form its documentation shows."""

from __future__ import annotations

import base64
import datetime as dt
import json
import random
from collections.abc import Callable
from decimal import Decimal as D
from typing import Any

import pyarrow as pa
import pytest

from airflow_kafka_spark.formats import Avro, Debezium, Format, Json, JsonEnvelope
from airflow_kafka_spark.formats.base import Decoded, Decoder
from airflow_kafka_spark.formats.debezium.tasks.decode import DebeziumDecoder
from tests.formats.avro.random_avro import encoded
from tests.formats.contract import CHECKS, Case

UTC = dt.timezone.utc
CUSTOMERS = "id int NOT NULL, first_name string NOT NULL, last_name string NOT NULL, email string NOT NULL"
ANNE = {"id": 1004, "first_name": "Anne", "last_name": "Kretchmar", "email": "annek@noanswer.org"}
ANNE_MARIE = ANNE | {"first_name": "Anne Marie"}
SOURCE = {
    "version": "3.0.0.Final", "connector": "mysql", "name": "dbserver1", "ts_ms": 1486501486308, "ts_us": 1486501486308000,
    "ts_ns": 1486501486308000000, "snapshot": "false", "db": "inventory", "sequence": None, "table": "customers",
    "server_id": 223344, "gtid": None, "file": "mysql-bin.000003", "pos": 364, "row": 0, "thread": 3, "query": None,
}  # fmt: skip


def event(op: str, before: Any = None, after: Any = None, **more: Any) -> dict[str, Any]:
    found = {"before": before, "after": after, "source": SOURCE, "transaction": None, "op": op, "ts_ms": 1486501558315}
    return found | {"ts_us": 1486501558315901, "ts_ns": 1486501558315901000} | more


def plain(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode()


def _row(field: str) -> dict[str, Any]:
    fields = [{"type": "int32", "optional": False, "field": "id"}]
    fields += [{"type": "string", "optional": False, "field": name} for name in ("first_name", "last_name", "email")]
    return {"type": "struct", "fields": fields, "optional": True, "name": "dbserver1.inventory.customers.Value", "field": field}


KINDS = {str: "string", int: "int64", type(None): "string"}
OF_TRANSACTION = [{"type": "string", "optional": False, "field": "id"}]
OF_SOURCE = [{"type": KINDS[type(value)], "optional": value is None, "field": name} for name, value in SOURCE.items()]
SCHEMA = {
    "type": "struct", "optional": False, "name": "dbserver1.inventory.customers.Envelope", "version": 2,
    "fields": [
        _row("before"), _row("after"),
        {"type": "struct", "fields": OF_SOURCE, "name": "io.debezium.connector.mysql.Source", "field": "source"},
        {"type": "struct", "fields": OF_TRANSACTION, "optional": True, "field": "transaction"},
        {"type": "string", "optional": False, "field": "op"},
        *({"type": "int64", "optional": True, "field": name} for name in ("ts_ms", "ts_us", "ts_ns")),
    ],
}  # fmt: skip


def with_schema(event: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, "payload": event}).encode()


CREATE, UPDATE, READ = event("c", after=ANNE), event("u", ANNE, ANNE_MARIE), event("r", after=ANNE, transaction={"id": "7"})
DELETE = event("d", ANNE_MARIE)
DELETE_OF_KEY = event("d", {"id": 1004, "first_name": None, "last_name": None})
TRUNCATE, MESSAGE = event("t"), {"op": "m", "ts_ms": 1, "source": SOURCE, "message": {"prefix": "foo", "content": "Ymfy"}}
BROKEN = [event("c"), event("u", ANNE), event("x", after=ANNE), {"after": ANNE}, {"op": None, "after": ANNE}, TRUNCATE,
          event("c", after={"id": 1}), event("c", after=ANNE | {"id": "1"}), {"ts_ms": 1486501558315}]  # fmt: skip

CASES = {
    f"{mode} {way}": Case(
        Debezium(format(CUSTOMERS), mode, ("op", "source.ts_ms", "transaction.id")),  # type: ignore[arg-type]
        tuple(write(e) for e in (CREATE, UPDATE, READ, DELETE, *([] if mode == "rewrite" else [MESSAGE, DELETE_OF_KEY]))),
        tuple(write(e) for e in BROKEN),
    )
    for mode in ("tombstone", "drop", "rewrite")
    for way, format, write in (("json", Json, plain), ("envelope", JsonEnvelope, with_schema))
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    assert case.format.validate("value") == []
    check(case)


WAYS = pytest.mark.parametrize(("format", "write"), [(Json, plain), (JsonEnvelope, with_schema)], ids=["json", "envelope"])
Write = Callable[[dict[str, Any]], bytes]


def decode(format: Format, *values: bytes | None) -> Decoded:
    """Return rows; events that are no rows become rows of nulls."""
    decoded = format.make_decoder().decode(values)
    gone = {at for at, _ in decoded.bad} | set(decoded.left_out)
    gone |= {at for at, dead in enumerate(decoded.deleted.to_pylist()) if dead} if decoded.deleted else set()
    for at in gone:
        assert set(decoded.batch.to_pylist()[at].values()) == {None}
    assert not set(decoded.left_out) & {at for at, _ in decoded.bad}
    return decoded


@WAYS
def test_a_row_is_what_stands_after_the_change(format: type[Json], write: Write) -> None:
    decoded = decode(Debezium(format(CUSTOMERS)), write(CREATE), write(UPDATE), write(READ))
    assert decoded.batch.to_pylist() == [ANNE, ANNE_MARIE, ANNE]
    assert (decoded.bad, decoded.deleted, decoded.left_out) == ((), None, ())
    assert decoded.batch.schema == Json(CUSTOMERS).get_arrow_schema()


@WAYS
def test_a_delete_event_is_a_delete_and_so_is_its_tombstone(format: type[Json], write: Write) -> None:
    decoded = decode(Debezium(format(CUSTOMERS)), write(CREATE), write(DELETE), None, write(DELETE_OF_KEY), write(event("d")))
    assert decoded.deleted is not None and decoded.deleted.to_pylist() == [False, True, False, True, True]
    # A missing value stays visible: it is not left out.
    assert (decoded.bad, decoded.left_out) == ((), ())


@WAYS
def test_deletes_and_their_tombstones_can_be_dropped(format: type[Json], write: Write) -> None:
    decoded = decode(Debezium(format(CUSTOMERS), "drop"), write(DELETE), None, write(CREATE))
    assert (decoded.bad, decoded.deleted, decoded.left_out) == ((), None, (0, 1))
    assert decoded.batch.to_pylist()[2] == ANNE


@WAYS
def test_deletes_can_be_rewritten_to_rows(format: type[Json], write: Write) -> None:
    debezium = Debezium(format(CUSTOMERS), "rewrite", add_fields=("op",))
    decoded = decode(debezium, write(UPDATE), write(DELETE), None, write(DELETE_OF_KEY), write(event("d")))
    assert decoded.batch.to_pylist()[:2] == [
        ANNE_MARIE | {"__op": "u", "__deleted": "false"},
        ANNE_MARIE | {"__op": "d", "__deleted": "true"},
    ]
    assert decoded.batch.to_pylist()[3] == dict.fromkeys(ANNE) | {"id": 1004, "__op": "d", "__deleted": "true"}
    assert decoded.left_out == (2,) and decoded.deleted is None
    assert decoded.bad == ((4, "`before` is null in a delete event; expected the row that was deleted, or the mode `tombstone`"),)
    assert all(f.nullable for f in debezium.get_arrow_schema())


@WAYS
def test_the_tombstone_after_a_delete_event_can_be_the_delete_or_not(format: type[Json], write: Write) -> None:
    values = (write(UPDATE), write(DELETE), None)
    decoded = decode(Debezium(format(CUSTOMERS), "rewrite-with-tombstone"), *values)
    assert decoded.batch.to_pylist()[1] == ANNE_MARIE | {"__deleted": "true"}
    # The tombstone stays a tombstone.
    assert (decoded.bad, decoded.deleted, decoded.left_out) == ((), None, ())
    decoded = decode(Debezium(format(CUSTOMERS), "delete-to-tombstone"), *values)
    assert decoded.deleted is not None and decoded.deleted.to_pylist() == [False, True, False]
    assert (decoded.bad, decoded.left_out) == ((), (2,))


@WAYS
def test_fields_of_the_event_become_columns(format: type[Json], write: Write) -> None:
    fields = ("op", "ts_ms", "source.ts_ms", "table", "source.pos:position", "snapshot", "transaction.id", "gtid", "ts_ns")
    debezium = Debezium(format(CUSTOMERS), add_fields=fields)
    rows = decode(debezium, write(CREATE), write(READ)).batch.to_pylist()
    assert rows[0] == ANNE | {
        "__op": "c", "__ts_ms": 1486501558315, "__source_ts_ms": 1486501486308, "__table": "customers", "__position": 364,
        "__snapshot": "false", "__transaction_id": None, "__gtid": None, "__ts_ns": 1486501558315901000,
    }  # fmt: skip
    assert rows[1]["__transaction_id"] == "7"
    assert decode(Debezium(format("id int"), add_fields=("op",), add_fields_prefix="cdc_"), write(UPDATE)).batch.to_pylist() == [
        {"id": 1004, "cdc_op": "u"}
    ]


@WAYS
def test_messages_are_no_rows_and_truncates_are_bad_unless_configured_otherwise(format: type[Json], write: Write) -> None:
    decoded = decode(Debezium(format(CUSTOMERS)), write(MESSAGE), write(TRUNCATE), write(CREATE))
    assert decoded.left_out == (0,)
    ((at, reason),) = decoded.bad
    assert at == 1 and "truncate of the table" in reason
    decoded = decode(Debezium(format(CUSTOMERS), truncates="ignore"), write(MESSAGE), write(TRUNCATE))
    assert (decoded.left_out, decoded.bad) == ((0, 1), ())


@WAYS
@pytest.mark.parametrize(
    ("broken", "expected"),
    list(
        zip(
            BROKEN,
            [
                "`after` is null in an event of op `c`",
                "`after` is null",
                "`op` is 'x'",
                "`op` is missing",
                "`op` is missing",
                "truncate of the table",
                "column `after.first_name`: missing",
                'column `after.id`: found "1", expected int',
                "`op` is missing; expected a change event of Debezium",
            ],
            strict=True,
        )
    ),
    ids=lambda v: str(v)[:40],
)
def test_what_is_bad(format: type[Json], write: Write, broken: dict[str, Any], expected: str) -> None:
    ((at, reason),) = decode(Debezium(format(CUSTOMERS)), write(CREATE), write(broken), None, write(CREATE)).bad
    assert at == 1 and expected in reason


PLACEHOLDER = "__debezium_unavailable_value"


def test_a_value_that_the_log_does_not_hold_is_never_written() -> None:
    schema = "id int, note string, raw binary, list array<string>, numbers array<int>"
    row = {"id": 1, "note": "n", "raw": "eA==", "list": ["a"], "numbers": [1]}
    raw = base64.b64encode(PLACEHOLDER.encode()).decode()
    missing = [{"note": PLACEHOLDER}, {"raw": raw}, {"list": [PLACEHOLDER]}]
    there: list[dict[str, Any]] = [{}, {"note": f"{PLACEHOLDER}s"}, {"list": [PLACEHOLDER, "a"]}, {"list": None, "note": None}]
    events = [plain(event("u", after=row | part)) for part in (*missing, *there)]
    found = decode(Debezium(Json(schema)), *events)
    names = ("note", "raw", "list")
    assert [(at, reason.partition(",")[0]) for at, reason in found.bad] == [
        (at, f"the event does not hold the value of `{name}`") for at, name in enumerate(names)
    ]
    assert all("REPLICA IDENTITY FULL" in reason for _, reason in found.bad)
    rows = found.batch.to_pylist()
    assert [r["id"] for r in rows] == [None] * 3 + [1] * 4 and rows[4]["note"] == f"{PLACEHOLDER}s"
    other = decode(Debezium(Json(schema), unavailable_value_placeholder="n"), *events)
    assert [at for at, _ in other.bad] == [1, 2, 3, 5]
    taken = decode(Debezium(Json(schema), unavailable_value_placeholder=None), *events)
    assert taken.bad == () and [r["note"] for r in taken.batch.to_pylist()][:2] == [PLACEHOLDER, "n"]
    deleted = decode(Debezium(Json(schema), "rewrite"), plain(event("d", row)), events[0], events[3])
    assert [at for at, _ in deleted.bad] == [1] and [r["__deleted"] for r in deleted.batch.to_pylist()] == ["true", None, "false"]


def test_plain_json_names_the_format_that_reads_an_event_in_connects_envelope() -> None:
    value = json.dumps({"schema": {"type": "struct"}, "payload": CREATE}).encode()
    ((_, reason),) = Debezium(Json(CUSTOMERS)).make_decoder().decode([value]).bad
    assert reason.endswith("it looks like Connect's envelope, which Debezium(JsonEnvelope(...)) reads")


def test_numbers_of_plain_events_have_the_configured_meaning() -> None:
    schema = "at timestamp, local timestamp_ntz, day date, n decimal(5,2)"
    moment = dt.datetime(1975, 1, 1, 0, 0, 0, 5000)
    row = {"at": "1975-01-01T00:00:00.005Z", "local": 157766400005, "day": 1826, "n": "AJY="}
    expected = {"at": moment.replace(tzinfo=UTC), "local": moment, "day": dt.date(1975, 1, 1), "n": D("1.50")}
    numbers = Debezium(Json(schema), timestamps="millis", decimals="unscaled")
    assert decode(numbers, plain(event("c", after=row))).batch.to_pylist() == [expected]
    micros = row | {"local": 157766400005000, "n": 1.5}
    assert decode(
        Debezium(Json(schema), timestamps="micros", decimals="unscaled"), plain(event("c", after=micros))
    ).batch.to_pylist() == [expected]
    # A number could be anything: in seconds this would be the year 6969.
    ((_, reason),) = decode(
        Debezium(Json("local timestamp_ntz, at timestamp")), plain(event("c", after={"at": 157766400000}))
    ).bad
    assert "column `after.at`: found 157766400000, expected timestamp" in reason


def test_dates_and_times_of_isostring_end_in_z() -> None:
    schema = "at timestamp, local timestamp_ntz, day date"
    row = {"at": "2023-11-21T18:29:26Z", "local": "2023-11-21T18:29:26.5Z", "day": "2023-11-21Z"}
    local = dt.datetime(2023, 11, 21, 18, 29, 26, 500000)
    expected = {"at": local.replace(microsecond=0, tzinfo=UTC), "local": local, "day": local.date()}
    bare = {"local": "2023-11-21T18:29:26.5", "day": "2023-11-21"}
    values = [plain(event("c", after=r)) for r in (row, row | bare)]
    assert decode(Debezium(Json(schema)), *values * 200).batch.to_pylist() == [expected] * 400
    ((_, reason),) = decode(Debezium(Json(schema)), plain(event("c", after={"local": "2023-11-21T18:29:26+01:00"}))).bad
    assert "no time zone" in reason


def test_a_decimal_may_come_with_its_scale_and_a_time_in_nanoseconds() -> None:
    debezium = Debezium(Json("n decimal(5,2), at timestamp_ntz"), timestamps="nanos", decimals="unscaled")
    rows = ({"n": {"scale": 1, "value": "Dw=="}, "at": 1000}, {"n": "AJY=", "at": None}, {"n": None}, {"n": 1.5, "at": 1})
    decoded = decode(debezium, *(plain(event("c", after=row)) for row in rows))
    assert [row["n"] for row in decoded.batch.to_pylist()] == [D("1.50"), D("1.50"), None, None]
    assert decoded.batch.to_pylist()[0]["at"] == dt.datetime(1970, 1, 1, 0, 0, 0, 1)
    ((at, reason),) = decoded.bad
    assert at == 3 and "whole microseconds" in reason


def test_schemas_say_what_numbers_mean() -> None:
    after = {"type": "struct", "optional": True, "field": "after", "fields": [
        {"type": "int64", "name": "io.debezium.time.MicroTimestamp", "field": "at"},
        {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "2"}, "field": "n"},
    ]}  # fmt: skip
    schema = {"type": "struct", "fields": [after, {"type": "string", "field": "op"}]}
    value = json.dumps({"schema": schema, "payload": {"op": "c", "after": {"at": 7, "n": "AJY="}}}).encode()
    decoded = decode(Debezium(JsonEnvelope("at timestamp_ntz, n decimal(5,2)")), value)
    assert decoded.batch.to_pylist() == [{"at": dt.datetime(1970, 1, 1, 0, 0, 0, 7), "n": D("1.50")}]


class Events(Format):
    """A format whose columns are those of events, like a format of a schema registry."""

    def validate(self, where: str) -> list[Any]:
        return []

    def get_arrow_schema(self) -> pa.Schema:
        return self.json.get_arrow_schema()

    def make_decoder(self) -> Decoder:
        return self.json.make_decoder()

    json = Json("before struct<id:int>, after struct<id:int NOT NULL>, op string, source struct<ts_ms:bigint>")


def test_of_another_format_the_columns_are_those_of_the_events() -> None:
    for mode in ("tombstone", "rewrite"):
        debezium = Debezium(Events(), mode, add_fields=("source.ts_ms",))  # type: ignore[arg-type]
        assert debezium.validate("value") == []
        row = decode(debezium, plain(CREATE), plain(DELETE)).batch.to_pylist()[0]
        assert (row["id"], row["__source_ts_ms"]) == (1004, 1486501486308)
    without = Events()
    without.json = Json("after struct<id:int>, op string")
    assert Debezium(without).validate("value") == []
    (problem,) = Debezium(without, "rewrite").validate("value")
    assert "`before`" in problem.what
    (problem,) = Debezium(Events(), add_fields=("source.lsn",)).validate("value")
    assert "`source.lsn`" in problem.what


def optional(type_: Any) -> dict[str, Any]:
    return {"type": ["null", type_], "default": None}


def connects(type_: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": type_, "connect.version": 1, "connect.name": name, **more}


DECIMAL = {"logicalType": "decimal", "precision": 10, "scale": 2, "connect.parameters": {"scale": "2"}}
AVRO_ROW = {"type": "record", "name": "Value", "connect.name": "s.shop.orders.Value", "fields": [
    {"name": "id", "type": "long"},
    {"name": "day", **optional(connects("int", "io.debezium.time.Date"))},
    {"name": "at", **optional(connects("long", "io.debezium.time.MicroTimestamp"))},
    {"name": "zoned", **optional(connects("string", "io.debezium.time.ZonedTimestamp"))},
    {"name": "price", **optional(connects("bytes", "org.apache.kafka.connect.data.Decimal", **DECIMAL))},
]}  # fmt: skip
AVRO = {"type": "record", "name": "Envelope", "namespace": "s.shop.orders", "connect.name": "s.shop.orders.Envelope", "fields": [
    {"name": "before", **optional(AVRO_ROW)},
    {"name": "after", **optional("Value")},
    {"name": "source", "type": {"type": "record", "name": "Source", "namespace": "io.debezium.connector.oracle", "fields": [
        {"name": "ts_ms", "type": "long"}, {"name": "txId", **optional("string")}]}},
    {"name": "transaction", **optional({"type": "record", "name": "block", "namespace": "event", "fields": [
        {"name": "id", "type": "string"}, {"name": "total_order", "type": "long"}]})},
    {"name": "op", "type": "string"},
    {"name": "ts_ms", **optional("long")},
]}  # fmt: skip


def test_a_delete_in_avro_is_rewritten_where_before_lacks_a_struct_whose_fields_are_never_null() -> None:
    number = {"type": "record", "name": "VariableScaleDecimal", "namespace": "io.debezium.data", "fields": [
        {"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}]}  # fmt: skip
    row = {**AVRO_ROW, "fields": [AVRO_ROW["fields"][0], {"name": "size", **optional(number)}]}
    schema = {**AVRO, "fields": [{"name": "before", **optional(row)}, *AVRO["fields"][1:]]}
    event = {"before": None, "after": None, "source": {"ts_ms": 5, "txId": None}, "transaction": None, "ts_ms": 7}
    sizes = {"scale": 1, "value": b"\5"}, None
    values = [encoded(schema, event | {"op": "c", "after": {"id": 1, "size": size}}) for size in sizes]
    values += [encoded(schema, event | {"op": "d", "before": {"id": 1, "size": size}}) for size in sizes]
    decoded = decode(Debezium(Avro(json.dumps(schema)), "rewrite"), *values * 50)
    expected = [{"id": 1, "size": size, "__deleted": deleted} for deleted in ("false", "true") for size in sizes]
    assert (decoded.batch.to_pylist(), decoded.bad) == (expected * 50, ())


@pytest.mark.parametrize("mode", ["tombstone", "rewrite"])
def test_events_in_avro_are_read_as_connects_converter_writes_them(mode: str) -> None:
    at = dt.datetime(2023, 11, 14, 22, 13, 20, 1)
    sent = {"id": 1, "day": 19675, "at": 1_700_000_000_000_001, "zoned": "2023-11-14T22:13:20Z", "price": D("1.50")}
    row = sent | {"day": dt.date(2023, 11, 14), "at": at}
    event = {"before": None, "after": None, "source": {"ts_ms": 5, "txId": "0a00"}, "transaction": None, "ts_ms": 7}
    values = [
        encoded(AVRO, event | {"op": "c", "after": sent, "transaction": {"id": "t", "total_order": 1}}),
        encoded(AVRO, event | {"op": "d", "before": sent}),
        None,
        encoded(AVRO, event | {"op": "u", "after": dict.fromkeys(sent) | {"id": 2}}),
    ]
    added = ("op", "source.ts_ms", "txId", "transaction.total_order")
    debezium = Debezium(Avro(json.dumps(AVRO)), mode, added)  # type: ignore[arg-type]
    assert debezium.validate("value") == []
    decoded = decode(debezium, *values * 100)
    deleted, first = ({"__deleted": v} if mode == "rewrite" else {} for v in ("true", "false"))
    extra = {"__op": "c", "__source_ts_ms": 5, "__txId": "0a00", "__transaction_total_order": 1}
    rows = decoded.batch.to_pylist()[-4:]
    assert rows[0] == row | extra | first
    assert rows[3] == dict.fromkeys(row) | {"id": 2} | extra | {"__op": "u", "__transaction_total_order": None} | first
    if mode == "rewrite":
        assert rows[1] == row | extra | {"__op": "d", "__transaction_total_order": None} | deleted
        assert len(decoded.left_out) == 100
    else:
        assert decoded.deleted is not None and sum(decoded.deleted.to_pylist()) == 100
    assert decoded.bad == ()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"value": "json"}, "value"),
        ({"value": Debezium(Json("a int"))}, "value"),
        ({"value": Json("a foo")}, "value.schema"),
        ({"delete_tombstone_handling_mode": "delete"}, "delete_tombstone_handling_mode"),
        ({"add_fields": "op"}, "add_fields"),
        ({"add_fields": ("before.id",)}, "add_fields"),
        ({"add_fields": ("source.",)}, "add_fields"),
        ({"add_fields": ("op", "op")}, "add_fields"),
        ({"add_fields": ("op:a",), "add_fields_prefix": ""}, "add_fields"),
        ({"truncates": "do"}, "truncates"),
        ({"unavailable_value_placeholder": ""}, "unavailable_value_placeholder"),
        ({"timestamps": "seconds"}, "timestamps"),
        ({"decimals": None}, "decimals"),
    ],
    ids=str,
)
def test_what_is_wrong_with_options(options: dict[str, Any], where: str) -> None:
    (problem,) = Debezium(**{"value": Json("a int")} | options).validate("value")
    assert problem.where == f"value.{where}"


def test_events_among_others_keep_their_places() -> None:
    chance, compared = random.Random(3), 0
    events = [CREATE, UPDATE, READ, DELETE, MESSAGE, TRUNCATE, *BROKEN]
    for format, write in ((Json, plain), (JsonEnvelope, with_schema)):
        decoder = Debezium(format(CUSTOMERS), "rewrite", ("op",)).make_decoder()
        assert isinstance(decoder, DebeziumDecoder)
        for _ in range(20):
            values = [None if chance.random() < 0.1 else write(chance.choice(events)) for _ in range(40)]
            whole = decoder.decode(values)
            alone = [decoder.decode([v]) for v in values]
            assert whole.batch.to_pylist() == [row for d in alone for row in d.batch.to_pylist()]
            assert list(whole.left_out) == [at for at, d in enumerate(alone) if d.left_out]
            assert list(whole.bad) == [(at, reason) for at, d in enumerate(alone) for _, reason in d.bad]
            compared += len(values)
    assert compared == 1600
