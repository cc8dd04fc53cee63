"""Values of all types as Debezium writes them, read from the bytes of the log."""

from __future__ import annotations

import base64
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats import Debezium, Json
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import CODECS, ValueForm, make_decoder
from tests.sources.mysql_cdc.kit import Binlog


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def days(year: int, month: int, day: int) -> int:
    return (date(year, month, day) - date(1970, 1, 1)).days


def unscaled(number: int) -> str:
    return b64(number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True))


US = 1_000_000
LONGEST = (838 * 3600 + 3599) * US
LAST_MICRO, LAST_STAMP = days(9999, 12, 31) * 86_400 * US + 86_400 * US - 1, "2038-01-19T03:14:07Z"
POINT = bytes.fromhex("0101000000000000000000f03f0000000000000040")
# type, literals and what is written for each, the Connect type
CASES: list[tuple[str, list[tuple[str, Any]], str]] = [
    ("tinyint", [("-128", -128), ("127", 127)], "int16"),
    ("tinyint unsigned", [("255", 255), ("0", 0)], "int16"),
    ("bool", [("true", 1)], "int16"),
    ("smallint", [("-32768", -32768)], "int16"),
    ("smallint unsigned", [("65535", 65535)], "int32"),
    ("mediumint", [("-8388608", -8388608), ("8388607", 8388607)], "int32"),
    ("mediumint unsigned", [("16777215", 16777215)], "int32"),
    ("year", [("2155", 2155), ("1901", 1901), ("0", 0)], "int32"),
    ("int", [("-2147483648", -2147483648)], "int32"),
    ("int unsigned", [("4294967295", 4294967295)], "int64"),
    ("bigint", [("-9223372036854775808", -(2**63))], "int64"),
    ("bigint unsigned", [("9223372036854775807", 2**63 - 1)], "int64"),
    ("float", [("0.1", 0.1), ("-16777216", -16777216.0), ("1e-38", 1e-38), ("3.40282e38", 3.40282e38)], "float"),
    ("double", [("0.1", 0.1), ("-1e300", -1e300), ("0", 0.0)], "double"),
    ("decimal(10,2)", [("-123.45", unscaled(-12345)), ("1.28", unscaled(128)), ("0", unscaled(0))], "bytes"),
    ("decimal(65,30)", [("-" + "9" * 35 + "." + "9" * 30, unscaled(-(10**65) + 1)), ("1", unscaled(10**30))], "bytes"),
    ("decimal(5,0)", [("-99999", unscaled(-99999)), ("-1", unscaled(-1))], "bytes"),
    ("decimal(3,3)", [("-0.001", unscaled(-1)), ("0.999", unscaled(999))], "bytes"),
    ("decimal(20,10) unsigned", [("1234567890.0123456789", unscaled(12345678900123456789))], "bytes"),
    ("date", [("'1000-01-01'", days(1000, 1, 1)), ("'9999-12-31'", days(9999, 12, 31)), ("'1970-01-02'", 1)], "int32"),
    ("time", [("'838:59:59'", LONGEST), ("'-00:00:01'", -US), ("'-838:59:59'", -LONGEST)], "int64"),
    ("time(1)", [("'-00:00:00.1'", -100_000), ("'01:00:00.9'", 3600 * US + 900_000)], "int64"),
    ("time(3)", [("'-12:34:56.789'", -(45296 * US + 789_000)), ("'-00:00:00.001'", -1000)], "int64"),
    ("time(6)", [("'-00:00:00.000001'", -1), ("'12:34:56.789012'", 45296 * US + 789_012)], "int64"),
    ("datetime", [("'1969-12-31 23:59:59'", -1000), ("'1000-01-01 00:00:00'", days(1000, 1, 1) * 86_400_000)], "int64"),
    ("datetime(2)", [("'1970-01-01 00:00:01.23'", 1230)], "int64"),
    ("datetime(4)", [("'1970-01-01 00:00:01.2345'", 1_234_500)], "int64"),
    ("datetime(6)", [("'1969-12-31 23:59:59.5'", -500_000), ("'9999-12-31 23:59:59.999999'", LAST_MICRO)], "int64"),
    ("timestamp null", [("'2026-01-02 03:04:05'", "2026-01-02T03:04:05Z"), ("'2038-01-19 03:14:07'", LAST_STAMP)], "string"),
    ("timestamp(3) null", [("'2026-01-02 03:04:05.6'", "2026-01-02T03:04:05.600Z")], "string"),
    ("timestamp(6) null", [("'1970-01-01 00:00:01.000001'", "1970-01-01T00:00:01.000001Z")], "string"),
    ("char(5)", [("'ab'", "ab"), ("''", "")], "string"),
    ("varchar(10)", [("'a\"\\\\\\nü😀'", 'a"\\\nü😀')], "string"),
    ("varchar(300)", [("repeat('ü', 300)", "ü" * 300)], "string"),
    ("char(200)", [("repeat('ü', 200)", "ü" * 200)], "string"),
    ("varchar(10) character set latin1", [("'äß€'", "äß€")], "string"),
    ("char(9) character set utf16", [("'ä😀'", "ä😀")], "string"),
    ("text character set latin2", [("'łąka'", "łąka")], "string"),
    ("varchar(20) collate utf8mb4_uca1400_ai_ci", [("'é'", "é")], "string"),
    ("tinytext", [("'t'", "t")], "string"),
    ("mediumtext", [("repeat('m', 70000)", "m" * 70_000)], "string"),
    ("longtext", [("'l'", "l")], "string"),
    ("json", [('\'{"a": [1, null, "ü"]}\'', '{"a": [1, null, "ü"]}')], "string"),
    ("binary(4)", [("x'0100'", b64(b"\x01\0\0\0")), ("x''", b64(bytes(4)))], "bytes"),
    ("varbinary(10)", [("x'00ff00'", b64(b"\0\xff\0"))], "bytes"),
    ("blob", [("x'00'", b64(b"\0")), ("repeat('b', 5000)", b64(b"b" * 5000))], "bytes"),
    ("enum('klein','groß','a,b')", [("'groß'", "groß"), ("'a,b'", "a,b"), ("'none'", "")], "string"),
    ("enum('ä') character set latin1", [("'ä'", "ä")], "string"),
    ("enum('a\\\\b','it''s','\\n')", [("'a\\\\b'", "a\\b"), ("'it''s'", "it's"), ("'\\n'", "\n")], "string"),
    ("set('x','y','ü')", [("'ü,x'", "x,ü"), ("''", "")], "string"),
    ("bit(1)", [("b'1'", True), ("b'0'", False)], "boolean"),
    ("bit(10)", [("b'1000000001'", b64(b"\x01\x02"))], "bytes"),
    ("bit(64)", [("b'1'", b64(b"\x01" + bytes(7)))], "bytes"),
    ("point", [("ST_GeomFromText('POINT(1 2)', 4326)", {"x": 1.0, "y": 2.0, "wkb": b64(POINT), "srid": 4326})], "struct"),
    ("int generated always as (7) stored", [("default", 7)], "int32"),
    ("int generated always as (8) virtual", [("default", 8)], "int32"),
    ("int invisible", [("9", 9)], "int32"),
]  # fmt: skip

CHARACTERS = [chr(code) for code in range(0x20, 0x250)]


@pytest.fixture
def types(shop: Binlog) -> Binlog:
    columns = ", ".join(f"c{n} {case[0]}" for n, case in enumerate(CASES))
    shop.execute("SET SESSION sql_mode = 'NO_UNSIGNED_SUBTRACTION'", "SET time_zone = '+00:00'")
    shop.execute(f"CREATE TABLE types (id int PRIMARY KEY, {columns})")
    return shop


def test_values_of_every_type_are_written_as_debezium_does_and_the_schema_says_so(types: Binlog):
    windows = types.windows(schemas_enable=True)
    names = ", ".join(["id", *(f"c{n}" for n in range(len(CASES)))])
    for number in range(4):  # the fourth row has NULL wherever it can
        literals = [case[1][number][0] if number < len(case[1]) else "DEFAULT" for case in CASES]
        types.execute(f"INSERT INTO types ({names}) VALUES ({number}, {', '.join(literals)})")
    records = windows.next()
    schema = {f["field"]: f for f in records[0]["value"]["schema"]["fields"][1]["fields"]}
    wrong, compared = {}, 0
    for number, record in enumerate(records):
        after = record["value"]["payload"]["after"]
        for n, (kind, literals, _) in enumerate(CASES):
            expected = literals[number][1] if number < len(literals) else literals[0][1] if "generated" in kind else None
            compared += 1
            if after[f"c{n}"] != expected or type(after[f"c{n}"]) is not type(expected):
                wrong[f"{number} {kind}"] = (after[f"c{n}"], expected)
    assert wrong == {}
    assert compared == 4 * len(CASES)
    assert [schema[f"c{n}"]["type"] for n in range(len(CASES))] == [case[2] for case in CASES]
    assert records[0]["key"]["payload"] == {"id": 0}
    read = {r["key"]["payload"]["id"]: r for r in types.windows(schemas_enable=True, snapshot="initial").drain()}
    for number, record in enumerate(records):
        found, parts = read[number]["value"], (read[number]["value"]["payload"], record["value"]["payload"])
        assert found["schema"] == record["value"]["schema"] and read[number]["topic"] == record["topic"]
        assert parts[0]["after"] == parts[1]["after"], "a snapshot reads what the log has"
        assert (parts[0]["op"], parts[0]["source"]["snapshot"]) == ("r", "incremental")


def test_texts_of_each_character_set_are_those_that_the_server_writes(shop: Binlog):
    """Every character that the set has, and for sets of one byte every byte."""
    known = dict(shop.rows("SELECT character_set_name, maxlen FROM information_schema.character_sets"))
    wrong = []
    for charset in CODECS:
        if charset not in known:
            continue
        decode = make_decoder(1, ValueForm(charsets={1: charset}))
        codes = [bytes([n]) for n in range(256)] if known[charset] == 1 else []
        codes += [row[0] for row in shop.rows(" UNION ALL ".join(
            f"SELECT CAST(CONVERT(_utf8mb4 X'{c.encode().hex()}' USING {charset}) AS BINARY)" for c in CHARACTERS))]  # fmt: skip
        if charset == "ascii":
            codes = [code for code in codes if code < b"\x80"]
        query = " UNION ALL ".join(f"SELECT HEX(CONVERT(_{charset} X'{code.hex()}' USING utf8mb4))" for code in codes)
        expected = [bytes.fromhex(row[0]).decode() for row in shop.rows(query)]
        found = []
        for code in codes:
            try:
                found.append(decode(code))
            except ValueError:
                found.append("?")
        wrong += [(charset, *pair) for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    assert wrong == []


def test_a_zero_date_is_refused_by_name_or_null_if_the_options_say_so(shop: Binlog):
    shop.execute("CREATE TABLE t (id int PRIMARY KEY, day date, at datetime, stamp timestamp NULL)")
    strict, lenient = shop.windows(), shop.windows(zero_date_handling_mode="null")
    for n, literals in enumerate(
        ("'0000-00-00', NULL, NULL", "NULL, '0000-00-00', NULL", "NULL, NULL, '0000-00-00'", "'2026-00-00', NULL, NULL")
    ):
        shop.execute(f"INSERT INTO t VALUES ({n}, {literals})")
        window = strict.freeze()
        with pytest.raises(SourceRejected, match=r"column `(day|at|stamp)` cannot be written: .* is no day") as refused:
            strict.read(window)
        assert 'zero_date_handling_mode="null"' in refused.value.action
    assert [list(r["value"]["after"].values())[1:] for r in lenient.next()] == [[None, None, None]] * 4
    # In a key, two dates would become one null; other columns of the table may still be null.
    shop.execute(
        "CREATE TABLE days (day date, at datetime, PRIMARY KEY (day))", "INSERT INTO days VALUES ('2026-01-01', '0000-00-00')"
    )
    assert lenient.next()[0]["value"]["after"] == {"day": 20454, "at": None}
    shop.execute("INSERT INTO days VALUES ('0000-00-00', NULL), ('2026-00-00', NULL)")
    snapshot = shop.windows(tables=["shop.days"], snapshot="initial", zero_date_handling_mode="null")
    for windows in (lenient, snapshot):
        with pytest.raises(
            SourceRejected, match="column `day` cannot be written: .* is no day, and it belongs to the key"
        ) as refused:
            windows.next()
        assert "`message_key_columns`" in refused.value.action


def test_large_unsigned_numbers_are_refused_by_name_or_exact_if_the_options_say_so(shop: Binlog):
    shop.execute("CREATE TABLE t (id int PRIMARY KEY, n bigint unsigned)")
    shop.execute("INSERT INTO t VALUES (1, 18446744073709551615)")
    with pytest.raises(SourceRejected, match="column `n`.*18446744073709551615") as refused:
        shop.windows().next()
    assert 'bigint_unsigned_handling_mode="precise"' in refused.value.action
    [record] = shop.windows(bigint_unsigned_handling_mode="precise").next()
    assert record["value"]["after"]["n"] == unscaled(2**64 - 1)


def test_decimals_and_times_have_the_form_that_the_options_say(shop: Binlog):
    shop.execute("CREATE TABLE t (id int PRIMARY KEY, d decimal(6,3), at datetime(6), clock time(6), day date)")
    shop.execute("INSERT INTO t VALUES (1, -0.05, '1970-01-01 00:00:01.234567', '-00:00:01.5', '1970-01-02')")
    [record] = shop.windows(decimal_handling_mode="string", time_precision_mode="connect").next()
    assert record["value"]["after"] == {"id": 1, "d": "-0.050", "at": 1234, "clock": -1500, "day": 1}
    [record] = shop.windows(decimal_handling_mode="double").next()
    assert record["value"]["after"]["d"] == -0.05


def test_our_debezium_format_reads_the_values_again(shop: Binlog):
    shop.execute("CREATE TABLE t (id bigint PRIMARY KEY, amount decimal(12,2), at timestamp(6), local datetime(6), note text)")
    shop.execute(
        "SET time_zone = '+00:00'", "INSERT INTO t VALUES (1, -0.05, '2026-01-01 00:00:00.000001', '1960-05-05 05:05:05.5', 'ö')"
    )
    source = shop.source()
    reader = source.make_reader(source.freeze(None).splits, None)
    assert not isinstance(reader, str)
    raw = [value for batch in reader.read(0) for value in batch.column("value").to_pylist()]
    schema = "id bigint, amount decimal(12,2), at timestamp, local timestamp_ntz, note string"
    decoded = Debezium(Json(schema=schema), timestamps="micros", decimals="unscaled").make_decoder().decode(raw)
    assert decoded.bad == ()
    [row] = decoded.batch.to_pylist()
    assert (row["id"], row["amount"], row["note"]) == (1, Decimal("-0.05"), "ö")
    assert (row["at"].isoformat(), row["local"].isoformat()) == ("2026-01-01T00:00:00.000001+00:00", "1960-05-05T05:05:05.500000")
