"""The two implementations of JSON decoding agree: whole batches by Arrow, and the reference record by record."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from types import ModuleType

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.formats.json.tasks import decode
from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder
from airflow_kafka_spark.formats.tasks import base
from airflow_kafka_spark.formats.types import parse_ddl
from tests.formats.budget import MANY, examples, pairs
from tests.formats.json.random_json import Maker, ddl
from tests.formats.json.test_json_meaning import BAD, GOOD

ORDERS = "id bigint, customer string, amount decimal(12,2), placed_at timestamp"


def disagreement(schema: str, values: Sequence[bytes | None]) -> str:
    """Return the differences of both implementations for these values. Even the smallest batch goes to Arrow first."""
    decoder = JsonDecoder(parse_ddl(schema), few=0)
    fast, reference = decoder.decode(values), decoder.decode_row_wise(values)
    try:
        fast.batch.validate(full=True)
        rows = [repr(row) for row in fast.batch.to_pylist()]
    except (pa.ArrowInvalid, OverflowError) as e:
        return f"by Arrow it is no value at all: {e}"
    for what, one, other in (
        ("schema", fast.batch.schema, reference.batch.schema),
        ("bad", fast.bad, reference.bad),
        # As text NaN equals itself, and -0.0 is not 0.0.
        *((f"row {i}", a, repr(b)) for i, (a, b) in enumerate(zip(rows, reference.batch.to_pylist(), strict=True))),
    ):
        if one != other:
            return f"{what}: {one} by Arrow, {other} by the reference; {schema}; {values!r}"
    return ""


def order(number: int, **changes: object) -> bytes:
    day = {"id": number, "customer": f"customer {number % 97}", "amount": f"{number}.50", "placed_at": "2026-11-05T07:08:09Z"}
    return json.dumps(day | changes).encode()


# --- they agree -----------------------------------------------------------------------------------------------------------


@pytest.mark.extended
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False), st.sampled_from([1.0, 0.99, 0.95, 0.8]), st.integers(1, 12))
def test_fast_path_equals_reference_for_random_schemas_and_records(chance: random.Random, tidy: float, count: int) -> None:
    maker = Maker(chance)
    schema = maker.schema()
    values = [maker.record(schema, tidy) for _ in range(count)]
    assert disagreement(ddl(schema), values) == ""


@pytest.mark.extended
def test_fast_path_equals_reference_for_many_seeds() -> None:
    """These are more records than Hypothesis reaches in the time. Enough of them must have taken the fast path."""
    fast = total = 0
    for seed in range(examples(400)):
        maker = Maker(random.Random(seed), maps=seed % 10 == 0)
        schema = maker.schema()
        values = [maker.record(schema, (1.0, 0.99, 0.9)[seed % 3]) for _ in range(1 + seed % 9)]
        assert disagreement(ddl(schema), values) == "", seed
        decoder = JsonDecoder(parse_ddl(ddl(schema)), few=0)
        bad = len(decoder.decode(values).bad)
        fast += len(values) - min(decoder.row_wise_count, len(values))
        total += len(values) - bad
    assert fast > 0.4 * total


def test_fast_path_equals_reference_where_suspects_are_sifted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Several chunks, so that some of them come after one in which bad records were found.
    monkeypatch.setattr(base, "FINDER_MIN_RECORDS", 2)
    monkeypatch.setattr(base, "CHUNK_RECORDS", 8)
    sifted = 0
    for seed in range(examples(200)):
        maker = Maker(random.Random(seed))
        schema = maker.schema()
        values = [maker.record(schema, (0.995, 0.97)[seed % 2]) for _ in range(2 + seed % 30)]
        assert disagreement(ddl(schema), values) == "", seed
        decoder = JsonDecoder(parse_ddl(ddl(schema)), few=0)
        sifted += (
            decoder._read_without_suspects([value for value in values if value is not None], 0, decoder._suspect_finders)
            is not None
        )
    assert sifted > 10


def test_fast_path_equals_reference_with_every_good_and_bad_value_beside_others() -> None:
    for kind in {t for t, _, _ in GOOD}:
        texts = [v for t, v, _ in (*GOOD, *BAD) if t == kind]
        values = [f'{{"a":{v}}}'.encode("utf-8", "surrogatepass") for v in texts]
        for pair in pairs(values):
            assert disagreement(f"a {kind}", pair) == ""
        assert disagreement(f"a {kind}", values) == ""


FRAGMENTS = [
    *(
        b'{"a":1}',
        b"{}",
        b'{"a":1',
        b'{"a":',
        b"{",
        b"}",
        b'"a":2}',
        b',"a":2}',
        b'}{"a":2',
        b'{"a":1}{"a":2}',
        b'{"a":1}\n{"a":2}',
        b'{"a":1},"x":{"a":2}',
    ),
    *(
        b'{"a":1},{"a":2}',
        b'{"a":1}}',
        b'{"a":1},"v":{"a":2}}',
        b'{"x":{',
        b'{"x":[',
        b'{"a":1}]',
        b'{"x":"',
        b'"}',
        b'{"x":"}',
        b'{"}',
        b'","a":2}',
        b"}\n{",
        b"\n",
        b"",
    ),
    *(
        b"null",
        b'{"a":1} null',
        b'null {"a":1}',
        b'null\n{"a":1}',
        b"\xef\xbb\xbf",
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":1}\x00',
        b'\x00{"a":1}',
        b'{"a":1}\n',
        b'\n{"a":1}',
        b'{\n"a":1\n}',
    ),
    *(
        b'{"x":"\n"}',
        b'{"x":"}\n{"}',
        b'{"x":"\\',
        b'\\"}',
        b'{"a":1}/*',
        b'*/{"a":1}',
        b'{"a":2,"a":3}',
        b'{"x":1,"x":2}',
        b"[",
        b"]",
        b'[{"a":1}',
        b'{"a":1}]',
        b" ",
        b'{"a":null}',
    ),
]


@pytest.mark.extended
def test_no_record_ends_in_another_or_makes_two() -> None:
    """Combine two or three values that together make one document, or that hold two documents, none, or a forged end."""
    for values in itertools.product(FRAGMENTS, FRAGMENTS):
        assert disagreement("a bigint", values) == ""
    chance = random.Random(1)
    for _ in range(examples(600)):
        values = tuple(chance.choice(FRAGMENTS) for _ in range(chance.randint(3, 5)))
        assert disagreement("a bigint", values) == ""


def test_no_record_ends_in_another_by_a_guessed_separator() -> None:
    swallowed = [b'{"x":"', b'{"a":9}', b'","a":1}', b'{"a":2}{"a":3}', b'{"a":4}{"a":5}']
    decoded = JsonDecoder(parse_ddl("a bigint"), few=0).decode(swallowed)
    assert [at for at, _ in decoded.bad] == [0, 2, 3, 4]
    assert decoded.batch.column("a").to_pylist() == [None, 9, None, None, None]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # For these values, Arrow 16 to 26 reads memory out of bounds, and returns a right result, a wrong result, or crashes.
        *(
            ("a decimal(5,2)", f"{q}{digits}e-{exponent}{q}")
            for q in ("", '"')
            for digits in ("5", "0", "0.5")
            for exponent in (39, 62, 324, 2**31 - 1, 10**9)
        ),
        ("a decimal(5,2)", '"-.5E-4000"'),
        ("a decimal(5,2)", '"+5.e-4000"'),
        ("a decimal(5,2)", r'"5\u0065-4000"'),
        ("a decimal(5,2)", r'"5e\u002D4000"'),
        ("a decimal(5,2)", r'"\u0035e-4000"'),
        ("a decimal(5,2)", r'"5e-\u0034000"'),
        *(("a decimal(5,2)", f'"-{"0" * zeros}5e-4000"') for zeros in range(55, 70)),
        *(("a decimal(5,2)", f"0.{'0' * zeros}5e-4000") for zeros in range(55, 70)),
        ("a array<decimal(5,2)>", "[1 , 5e-4000 ]"),
        ("a struct<b:decimal(5,2)>", '{"b" : "5e-4000"\t}'),
        ("a decimal(5,2)", "5e-4000\n"),
        # For these values its product overflows without an error.
        *(
            (f"a decimal(38,{scale})", number)
            for scale in (10, 20, 37, 38)
            for number in ("7", "9" * 38, "9" * 20, "1e37", "-123456789012345678901234567.8")
        ),
        *(
            ("a decimal(12,2)", f"{digits}e{exponent}")
            for digits in ("1", "12345678901", "9" * 38)
            for exponent in (1, 9, 27, 36, 37, 38, 39, 77, 2**31, 2**32, 2**64)
        ),
        # Too large for a float. Arrow refuses 1e309, and reads these as infinite.
        *(
            (f"a {kind}", sign + number)
            for kind in ("double", "float")
            for sign in ("", "-")
            for number in (
                "1.7976931348623159e308",
                "9.11111111111111111111e308",
                "12.5e324",
                "1" + "0" * 400,
                "95239391700000e+308",
            )
        ),
        ("a array<double>", "[Infinity, 12.5e324]"),
        # Rounded twice, to a double and to a float, these would be the next float.
        *(("a float", number) for number in ("1.00000017881393432617187499", "16777217.00000000000001", "7.006492321624085e-46")),
    ],
    ids=lambda v: v[:40],
)
def test_numbers_that_arrow_gets_wrong_do_not_reach_it(schema: str, text: str) -> None:
    good = b'{"a":null}'
    assert disagreement(schema, [good, f'{{"a":{text}}}'.encode(), good]) == ""
    assert disagreement(schema, [f'{{"a":{text},"z":1}}'.encode()]) == ""


@pytest.mark.parametrize("first", [b"null", b" null", b"null\n", b"\xef\xbb\xbfnull", b"\xef\xbb\xbf", b""])
def test_a_batch_that_begins_with_null_does_not_reach_arrow_which_would_crash(first: bytes) -> None:
    assert disagreement("a bigint", [first, b'{"a":1}']) == ""
    assert disagreement("a bigint", [first]) == ""


def test_huge_values_and_batches_of_them() -> None:
    big = b'{"a":"' + b"x" * (5 << 20) + b'","n":[' + b"1," * (1 << 20) + b"2]}"
    decoder = JsonDecoder(parse_ddl("a string, n array<int>"))
    decoded = decoder.decode([big, b"{}", *[big] * 8, b'{"a":1', None])
    assert [at for at, _ in decoded.bad] == [10]
    assert [len(a or "") for a in decoded.batch.column("a").to_pylist()] == [5 << 20, 0, *[5 << 20] * 8, 0, 0]
    assert decoded.batch.column("n").flatten().to_pylist().count(2) == 9
    assert decoder.row_wise_count < 6


# --- the comparison itself ------------------------------------------------------------------------------------------------


def test_the_comparison_fails_when_the_fast_path_means_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check of the fast path is there for a value: without it the comparison finds the difference."""
    removed = [
        ("_check_digits", lambda array: array, "a decimal(5,2)", [b'{"a":1000}', b"{}"]),
        ("check_years", lambda array: array, "a timestamp", [b'{"a":"0000-12-31T23:59:59Z"}', b"{}"]),
        ("_check_finite", lambda array: array, "a float", [b'{"a":1e39}', b"{}"]),
        ("refuse_nulls", lambda change: change, "a int NOT NULL", [b"{}", b'{"a":1}']),
        ("is_too_deep", lambda value: False, "a int", [b'{"z":' + b"[" * 501 + b"]" * 501 + b"}", b"{}"]),
        ("_odd_infinity", lambda buffer: None, "a int", [b'{"z":Inf}', b"{}"]),
        ("_find_separators", lambda buffer, count: decode.np.array([len(buffer)]), "a int", [b'{"a":', b"1}", b'{"a":2}{"a":3}']),
    ]
    for name, without, schema, values in removed:
        assert disagreement(schema, values) == ""
        with monkeypatch.context() as patch:
            patch.setattr(decode, name, without)
            patch.setitem(decode._READ_AS, "float", (pa.float32(), decode._check_finite))
            assert disagreement(schema, values) != "", name


@pytest.mark.parametrize(("name", "modules"), [("check_within", (decode, base)), ("_odd_infinity", (decode,))])
def test_the_random_comparison_fails_too(monkeypatch: pytest.MonkeyPatch, name: str, modules: tuple[ModuleType, ...]) -> None:
    for module in modules:
        monkeypatch.setattr(module, name, lambda *_: None)
    for seed in range(300):
        maker = Maker(random.Random(seed))
        schema = maker.schema()
        if disagreement(ddl(schema), [maker.record(schema, (1.0, 0.99, 0.9)[seed % 3]) for _ in range(1 + seed % 9)]):
            return
    pytest.fail("300 random batches and no difference")


def test_the_comparison_sees_signs_nans_and_types() -> None:
    assert disagreement("a double, b float", [b'{"a":-0.0,"b":NaN}', b'{"a":0,"b":"NaN"}']) == ""


# --- the work ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"amount": 12.5},
        {"placed_at": 1790000000},
        {"placed_at": 1790000000, "amount": 7},
        {"placed_at": "2026-11-05 07:08:09.123+02:00"},
        {"placed_at": None, "amount": None},
        {"extra": {"a": [1, {"b": None}]}, "more": "NaN"},
        {"customer": "Zürich 😀"},
        {"customer": "550e8400-e29b-41d4-a716-4466554e-12"},
        {"customer": "1e-5, 2e-7", "note": "5e-3x"},
        {"customer": "Information, Inf"},
        {"customer": "}\n{"},
    ],
    ids=str,
)
def test_ordinary_records_go_the_fast_way(change: dict[str, object]) -> None:
    decoder = Json(ORDERS).make_decoder()
    assert isinstance(decoder, JsonDecoder)
    values = [order(n, **change) for n in range(MANY)]
    decoded = decoder.decode(values)
    assert decoded.bad == ()
    assert decoder.row_wise_count <= 1
    assert decoded.batch.column("id").to_pylist() == list(range(MANY))


@pytest.mark.parametrize("frame", [b"%s\n", b" %s \r\n", b"\t%s"])
def test_space_around_records_goes_the_fast_way_too(frame: bytes) -> None:
    decoder = JsonDecoder(parse_ddl(ORDERS))
    pretty = [json.dumps(json.loads(order(n)), indent=2).encode() for n in range(MANY)]
    assert decoder.decode([frame % value for value in pretty]).bad == ()
    assert decoder.row_wise_count == 0


@pytest.mark.parametrize("bad", [b'{"id":"x"}', b'{"id":1', b"", b'{"amount":0.001}', b"null", b'{"placed_at":"soon"}', b"\xff"])
def test_the_work_is_in_proportion_to_the_bad_records(bad: bytes) -> None:
    values = [order(n) for n in range(MANY)]
    for places in ([2_222], [0, MANY // 2, MANY - 1]):
        decoder = JsonDecoder(parse_ddl(ORDERS))
        spoiled: list[bytes | None] = list(values)
        for at in places:
            spoiled[at] = bad
        decoded = decoder.decode(spoiled)
        assert [at for at, _ in decoded.bad] == places
        assert decoded.batch.column("id").null_count == len(places)
        assert decoder.row_wise_count <= 64 * len(places)


@pytest.mark.parametrize(
    "bad",
    [
        *(b'{"id":"x"}', b'{"id":1', b"[]", b'{"id":9223372036854775808}', b'{"customer":"\xff"}'),
        *(b'{"amount":"ten"}', b'{"amount":1.005}', b'{"amount":"12345678901"}'),
        *(b'{"placed_at":"soon"}', b'{"placed_at":"2026-13-01T00:00:00Z"}', b'{"placed_at":"2026-11-05T07:08:09.1234567Z"}'),
    ],
)
def test_one_bad_record_in_a_hundred_is_sifted_out(bad: bytes) -> None:
    decoder = JsonDecoder(parse_ddl(ORDERS))
    places = range(50, MANY, 100)
    values = [bad if at in places else order(at) for at in range(MANY)]
    decoded = decoder.decode(values)
    assert [at for at, _ in decoded.bad] == list(places)
    assert decoded.batch.column("id").drop_null().to_pylist() == [at for at in range(MANY) if at not in places]
    # The suspects, and the first record of a batch, which tells whether timestamps are numbers.
    assert decoder.row_wise_count <= 1.5 * len(places)


@pytest.mark.parametrize("placed_at", ["2026-11-05", "2026-11-05T07:08", "2026-11-05 07:08:09+02"])
def test_bad_records_are_sifted_out_of_good_ones_that_are_not_written_as_usual(placed_at: str) -> None:
    decoder = JsonDecoder(parse_ddl(f"{ORDERS}, born date NOT NULL"))
    places = range(50, MANY, 100)
    values = [order(at, placed_at=placed_at, born=None if at in places else "2026-11-05") for at in range(MANY)]
    assert [at for at, _ in decoder.decode(values).bad] == list(places)
    # The first checks find nothing, and are not repeated.
    assert decoder.row_wise_count <= 2 * len(places)


def test_a_screen_that_has_found_bad_records_looks_before_arrow_reads_and_one_that_finds_none_does_not() -> None:
    decoder = JsonDecoder(parse_ddl("a int"))
    good = [b'{"a":%d}' % n for n in range(2000)]
    for bad, spoiled in ((b"[]", True), (None, False), (b'{"a":1,"a":2}', False)):
        values = [*good, bad] if bad else good
        decoded = decoder.decode(values)
        assert ([at for at, _ in decoded.bad], decoder._recently_bad) == ([2000] if bad else [], spoiled)
        assert decoded.batch.column("a").to_pylist()[:2000] == list(range(2000))


def test_timestamps_that_become_numbers_midway_go_the_fast_way() -> None:
    decoder = JsonDecoder(parse_ddl(ORDERS))
    values = [order(n, placed_at=1_790_000_000 if 2_100 <= n < 4_500 else "2026-09-21T14:13:20Z") for n in range(MANY)]
    decoded = decoder.decode(values)
    assert decoded.bad == ()
    assert len(decoded.batch.column("placed_at").unique()) == 1
    assert decoder.row_wise_count < 200
