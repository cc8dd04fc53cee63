"""A format whose decoder waits for a file: some splits end only after a test has seen what it wants to see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.formats.base import Decoded, Decoder
from tests.support.waiting import eventually


@dataclass(frozen=True)
class GatedJson(Json):
    """Orders in JSON. Batches with an order of the last part of a window are decoded after the file ``gate`` exists.

    :param gate: path of the file.
    :param records: number of records of a window; orders have consecutive numbers.
    :param free: number of records of each window that never wait.
    """

    gate: str = ""
    records: int = 1
    free: int = 0

    def make_decoder(self) -> Decoder:
        return GatedDecoder(super().make_decoder(), self.gate, self.records, self.free)


@dataclass(frozen=True)
class GatedDecoder(Decoder):
    """Decodes like ``decoder``, after the file ``gate`` exists."""

    decoder: Decoder
    gate: str
    records: int
    free: int

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        if any(value and len(value) > 1 and json.loads(value)["id"] % self.records >= self.free for value in values):
            eventually(Path(self.gate).exists)
        return self.decoder.decode(values)
