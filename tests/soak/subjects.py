"""Pipelines for the soak program: one class per kind, with what its records are, and what its sink must hold."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark import faults
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.sinks import IcebergSink, PostgresSink
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from airflow_kafka_spark.windows.offset_specs import ShiftBy
from tests.faults.test_capturing import Other
from tests.operators.test_follows import load
from tests.sources.mysql_cdc.kit import Binlog, log_server
from tests.sources.mysql_cdc.shop import CapturedTable
from tests.sources.mysql_cdc.shop import captured as table_with_log
from tests.sources.postgres_cdc.shop import Captured, captured
from tests.support.cluster import Driver, connection
from tests.support.control import forget, pause, rename, replay, resend, reset, resume, skip
from tests.support.dead_letters import check_sorted_out, is_bad, produce_mixed
from tests.support.intervals import BEGIN, make_archiving, usual_limits
from tests.support.lenient import NOBODY, Lenient
from tests.support.mariadb import missing
from tests.support.oracle import same_multiset, wait_stable
from tests.support.pipelines import CATALOGS, SCHEMA, STORE_KINDS, Pipeline, files_rows, order, pipeline, row_of
from tests.support.relay import relay
from tests.support.runs import Attempts, Victim
from tests.support.s3 import EmbeddedS3
from tests.support.shop import shop
from tests.support.waiting import settled

COMMITTING = ("sink.committed", "close.begin", "close.in_transaction", "close.committed")
"""The points at which a sink has taken the window."""


class Subject(ABC):
    """One pipeline that is run, killed and changed, and counted after each.

    :param attempts: the pipeline, and the task attempts at it.
    :param points: where its attempts may die or stop.
    :cvar skips: whether an open window may be skipped: its sink shows whole windows, so what a skipped one leaves is nothing.
    :cvar appends: whether records that are read again after a reset are rows again.
    :cvar has_cluster: whether attempts may also run on executors of their own, :attr:`cluster`.
    """

    skips = False
    appends = False
    has_cluster = False

    def __init__(self, attempts: Attempts, points: tuple[str, ...]) -> None:
        self.attempts, self.points = attempts, points
        self.number = 0

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def run_id(self) -> str:
        return f"run{self.number}"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the context of the current run, without its id."""
        return {}

    def next_run(self) -> None:
        """Begin another run."""
        self.number += 1

    def run(self, **facts: Any) -> dict[str, Any]:
        """Let one attempt at the current run do its work in this process; return its report."""
        return self.attempts.run(self.run_id, facts={**self.facts, **facts})

    def victim(self, fault: str | None) -> Victim:
        """Start one attempt at the current run in a process of its own."""
        return self.attempts.victim(self.run_id, fault=fault, facts=self.facts, alone=True)

    @property
    def cluster(self) -> Driver:
        """The driver of these executors."""
        raise NotImplementedError

    @property
    def order(self) -> tuple[Callable[..., Any], dict[str, Any], str]:
        """Return the arguments of that driver for one attempt at the current run."""
        return type(self.attempts).make, self.attempts.arguments, self.run_id

    @abstractmethod
    def feed(self, chance: random.Random) -> None:
        """Write more records."""

    @abstractmethod
    def check(self) -> int:
        """Assert that each record is where it belongs, exactly once; return how many were compared."""

    def command(self, chance: random.Random) -> str | None:
        """Do what an operator may ask for between two runs; return what it was, None where nothing was asked for."""
        commands = [self._clear, self._clear, self._clear, self._pause, self._other_deployment, *self.more_commands]
        return chance.choice(commands)(chance) if chance.random() < 0.7 else None

    @property
    def more_commands(self) -> Sequence[Callable[[random.Random], str | None]]:
        """Return the options that only this kind of pipeline has."""
        return ()

    def _ask(self, action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Give a command for this pipeline."""
        given = self.attempts.arguments
        pipeline, ledger = str(given["pipeline"]), str(given["ledger_topic"])
        wait_stable(self.kafka.connection_extra(), ledger)
        with KafkaHook() as hook:
            return action(hook, pipeline, *arguments, why="soak", who="soak", ledger_topic=ledger, **options)

    @property
    def kafka(self) -> EmbeddedKafka:
        return self.attempts.kafka  # type: ignore[attr-defined,no-any-return]

    def _clear(self, chance: random.Random) -> str:
        self.run()
        return "clear"

    def _pause(self, chance: random.Random) -> str:
        from airflow.providers.common.compat.sdk import AirflowSkipException

        self.feed(chance)
        self.next_run()
        self._ask(pause)
        try:
            self.run()
        except AirflowSkipException:
            pass
        else:
            raise AssertionError("a paused pipeline moved a window")
        self._ask(resume)
        self.run()
        return "pause"

    def _leave_open(self, chance: random.Random) -> bool:
        """Leave a window that is planned and of which nothing is moved. If the attempt fails before its plan, its retry moves the
        records, and False is returned.
        """
        self.feed(chance)
        self.next_run()
        victim = self.victim("planned")
        victim.wait()
        if not victim.fired:
            self.run()
        return victim.fired

    def _other_deployment(self, chance: random.Random) -> str | None:
        """A run of another deployment must be refused."""
        from airflow_kafka_spark.errors import BindingChanged

        if not self._leave_open(chance):
            return None
        try:
            with variable("AIRFLOW__KAFKA_SPARK__DEPLOYMENT", "another"):
                self.run()
        except BindingChanged:
            self.run()
            return "another deployment"
        raise AssertionError("a run of another deployment took an open window")


class ToSink(Subject):
    """Records of one topic in one sink."""

    def __init__(self, flow: Pipeline) -> None:
        super().__init__(flow, faults.POINTS)
        self.flow = flow
        self.skips = flow.kind not in ("postgres-split", "s3-listing")
        self.appends = flow.kind != "postgres-upsert"
        self._records: dict[tuple[int, int], bytes] = {}
        self._times: dict[tuple[int, int], int] = {}
        self._open: tuple[Producer, range] | None = None
        self._ended: dict[str, set[int]] = {"commit": set(), "abort": set()}
        if flow.kind == "postgres":
            with flow.postgres.connect(autocommit=True) as connection:
                connection.execute(f'ALTER TABLE "{flow.place}" ADD COLUMN "window" text')
            flow.options["sink"] = PostgresSink(conn_id="warehouse", table=flow.place, window_column="window")
        if flow.postgres is not None:
            with flow.postgres.connect(autocommit=True) as connection:
                connection.execute(f'CREATE TABLE "{flow.place}-elsewhere" (LIKE "{flow.place}" INCLUDING ALL)')

    def __str__(self) -> str:
        return f"ToSink {self.flow.kind}"

    def feed(self, chance: random.Random) -> None:
        if self._open is not None and chance.random() < 0.6:
            self._end_transaction(chance.choice(["commit", "abort"]))
        # Beside an open transaction no other one is waited for: what it writes is hidden until the open one ends.
        transaction = chance.choice([None, None, None, "commit", "abort"]) if self._open is None else None
        self.flow.produce(chance.randrange(1, 400), transaction=transaction)
        if self._open is None and chance.random() < 0.2:
            self._open = self.flow.begin(chance.randrange(3, 100))
            self.flow.produce(chance.randrange(1, 100))
        if chance.random() < 0.2:
            self._delete_what_was_read()

    def _end_transaction(self, how: str) -> None:
        """:param how: ``commit`` or ``abort``."""
        assert self._open is not None
        producer, numbers = self._open
        try:
            getattr(producer, f"{how}_transaction")(120)
        except KafkaException as error:
            # On a slow machine it was open for too long: the brokers have aborted it.
            if error.args[0].code() != KafkaError._FENCED:
                raise
            how = "abort"
        self._open = None
        self._ended[how] |= set(numbers)
        settled(self.flow.topic, seconds=120)

    def _delete_what_was_read(self) -> None:
        """Delete records that were moved, as retention does."""
        self._look()
        self._delete({p: offset for p, offset in self.flow.committed().items() if offset > 0})

    def _delete(self, offsets: Mapping[int, int]) -> None:
        """Delete the records below some offsets, by partition."""
        if offsets:
            admin = AdminClient(self.flow.kafka.connection_extra())
            deleted = admin.delete_records([TopicPartition(self.flow.topic, p, offset) for p, offset in offsets.items()])
            for answer in deleted.values():
                answer.result(60)

    def _look(self) -> None:
        events = self.flow.events(stable=self._open is None)
        self._records.update({(p, o): value for p, o, _, value in events if value is not None})

    @property
    def _name(self) -> str:
        """Return the pipeline's present name."""
        return str(self.flow.arguments["pipeline"])

    def check(self) -> int:
        self._look()
        seen = {row_of(value)[0] for value in self._records.values()}
        assert self._ended["commit"] <= seen and not self._ended["abort"] & seen, "the oracle has not read what was committed"
        expected = [row_of(value) for place, value in self._records.items() for _ in range(self._times.get(place, 1))]
        return same_multiset(expected, self.flow.rows()) if expected else 0

    @property
    def more_commands(self) -> Sequence[Callable[[random.Random], str | None]]:
        return (
            self._replay,
            self._skip,
            self._reset,
            self._go_elsewhere,
            self._share_its_group,
            self._rename,
            self._forget,
            self._change_arguments,
            self._stop_at_a_time,
            self._lose_records,
            self._unmount,
        )

    def _clear(self, chance: random.Random) -> str:
        assert self.run()["window"] == self.flow.reports[-1]["window"]
        return "clear"

    def _replay(self, chance: random.Random) -> str | None:
        last, low = self.flow.reports[-1], self._lows()
        replaces = self.flow.kind.removeprefix("s3-") in ("manifest", "postgres", "delta", "iceberg")
        if not replaces or any(r["start"] < low.get(r["partition"], 0) for r in last["ranges"]):
            return None  # its sink does not replace windows, or the records are deleted
        self._ask(replay, window=int(last["window"]))
        self.run(max_tries=1)
        return "replay"

    def _skip(self, chance: random.Random) -> str | None:
        if not self.skips:
            return None
        self.feed(chance)
        self.next_run()
        point = chance.choice([p for p in self.points if p not in COMMITTING and p != "fenced"])
        victim = self.victim(point)
        victim.wait()
        if victim.fired:
            self._look()
            for gap in self._ask(skip, running=False).skipped:
                self._times |= {(gap.partition, offset): 0 for offset in range(gap.start, gap.end)}
        self.next_run()
        self.run()
        return f"skip at {point}" if victim.fired else None

    def _reset(self, chance: random.Random) -> str:
        self._look()
        for move in self._ask(reset, ShiftBy(-chance.randrange(1, 40))).moves:
            for offset in range(move.after, move.before or 0):
                place = (move.partition, offset)
                if self.appends or not self._times.get(place, 1):
                    self._times[place] = self._times.get(place, 1) + 1
        self.next_run()
        self.run()
        return "reset"

    def _go_elsewhere(self, chance: random.Random) -> str | None:
        """A run with another destination must be refused while a window is open."""
        from airflow_kafka_spark.errors import BindingChanged

        if not self._leave_open(chance):
            return None
        options: dict[str, Any] = {"place": f"{self.flow.place}-elsewhere"}
        if self.flow.kind in CATALOGS:
            options["sink"] = IcebergSink("shop.elsewhere", CATALOGS[self.flow.kind])
        elif "sink" in self.flow.options:
            options["sink"] = PostgresSink(conn_id="warehouse", table=options["place"], window_column="window")
        try:
            self.attempts.run(self.run_id, facts=self.facts, **options)
        except BindingChanged:
            self.run()
            return "another place"
        raise AssertionError("a run with another destination took an open window")

    def _share_its_group(self, chance: random.Random) -> str:
        """Another pipeline must not begin with the group of this one."""
        from airflow_kafka_spark.errors import GroupOwned

        self.next_run()
        self.run()
        try:
            self.attempts.run(self.run_id, facts=self.facts, pipeline=f"{self._name}-stranger")
        except GroupOwned:
            return "another pipeline with its group"
        raise AssertionError("another pipeline began with the group of this one")

    def _change_arguments(self, chance: random.Random) -> str | None:
        """A run with other arguments finishes a window of which any part may be done."""
        from airflow_kafka_spark.errors import SinkRejected

        self.feed(chance)
        self.next_run()
        victim = self.victim(chance.choice([point for point in self.points if point != "fenced"]))
        victim.wait()
        name, value = chance.choice([("max_records", 40), ("keep_windows", 2), ("split_records", 37), ("split_records", 1000)])
        try:
            self.attempts.run(self.run_id, facts=self.facts, **{name: value})
        except SinkRejected:
            # Splits of the other cut are in the table.
            assert (self.flow.kind, name) == ("postgres-split", "split_records")
            self.run()
        # What `max_records` has left.
        self.next_run()
        self.run()
        return f"another {name}"

    def _stop_at_a_time(self, chance: random.Random) -> str:
        """A record with a timestamp in the future must not end all windows that stop at a time."""
        producer = Producer({**self.flow.kafka.connection_extra(), "enable.idempotence": True})
        ahead = datetime.now(timezone.utc) + timedelta(days=chance.choice([2, 900, 300_000]))
        for partition in range(3):
            number = self.flow._produced
            producer.produce(self.flow.topic, order(number), b"%d" % number, partition, timestamp=round(ahead.timestamp() * 1000))
            self.flow._produced += 1
        assert producer.flush(60) == 0
        self.flow.produce(chance.randrange(20, 100))
        until = datetime.now(timezone.utc) + timedelta(minutes=1)
        self.next_run()
        report = self.attempts.run(self.run_id, facts=self.facts, ending_offsets=until.isoformat())
        # Records behind those of the future are moved, unless an open transaction hides them.
        assert self._open is not None or report["records_read"] >= 20, report
        self.next_run()
        self.run()
        return "records of the future"

    def _lose_records(self, chance: random.Random) -> str | None:
        """Delete records that were not read: that is refused until the user allows the pipeline to skip them."""
        from airflow_kafka_spark.errors import DataLoss

        if self._open is not None:
            return None
        self.next_run()
        self.run()
        self.flow.produce(chance.randrange(30, 120))
        self._look()
        at = self.flow.committed()
        with KafkaHook() as hook:
            ends = {tp.partition: offsets.lso for tp, offsets in hook.read_offsets([self.flow.topic]).items()}
        gone = {p: chance.randrange(at[p], end + 1) for p, end in ends.items() if 0 < at[p] < end}
        gone = {p: offset for p, offset in gone.items() if offset > at[p]}
        if not gone:
            return None
        self._delete(gone)
        self.next_run()
        try:
            self.run()
        except DataLoss:
            self._times |= {(p, offset): 0 for p, end in gone.items() for offset in range(at[p], end)}
            report = self.attempts.run(self.run_id, facts=self.facts, data_loss="skip")
            assert len(report["gaps"]) == len(gone), report
            return "lost records"
        raise AssertionError("records that were deleted unread were passed over")

    def _unmount(self, chance: random.Random) -> str | None:
        """A window must not go into a directory that has lost the windows before it."""
        from airflow_kafka_spark.errors import SinkRecordMissing

        if self.flow.kind != "files":
            return None
        self.feed(chance)
        self.next_run()
        if not self.run()["records_read"]:
            return None  # an open transaction hides them
        self.feed(chance)
        self.next_run()
        there = Path(self.flow.place)
        away = there.rename(there.with_name("away"))
        try:
            report = self.run()
        except SinkRecordMissing:
            report = None
        finally:
            shutil.rmtree(there, ignore_errors=True)
            away.rename(there)
        assert report is None or not report["records_read"], "a window went into an empty directory"
        self.run()
        return "a directory that was gone"

    def _rename(self, chance: random.Random) -> str:
        """Go on under another name. With an open window that must be refused, and a run under the old name afterwards."""
        from airflow_kafka_spark.errors import PipelineRenamed, WindowOpen

        old, to = self._name, f"{self.flow.name}-{self.number}"
        if chance.random() < 0.5:
            self.feed(chance)
            self.next_run()
            victim = self.victim("planned")
            victim.wait()
            if victim.fired:
                try:
                    self._ask(rename, to)
                except WindowOpen:
                    self.run()
                    return "rename, refused"
                raise AssertionError("a pipeline with an open window was given another name")
            self.run()
        self._ask(rename, to)
        self.flow.options["pipeline"] = to
        self.feed(chance)
        self.next_run()
        try:
            self.attempts.run(self.run_id, facts=self.facts, pipeline=old)
        except PipelineRenamed:
            self.run()
            return "rename"
        raise AssertionError("a run under the old name went on")

    def _forget(self, chance: random.Random) -> str:
        """Forget the pipeline, now and then with an open window. It goes on after its last window in the sink."""
        has_window = chance.random() < 0.5 and self._leave_open(chance)
        self._ask(forget, discard_open=has_window)
        self.feed(chance)
        self.next_run()
        self.run()
        return "forget with an open window" if has_window else "forget"

    def _lows(self) -> dict[int, int]:
        with KafkaHook() as hook:
            return {tp.partition: offsets.low for tp, offsets in hook.read_offsets([self.flow.topic]).items()}


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class BetweenTopics(Subject):
    """Records of one topic in another one."""

    def __init__(self, made: Any) -> None:
        super().__init__(made, faults.PUBLISHING)
        self.relay = made
        self._skipped: set[tuple[int, int]] = set()

    def feed(self, chance: random.Random) -> None:
        self.relay.send(chance.randrange(1, 400))

    @property
    def more_commands(self) -> Sequence[Callable[[random.Random], str | None]]:
        return self._skip, self._fewer, self._begin_anew, self._begin_anew

    def _begin_anew(self, chance: random.Random) -> str:
        """Forget the pipeline, which goes on where its group stands, and kill attempts at its first window."""
        self._ask(forget)
        self.feed(chance)
        self.next_run()
        for _ in range(chance.randrange(1, 4)):
            victim = self.victim(chance.choice(self.points))
            victim.wait()
        self.run()
        return "forget, and kills at the first window"

    def _skip(self, chance: random.Random) -> str | None:
        if not self._leave_open(chance):
            return None
        gaps = self._ask(skip, running=False).skipped
        self._skipped |= {(gap.partition, offset) for gap in gaps for offset in range(gap.start, gap.end)}
        self.next_run()
        self.run()
        return "skip"

    def _fewer(self, chance: random.Random) -> str:
        """A window of fewer records, and one of the rest."""
        self.feed(chance)
        self.next_run()
        self.attempts.run(self.run_id, facts=self.facts, max_records=40)
        self.next_run()
        self.run()
        return "another max_records"

    def check(self) -> int:
        return self.relay.check(lambda r: None if (r.partition, r.offset) in self._skipped else r.content)


class FromTable(Subject):
    """Rows of a table in a topic, and the rows that another pipeline has loaded, which follows the first."""

    has_cluster = True

    def __init__(self, made: Any, stack: ExitStack) -> None:
        super().__init__(made, faults.PUBLISHING)
        self.shop, self._stack = made, stack
        self._driver: Driver | None = None

    @property
    def cluster(self) -> Driver:
        """Two executors of one core, started when they are needed first."""
        if self._driver is None or self._driver.process.poll() is not None:
            directory = self.shop.directory / f"cluster-{self.number}"
            self._driver = self._stack.enter_context(Driver(connection("local-cluster[2,1,1024]"), directory))
        return self._driver

    def feed(self, chance: random.Random) -> None:
        self.shop.sell(chance.randrange(1, 600))

    def check(self) -> int:
        compared = self.shop.check()
        load(self.shop, f"load-{self.run_id}")
        loaded = [row[0] for row in files_rows(str(self.shop.directory / "lake"))]
        assert same_multiset([row[0] for row in self.shop.rows()], loaded) == compared
        return compared


class FromLog(Subject):
    """Changes of two tables in topics, and a copy of one of them."""

    def __init__(self, made: Captured, chance: random.Random) -> None:
        super().__init__(made, (*faults.PUBLISHING, *faults.CAPTURING))
        self.shop = made
        # The first window makes the slot: changes before it are not captured.
        for _ in range(chance.randrange(2)):
            made.victim("begin", fault=chance.choice(self.points), alone=True).wait()
        made.run("begin")

    def feed(self, chance: random.Random) -> None:
        self.shop.change(chance.randrange(1, 80))

    def check(self) -> int:
        self.shop.drain(f"drain{self.number}")
        return self.shop.compare()


class FromBinlog(Subject):
    """Changes of a MariaDB table in a topic, which begins with the rows that are there."""

    EVERY = 3
    """Steps after which all is read and compared, and another pipeline begins with the rows: meanwhile chunks are under way."""

    def __init__(self, made: CapturedTable, unique: Callable[[str], str]) -> None:
        super().__init__(made, faults.PUBLISHING)
        self.table, self._unique = made, unique

    def feed(self, chance: random.Random) -> None:
        # A truncate would wait for the session of a frozen attempt.
        self.table.change(chance.randrange(1, 80), truncates=False)

    def check(self) -> int:
        if self.number % self.EVERY:
            return 0
        self.table.drain(f"drain{self.number}")
        settled(self.table.topic)
        compared = self.table.compare()
        self.table.begin(self._unique("binlog"))
        return compared


class WithDeadLetters(Subject):
    """Good records in a table, bad ones in a topic of dead letters, which are sent again, and become rows in replays."""

    def __init__(self, flow: Pipeline) -> None:
        super().__init__(flow, (*faults.POINTS, *faults.DEAD_LETTERS))
        self.flow, self.dead, self._sent = flow, f"dead-{flow.topic}", 0
        self._resent: set[tuple[int, int]] = set()
        self._mended: set[tuple[int, int]] = set()
        with flow.postgres.connect(autocommit=True) as connection:
            connection.execute(f'ALTER TABLE "{flow.place}" ADD COLUMN "window" text')
        flow.options |= {
            "sink": PostgresSink(conn_id="warehouse", table=flow.place, window_column="window"),
            "errors_tolerance": "all",
            "errors_deadletterqueue_topic_name": self.dead,
            "errors_deadletterqueue_topic_replication_factor": 1,
        }

    def feed(self, chance: random.Random) -> None:
        count = chance.randrange(20, 300)
        produce_mixed(self.flow, count, 10, first=self._sent)
        self._sent += count

    @property
    def more_commands(self) -> Sequence[Callable[[random.Random], str | None]]:
        return (self._send_again, self._send_again, self._replay, self._replay)

    def _bad_of_last_window(self) -> set[tuple[int, int]]:
        """Return the places of the bad records of the last window that were not sent again."""
        spans = {r["partition"]: range(r["start"], r["end"]) for r in self.flow.reports[-1]["ranges"]}
        bad = {(p, o) for p, o, _, value in self.flow.events() if is_bad(value) and o in spans.get(p, ())}
        return bad - self._resent

    def _send_again(self, chance: random.Random) -> str | None:
        """Send the dead letters of the last window again. Those that a replay has made rows stay where they are."""
        from airflow_kafka_spark.errors import ResendRefused

        bad = self._bad_of_last_window() - self._mended
        try:
            done = self._ask(resend, window=int(self.flow.reports[-1]["window"]))
        except ResendRefused:
            assert not bad, "dead letters were not sent again"
            return None
        assert sum(part.records for part in done.sent_again) == len(bad)
        self._resent |= bad
        settled(self.flow.topic)
        self.next_run()
        self.run()
        return "dead letters sent again"

    def _replay(self, chance: random.Random) -> str | None:
        """Replay the last window. A lenient format makes rows of its bad records, except of those that were sent again."""
        if not any(r["start"] < r["end"] for r in self.flow.reports[-1]["ranges"]):
            return None
        bad, mends = self._bad_of_last_window(), chance.random() < 0.6
        options: dict[str, Any] = {"value": Lenient(SCHEMA)} if mends else {}
        facts = {**self.facts, "max_tries": 1}
        self._ask(replay, window=int(self.flow.reports[-1]["window"]))
        if chance.random() < 0.5:
            point = chance.choice(self.points)
            self.attempts.victim(self.run_id, fault=point, facts=facts, alone=True, **options).wait()
        self.attempts.run(self.run_id, facts=facts, **options)
        self._mended = self._mended | bad if mends else self._mended - bad
        return "lenient replay" if mends else "replay"

    def check(self) -> int:
        return sum(check_sorted_out(self.flow, self.dead, [row_of(NOBODY)] * len(self._mended)))


class IntoTwoSinks(Subject):
    """Records that a filter sends to another sink, and the rest in the operator's own."""

    EVERY = 7

    def __init__(self, flow: Pipeline) -> None:
        super().__init__(flow, faults.POINTS)
        self.flow, self.other = flow, Other(flow, "files")
        self.other.take(self.EVERY)

    def __str__(self) -> str:
        return f"IntoTwoSinks {self.flow.kind}"

    def feed(self, chance: random.Random) -> None:
        self.flow.produce(chance.randrange(20, 300))

    def check(self) -> int:
        events = [(p, o, row_of(value)) for p, o, _, value in self.flow.events() if value is not None]
        rows = [row for *_, row in events]
        # Whether records are lost in a window, or are not in it, or are in the topic twice.
        assert len({row[0] for row in rows}) == len(rows) == self.flow._produced, "the topic does not have each record once"
        ends = {r["partition"]: r["end"] for r in self.flow.reports[-1]["ranges"]}
        reached = {p: max((o + 1 for q, o, _ in events if q == p), default=0) for p in ends}
        assert ends == reached, f"the last window ends at {ends}, the topic at {reached}"
        own, other = str(self.flow.kind), "other"
        found = [*((own, row) for row in self.flow.rows()), *((other, row) for row in self.other.rows())]
        return same_multiset(((own if row[0] % self.EVERY else other, row) for row in rows), found)


class ByInterval(Subject):
    """Records of one topic by data intervals of a minute, which come in any order, are replayed, and go into archives early."""

    def __init__(self, flow: Pipeline, chance: random.Random) -> None:
        super().__init__(flow, (*faults.POINTS, *faults.PLANNING, *faults.GROUP))
        self.flow, self._sent, self._end = flow, 0, 0
        self._waiting: list[int] = []
        self._current, self._chance = 0, chance
        self._done: dict[int, dict[str, Any]] = {}
        flow.options |= {"window": "interval", "grace": 0, "keep_windows": 3}
        flow.make = make_archiving
        with flow.postgres.connect(autocommit=True) as connection:
            connection.execute(f'ALTER TABLE "{flow.place}" ADD COLUMN "window" text')
        flow.options["sink"] = PostgresSink(conn_id="warehouse", table=flow.place, window_column="window")

    @property
    def run_id(self) -> str:
        return f"minute{self._current}"

    @property
    def facts(self) -> dict[str, Any]:
        start = BEGIN + timedelta(minutes=self._current)
        return {"interval": (start, start + timedelta(minutes=1))}

    def feed(self, chance: random.Random) -> None:
        """Write the records of some minutes, most of them in order, a few of them late, one of the future now and then."""
        producer = Producer({**self.flow.kafka.connection_extra(), "enable.idempotence": True})
        for _ in range(chance.randrange(1, 4)):
            for _ in range(chance.randrange(3, 40)):
                late = chance.randrange(0, 90) if chance.random() < 0.05 else 0
                at = BEGIN + timedelta(minutes=self._end, seconds=chance.uniform(0, 60) - late)
                if chance.random() < 0.01:
                    at = datetime.now(timezone.utc) + timedelta(days=900)
                self._send(producer, at, chance.randrange(3))
            self._waiting.append(self._end)
            self._end += 1
        # A boundary lies before the first record at or after it: each partition needs one.
        for partition in range(3):
            self._send(producer, BEGIN + timedelta(minutes=self._end), partition)
        assert producer.flush(60) == 0

    def _send(self, producer: Producer, at: datetime, partition: int) -> None:
        producer.produce(
            self.flow.topic, order(self._sent), b"%d" % self._sent, partition, timestamp=round(at.timestamp() * 1000)
        )
        self._sent += 1

    def next_run(self) -> None:
        super().next_run()
        self._current = self._waiting.pop(self._chance.randrange(len(self._waiting)))

    def run(self, **facts: Any) -> dict[str, Any]:
        self._done[self._current] = super().run(**facts)
        return self._done[self._current]

    @property
    def more_commands(self) -> Sequence[Callable[[random.Random], str | None]]:
        return (self._clear_and_replay, self._clear_and_replay, self._replay_any, self._replay_any, self._lose_records)

    def _lose_records(self, chance: random.Random) -> str | None:
        """No interval may go into a table that has lost the record of the latest one, as a database that was restored has."""
        from airflow_kafka_spark.errors import SinkRecordMissing

        if not any(report["records_read"] for report in self._done.values()):
            return None
        self.feed(chance)
        self.next_run()
        kept = f'"kept_{self.flow.place}"'
        with self.flow.postgres.connect(autocommit=True) as connection:
            mine = [f"{self.flow.name}.%"]
            connection.execute(f"CREATE TABLE {kept} AS SELECT * FROM airflow_windows WHERE pipeline LIKE %s", mine)
            connection.execute("DELETE FROM airflow_windows WHERE pipeline LIKE %s", mine)
            try:
                self.run()
            except SinkRecordMissing:
                pass
            else:
                raise AssertionError("an interval went into a table that has lost the others")
            finally:
                connection.execute(f"INSERT INTO airflow_windows SELECT * FROM {kept}")
                connection.execute(f"DROP TABLE {kept}")
        self.run()
        return "records that were gone"

    def _clear_and_replay(self, chance: random.Random) -> str:
        self.run(max_tries=self.number)
        return "clear and replay"

    def _replay_any(self, chance: random.Random) -> str:
        """Replay an interval of any age, now and then one that dies meanwhile."""
        self._current = chance.choice(sorted(self._done))
        self.number += 1
        facts = {**self.facts, "max_tries": self.number}
        for _ in range(chance.randrange(2)):
            self.attempts.victim(self.run_id, fault=chance.choice(self.points), facts=facts, alone=True).wait()
        self.run(max_tries=self.number)
        return "replay of any interval"

    def check(self) -> int:
        while self._waiting:
            self.next_run()
            self.run()
        # Records before the first interval belong to an interval that no run moves.
        starts = {r["partition"]: r["start"] for r in self._done[0]["ranges"]}
        ends = {r["partition"]: r["end"] for r in self._done[max(self._done)]["ranges"]}
        expected = [row_of(value) for p, o, _, value in self.flow.events() if starts[p] <= o < ends[p]]
        return same_multiset(expected, self.flow.rows())


@dataclass(frozen=True)
class Kind:
    """A kind of pipeline.

    :param name: name of its pipelines.
    :param make: builds a pipeline with its own topic, sink and ledger. Its servers and files live as long as the stack.
    :param renews: False if there can be only one at a time, which starts again by itself.
    """

    name: str
    make: Callable[[ExitStack], Subject]
    renews: bool = True


def kinds(
    kafka: EmbeddedKafka,
    postgres: EmbeddedPostgres,
    unique: Callable[[str], str],
    directory: Path,
    chance: random.Random,
    stack: ExitStack,
) -> Iterator[Kind]:
    """Yield the kinds of pipelines.

    :param stack: ends what all pipelines share.
    """

    # Only deployments with names can be distinguished.
    stack.enter_context(variable("AIRFLOW__KAFKA_SPARK__DEPLOYMENT", "soak"))
    stack.enter_context(usual_limits())

    def place(name: str) -> Path:
        found = directory / unique(name)
        found.mkdir()
        return found

    def flow(own: ExitStack, kind: str, **options: Any) -> Pipeline:
        return own.enter_context(pipeline(kind, kafka, lambda: postgres, unique, place(kind), **options))

    def to_sink(kind: str, own: ExitStack) -> Subject:
        options = {"split_records": 50} if kind == "postgres-split" else {}
        return ToSink(flow(own, kind, **options))

    for kind in ("files", "manifest", "postgres", "postgres-split", "postgres-upsert", "delta", "iceberg"):
        yield Kind(f"ToSink {kind}", partial(to_sink, kind))
    # Not in `make test`: another process has the packages of a store (tests/test_s3.py).
    if "SOAK_MINUTES" in os.environ and importlib.util.find_spec("moto"):
        store = stack.enter_context(EmbeddedS3())
        for kind in STORE_KINDS:
            yield Kind(f"ToSink {kind}", lambda own, kind=kind: ToSink(flow(own, kind, store=store)))
    yield Kind("WithDeadLetters", lambda own: WithDeadLetters(flow(own, "postgres")))
    yield Kind("IntoTwoSinks files", lambda own: IntoTwoSinks(flow(own, "files")))
    yield Kind("IntoTwoSinks postgres", lambda own: IntoTwoSinks(flow(own, "postgres")))
    yield Kind("ByInterval", lambda own: ByInterval(flow(own, "postgres"), chance))
    yield Kind("BetweenTopics", lambda own: BetweenTopics(own.enter_context(relay(kafka, unique, place("relay")))))

    def from_log(own: ExitStack) -> Subject:
        return FromLog(own.enter_context(captured(kafka, postgres, unique, place("log"), chance.randrange(10**6))), chance)

    yield Kind("FromLog", from_log)
    # Not in the minute of `make test`: the server takes some seconds to start.
    if "SOAK_MINUTES" in os.environ and not missing():

        def from_binlog(own: ExitStack) -> Subject:
            log = Binlog(server := own.enter_context(log_server()), own.enter_context(server.connect()))
            options = {"snapshot": "initial", "snapshot_chunk_rows": 3, "snapshot_chunks_per_window": 2}
            made = table_with_log(kafka, log, unique, place("binlog"), chance.randrange(10**6), **options)
            return FromBinlog(own.enter_context(made), unique)

        yield Kind("FromBinlog", from_binlog, renews=False)
    yield Kind("FromTable", lambda own: FromTable(own.enter_context(shop(kafka, postgres, unique, place("shop"))), own))
