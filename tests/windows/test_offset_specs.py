"""Starts and stops as users write them, parsed."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from airflow_kafka_spark.windows.model import TopicPartition
from airflow_kafka_spark.windows.offset_specs import (
    CommittedOffsets,
    Earliest,
    Latest,
    ShiftBy,
    SpecificOffsets,
    Timestamp,
    parse_start,
    parse_stop,
    parse_target,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
NOON_MS = 1_767_268_800_000
ORDERS = SpecificOffsets({"orders": {0: 23, 1: -2}})


@pytest.mark.parametrize(
    "written, meant",
    [
        (None, CommittedOffsets()),
        ("committed", CommittedOffsets(None, "earliest")),
        ("none", CommittedOffsets(None, "none")),
        ("committed:connect-orders", CommittedOffsets("connect-orders")),
        ("earliest", Earliest()),
        (" latest ", Latest()),
        (NOON, Timestamp(NOON_MS)),
        (NOON.astimezone(timezone(timedelta(hours=9))), Timestamp(NOON_MS)),
        (NOON + timedelta(microseconds=1), Timestamp(NOON_MS + 1)),
        ("2026-01-01T12:00:00Z", Timestamp(NOON_MS)),
        ("2026-01-01 12:00:00+00:00", Timestamp(NOON_MS)),
        ("2026-01-01T14:00:00.500+02:00", Timestamp(NOON_MS + 500)),
        ('{"orders": {"0": 23, "1": -2}}', ORDERS),
        ({"orders": {"0": 23, 1: -2}}, ORDERS),
        ({TopicPartition("orders", 1): -2, ("orders", 0): 23}, ORDERS),
        (CommittedOffsets("flink-job", "latest"), CommittedOffsets("flink-job", "latest")),
    ],
    ids=str,
)
def test_a_start_may_be_written_in_many_ways(written, meant):
    assert parse_start(written) == meant


@pytest.mark.parametrize(
    "written, complaint",
    [
        ("newest", "not understood"),
        ("", "not understood"),
        ("committed:", "name of the group is empty"),
        (1_767_268_800_000, r"is `1767268800000` \(int\)"),
        (datetime(2026, 1, 1), "no time zone"),
        ("2026-01-01T12:00:00", "no time zone"),
        ("2026-01-01", "no time zone"),
        ("1969-12-31T23:59:59Z", "not a time"),
        ("2026-13-01T00:00:00Z", "not understood"),
        ("{orders: 1}", "not JSON"),
        ("{'orders': {'0': 1}}", "not JSON: .*with the filter `tojson`"),
        ("{}", "names no offsets"),
        ('{"orders": 5}', "names no offsets of a topic"),
        ({"orders": {"x": 5}}, "not the number of a partition"),
        ({"orders": {"0": 5, 0: 7}}, "orders-0 is named twice"),
        ('{"orders": {"0": 5, "0": 7}}', "`0` is named twice"),
        ({"orders": {0: -3}}, "not an offset"),
        ({"orders": {0: "7"}}, "not an offset"),
        ({"orders": {0: True}}, "not an offset"),
        (ShiftBy(3), "needs a position, which"),
    ],
    ids=str,
)
def test_what_is_no_start_is_refused_with_what_is_expected(written, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_start(written)


def test_an_unknown_fallback_is_refused():
    with pytest.raises(ValueError, match="newest"):
        CommittedOffsets(fallback="newest")


def test_a_stop_is_latest_a_time_offsets_or_another_group():
    assert parse_stop(None) == parse_stop("latest") == Latest()
    assert parse_stop("2026-01-01T12:00:00Z") == Timestamp(NOON_MS)
    assert parse_stop("committed:other") == CommittedOffsets("other")
    assert parse_stop({"orders": {0: -1}}) == SpecificOffsets({"orders": {0: -1}})


@pytest.mark.parametrize(
    "written", ["earliest", "committed", "none", CommittedOffsets(), Earliest(), {"orders": {0: -2}}], ids=str
)
def test_a_window_stops_neither_at_the_beginning_nor_at_its_own_group(written):
    with pytest.raises(ValueError):
        parse_stop(written)


def test_a_target_may_be_a_shift_but_never_the_groups_own_offsets():
    assert parse_target(ShiftBy(-5)) == ShiftBy(-5)
    assert parse_target("earliest") == Earliest()
    for written in ("committed", CommittedOffsets()):
        with pytest.raises(ValueError):
            parse_target(written)
