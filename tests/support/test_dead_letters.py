"""The oracle of dead letters fails on a lost, a doubled and a swapped record, on either side."""

from __future__ import annotations

import pytest

from tests.support import dead_letters
from tests.support.dead_letters import BAD, check_sorted_out
from tests.support.pipelines import order, row_of

EVENTS = [(0, 0, b"0", order(0)), (0, 1, b"1", BAD[0]), (1, 0, b"2", order(1)), (1, 1, b"3", BAD[1])]
ROWS = [row_of(order(0)), row_of(order(1))]


def letter(partition: int, offset: int, key: bytes, value: bytes):
    facts = {"partition": partition, "offset": offset}
    return key, value, 0, [(dead_letters.PREFIX + name, str(fact).encode()) for name, fact in facts.items()]


LETTERS = [letter(0, 1, b"1", BAD[0]), letter(1, 1, b"3", BAD[1])]


class Flow:
    topic = "t"

    class kafka:  # noqa: N801 - stands where a broker would
        @staticmethod
        def connection_extra():
            return {}

    def __init__(self, rows) -> None:
        self.rows = lambda: rows


def check(monkeypatch, rows, letters):
    monkeypatch.setattr(dead_letters, "committed_records", lambda config, topic: EVENTS)
    monkeypatch.setattr(dead_letters, "letters", lambda config, topic: letters)
    return check_sorted_out(Flow(rows), "dead")


def test_it_is_green_when_each_is_there_once(monkeypatch):
    assert check(monkeypatch, ROWS, LETTERS) == (2, 2)


@pytest.mark.parametrize(
    "rows, letters",
    [
        (ROWS[:1], LETTERS),
        (ROWS, LETTERS[:1]),
        ([*ROWS, ROWS[0]], LETTERS),
        (ROWS, [*LETTERS, LETTERS[0]]),
        ([ROWS[0], row_of(order(5))], LETTERS),
        (ROWS, [LETTERS[0], letter(1, 0, b"2", order(1))]),
        (ROWS, [LETTERS[0], letter(1, 0, b"3", BAD[1])]),
        ([], []),
    ],
)
def test_it_is_red_on_one_lost_one_doubled_and_one_swapped_record(monkeypatch, rows, letters):
    with pytest.raises(AssertionError):
        check(monkeypatch, rows, letters)
