"""Random faults at random moments, for pipelines of all kinds, until the time is over. After each fault, every record is counted.

The choices come from one seed. The seed cannot repeat the machine's timing: which of two processes is first.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from airflow_kafka_spark.errors import KafkaUnavailable
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.testing._processes import wait_until
from tests.soak.subjects import Kind, Subject, variable
from tests.support import workers
from tests.support.runs import Victim
from tests.support.victim import TIMEOUT

ANEW = 0.15
"""Share of the steps that begin with a new pipeline."""
LONGEST = 4.0
"""Seconds after the start of an attempt within which something random happens to it."""


@dataclass
class Campaign:
    """The faults of pipelines, and their frequency.

    :param kafka: their broker, which is killed, too.
    :param kinds: the kinds of pipelines, of which there is one each at a time.
    :param stack: ends the pipelines.
    :param seed: decides every choice.
    :param say: takes a line for each step.
    :ivar counts: how often each trouble happened.
    :ivar compared: how many records were compared.
    :ivar last: the step that is under way.
    :ivar logs: returns the ends of the logs of its attempts.
    """

    kafka: EmbeddedKafka
    kinds: Sequence[Kind]
    stack: ExitStack
    seed: int
    say: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    last: str = ""
    logs: Callable[[], list[str]] = list

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._own = [self.stack.enter_context(ExitStack()) for _ in self.kinds]
        self._subjects: list[Subject | None] = [None for _ in self.kinds]

    def _next_subject(self) -> Subject:
        """Return a pipeline, now and then a new one of its kind, so that the trouble of the step meets its first window."""
        at = self.chance.randrange(len(self.kinds))
        subject = self._subjects[at]
        if subject is not None and self.kinds[at].renews and self.chance.random() < ANEW:
            self._own[at].close()
            subject = None
            self.counts["new pipeline"] += 1
        # A short run does not come to most kinds: their topics and tables are made when they are needed.
        if subject is None:
            subject = self._subjects[at] = self.kinds[at].make(self._own[at])
        return subject

    def run(self, seconds: float, least: int) -> None:
        """Go on until so many seconds have passed; each step is finished.

        :param least: the number of steps after which it may end.
        :raises RecordsDiffer: records are lost, doubled, or other ones.
        """
        deadline, step = time.monotonic() + seconds, 0
        while step < least or time.monotonic() < deadline:
            step += 1
            subject = self._next_subject()
            self.last = f"step {step}, {subject}, its records"
            self.logs = partial(subject.attempts.tails, subject.attempts.count)
            subject.feed(self.chance)
            subject.next_run()
            trouble = self.chance.choice([*TROUBLES, *([_kill_an_executor] * 2 if subject.has_cluster else [])])
            self.last = f"step {step}, {subject}, {trouble.__name__.lstrip('_')}"
            outcome = trouble(self, subject)
            self.last += f": {outcome}"
            if outcome:
                self.counts[trouble.__name__.lstrip("_")] += 1
            self._retry(subject)
            command = subject.command(self.chance)
            self.last += f"; {command}"
            if command:
                self.counts[command.split(" at ")[0]] += 1
            compared = subject.check()
            self.compared += compared
            self.say(
                f"{step:4d}  {subject}: {outcome or 'no trouble'}; {command or 'no command'}; {compared} records as expected"
            )

    def _retry(self, subject: Subject) -> None:
        """Run the task again, as Airflow does. A broker that was killed may answer only a later try on a busy machine."""
        for _ in range(2):
            try:
                subject.run()
            except KafkaUnavailable:
                self.counts["further retry"] += 1
            else:
                return
        subject.run()

    def moment(self) -> float:
        """Wait for a random moment; return its length in seconds."""
        seconds = self.chance.uniform(0, LONGEST)
        threading.Event().wait(seconds)
        return seconds


def _kill_at_a_point(campaign: Campaign, subject: Subject) -> str:
    kills = []
    for _ in range(campaign.chance.choice([1, 1, 1, 2, 3])):
        point = campaign.chance.choice(subject.points)
        victim = subject.victim(point)
        victim.wait()
        kills.append(point if victim.fired else f"{point} not reached")
    return f"killed at {', '.join(kills)}"


def _kill_at_a_moment(campaign: Campaign, subject: Subject) -> str:
    victim = subject.victim(None)
    seconds = campaign.moment()
    done = victim.process.poll() is not None
    victim.end()
    return "" if done else f"killed after {seconds:.2f} s"


def _wake_a_zombie(campaign: Campaign, subject: Subject) -> str:
    point = campaign.chance.choice(subject.points)
    victim = subject.victim(f"{point}:stop")
    if not victim.stops():
        victim.wait()
        return ""
    victim.freeze()
    subject.run()
    if campaign.chance.random() < 0.5:
        subject.feed(campaign.chance)
        subject.next_run()
        subject.run()
    victim.wake()
    victim.wait()
    return f"a zombie of {point} woke"


def _freeze_at_a_moment(campaign: Campaign, subject: Subject) -> str:
    victim = subject.victim(None)
    seconds = campaign.moment()
    victim.freeze()
    done = victim.process.poll() is not None
    subject.run()
    victim.wake()
    victim.wait()
    return "" if done else f"frozen after {seconds:.2f} s, awake after the retry"


def _start_two(campaign: Campaign, subject: Subject) -> str:
    first = subject.victim(None)
    campaign.moment()
    second = subject.victim(None)
    first.wait()
    second.wait()
    return "two attempts at once"


def _kill_a_worker(campaign: Campaign, subject: Subject) -> str:
    victim = subject.victim(None)
    seconds = campaign.moment()
    killed = _kill(_workers_of(victim), campaign.chance)
    victim.wait()
    return f"a Python worker killed after {seconds:.2f} s" if killed else ""


def _kill_the_jvm(campaign: Campaign, subject: Subject) -> str:
    victim = subject.victim(None)
    seconds = campaign.moment()
    engine = victim._engine
    killed = engine is not None and victim.process.poll() is None and _kill({engine.pid}, campaign.chance)
    victim.wait()
    return f"Spark's JVM killed after {seconds:.2f} s" if killed else ""


def _kill_an_executor(campaign: Campaign, subject: Subject) -> str:
    driver = subject.cluster
    driver.start(*subject.order)
    assert wait_until(lambda: driver.process.poll() is not None or workers.executors(driver.process.pid), 120), "no executor"
    seconds = campaign.moment()
    killed = _kill(workers.executors(driver.process.pid), campaign.chance)
    with contextlib.suppress(AssertionError):  # Spark may give up: then the retry finishes the window
        driver.result()
    return f"an executor killed after {seconds:.2f} s" if killed else ""


def _time_out(campaign: Campaign, subject: Subject) -> str:
    seconds = campaign.chance.uniform(0.1, LONGEST)
    with variable(TIMEOUT, f"{seconds:.3f}"):
        victim = subject.victim(None)
    return f"interrupted after {seconds:.2f} s" if victim.wait() else ""


def _terminate(campaign: Campaign, subject: Subject) -> str:
    victim = subject.victim(None)
    seconds = campaign.moment()
    done = victim.process.poll() is not None
    if not done:
        os.kill(victim.process.pid, signal.SIGTERM)
    victim.wait()
    return "" if done else f"terminated after {seconds:.2f} s"


def _kill_the_broker(campaign: Campaign, subject: Subject) -> str:
    victim = subject.victim(None)
    seconds = campaign.moment()
    campaign.kafka.kill()
    campaign.kafka.restart()
    victim.wait()
    return f"the broker killed after {seconds:.2f} s"


def _do_nothing(campaign: Campaign, subject: Subject) -> str:
    return ""


TROUBLES: tuple[Callable[[Campaign, Subject], str], ...] = (
    _kill_at_a_point,
    _kill_at_a_point,
    _kill_at_a_point,
    _kill_at_a_moment,
    _wake_a_zombie,
    _freeze_at_a_moment,
    _start_two,
    _kill_a_worker,
    _kill_the_jvm,
    _kill_the_broker,
    _time_out,
    _terminate,
    _do_nothing,
)


def _workers_of(victim: Victim) -> set[int]:
    engine = victim._engine
    return set() if engine is None else workers.session(engine.pid) - engine.kept


def _kill(pids: set[int], chance: random.Random) -> bool:
    if not pids:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(sorted(pids)), signal.SIGKILL)
        return True
    return False
