"""Protobuf without a registry: columns of messages, messages of columns, and values that do not fit."""

from __future__ import annotations

import datetime
import math
import pickle
import struct
from base64 import b64encode
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.errors import RowRejected, SchemaUnusable, ValidationError
from airflow_kafka_spark.formats import Protobuf
from airflow_kafka_spark.formats.protobuf.schema import (
    compile_schemas,
    find_incompatibility,
    find_message,
    list_messages,
    make_pool,
)
from airflow_kafka_spark.formats.protobuf.tasks.decode import ProtobufDecoder, read_message_indexes
from airflow_kafka_spark.formats.protobuf.tasks.encode import make_message_header as indexed
from airflow_kafka_spark.formats.registry import SchemaDocument, make_wire_header
from airflow_kafka_spark.formats.types import parse_ddl
from tests.formats.contract import CHECKS, Case

UTC = datetime.timezone.utc
ALL = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/empty.proto";
import "google/type/date.proto";
import "confluent/meta.proto";
import "confluent/type/decimal.proto";
message Other { int32 x = 1; message Deep { int32 y = 1; } }
message All {
  enum State { NEW = 0; PAID = 1; }
  int32 i32 = 1; sint32 s32 = 2; sfixed32 f32 = 3; int64 i64 = 4; sint64 s64 = 5; sfixed64 f64 = 6;
  uint32 u32 = 7; fixed32 x32 = 8; uint64 u64 = 9; fixed64 x64 = 10;
  float real = 11; double wide = 12; bool yes = 13; string text = 14; bytes raw = 15; State state = 16;
  optional int32 maybe = 17; optional string said = 18;
  oneof choice { int64 number = 19; Other other = 20; }
  repeated string tags = 21; repeated Other others = 22; repeated State states = 23;
  map<string, int64> counts = 24; map<int32, Other> by_id = 25;
  google.protobuf.Timestamp at = 26; google.protobuf.Duration took = 27; google.type.Date day = 28;
  google.protobuf.StringValue wrapped = 29; google.protobuf.UInt64Value big = 30; repeated google.protobuf.Int32Value many = 31;
  google.protobuf.Struct free = 32; google.protobuf.Empty nothing = 33;
  confluent.type.Decimal amount = 34 [(confluent.field_meta) = {
    params: [{ key: "precision", value: "12" }, { key: "scale", value: "2" }] }];
}
"""
SMALL = 'syntax = "proto3"; message Order { int64 id = 1; optional string note = 2; repeated int32 n = 3; Order.S s = 4; '
SMALL += "message S { bool b = 1; } }"


def message_class(text: str, name: str = "") -> Any:
    """Return protobuf's class of a message."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(find_message(files_of(text), name, "it"))


def files_of(text: str, *references: tuple[str, str]) -> bytes:
    (files,) = compile_schemas([SchemaDocument(text, references, "it")])
    assert isinstance(files, bytes), files
    return files


def decoded(format: Protobuf, *values: bytes | None) -> tuple[list[dict[str, Any]], tuple[tuple[int, str], ...]]:
    found = format.make_decoder().decode(values)
    return found.batch.to_pylist(), found.bad


def written(format: Protobuf, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> list[bytes]:
    """Return the values that tasks write for rows; the columns are those that the format reads, or given ones."""
    batch = pa.RecordBatch.from_pylist(rows, schema or format.get_arrow_schema())
    columns = parse_ddl(ddl_of(batch.schema))
    return format.make_struct_encoder(columns).encode(dict(zip(batch.schema.names, batch.columns, strict=True))).to_pylist()


def ddl_of(schema: pa.Schema) -> str:
    return ", ".join(f"`{f.name}` {_ddl(f.type)}{'' if f.nullable else ' NOT NULL'}" for f in schema)


def _ddl(found: pa.DataType) -> str:
    if pa.types.is_struct(found):
        return f"struct<{', '.join(f'`{f.name}` {_ddl(f.type)}' for f in found)}>"
    if pa.types.is_map(found):
        return f"map<{_ddl(found.key_type)}, {_ddl(found.item_type)}>"
    if pa.types.is_list(found):
        return f"array<{_ddl(found.value_type)}>"
    if pa.types.is_decimal(found):
        return f"decimal({found.precision},{found.scale})"
    names = {"int32": "int", "int64": "bigint", "bool": "boolean", "date32[day]": "date", "timestamp[us, tz=UTC]": "timestamp"}
    names |= {"timestamp[us]": "timestamp_ntz", "int8": "tinyint", "int16": "smallint"}
    return names.get(str(found), str(found))


# --- the contract --------------------------------------------------------------------------------------------------------

Order = message_class(SMALL)
CASE = Case(
    Protobuf(schema=SMALL),
    (
        b"",
        Order(id=1, note="é", n=[1, 2], s={"b": True}).SerializeToString(),
        Order(id=-1, note="", s={}).SerializeToString(),
    ),
    (b"\xff", b"\x0a\x01a", b"\x12\x01\xff", b"\x12\x05a", b"\x08"),
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_contract(check: Callable[[Case], None]) -> None:
    check(CASE)


# --- reading -------------------------------------------------------------------------------------------------------------


def test_each_type_of_protobuf_has_its_column() -> None:
    format = Protobuf(schema=ALL, message="All")
    assert format.validate("value") == []
    assert ddl_of(format.get_arrow_schema()).replace("`", "") == (
        "i32 int NOT NULL, s32 int NOT NULL, f32 int NOT NULL, i64 bigint NOT NULL, s64 bigint NOT NULL, f64 bigint NOT NULL, "
        "u32 bigint NOT NULL, x32 bigint NOT NULL, u64 decimal(20,0) NOT NULL, x64 decimal(20,0) NOT NULL, real float NOT NULL, "
        "wide double NOT NULL, yes boolean NOT NULL, text string NOT NULL, raw binary NOT NULL, state string NOT NULL, "
        "maybe int, said string, number bigint, other struct<x int>, tags array<string> NOT NULL, "
        "others array<struct<x int>> NOT NULL, states array<string> NOT NULL, counts map<string, bigint> NOT NULL, "
        "by_id map<int, struct<x int>> NOT NULL, at timestamp, took bigint, day date, wrapped string, big decimal(20,0), "
        "many array<int> NOT NULL, free string, amount decimal(12,2)"
    )


FULL: dict[str, Any] = {
    **{"i32": -(2**31), "s32": -1, "f32": 2**31 - 1, "i64": -(2**63), "s64": -1, "f64": 2**63 - 1, "u32": 2**32 - 1, "x32": 7},
    **{"u64": Decimal(2**64 - 1), "x64": Decimal(0), "real": 1.5, "wide": 0.1, "yes": True, "text": "é😀\0", "raw": b"\0\xff"},
    **{
        "state": "PAID",
        "maybe": 0,
        "said": "",
        "number": None,
        "other": {"x": 5},
        "tags": ["", "a"],
        "others": [{"x": 1}, {"x": 0}],
    },
    **{"states": ["NEW", "PAID"], "counts": [("", 1), ("b", -1)], "by_id": [(-1, {"x": 2})]},
    "at": datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
    **{"took": -1_500_001, "day": datetime.date(1, 1, 1), "wrapped": "", "big": Decimal(2**64 - 1), "many": [0, -5]},
    **{"free": '{"a":[true,null,"x"],"b":{}}', "amount": Decimal("-1234567890.12")},
}
EMPTY: dict[str, Any] = {
    **dict.fromkeys(("i32", "s32", "f32", "i64", "s64", "f64", "u32", "x32"), 0),
    **{"u64": Decimal(0), "x64": Decimal(0), "real": 0.0, "wide": 0.0, "yes": False, "text": "", "raw": b"", "state": "NEW"},
    **dict.fromkeys(("maybe", "said", "number", "other", "at", "took", "day", "wrapped", "big", "free", "amount")),
    **dict.fromkeys(("tags", "others", "states", "counts", "by_id", "many"), []),
}


def test_values_of_every_type_are_read_as_protobufs_own_class_writes_them() -> None:
    own = message_class(ALL, "All")
    at = {"seconds": 253402300799, "nanos": 999999000}
    message = own(
        i32=-(2**31), s32=-1, f32=2**31 - 1, i64=-(2**63), s64=-1, f64=2**63 - 1, u32=2**32 - 1, x32=7, u64=2**64 - 1, real=1.5,
        wide=0.1, yes=True, text="é😀\0", raw=b"\0\xff", state="PAID", maybe=0, said="", other={"x": 5}, tags=["", "a"],
        others=[{"x": 1}, {}], states=["NEW", "PAID"], counts={"b": -1, "": 1}, by_id={-1: {"x": 2}}, at=at,
        took={"seconds": -1, "nanos": -500001000}, day={"year": 1, "month": 1, "day": 1}, wrapped={}, big={"value": 2**64 - 1},
        many=[{}, {"value": -5}], nothing={}, amount={"value": (-123456789012).to_bytes(6, "big", signed=True), "scale": 2},
    )  # fmt: skip
    message.free.update({"b": {}, "a": [True, None, "x"]})
    rows, bad = decoded(Protobuf(schema=ALL, message="shop.All"), message.SerializeToString(), b"", None)
    assert bad == ()
    assert rows == [FULL, EMPTY, dict.fromkeys(FULL)]


def test_what_is_written_is_read_again_as_the_same_values() -> None:
    format = Protobuf(schema=ALL, message="All")
    values = written(format, [FULL, EMPTY])
    assert decoded(format, *values) == ([FULL, EMPTY], ())
    own = message_class(ALL, "All")
    assert own.FromString(values[1]) == own(), "what is a default is not written, as protobuf has it"
    assert own.FromString(values[0]).amount.value == (-123456789012).to_bytes(5, "big", signed=True)


def test_of_several_symbols_with_one_number_the_first_is_read_and_each_is_written() -> None:
    text = 'syntax = "proto3"; message M { E x = 1; enum E { option allow_alias = true; Z = 0; A = 1; B = 1; } }'
    format = Protobuf(schema=text)
    values = written(format, [{"x": "A"}, {"x": "B"}])
    assert (values, decoded(format, *values)) == ([b"\x08\x01"] * 2, ([{"x": "A"}] * 2, ()))


def test_nan_and_infinities_are_themselves() -> None:
    format = Protobuf(schema='syntax = "proto3"; message M { double d = 1; float f = 2; }')
    rows = [{"d": math.inf, "f": -math.inf}, {"d": math.nan, "f": math.nan}, {"d": -0.0, "f": 1e-45}]
    found, _ = decoded(format, *written(format, rows))
    assert repr(found[:2]) == repr(rows[:2])
    assert struct.pack("<df", *found[2].values()) == struct.pack("<df", -0.0, 1e-45)


texts, longs = st.text(), st.integers(-(2**63), 2**63 - 1)
times = st.datetimes(datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999)).map(
    lambda t: t.replace(tzinfo=UTC)
)
ROWS = st.fixed_dictionaries(
    {
        **{"i64": longs, "u64": st.integers(0, 2**64 - 1).map(Decimal), "wide": st.floats(allow_nan=False), "text": texts},
        **{"raw": st.binary(), "said": st.none() | texts, "other": st.none() | st.fixed_dictionaries({"x": st.integers(-9, 9)})},
        **{"tags": st.lists(texts), "counts": st.dictionaries(texts, longs).map(lambda d: sorted(d.items()))},
        **{"at": st.none() | times, "amount": st.none() | st.decimals(-(10**9), 10**9, places=2)},
        **{"state": st.sampled_from(["NEW", "PAID"]), "day": st.none() | st.dates()},
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=5), st.binary(max_size=3))
def test_random_rows_come_back_and_damaged_ones_never_raise(rows: list[dict[str, Any]], damage: bytes) -> None:
    format = Protobuf(schema=ALL, message="All")
    names = [name for name in FULL if rows and name in rows[0]]
    schema = pa.schema([format.get_arrow_schema().field(name) for name in names])
    values = written(format, rows, schema) if rows else []
    found = format.make_decoder().decode([*values, *(v[: len(v) // 2] + damage for v in values)])
    assert found.batch.num_rows == 2 * len(rows)
    for row, back in zip(rows, found.batch.to_pylist()[: len(rows)], strict=True):
        # Python tells +0 from -0 nowhere but in its text.
        assert {name: repr(back[name]) for name in row} == {name: repr(_normal(value)) for name, value in row.items()}
    assert all(at >= len(rows) for at, _ in found.bad)


def _normal(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return pa.scalar(value, pa.timestamp("us", "UTC")).as_py()
    return value


PB = "google.protobuf"
WRONG = [
    ("int32 x = 1;", b"\x0a\x00", "column `x`: found a value of another type"),
    ("google.protobuf.Timestamp x = 1;", {"x": {"seconds": 253402300800}}, "column `x`: found 253402300800 s"),
    ("google.protobuf.Timestamp x = 1;", {"x": {"nanos": 1001}}, 'column `x`: found 1001 nanoseconds.*nanoseconds="cut"'),
    ("google.protobuf.Timestamp x = 1;", {"x": {"nanos": -1000}}, "column `x`: found 0 s and -1000 ns"),
    ("google.protobuf.Duration x = 1;", {"x": {"seconds": 1, "nanos": -5}}, "column `x`: found 1 s and -5 ns"),
    ("google.type.Date x = 1;", {"x": {"year": 2026, "month": 2}}, "column `x`: found year 2026, month 2, day 0"),
    ("message S { string y = 1; } repeated S x = 1;", b"\x0a\x03\x0a\x01\xff", "no message of type `M`"),
    ("message S { google.type.Date y = 1; } S x = 1;", {"x": {"y": {"day": 1}}}, "column `x.y`: found year 0"),
    (
        "enum E { option allow_alias = true; A = 0; B = 1; C = 1; } E x = 1;",
        b"\x08\x07",
        r"column `x`: found the number 7, expected one of A \(0\), B \(1\)$",
    ),
    (
        'confluent.type.Decimal x = 1 [(confluent.field_meta) = {params: [{key: "precision", value: "3"}, '
        '{key: "scale", value: "1"}]}];',
        {"x": {"value": b"\x7f", "scale": 2}},
        r"column `x`: found 127e-2, expected decimal\(3,1\)",
    ),
]


@pytest.mark.parametrize(("body", "value", "reason"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_bad_with_the_column_and_spoils_no_other(body: str, value: Any, reason: str) -> None:
    known = (
        "google/protobuf/timestamp",
        "google/protobuf/duration",
        "google/type/date",
        "confluent/meta",
        "confluent/type/decimal",
    )
    text = 'syntax = "proto3";' + "".join(f'import "{k}.proto";' for k in known) + f"message M {{ {body} }}"
    bad = value if isinstance(value, bytes) else message_class(text)(**value).SerializeToString()
    rows, found = decoded(Protobuf(schema=text), b"", bad, b"")
    assert [at for at, _ in found] == [1]
    pytest.raises(ValueError, _raise, found[0][1]).match(reason)
    assert rows[0] == rows[2] != [] and set(rows[1].values()) == {None}


def _raise(reason: str) -> None:
    raise ValueError(reason)


def test_nanoseconds_may_be_cut() -> None:
    text = 'syntax = "proto3"; import "google/protobuf/timestamp.proto"; message M { google.protobuf.Timestamp x = 1; }'
    value = message_class(text)(x={"seconds": -1, "nanos": 999}).SerializeToString()
    rows, bad = decoded(Protobuf(schema=text, nanoseconds="cut"), value)
    assert bad == () and rows == [{"x": datetime.datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)}]


def test_proto2_has_required_fields_defaults_and_closed_enums() -> None:
    text = 'syntax = "proto2"; message M { required int32 a = 1; optional int32 b = 2 [default = 5]; '
    text += "optional E c = 3; enum E { A = 1; } }"
    format = Protobuf(schema=text)
    assert ddl_of(format.get_arrow_schema()).replace("`", "") == "a int NOT NULL, b int NOT NULL, c string"
    rows, bad = decoded(format, b"\x08\x01", b"", b"\x08\x01\x18\x01", b"\x08\x01\x18\x09")
    assert [rows[0], rows[2]] == [{"a": 1, "b": 5, "c": None}, {"a": 1, "b": 5, "c": "A"}]
    assert bad == (
        (1, "found no `a`, which is required"),
        (3, "column `c`: found the number 9, which the schema does not have"),
    )


def test_texts_of_proto2_are_texts_or_bad() -> None:
    text = 'syntax = "proto2"; message M { optional string a = 1; repeated string b = 2; }'
    rows, bad = decoded(Protobuf(schema=text), b"\x0a\x01\xff", b"\x12\x01\xff", b"\x0a\x01x")
    assert rows[2] == {"a": "x", "b": []}
    assert bad == ((0, r"column `a`: not UTF-8: b'\xff'"), (1, r"column `b`: not UTF-8: b'\xff'"))


def test_messages_that_hold_themselves_are_refused_or_cut() -> None:
    text = 'syntax = "proto3"; message M { int32 a = 1; M next = 2; repeated M more = 3; }'
    (problem,) = Protobuf(schema=text).validate("value")
    assert "holds itself" in problem.what and "recursive_fields_max_depth" in problem.action
    value = message_class(text)(a=1, next={"a": 2, "next": {"a": 3}}).SerializeToString()
    assert decoded(Protobuf(schema=text, recursive_fields_max_depth=1), value) == ([{"a": 1}], ())
    twice = {"a": 1, "next": {"a": 2}, "more": []}
    assert decoded(Protobuf(schema=text, recursive_fields_max_depth=2), value) == ([twice], ())


def test_deeply_nested_and_huge_messages_are_read_or_bad() -> None:
    text = 'syntax = "proto3"; message M { string a = 1; M next = 2; }'
    format = Protobuf(schema=text, recursive_fields_max_depth=1)
    value = b"\x0a\x01x"
    for _ in range(200):
        value = b"\x12" + _varint(len(value)) + value
    huge = message_class(text)(a="é" * (8 << 20)).SerializeToString()
    rows, bad = decoded(format, value, huge)
    assert [at for at, _ in bad] == [0], "protobuf itself refuses more than 100"
    assert len(rows[1]["a"]) == 8 << 20


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80, number >> 7]) if number > 0x7F else bytes([number])


def test_names_that_python_or_protobuf_use_are_names_of_columns() -> None:
    text = 'syntax = "proto3"; message M { int32 class = 1; int32 self = 2; int32 HasField = 3; '
    text += "optional int32 DESCRIPTOR = 4; int32 SerializeToString = 5; }"
    format, row = Protobuf(schema=text), {"class": 1, "self": 2, "HasField": 3, "DESCRIPTOR": 4, "SerializeToString": 5}
    assert decoded(format, *written(format, [row])) == ([row], ())


def test_a_descriptor_set_will_do_and_messages_are_found_by_either_name() -> None:
    by_set = Protobuf(schema=files_of(ALL), message="Other.Deep")
    assert by_set.validate("value") == [] and decoded(by_set, b"\x08\x05") == ([{"y": 5}], ())
    assert decoded(Protobuf(schema=ALL), b"\x08\x05") == ([{"x": 5}], ()), "the first by default"
    (problem,) = Protobuf(schema=ALL, message="shop.None").validate("value")
    assert "shop.Other, shop.Other.Deep, shop.All" in problem.what


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, "neither"),
        ({"schema": "message {"}, "protoc reports: schema.proto:1:"),
        ({"schema": 'syntax = "proto3"; import "gone.proto"; message M { int32 a = 1; }'}, "gone.proto"),
        ({"schema": 'syntax = "proto3"; mesage'}, "protoc reports: schema.proto:1:"),
        ({"schema": b"nonsense"}, "the descriptor set"),
        ({"schema": 'syntax = "proto3"; message M {}'}, "has no fields"),
        ({"schema": 'syntax = "proto3"; message M { int32 a = 1; int32 A = 2; }'}, "which are one to Spark|protoc reports"),
        ({"schema": SMALL, "recursive_fields_max_depth": 11}, "found 11"),
        ({"schema": SMALL, "nanoseconds": "round"}, "found 'round'"),
        ({"schema": SMALL, "reader_schema": 3}, "a version is one of a registry"),
        ({"schema": SMALL, "subject_name_strategy": "Topic"}, "found 'Topic'"),
        ({"registry": "sr"}, "the subject is unknown"),
        ({"registry": "sr", "topics": ("t",), "schema": b"x"}, "a registry keeps texts"),
        ({"schema": "a int, a int"}, "`a` is there already"),
    ],
)
def test_wrong_options_are_reported(options: dict[str, Any], found: str) -> None:
    problems = Protobuf(**options).validate("value")
    pytest.raises(ValueError, _raise, str(problems)).match(found)


# --- the wire format -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [(0,), (1,), (0, 0), (2, 64, 5), (63, 8192)])
def test_message_indexes_are_those_of_confluents_clients(path: tuple[int, ...]) -> None:
    import io

    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer

    theirs = io.BytesIO()
    ProtobufSerializer._encode_varints(theirs, list(path))
    assert indexed(b"", path) == theirs.getvalue()
    assert read_message_indexes(theirs.getvalue() + b"x", 0) == (path, len(theirs.getvalue()))


def framed(*, writers: dict[int, str], reader: str, message: str = "Order") -> ProtobufDecoder:
    """Return a decoder as it is made for a registry that has these schemas."""
    from airflow_kafka_spark.formats.protobuf.format import _find_unreadable_messages

    format = Protobuf(schema=reader, message=message)
    files = {number: files_of(text) for number, text in writers.items()}
    known = {number: _find_unreadable_messages(f, find_message(files_of(reader), message, "it")) for number, f in files.items()}
    return ProtobufDecoder(files_of(reader), format._layout, known, {99: "it is of type AVRO"}, "1, 2 of `orders-value`")


OLD = 'syntax = "proto3"; message Order { int32 id = 1; string gone = 2; }'
NEW = 'syntax = "proto3"; message Other { bool b = 1; } message Order { int64 id = 1; optional string note = 3; } '
NEW += "message A { Order o = 1; message B { int32 x = 1; } }"


def test_old_and_new_records_come_out_alike_and_headers_that_are_wrong_are_reported() -> None:
    decoder = framed(writers={1: OLD, 2: NEW}, reader=NEW)
    old = make_wire_header(1) + b"\0" + message_class(OLD)(id=-5, gone="x").SerializeToString()
    new = make_wire_header(2) + b"\x02\x02" + message_class(NEW, "Order")(id=2**40, note="n").SerializeToString()
    wrong = {
        b"": "found 0 bytes, expected at least 5",
        b"\1" + old[1:]: "found the first byte 0x01",
        make_wire_header(3) + b"\0": "found schema id 3, expected one of 1, 2 of `orders-value`",
        make_wire_header(99) + b"\0": "found schema id 99: it is of type AVRO",
        make_wire_header(2) + b"\0": "found schema id 2: the record is a `Other`, expected `Order`",
        make_wire_header(2) + b"\x04\x04\x00": "the record is a `A.B`, expected `Order`",
        make_wire_header(2) + b"\x02\x08": "found message indexes [4], which the schema of id 2 does not have",
        make_wire_header(2): "found message indexes that do not end",
        make_wire_header(2) + b"\x01": "found -1 message indexes",
        make_wire_header(2) + b"\xff\xff\xff\xff\xff\xff": "found message indexes that do not end",
        old[:-1]: "no message of type `Order`",
    }
    for decode in (decoder.decode, pickle.loads(pickle.dumps(decoder)).decode):
        found = decode([old, *wrong, None, new, *[old, new] * 1500])
        assert found.batch.to_pylist()[0] == {"id": -5, "note": None}
        assert found.batch.to_pylist()[len(wrong) + 2 :] == [
            {"id": 2**40, "note": "n"},
            *[{"id": -5, "note": None}, {"id": 2**40, "note": "n"}] * 1500,
        ]
        assert [at for at, _ in found.bad] == list(range(1, 1 + len(wrong)))
        assert all(reason.startswith(said) or said in reason for (_, reason), said in zip(found.bad, wrong.values(), strict=True))


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("int32 x = 1;", "int64 x = 1;", ""),
        ("uint32 x = 1;", "int64 x = 1;", ""),
        ("string x = 1;", "bytes x = 1;", ""),
        ("string x = 1;", "repeated string x = 1;", ""),
        ("string x = 1; string y = 2;", "string y = 2;", ""),
        ("int64 x = 1;", "int32 x = 1;", "was of type int64, which is not read as int32"),
        ("int32 x = 1;", "sint32 x = 1;", "int32, which is not read as sint32"),
        ("int32 x = 1;", "uint32 x = 1;", "int32, which is not read as uint32"),
        ("string x = 1;", "int32 x = 1;", "string, which is not read as int32"),
        ("repeated string x = 1;", "string x = 1;", "was repeated"),
        ("message S { int64 y = 1; } S x = 1;", "message S { int32 y = 1; } S x = 1;", "field 1 (`y`) was of type int64"),
        ("string x = 1; int32 y = 2;", "oneof c { string x = 1; int32 y = 2; }", "the oneof `c` was fields"),
        ("oneof c { string x = 1; int32 y = 2; }", "oneof d { string x = 1; int32 y = 2; }", ""),
        ("map<string, int32> x = 1;", "map<string, int64> x = 1;", ""),
        (
            "map<string, int32> x = 1;",
            "message E { string key = 1; int32 value = 2; } repeated E x = 1;",
            "field 1 (`x`) was a map",
        ),
        (
            "enum E { Z = 0; A = 1; B = 2; } E x = 1;",
            "enum E { Z = 0; B = 1; } E x = 1;",
            "had the symbol `B` as 2, which is 1 now",
        ),
        ("enum E { Z = 0; A = 1; } map<int32, E> x = 1;", "enum E { A = 0; Z = 1; } map<int32, E> x = 1;", "symbol `A` as 1"),
        ("enum E { Z = 0; A = 1; } E x = 1;", "enum E { Z = 0; RENAMED = 1; B = 2; } E x = 1;", ""),
        ("enum E { Z = 0; A = 1; } E x = 1;", "enum E { Z = 0; A = 2; } E x = 1;", ""),
        (f"{PB}.Timestamp x = 1;", f"{PB}.Duration x = 1;", f"was a {PB}.Timestamp, which is not read as a {PB}.Duration"),
        (f"{PB}.Timestamp x = 1;", f"{PB}.Timestamp x = 1;", ""),
        (f"{PB}.Int64Value x = 1;", f"{PB}.Timestamp x = 1;", f"was a {PB}.Int64Value, which is not read as a {PB}.Timestamp"),
        (f"{PB}.Int32Value x = 1;", f"{PB}.Int64Value x = 1;", ""),
        (f"{PB}.Timestamp x = 1;", "message Moment { int64 seconds = 1; int32 nanos = 2; } Moment x = 1;", ""),
    ],
)
def test_a_version_whose_fields_would_be_taken_for_something_else_is_found(old: str, new: str, wrong: str) -> None:
    imports = "".join(f'import "google/protobuf/{name}.proto"; ' for name in ("timestamp", "duration", "wrappers") if PB in old)
    of = [find_message(files_of(f'syntax = "proto3"; {imports}message M {{ {body} }}'), "", "it") for body in (old, new)]
    assert (wrong in find_incompatibility(*of)) if wrong else find_incompatibility(*of) == ""


def test_texts_import_by_the_names_of_references_and_never_leave_their_directory() -> None:
    text = 'syntax = "proto3"; package a; import "b/money.proto"; message M { b.Money m = 1; }'
    money = 'syntax = "proto3"; package b; message Money { int64 units = 1; }'
    good, bad, worse = compile_schemas(
        [
            SchemaDocument(text, (("b/money.proto", money),)),
            SchemaDocument("syntax", (), "it"),
            SchemaDocument(text, (("../../x.proto", money),), "it"),
        ]
    )
    assert isinstance(good, bytes) and [m.full_name for _, m in list_messages(good)] == ["a.M"]
    assert make_pool(good)[0].FindMessageTypeByName("b.Money")
    assert isinstance(bad, SchemaUnusable) and isinstance(worse, SchemaUnusable) and "no plain path" in str(worse)


def test_a_descriptor_in_base64_is_read_with_the_files_that_it_imports() -> None:
    """Confluent's Python clients register descriptors instead of texts."""
    texts = {
        "a.proto": 'import "google/protobuf/timestamp.proto"; import "b/money.proto"; '
        "message M { b.Money m = 1; google.protobuf.Timestamp at = 2; }",
        "b/money.proto": 'package b; import "c.proto"; message Money { int64 units = 1; c.Currency c = 2; }',
        "c.proto": "package c; message Currency { string code = 1; }",
    }
    texts = {name: f'syntax = "proto3"; {text}' for name, text in texts.items()}
    whole = FileDescriptorSet.FromString(files_of(texts["a.proto"], *(item for item in texts.items() if item[0] != "a.proto")))
    coded = {file.name: b64encode(file.SerializeToString()).decode() for file in whole.file}
    own = b64encode(whole.file[-1].SerializeToString()).decode()
    imports = [(name, coded[name]) for name in texts if name != "a.proto"]
    read, without, unknown = compile_schemas(
        [SchemaDocument(own, tuple(imports)), SchemaDocument(own, (imports[1],), "it"), SchemaDocument("bm9uZQ==", (), "it")]
    )
    assert isinstance(read, bytes) and [m.full_name for _, m in list_messages(read)] == ["M"]
    assert make_pool(read)[0].FindMessageTypeByName("c.Currency")
    assert isinstance(without, SchemaUnusable) and isinstance(unknown, SchemaUnusable)


# --- writing -------------------------------------------------------------------------------------------------------------

MADE = """
a tinyint NOT NULL, b smallint, c int, d bigint, e float, f double, g boolean, h string, i binary, j date, k timestamp,
l decimal(38,6), m array<int> NOT NULL, n map<string,double> NOT NULL, o struct<x: int NOT NULL, y: struct<z: string>>,
p array<struct<q: decimal(3,1)>> NOT NULL
"""


def test_a_schema_made_of_columns_gives_their_values_back() -> None:
    format = Protobuf(schema=MADE)
    assert format.validate("value") == []
    row = {
        **{
            "a": -128,
            "b": 5,
            "c": 6,
            "d": 7,
            "e": 0.5,
            "f": 0.1,
            "g": False,
            "h": "é",
            "i": b"\0",
            "j": datetime.date(2026, 11, 5),
        },
        **{"k": datetime.datetime(1, 1, 1, tzinfo=UTC), "l": Decimal("-12345678901234567890123456789012.345678")},
        **{"m": [1], "n": [("k", 1.5)], "o": {"x": 1, "y": {"z": None}}, "p": [{"q": Decimal("-9.9")}, {"q": None}]},
    }
    nulls = {**dict.fromkeys(row), "a": 1, "m": [], "n": [], "p": []}
    assert decoded(format, *written(format, [row, nulls])) == ([row, nulls], ())


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ("`a b` int", "a name that Protobuf does not take"),
        ("a array<array<int>>", "which Protobuf does not have"),
        ("a map<date,int>", "Keys are strings"),
        ("a map<string,array<int>>", "Put the value into a struct"),
        ("a timestamp_ntz", "Declare it timestamp"),
    ],
)
def test_columns_of_which_no_message_can_be_made_are_reported(columns: str, found: str) -> None:
    pytest.raises(ValueError, _raise, str(Protobuf(schema=columns).validate("value"))).match(found)


def test_a_value_that_does_not_fit_ends_with_row_and_column() -> None:
    text = 'syntax = "proto3"; import "google/protobuf/struct.proto"; message M { int32 a = 1; '
    text += "repeated string b = 2; E c = 3; enum E { A = 0; } google.protobuf.Struct d = 4; uint32 e = 5; }"
    schema = pa.schema(
        [("a", pa.int64()), ("b", pa.list_(pa.string())), ("c", pa.string()), ("d", pa.string()), ("e", pa.int64())]
    )
    good = {"a": 1, "b": [], "c": "A", "d": "{}", "e": 1}
    for change, expected in (
        ({"a": 2**31}, "`a`: found 2147483648"),
        ({"a": None}, "`a`: it is null"),
        ({"b": ["x", None]}, "`b`: it holds a null"),
        ({"b": None}, "`b`: it is null"),
        ({"c": "B"}, "`c`: found `B`, expected one of A"),
        ({"d": "[1]"}, "`d`: "),
        ({"d": "{"}, "`d`: "),
        ({"d": '{"n":9007199254740993}'}, "`d`: found 9007199254740993, which a double cannot hold exactly"),
        ({"d": '{"n":1e400}'}, "`d`: found 1e400, which is no number of JSON, or too large"),
        ({"d": '{"n":NaN}'}, "`d`: found NaN, which is no number"),
        ({"d": '{"n":1,"n":2}'}, "`d`: found the name `n` twice in one object"),
        ({"e": -1}, "`e`: found -1"),
    ):
        with pytest.raises(RowRejected, match=f"Row 2 of the split cannot become a record: column {expected}"):
            written(Protobuf(schema=text), [good, {**good, **change}], schema)


def test_two_members_of_a_oneof_are_never_written_as_one() -> None:
    text = 'syntax = "proto3"; message M { oneof c { string s = 1; I i = 2; } optional int32 o = 3; message I { int32 n = 1; } }'
    schema = pa.schema([("s", pa.string()), ("i", pa.struct([("n", pa.int32())])), ("o", pa.int32())])
    good = [{"s": "x", "i": None, "o": 1}, {"s": None, "i": {"n": 1}, "o": 0}, {"s": None, "i": None, "o": None}]
    found = Protobuf(schema=text).make_decoder().decode(written(Protobuf(schema=text), good, schema))
    assert (found.batch.to_pylist(), found.bad) == (good, ())
    with pytest.raises(RowRejected, match="column `i`: it is set beside `s`, and only one field of the oneof `c` can be"):
        written(Protobuf(schema=text), [{"s": "x", "i": {"n": 1}, "o": 1}], schema)


def test_columns_that_do_not_fit_the_message_are_reported_before_anything_is_written() -> None:
    format = Protobuf(schema=SMALL).to_write("orders", "value")
    assert format.find_encoding_problems("value", ["id", "note"]) == []
    (problem,) = format.find_encoding_problems("value", ["id", "more"])
    assert "`more`" in problem.what
    with pytest.raises(ValidationError) as caught:
        format.make_struct_encoder(parse_ddl("id double, note int, more int, n array<bigint>, s struct<b: boolean, c: int>"))
    for part in ("`id` is of type double, and its field takes bigint", "`note`", "`more`", "`s.c`"):
        assert part in str(caught.value)
    assert "`n`" not in str(caught.value), "of integers the value decides"


def test_an_entry_without_a_schema_is_reported_when_it_is_to_be_written() -> None:
    (problem,) = Protobuf().to_write("orders", "value").find_encoding_problems("value", ["id"])
    assert "neither" in problem.what
