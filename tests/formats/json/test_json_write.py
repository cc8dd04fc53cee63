"""Writing JSON in Arrow, without Spark: compared with Python's JSON, on slices and NULLs. (Spark's JSON: test_jdbc_arrow.)"""

from __future__ import annotations

import json
import random
from datetime import date, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.formats.base import Kind

SCHEMA = pa.schema(
    [
        ("id", pa.int64()), ("yes", pa.bool_()), ("text", pa.string()), ("raw", pa.binary()), ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")), ("day", pa.date32()),
    ]
)  # fmt: skip
KINDS: list[tuple[str, Kind]] = [
    ("id", "integer"), ("yes", "boolean"), ("text", "text"), ("raw", "binary"), ("at", "zoned"), ("local", "local"),
    ("day", "date"),
]  # fmt: skip
ALPHABET = [*map(chr, range(0x180)), *"\u2028\ufeff\uffff\ue000", "𝄞", "\U0010ffff"]


def random_row(chance: random.Random) -> dict[str, Any]:
    moment = datetime(1, 1, 1) + timedelta(microseconds=chance.randrange(315_537_897_600_000_000))
    row = {
        "id": chance.randint(-(2**63), 2**63 - 1),
        "yes": chance.random() < 0.5,
        "text": "".join(chance.choices(ALPHABET, k=chance.randrange(30))),
        "raw": chance.randbytes(chance.randrange(9)),
        "at": moment.replace(tzinfo=timezone.utc),
        "local": moment.replace(microsecond=0),
        "day": moment.date(),
    }
    return {name: None if chance.random() < 0.1 else value for name, value in row.items()}


def written(rows: list[dict[str, Any]], start: int = 0) -> list[bytes]:
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).slice(start)
    encoder = Json().make_encoder(KINDS)
    assert encoder is not None
    return encoder.encode(dict(zip(SCHEMA.names, batch.columns, strict=True))).to_pylist()


def test_what_is_written_is_read_again():
    """The format reads any part of a batch that it has written."""
    chance, compared = random.Random(20261121), 0
    schema = "id bigint, yes boolean, text string, raw binary, at timestamp, local timestamp_ntz, day date"
    decoder = Json(schema).make_decoder()
    for start in range(40):
        rows = [random_row(chance) for _ in range(start + 25)]
        decoded = decoder.decode(written(rows, start))
        assert decoded.bad == ()
        assert decoded.batch.to_pylist() == rows[start:]
        compared += len(rows[start:])
    assert compared == 1000


def test_nothing_is_escaped_that_need_not_be():
    found = written([{"text": f"a{character}b"} for character in ALPHABET])
    for character, value in zip(ALPHABET, found, strict=True):
        inside = value.decode().partition('"text":"')[2].partition('","raw":')[0]
        assert json.loads(f'"{inside}"') == f"a{character}b"
        # As Python writes it, but for the digits of control characters.
        assert inside.lower() == json.dumps(f"a{character}b", ensure_ascii=False)[1:-1].lower()
    assert len(found) > 380


def test_all_at_once():
    row = {
        "id": -1, "yes": True, "text": 'a"\\\x01\x1f\n/é𝄞', "raw": b"\xff\x00",
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
        "local": datetime(999, 1, 2, 3, 4, 5, 60), "day": date(1, 1, 1),
    }  # fmt: skip
    assert written([row, dict.fromkeys(row)])[0].decode() == (
        '{"id":-1,"yes":true,"text":"a\\"\\\\\\u0001\\u001F\\n/é𝄞","raw":"/wA=","at":"2026-01-02T03:04:05.000000Z",'
        '"local":"0999-01-02T03:04:05.000060","day":"0001-01-01"}'
    )
    assert json.loads(written([row, dict.fromkeys(row)])[1]) == dict.fromkeys(row)
    assert written([]) == []


@pytest.mark.parametrize(
    ("kind", "column", "expected"),
    [
        ("integer", pa.array([1, None], pa.int32()), [b"1", None]),
        ("text", pa.array(["", None]), [b"", None]),
        ("zoned", pa.array([0, 120_000], pa.timestamp("us", "UTC")), [b"1970-01-01 00:00:00", b"1970-01-01 00:00:00.12"]),
        ("local", pa.array([10_000_000], pa.timestamp("us")), [b"1970-01-01 00:00:10"]),
    ],
)  # fmt: skip
def test_one_column_is_its_text(kind, column, expected):
    encoder = String().make_encoder([("a", kind)])
    assert encoder is not None and encoder.encode({"a": column}).to_pylist() == expected


def test_bytes_stay_bytes():
    encoder = Raw().make_encoder([("a", "binary")])
    assert encoder is not None and encoder.encode({"a": pa.array([b"\xff", None])}).to_pylist() == [b"\xff", None]
