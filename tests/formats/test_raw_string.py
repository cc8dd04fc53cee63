"""Raw and String: bytes and texts, unchanged."""

from __future__ import annotations

import pyarrow as pa
import pytest

from airflow_kafka_spark.formats import Raw, String


def test_raw_keeps_every_byte() -> None:
    values = [bytes([b]) for b in range(256)] + [None, b""]
    decoded = Raw().make_decoder().decode(values)
    assert decoded.batch.column("value").to_pylist() == values
    assert decoded.bad == ()


def test_the_column_has_the_name_it_was_given() -> None:
    assert Raw(column="key").get_arrow_schema() == pa.schema([("key", pa.binary())])
    assert String(column="key").get_arrow_schema() == pa.schema([("key", pa.string())])


def test_text_that_is_none_is_bad_and_the_reason_says_where() -> None:
    decoded = String(column="key").make_decoder().decode([b"ok", b"ab\xffc", None, b"\xc3"])
    assert decoded.batch.column("key").to_pylist() == ["ok", None, None, None]
    assert decoded.bad == (
        (1, "column `key`: not UTF-8, byte 0xff at position 2: invalid start byte"),
        (3, "column `key`: not UTF-8, byte 0xc3 at position 0: unexpected end of data"),
    )


def test_other_encodings() -> None:
    assert String(encoding="cp1252").make_decoder().decode([b"\x80"]).batch.column(0).to_pylist() == ["€"]
    (bad,) = String(encoding="utf-7").make_decoder().decode([b"+2AA-"]).bad
    assert "surrogate" in bad[1] or "not utf-7" in bad[1]


@pytest.mark.parametrize("encoding", ["nonsense", "base64", "rot13", "", None, 8])
def test_what_is_no_text_encoding_is_a_problem(encoding: str) -> None:
    (problem,) = String(encoding=encoding).validate("key")
    assert problem.where == "key.encoding"
    assert repr(encoding) in problem.what


@pytest.mark.parametrize("column", ["", None, 7])
def test_what_is_no_name_is_a_problem(column: str) -> None:
    for options in (Raw(column=column), String(column=column)):
        assert [p.where for p in options.validate("value")] == ["value.column"]
