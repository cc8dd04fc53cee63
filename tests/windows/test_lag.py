"""The rules of lag, without Kafka: sums, thresholds, the status of a consumer, and when a run is expected or late."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from airflow_kafka_spark.windows.lag import (
    LATE_SECONDS,
    MIN_OBSERVATIONS,
    OBSERVATIONS,
    PERIODS,
    BacklogHead,
    CompletedWindow,
    History,
    Lag,
    Observation,
    PartitionLag,
    Periodic,
    Status,
    Threshold,
    Timetabled,
    Unscheduled,
    Verdict,
    derive_cadence,
    find_usual_period,
    find_worst_verdict,
    judge_partition,
)
from airflow_kafka_spark.windows.model import TopicPartition

NOW = 1_750_000_000.0
HOUR, DAY = 3600.0, 86400.0
SEEDS = range(50)


def for_each_seed(test):
    """Run one test for all seeds; a pytest parameter for each of fifty seeds would take longer than the test itself."""

    def run():
        for seed in SEEDS:
            try:
                test(seed)
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error}") from error

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def state(committed, end, head=None, seconds=0.0, low=0):
    return PartitionLag(committed, low, end, None if head is None else BacklogHead(head, 0), seconds=seconds)


def lag(*states):
    return Lag("group g", {TopicPartition("t", n): each for n, each in enumerate(states)}, NOW)


def test_the_line_for_a_log_counts_offsets_that_were_deleted_before_they_were_read():
    assert "deleted" not in lag(state(5, 9, head=5)).line
    line = lag(state(5, 90, head=30, low=30), state(7, 9, head=8, low=8)).line
    assert line.startswith("group g is 61 records behind")
    assert line.endswith(", 26 offsets were deleted before they were read (2 partitions)")


def seen(hours, committed, records, seconds=None, active=False):
    return Observation(NOW + hours * HOUR, committed, records, seconds, active)


# --- one partition, and several ---


def test_records_count_from_the_first_one_that_a_reader_is_handed():
    assert state(3, 10, head=3).records == 7
    assert state(3, 10, head=8).records == 2
    assert state(3, 10).records == 0
    assert not state(3, 10).behind


def test_a_reader_continues_at_the_first_record_that_is_still_there():
    deleted = state(3, 10, head=6, low=6)
    assert (deleted.start, deleted.records, deleted.lost) == (6, 4, 3)
    never = state(None, 10, head=6, low=6)
    assert (never.start, never.records, never.lost) == (6, 4, 0)


def random_lag(rng):
    states = []
    for _ in range(rng.randint(1, 6)):
        committed, more = rng.randint(0, 50), rng.choice([0, 0, rng.randint(1, 40)])
        head = committed + rng.randint(0, more - 1) if more else None
        states.append(state(committed, committed + more, head, rng.choice([0.0, 1.5, 900.0]) if more else 0.0))
    return lag(*states)


@for_each_seed
def test_the_total_is_the_sum_and_the_partition_is_the_worst_one(seed):
    found = random_lag(random.Random(seed))
    single = [s.records for s in found.partitions.values()]
    assert found.count_records("total") == sum(single)
    assert found.count_records("partition") == max(single)
    assert found.seconds == max(s.seconds for s in found.partitions.values())
    assert (found.count_records() == 0) == all(not s.behind for s in found.partitions.values())


def test_the_age_of_a_record_without_a_timestamp_is_unknown_not_nought():
    unknown = lag(state(0, 5, head=0, seconds=None), state(0, 5, head=0, seconds=7.0))
    assert unknown.seconds is None
    assert not Threshold(at_most_seconds=1e9).is_reached(unknown)
    assert not Threshold(at_least_seconds=0).is_reached(unknown)


# --- thresholds ---


@for_each_seed
def test_thresholds_agree_with_counting_by_hand(seed):
    rng = random.Random(seed)
    found, records, seconds = random_lag(rng), rng.randint(0, 60), rng.choice([0.0, 1.0, 1.5, 1000.0])
    single = [s.records for s in found.partitions.values()]
    assert Threshold(at_most_records=records).is_reached(found) == (sum(single) <= records)
    assert Threshold(at_most_records=records, per="partition").is_reached(found) == all(n <= records for n in single)
    assert Threshold(at_least_records=records).is_reached(found) == (sum(single) >= records)
    assert Threshold(at_least_records=records, per="partition").is_reached(found) == any(n >= records for n in single)
    ages = [s.seconds for s in found.partitions.values()]
    assert Threshold(at_most_seconds=seconds).is_reached(found) == all(age <= seconds for age in ages)
    assert Threshold(at_least_seconds=seconds).is_reached(found) == any(age >= seconds for age in ages)


def test_at_most_needs_both_and_at_least_needs_one():
    many_and_young = lag(state(0, 100, head=0, seconds=1.0))
    assert not Threshold(at_most_records=10, at_most_seconds=10).is_reached(many_and_young)
    assert Threshold(at_most_records=100, at_most_seconds=10).is_reached(many_and_young)
    assert Threshold(at_least_records=100, at_least_seconds=10).is_reached(many_and_young)
    assert not Threshold(at_least_records=101, at_least_seconds=10).is_reached(many_and_young)


def test_a_threshold_can_be_read():
    assert str(Threshold(at_most_records=1000, at_most_seconds=60)) == "at most 1,000 records and at most 60 s"
    assert str(Threshold(at_least_records=5, at_least_seconds=1.5)) == "at least 5 records or at least 1.5 s"
    assert str(Threshold(at_most_records=0, per="partition")) == "at most 0 records in every partition"


# --- the status ---


def test_no_lag_is_ok_whatever_was_before():
    history = [seen(-3, 50, 9), seen(-2, 40, 9), seen(0, None, 0)]
    assert judge_partition(history).status is Status.OK


def test_lag_that_was_gone_within_the_time_looked_back_on_is_ok():
    assert judge_partition([seen(-2, 5, 0), seen(-1, 4, 3), seen(0, 3, 9)]).status is Status.OK
    long_ago = [seen(-40, 5, 0), *(seen(-h / 10, 5, 9) for h in range(OBSERVATIONS, 0, -1))]
    assert judge_partition(long_ago).status is Status.WARN


def test_records_without_a_committed_offset_are_stop():
    verdict = judge_partition([seen(0, None, 10, 5.0)])
    assert verdict.status is Status.STOP
    assert "no committed offset" in verdict.reason


def test_an_offset_that_went_back_is_rewind_before_everything_else():
    history = [seen(-30 * 24, 90, 10), seen(-2, 40, 60), seen(0, 40, 61, 40 * DAY)]
    assert judge_partition(history).status is Status.REWIND
    assert "from 90 to 40" in judge_partition(history).reason


def test_silence_longer_than_the_schedule_allows_is_stop():
    history = [seen(-37, 5, 3), seen(-36.5, 6, 3, active=True), seen(0, 6, 30, 36.5 * HOUR)]
    assert judge_partition(history, Periodic(DAY)).status is Status.STOP
    assert judge_partition(history, Periodic(2 * DAY)).status is Status.OK


@pytest.mark.parametrize("hours", [0.1, 1, 12, 23.9, 25, 35])
def test_a_nightly_consumer_is_not_called_dead_between_two_nights(hours):
    """The consumer committed at night, and the lag has grown all day since then."""
    polls = [seen(-hours * n / 20, 100, 5000 - n * 10, hours * n / 20 * HOUR) for n in range(20, -1, -1)]
    night = [seen(-hours - 0.5, 90, None, active=True), seen(-hours - 0.2, 100, None, active=True)]
    assert judge_partition([*night, *polls], Periodic(DAY)) == Verdict(Status.OK)
    assert judge_partition(polls, Periodic(DAY)) == Verdict(Status.OK)


def test_one_look_is_enough_to_see_that_a_night_was_missed():
    """No attempt was seen, and the record at the committed offset has waited for longer than the time between runs."""
    assert judge_partition([seen(0, 100, 50, 20 * HOUR)], Periodic(DAY)).status is Status.OK
    assert judge_partition([seen(0, 100, 50, PERIODS * DAY + 1)], Periodic(DAY)).status is Status.STOP


def test_a_consumer_is_silent_only_while_there_is_something_to_read():
    history = [seen(-500, 10, None, active=True), seen(0, 10, 4, 60.0)]
    assert judge_partition(history, Periodic(HOUR)).status is Status.OK
    assert judge_partition([*history, seen(2, 10, 4, 2 * HOUR + 60)], Periodic(HOUR)).status is Status.STOP


def test_without_a_schedule_silence_is_judged_by_the_commits_that_were_seen():
    commits = [seen(-4 + n / 10, n, 50, 9 * HOUR) for n in range(6)]
    assert judge_partition([*commits, seen(-3.2, 5, 60, 9 * HOUR)]).status is not Status.STOP
    assert judge_partition([*commits, seen(0, 5, 60, 9 * HOUR)]).status is Status.STOP
    assert judge_partition([seen(0, 5, 60, 900 * DAY)]).status is Status.OK, (
        "one look at a group without a schedule proves nothing"
    )


def test_a_consumer_that_lives_and_stays_where_it_is_is_stalled():
    history = [seen(-n / 60, 7, 10, (3 - n / 60) * HOUR, active=True) for n in range(MIN_OBSERVATIONS, -1, -1)]
    assert judge_partition(history).status is Status.STALL
    assert judge_partition(history[-2:]).status is Status.OK, "two looks prove nothing"
    moved = [*history[:-1], seen(0, 8, 9, 3 * HOUR, active=True)]
    assert judge_partition(moved).status is Status.OK


def test_a_sign_of_life_without_an_offset_is_neither_a_move_nor_a_way_back():
    history = [seen(-n / 60, 7, 10, (3 - n / 60) * HOUR, active=True) for n in range(MIN_OBSERVATIONS, -1, -1)]
    life = Observation(history[1].time + 1, None, active=True, has_offset=False)
    assert judge_partition([*history[:2], life, *history[2:]]).status is judge_partition(history).status is Status.STALL
    # Two that tell are not enough for a stall, with the others they are.
    assert judge_partition([history[0], life, replace(life, time=life.time + 1), history[-1]]).status is Status.STALL
    quiet = [replace(one, active=False) for one in history]
    assert judge_partition([*quiet[:2], life, *quiet[2:]]).status is judge_partition(quiet).status


def test_windows_that_do_not_take_a_record_which_is_waiting_are_a_stall():
    windows = [seen(-n, 7, None, active=True) for n in (4, 3, 2, 1)]
    assert judge_partition([*windows, seen(0, 7, 3, 5 * HOUR)], Periodic(HOUR)).status is Status.STALL
    assert judge_partition([*windows, seen(0, 7, 3, 0.5 * HOUR)], Periodic(HOUR)).status is Status.OK, (
        "the record came after the last window"
    )


def test_a_lag_that_never_decreases_is_a_warning():
    growing = [seen(-n / 60, 100 - n, 50 - n, 60.0, active=True) for n in range(5, -1, -1)]
    assert judge_partition(growing).status is Status.WARN
    falling = [*growing[:-1], seen(0, 105, 20, 60.0, active=True)]
    assert judge_partition(falling).status is Status.OK


def test_with_a_schedule_lag_is_compared_at_commits():
    def run(day, committed, records):
        return [seen(-24 * day - 0.1, committed - 10, records + 10, 60.0), seen(-24 * day, committed, records, 60.0)]

    behind_more_each_day = [*run(1.2, 10, 5), *run(0.9, 20, 8), *run(0.5, 30, 8), *run(0.1, 40, 12)]
    assert judge_partition(behind_more_each_day, Periodic(DAY)).status is Status.WARN
    assert judge_partition([*behind_more_each_day, *run(0, 50, 3)], Periodic(DAY)).status is Status.OK


@for_each_seed
def test_a_consumer_that_keeps_up_with_its_schedule_is_never_called_dead(seed):
    """Runs come once a period, late by up to a third of it, and take all there is; it is looked at whenever."""
    rng = random.Random(seed)
    period = rng.choice([60.0, HOUR, DAY, 7 * DAY])
    runs = [n * period + rng.uniform(0, period / 3) for n in range(8)]
    looks = sorted(rng.uniform(runs[0], runs[-1]) for _ in range(30))
    history = []
    for look in looks:
        last = max(run for run in runs if run <= look)
        waiting = look - last
        history.append(Observation(NOW + look, round(last), round(waiting), waiting))
        assert judge_partition(history, Periodic(period)).status in (Status.OK, Status.WARN), history[-1]
        assert judge_partition(history[-OBSERVATIONS:], Periodic(period)).status in (Status.OK, Status.WARN)


@for_each_seed
def test_a_consumer_that_has_died_is_found_out_in_two_periods(seed):
    rng = random.Random(seed)
    period = rng.choice([60.0, HOUR, DAY])
    history = [Observation(NOW, 100, 5, 1.0, active=True)]
    for n in range(1, 20):
        elapsed = n * period / rng.uniform(4, 8)
        history.append(Observation(history[0].time + elapsed, 100, 5 + n, elapsed))
    final = Observation(history[0].time + 2 * max(period, history[-1].time - NOW), 100, 99, 2 * period)
    assert judge_partition([*history, final], Periodic(period)).status is Status.STOP


def test_a_history_forgets_what_no_verdict_looks_back_on():
    history, tp = History(), TopicPartition("t", 0)
    for n in range(100):
        verdict = history.judge(Lag("g", {tp: state(5, 9 + n, head=5, seconds=float(n))}, NOW + n), {})[tp]
    assert verdict.status is Status.WARN
    assert len(history._seen[tp]) == OBSERVATIONS


def test_the_worst_status_wins_and_says_where():
    verdicts = {TopicPartition("t", n): Verdict(each, "why") for n, each in enumerate([Status.OK, Status.STALL, Status.WARN])}
    assert find_worst_verdict(verdicts) == Verdict(Status.STALL, "t-1: why")
    assert find_worst_verdict({}) == Verdict(Status.OK)
    ranks = sorted(Status, key=lambda each: each.rank)
    assert ranks == [Status.OK, Status.WARN, Status.STALL, Status.STOP, Status.REWIND]


MONDAY = datetime(2026, 1, 5, tzinfo=timezone.utc).timestamp()


def next_hour(instant):
    return (instant // HOUR + 1) * HOUR


def next_working_day(instant):
    """09:00 UTC from Monday to Friday."""
    day = datetime.fromtimestamp(instant, timezone.utc).replace(hour=9, minute=0, second=0, microsecond=0)
    while day.timestamp() <= instant or day.weekday() > 4:
        day += timedelta(days=1)
    return day.timestamp()


def windows(count, *, kind="scheduled", hours=1, seconds=10.0, interval=False):
    """Windows that a catch-up has moved within seconds of each other."""
    found = []
    for n in range(count):
        at = datetime.fromtimestamp(MONDAY, timezone.utc) + timedelta(hours=n * hours)
        span = (round(at.timestamp() * 1000), round((at.timestamp() + hours * HOUR) * 1000)) if interval else None
        found.append(CompletedWindow(MONDAY + n * seconds, f"dag/{kind}__{at.isoformat()}/task", span))
    return found


@pytest.mark.parametrize("given", [windows(6), windows(6, interval=True), windows(6, kind="manual", interval=True)])
def test_a_catch_up_does_not_say_how_often_a_pipeline_runs(given):
    assert derive_cadence(given) == Periodic(HOUR)
    # Six hourly intervals were moved in a minute; five minutes later there are new records.
    past = [Observation(window.completed_at, 60 + n, active=True) for n, window in enumerate(given)]
    now = Observation(past[-1].time + 216, past[-1].committed, 15, 216.0)
    assert judge_partition([*past, now], derive_cadence(given)).status is Status.OK
    assert judge_partition([*past, now], Periodic(10.0)).status is Status.STOP


def test_runs_without_a_schedule_cannot_be_missed():
    for kind in ("manual", "asset_triggered", "backfill"):
        assert derive_cadence(windows(6, kind=kind)) == Unscheduled()
    silent = [Observation(0.0, 7, active=True), Observation(900 * HOUR, 7, 50, 800 * HOUR)]
    assert judge_partition(silent, Unscheduled()).status is Status.OK


def test_with_names_of_another_kind_the_time_between_completions_decides():
    known = [CompletedWindow(at, "dag/run/task") for at in (0.0, 10.0, 30.0, 35.0)]
    assert derive_cadence(known) == Periodic(20.0)
    assert derive_cadence(known[:2]) is None
    assert derive_cadence(windows(1)) is None
    assert derive_cadence([]) is None


def test_the_usual_period_is_the_longest_one_once_there_are_enough():
    assert find_usual_period([0.0, 10.0]) is None
    assert find_usual_period([0.0, 10.0, 30.0, 35.0]) == 20.0


def test_a_run_by_a_timetable_is_late_after_half_of_the_time_to_the_next_one():
    hourly = Timetabled(next_hour)
    assert hourly.compute_deadline(MONDAY + 300) == MONDAY + 1.5 * HOUR
    friday = MONDAY + 4 * 24 * HOUR + 9.1 * HOUR
    working_days = Timetabled(next_working_day)
    assert working_days.find_due_after(friday) == MONDAY + 7 * 24 * HOUR + 9 * HOUR, "no run is due at a weekend"
    assert working_days.compute_deadline(friday) == MONDAY + 7 * 24 * HOUR + 21 * HOUR
    last = Timetabled(lambda instant: MONDAY if instant < MONDAY else None)
    assert last.compute_deadline(MONDAY - 100) == MONDAY + LATE_SECONDS
    assert last.compute_deadline(MONDAY) is None


def test_a_run_that_was_due_and_did_not_come_is_a_stop_that_says_so():
    history = [Observation(MONDAY + 300, 7, active=True), Observation(MONDAY + 2 * HOUR, 7, 9, 1.8 * HOUR)]
    verdict = judge_partition(history, Timetabled(next_hour))
    assert verdict.status is Status.STOP
    assert verdict.reason == "no sign of life for 6,480 s; a run was due 3,600 s ago"
    assert judge_partition([history[0], Observation(MONDAY + HOUR + 60, 7, 9, 1000.0)], Timetabled(next_hour)).status is Status.OK
