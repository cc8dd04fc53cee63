"""Rows of the log that are read in columns have the JSON of values that are read one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog, images
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogColumn, LogTable, LogUnreadable
from airflow_kafka_spark.sources.mysql_cdc.tasks.events import MySqlEventForm, MySqlTableWriter
from airflow_kafka_spark.sources.mysql_cdc.tasks.images import RowImages, find_rows, measure
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import ValueForm, list_decimal_groups, read_column

Draw = Callable[[random.Random], bytes]


def numbers(size: int) -> Draw:
    edges = (0, 1, 1 << 8 * size - 1, (1 << 8 * size - 1) - 1, (1 << 8 * size) - 1)
    return lambda r: r.choice((*edges, r.getrandbits(8 * size))).to_bytes(size, "little")


def decimals(precision: int, scale: int) -> Draw:
    def draw(r: random.Random) -> bytes:
        out, edge = b"", r.choice((0, 1, None))
        for count, digits in list_decimal_groups(precision, scale):
            number = 0 if edge == 0 else 10**digits - 1 if edge else r.randrange(10**digits)
            out += number.to_bytes(count, "big")
        if r.random() < 0.5:
            out = bytes(byte ^ 0xFF for byte in out)
        return bytes([out[0] ^ 0x80]) + out[1:]

    return draw


def day(r: random.Random) -> tuple[int, int, int]:
    any_day = r.randint(1, 9999), r.randint(1, 12), r.randint(1, 28)
    return r.choice(((1, 1, 1), (9999, 12, 31), (2024, 2, 29), (1969, 12, 31), any_day))


def dates(r: random.Random) -> bytes:
    year, month, of_month = day(r)
    return (year << 9 | month << 5 | of_month).to_bytes(3, "little")


def fractions(precision: int) -> Draw:
    size = (precision + 1) // 2
    return lambda r: (r.randrange(10**precision) * (10 if precision % 2 else 1)).to_bytes(size, "big")


def times(precision: int) -> Draw:
    def draw(r: random.Random) -> bytes:
        year, month, of_month = day(r)
        clock = r.randrange(24) << 12 | r.randrange(60) << 6 | r.randrange(60)
        packed = (year * 13 + month) << 22 | of_month << 17 | clock
        return (packed + 0x8000000000).to_bytes(5, "big") + fractions(precision)(r)

    return draw


def sized(prefix: int, *texts: bytes) -> Draw:
    return lambda r: (text := r.choice(texts)) and len(text).to_bytes(prefix, "little") + text or bytes(prefix)


UTF8_ID, LATIN_ID = 45, 8
INTEGERS = {binlog.TINY: 1, binlog.SHORT: 2, binlog.INT24: 3, binlog.LONG: 4, binlog.LONGLONG: 8}
DECIMALS = ((10, 2), (18, 9), (18, 0), (5, 5), (1, 0), (65, 30))
VALUE = "ü".encode()
# a column, how its values are drawn, and unusual values, which only single values are written for
CASES: list[tuple[LogColumn, Draw, list[bytes]]] = [
    *((LogColumn(kind, is_unsigned=sign), numbers(size), []) for kind, size in INTEGERS.items() for sign in (False, True)),
    *((LogColumn(binlog.NEWDECIMAL, bytes(of)), decimals(*of), []) for of in DECIMALS),
    (LogColumn(binlog.DOUBLE), lambda r: r.choice((numbers(7)(r) + b"\x3f", bytes(8), bytes(7) + b"\x80")), []),
    (LogColumn(binlog.FLOAT), lambda r: numbers(3)(r) + b"\x3f", []),
    (LogColumn(binlog.YEAR), numbers(1), []),
    (LogColumn(binlog.DATE), dates, [bytes(3), b"\x01\0\0", (2023 << 9 | 2 << 5 | 29).to_bytes(3, "little")]),
    *((LogColumn(binlog.DATETIME2, bytes([n])), times(n), [b"\x80" + bytes(4 + (n + 1) // 2)]) for n in range(7)),
    *(
        (
            LogColumn(binlog.TIMESTAMP2, bytes([digits])),
            lambda r, digits=digits: r.choice((1, 2**31 - 1, r.randint(1, 2**31))).to_bytes(4, "big") + fractions(digits)(r),
            [bytes(4 + (digits + 1) // 2)],
        )
        for digits in range(7)
    ),
    (LogColumn(binlog.TIME2, b"\6"), lambda r: r.choice((b"\x80" + bytes(5), b"\x7f" + b"\xff" * 5, b"\xb4\x6e\xfb\0\0\1")), []),
    (LogColumn(binlog.VARCHAR, b"\x2c\1", collation=UTF8_ID), sized(2, b"", b'a"\n', VALUE, b"x" * 300), []),
    (LogColumn(binlog.VARCHAR, b"\x14\0", collation=LATIN_ID), sized(1, b"", b"\xe9\x80"), []),
    (LogColumn(binlog.STRING, bytes([254, 40]), collation=UTF8_ID), sized(1, b"", VALUE), []),
    (LogColumn(binlog.STRING, bytes([254 ^ 0x30, 252]), collation=UTF8_ID), sized(2, VALUE), []),
    (LogColumn(binlog.STRING, bytes([254, 5]), collation=63), sized(1, b"", b"\0\1"), []),
    (LogColumn(binlog.BLOB, b"\3", collation=63), sized(3, b"", b"\0\1\2\3"), []),
    (LogColumn(binlog.ENUM, bytes([247, 1]), collation=UTF8_ID, values=(b"a", VALUE)), lambda r: bytes([r.randrange(3)]), []),
    (LogColumn(binlog.SET, b"\xf8\2", collation=UTF8_ID, values=(b"a",) * 9), lambda r: bytes([r.randrange(256), 1]), []),
    (LogColumn(binlog.BIT, b"\1\0"), lambda r: bytes([r.randrange(2)]), []),
    (LogColumn(binlog.BIT, b"\3\1"), lambda r: bytes([r.randrange(8), r.randrange(256)]), []),
]  # fmt: skip
CHARSETS = {UTF8_ID: "utf8mb4", LATIN_ID: "latin1", 63: "binary"}
FORMS: Mapping[str, dict[str, Any]] = {
    "default": {"zero_dates": "null"},
    "others": {"decimals": "string", "times": "connect", "unsigned": "precise", "zero_dates": "null"},
    "strict": {"decimals": "double", "unsigned": "precise"},
}


def make_table(cases: list[tuple[LogColumn, Draw, list[bytes]]]) -> LogTable:
    columns = [LogColumn(binlog.LONG, name="id"), *(case[0] for case in cases)]
    for number, column in enumerate(columns):
        column.name = f"c{number}"
    return LogTable(1, "shop", "t", columns, (0,))


def draw_row(r: random.Random, cases: list[tuple[LogColumn, Draw, list[bytes]]], unusual: float) -> bytes:
    nulls, out = 0, r.randrange(1000).to_bytes(4, "little")
    for number, (_, draw, others) in enumerate(cases):
        if r.random() < 0.2:
            nulls |= 2 << number
        else:
            out += r.choice(others) if others and r.random() < unusual else draw(r)
    return nulls.to_bytes((len(cases) + 8) // 8, "little") + out


def read_one_by_one(table: LogTable, values: ValueForm, data: bytes) -> tuple[str, bytes]:
    """Return the JSON of a row, and the bytes after it."""
    at = (len(table.columns) + 7) // 8
    nulls, members = int.from_bytes(data[:at], "little"), []
    for number, column in enumerate(table.columns):
        text = "null"
        if not nulls >> number & 1:
            text, at = read_column(column, values).read(data, at)
        members.append(f'"{column.name}":{text}')
    return f"{{{','.join(members)}}}", data[at:]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unusual", [0, 0.3])
def test_rows_in_columns_have_the_json_of_their_values_one_by_one(form, unusual):
    values, r = ValueForm(charsets=CHARSETS, **FORMS[form]), random.Random(7)
    cases = [case for case in CASES if not (form == "default" and case[0].kind == binlog.LONGLONG and case[0].is_unsigned)]
    table = make_table(cases)
    writer = MySqlTableWriter(table, MySqlEventForm(prefix="p", database="shop", values=values))
    events = [[draw_row(r, cases, 0 if form == "strict" else unusual) for _ in range(r.randrange(6))] for _ in range(60)]
    expected = []
    for rows in events:
        expected.append([read_one_by_one(table, values, row) for row in rows])
        assert not any(left for _, left in expected[-1])
    found = writer.read_rows([RowImages(b"before" + b"".join(rows), 6) for rows in events]).list_rows()
    assert [list(map(writer.format_row, rows)) for rows in found] == [[text for text, _ in rows] for rows in expected]
    assert [writer.format_key(row) for rows in found for row in rows] == [
        text.partition(",")[0] + "}" for rows in expected for text, _ in rows
    ]


def test_ordinary_values_need_no_reading_one_by_one(monkeypatch):
    cases = [case for case in CASES if case[0].kind not in (binlog.FLOAT, binlog.TIME2, binlog.BIT)]
    cases = [case for case in cases if case[0].kind != binlog.NEWDECIMAL or case[0].meta[0] <= images.MOST_DIGITS]
    cases = [case for case in cases if case[0].kind != binlog.LONGLONG or not case[0].is_unsigned]
    form = MySqlEventForm(prefix="p", database="shop", values=ValueForm(charsets=CHARSETS))
    monkeypatch.setattr(images, "_read_one_by_one", lambda *_: pytest.fail("values are read one by one"))
    r = random.Random(3)
    assert MySqlTableWriter(make_table(cases), form).read_rows([RowImages(draw_row(r, cases, 0), 0) for _ in range(50)])


def test_a_value_that_cannot_be_written_and_a_row_that_is_cut_off_are_refused():
    case = next(case for case in CASES if case[0].kind == binlog.DATE)
    writer = MySqlTableWriter(make_table([case]), MySqlEventForm(prefix="p", database="shop"))
    with pytest.raises(SourceRejected, match="column `c1`.*0000-00-00 is no day"):
        writer.read_rows([RowImages(b"\0\1\0\0\0" + case[1](random.Random(1)), 0), RowImages(b"\0\2\0\0\0" + bytes(3), 0)])
    text = next(case for case in CASES if case[0].kind == binlog.VARCHAR)
    sizes = [measure(column) for column in make_table([text]).columns]
    row = b"\0\1\0\0\0\2\0ab"
    assert find_rows([RowImages(row * 2, 0)], sizes).counts == [2]
    assert writer.read_rows([RowImages(b"", 0)]).list_rows() == [[]]
    for end in range(1, len(row)):
        with pytest.raises(LogUnreadable):
            find_rows([RowImages(row + row[:end], 0)], sizes)
