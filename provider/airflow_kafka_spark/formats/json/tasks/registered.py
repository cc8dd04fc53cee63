"""JSON in Confluent's wire format, in Spark's tasks: a header, and what :mod:`.json.tasks.decode` reads behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.formats.base import Decoded, Decoder
from airflow_kafka_spark.formats.confluent import HEADER, header, schema_id
from airflow_kafka_spark.formats.json.logical_types import plain_columns
from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder
from airflow_kafka_spark.formats.registry import unknown_id
from airflow_kafka_spark.formats.text import BadValue
from airflow_kafka_spark.formats.types import Column

_MAX_TOLD = 300
_NONE: Mapping[int, Sequence[Column]] = {}


class RegisteredJsonDecoder(Decoder):
    """See :class:`airflow_kafka_spark.formats.json.registered.JsonSchema`.

    :param carried: the columns, with what their values are carried by.
    :param known: the schemas that records may have, by id; None where values are without a header.
    :param unusable: ids whose schema cannot be used, and why.
    :param span: where the schemas are from, as it stands in a sentence.
    :param checks: whether values are checked against the schema they were written with; without a header that of id 0.
    :param others: ids of records in which the columns' values are carried by something else, and by what.
    """

    def __init__(
        self,
        carried: Sequence[Column],
        known: Mapping[int, str],
        unusable: Mapping[int, str],
        span: str,
        framed: bool,
        checks: bool,
        others: Mapping[int, Sequence[Column]] = _NONE,
    ) -> None:
        self._given = (tuple(carried), dict(known), dict(unusable), span, framed, checks, dict(others))
        self._known, self._unusable, self._span, self._framed, self._checks = known, unusable, span, framed, checks
        self._json = JsonDecoder(plain_columns(carried), carried=carried)
        self._others = {header(n): JsonDecoder(plain_columns(columns), carried=columns) for n, columns in others.items()}
        self._heads: set[bytes] = set()
        self._validators: dict[int, Callable[[bytes], str]] = {}

    def __reduce__(self) -> tuple[type[RegisteredJsonDecoder], tuple[Any, ...]]:
        return type(self), self._given

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode many values at once."""
        bad: dict[int, str] = {}
        texts = self._texts(values, bad) if self._framed else list(values)
        decoded = self._json.decode(texts) if not self._others else self._by_writer(values, texts)
        bad.update(decoded.bad)
        if self._checks:
            decoded = self._checked(decoded, values, texts, bad)
        return replace(decoded, bad=tuple(sorted(bad.items())))

    def _by_writer(self, values: Sequence[bytes | None], texts: Sequence[bytes | None]) -> Decoded:
        """Each record as what carries its values is in its own schema."""
        groups: dict[JsonDecoder, list[int]] = {}
        for at, value in enumerate(values):
            groups.setdefault(self._others.get((value or b"")[:HEADER], self._json), []).append(at)
        batches, bad, places = [], dict[int, str](), list[int]()
        for decoder, group in groups.items():
            decoded = decoder.decode([texts[at] for at in group])
            batches.append(decoded.batch)
            bad.update((group[at], reason) for at, reason in decoded.bad)
            places += group
        if not batches:
            return self._json.decode([])
        rows = pa.Table.from_batches(batches).take(np.argsort(places)).combine_chunks()
        return Decoded(rows.to_batches()[0], tuple(sorted(bad.items())))

    def _texts(self, values: Sequence[bytes | None], bad: dict[int, str]) -> list[bytes | None]:
        """What is behind the headers; None where that is not known."""
        heads, found = self._heads, list[bytes | None]()
        for at, value in enumerate(values):
            if value is not None and value[:HEADER] not in heads:
                try:
                    self._admit(value)
                except BadValue as e:
                    bad[at] = e.reason
                    value = None
            found.append(None if value is None else value[HEADER:])
        return found

    def _admit(self, value: bytes) -> None:
        number = schema_id(value)
        if number not in self._known:
            raise BadValue(unknown_id(number, self._span, self._unusable))
        self._heads.add(value[:HEADER])

    def _checked(
        self, decoded: Decoded, values: Sequence[bytes | None], texts: Sequence[bytes | None], bad: dict[int, str]
    ) -> Decoded:
        wrong = []
        for at, text in enumerate(texts):
            if text is None or at in bad:
                continue
            number = schema_id(values[at] or b"") if self._framed else 0
            if reason := self._validator(number)(text):
                bad[at] = reason
                wrong.append(at)
        if not wrong:
            return decoded
        keep = np.ones(len(values), bool)
        keep[wrong] = False
        rows = pa.array(np.arange(len(values)), mask=~keep)
        taken = [column.take(rows) for column in decoded.batch.columns]
        return replace(decoded, batch=pa.RecordBatch.from_arrays(taken, schema=decoded.batch.schema))

    def _validator(self, number: int) -> Callable[[bytes], str]:
        if number not in self._validators:
            self._validators[number] = _validator(json.loads(self._known[number]))
        return self._validators[number]


def _validator(schema: Mapping[str, Any]) -> Callable[[bytes], str]:
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for

    validator = validator_for(schema)(schema)

    def wrong(text: bytes) -> str:
        try:
            error = best_match(validator.iter_errors(json.loads(text)))
        except Exception as e:  # noqa: BLE001 - what a schema's patterns and references do with a value is not ours
            return f"it cannot be checked by its schema: {type(e).__name__}: {str(e)[:_MAX_TOLD]}"
        if error is None:
            return ""
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path).lstrip(".")
        return (f"column `{place}`: " if place else "") + f"the schema refuses it: {error.message[:_MAX_TOLD]}"

    return wrong
