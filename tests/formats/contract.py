"""The contract of all formats: checks that take a format, values it decodes and values it must refuse."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from airflow_kafka_spark.formats import Format
from airflow_kafka_spark.formats.base import Decoded


@dataclass(frozen=True)
class Case:
    """A format and its test values.

    :param format: the format.
    :param good: values it decodes.
    :param bad: values it refuses; empty when there are none.
    """

    format: Format
    good: tuple[bytes, ...]
    bad: tuple[bytes, ...] = ()

    def mixed(self, rounds: int) -> tuple[list[bytes | None], list[int]]:
        """Return good values, with a None and a bad value in each round, and the positions of the bad values."""
        values: list[bytes | None] = []
        places: list[int] = []
        for number in range(rounds):
            values += [*self.good, None, *self.good]
            if self.bad:
                places.append(len(values))
                values.append(self.bad[number % len(self.bad)])
        return values, places


def rows(decoded: Decoded) -> list[str]:
    """Return each row in a form for comparisons: NaN equals NaN, -0.0 does not equal 0.0."""
    return [repr(row) for row in decoded.batch.to_pylist()]


def check_pickled(case: Case) -> None:
    decoder = case.format.make_decoder()
    decoder.decode(case.good)
    for pickled in (pickle.loads(pickle.dumps(decoder)), pickle.loads(pickle.dumps(case.format)).make_decoder()):
        assert rows(pickled.decode(case.good)) == rows(decoder.decode(case.good))


def check_one_row_per_value_in_order(case: Case) -> None:
    values, places = case.mixed(300)
    decoder = case.format.make_decoder()
    decoded = decoder.decode(values)
    found = rows(decoded)
    assert len(found) == len(values)
    alone = {value: rows(decoder.decode([value]))[0] for value in set(values)}
    assert found == [alone[value] for value in values]
    assert [at for at, _ in decoded.bad] == places


def check_bad_positions_are_exact_and_ascending(case: Case) -> None:
    for count in (1, 3, 40):
        values, places = case.mixed(count)
        decoded = case.format.make_decoder().decode(values)
        assert [at for at, _ in decoded.bad] == places
        assert all(isinstance(at, int) and reason for at, reason in decoded.bad)
        for at in places:
            assert all(value is None for value in decoded.batch.slice(at, 1).to_pylist()[0].values())


def check_a_missing_value_is_a_row_of_nulls_and_never_bad(case: Case) -> None:
    for values in ([None], [None] * 3000, [None, case.good[0], None]):
        decoded = case.format.make_decoder().decode(values)
        assert decoded.bad == ()
        for value, row in zip(values, decoded.batch.to_pylist(), strict=True):
            assert value is not None or set(row.values()) == {None}


def check_schema_is_as_announced(case: Case) -> None:
    announced = case.format.get_arrow_schema()
    values, _ = case.mixed(50)
    for given in ([], [None], case.good, case.bad, values, values * 6):
        batch = case.format.make_decoder().decode(given).batch
        assert batch.schema.equals(announced, check_metadata=True)
        assert [c.type for c in batch.columns] == [f.type for f in announced]
        batch.validate(full=True)
        assert batch.num_rows == len(given)


def check_chunks_decode_like_the_whole(case: Case) -> None:
    for size, rounds in ((1, len(case.bad) or 1), (7, 30), (100, 60)):
        values, _ = case.mixed(rounds)
        whole = case.format.make_decoder().decode(values)
        decoder = case.format.make_decoder()
        chunks = [(at, decoder.decode(values[at : at + size])) for at in range(0, len(values), size)]
        assert [row for _, chunk in chunks for row in rows(chunk)] == rows(whole)
        assert [(start + at, reason) for start, chunk in chunks for at, reason in chunk.bad] == list(whole.bad)


def check_any_sequence_will_do(case: Case) -> None:
    values, _ = case.mixed(5)
    sequences: tuple[Sequence[bytes | None], ...] = (tuple(values), list(values))
    assert len({str(rows(case.format.make_decoder().decode(s))) for s in sequences}) == 1


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
