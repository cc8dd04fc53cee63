"""Avro has one meaning and two ways to it: whole batches by polars, and the reference; fastavro is the third opinion."""

from __future__ import annotations

import io
import json

import fastavro
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.errors import AvroSchemaInvalid
from airflow_kafka_spark.formats import Avro
from airflow_kafka_spark.formats.avro.tasks.decode import AvroDecoder
from tests.formats.avro.random_avro import RandomAvro, bare, encoded, shown
from tests.formats.budget import examples
from tests.formats.contract import rows

SEEDS = st.integers(0, 1 << 40)
SOME = settings(max_examples=examples(30), derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def decoders(schema: dict, reader: dict | None = None) -> tuple[AvroDecoder, AvroDecoder]:
    """Return a decoder that uses the fast path if possible, and one for reference results."""
    made = Avro(json.dumps(schema), reader_schema=json.dumps(reader) if reader else "latest").make_decoder()
    assert isinstance(made, AvroDecoder)
    fast = AvroDecoder(made._reader, made._writers, False, few=0)
    return fast, made


def agree(fast: AvroDecoder, reference: AvroDecoder, values: list[bytes]) -> None:
    one, two = fast.decode(values), reference.decode_row_wise(values)
    assert one.bad == two.bad
    assert rows(one) == rows(two)
    one.batch.validate(full=True)


@SOME
@given(SEEDS)
def test_what_fastavro_writes_is_read_as_fastavro_reads_it(seed: int) -> None:
    made = RandomAvro(seed)
    schema = made.record()
    raws = [made.value(schema) for _ in range(20)]
    values = [encoded(bare(schema), raw) for raw in raws]
    parsed = fastavro.parse_schema(bare(schema))
    read = [fastavro.schemaless_reader(io.BytesIO(v), parsed, parsed) for v in values]
    fast, reference = decoders(schema)
    wanted = pa.array([shown(schema, r) for r in read], pa.struct(list(fast._schema)))
    for decoded in (fast.decode(values), reference.decode_row_wise(values)):
        assert decoded.bad == ()
        assert rows(decoded) == [repr(row) for row in wanted.to_pylist()]


@SOME
@given(SEEDS)
def test_both_ways_agree_on_damaged_values(seed: int) -> None:
    made = RandomAvro(seed)
    schema = made.record()
    values = [encoded(bare(schema), made.value(schema)) for _ in range(24)]
    values = [made.damaged(v) if made.r.random() < 0.3 else v for v in values]
    agree(*decoders(schema), values)
    for value in values[:6]:
        agree(*decoders(schema), [value])


@SOME
@given(SEEDS)
def test_both_ways_agree_on_values_of_another_version(seed: int) -> None:
    made = RandomAvro(seed)
    schema = made.record()
    reader = made.reader(schema)
    values = [encoded(bare(schema), made.value(schema)) for _ in range(24)]
    try:
        pair = decoders(schema, reader)
    except AvroSchemaInvalid:
        return
    agree(*pair, values)


def test_the_fast_way_is_taken_for_every_ordinary_type() -> None:
    taken = 0
    for seed in range(examples(120)):
        made = RandomAvro(seed)
        schema = made.record()
        if '["null", "string", "long"]' in json.dumps(schema):
            continue
        values = [encoded(bare(schema), made.value(schema)) for _ in range(20)]
        fast, _ = decoders(schema)
        assert fast.decode(values).bad == ()
        # A map's key may have come twice only where fastavro wrote one twice, which it does not.
        assert fast.row_wise_count == 0, schema
        taken += 1
    assert taken > 50
