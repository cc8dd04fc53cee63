"""A format that accepts every value. Tasks import this module, so it imports no more than a format does."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_kafka_spark.formats.base import Decoded, Decoder
from airflow_kafka_spark.formats.json.format import Json

NOBODY = b'{"id": -1, "customer": "nobody", "amount": "0.00", "placed_at": "2026-01-01T00:00:00Z"}'


class Lenient(Json):
    """Return records that Json cannot decode as orders without a customer."""

    def make_decoder(self) -> Decoder:
        return _Lenient(super().make_decoder())


class _Lenient(Decoder):
    def __init__(self, strict: Decoder) -> None:
        self.strict = strict

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        bad = {index for index, _ in self.strict.decode(values).bad}
        return self.strict.decode([NOBODY if index in bad else value for index, value in enumerate(values)])
