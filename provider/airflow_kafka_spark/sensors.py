"""Sensors: wait for lag, for a complete interval, for another pipeline's window, or for the log of a database.

Each can poke or be deferred. Those of Kafka check the cluster with the probe of their trigger
(:mod:`~airflow_kafka_spark.triggers`).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    AirflowSensorTimeout,
    AirflowSkipException,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)

from airflow_kafka_spark.arguments import ChecksArguments, replace_wrong_arguments
from airflow_kafka_spark.errors import KafkaSparkError, LogBehind, Problem, ValidationError
from airflow_kafka_spark.windows.lag import Per

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.sources.base import RowSource
    from airflow_kafka_spark.triggers import (
        Instant,
        KafkaIntervalTrigger,
        KafkaLagTrigger,
        KafkaTrigger,
        KafkaWindowTrigger,
        Polling,
        Probe,
        ProbeResult,
    )

__all__ = ["KafkaIntervalSensor", "KafkaLagSensor", "KafkaWindowSensor", "SourceLogSensor"]

DEFAULT_DEFERRABLE: bool = conf.getboolean("operators", "default_deferrable", fallback=False)
"""Value of Airflow's option ``[operators] default_deferrable``."""

_LEFT_OUT_BY_NONE = frozenset(
    {"at_most_records", "at_most_seconds", "at_least_records", "at_least_seconds", "schedule", "end", "grace", "after", "since"}
)
"""Numbers and instants. A template that renders to ``None`` leaves them out, as an empty text does."""
_SPARE_SECONDS = 60.0
"""Seconds after the trigger's own timeout at which Airflow ends the wait, if the trigger has not."""


class KafkaSensor(ChecksArguments, BaseSensorOperator):
    """A sensor that checks a condition at a Kafka cluster, and returns the observed values once it holds.

    The sensor follows the contract of Airflow's sensors, also when it is deferred: ``mode``, ``poke_interval`` (the interval of
    the trigger's checks, too), ``timeout``, ``soft_fail`` (a timeout is a skip), ``never_fail`` and ``silent_fail``. It checks
    once when it starts, and defers only if the condition does not hold yet.

    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param deferrable: True waits in the triggerer, False in a worker; default: Airflow's ``[operators] default_deferrable``.
    :param retry_timeout: seconds (or a ``timedelta``) for which brokers may be down before the sensor fails; default 300. At most
        ``timeout``.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic fails the sensor at once.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
    """

    def __init__(
        self,
        *,
        kafka_conn_id: str = "kafka_default",
        deferrable: bool = DEFAULT_DEFERRABLE,
        retry_timeout: float | timedelta = 300.0,
        wait_for_topic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.kafka_conn_id = kafka_conn_id
        self.deferrable = deferrable
        self.retry_timeout = retry_timeout.total_seconds() if isinstance(retry_timeout, timedelta) else retry_timeout
        self.wait_for_topic = wait_for_topic
        self._open_probe: tuple[Probe, KafkaHook] | None = None

    left_out_by_none = _LEFT_OUT_BY_NONE

    # --- for subclasses ---

    @abstractmethod
    def make_trigger(self, context: Mapping[str, Any], polling: Polling) -> KafkaTrigger:
        """Return the trigger that waits for the same condition, from the rendered arguments.

        :raises ValidationError: an argument that the trigger's probe does not check is invalid.
        """

    # --- for Airflow ---

    def execute(self, context: Context) -> Any:
        """Wait until the condition holds, and return the observed values.

        :raises ValidationError: the arguments have problems; the message names all of them.
        :raises AirflowSensorTimeout: the condition did not hold in time.
        :raises KafkaSparkError: the check failed, because a topic is missing or brokers are down for too long.
        """
        try:
            self._refuse_wrong_types(context)
            if self.deferrable:
                return self._check_or_defer(context)
            return super().execute(context)
        except KafkaSparkError as error:
            self._skip_if_never_fail(error)
            raise
        finally:
            self._close()

    def poke(self, context: Mapping[str, Any]) -> PokeReturnValue:
        """Return the result of one check, which is repeated for ``retry_timeout`` seconds while brokers are down."""
        from airflow_kafka_spark.triggers import RETRY_SECONDS, RetryBudget

        budget = RetryBudget(min(self.retry_timeout, self.timeout))
        while True:
            try:
                observed = self._check(context)
                return PokeReturnValue(observed.done, observed.value)
            except KafkaSparkError as error:
                if self._is_awaited(error):
                    self.log.info("%s", error)
                    return PokeReturnValue(False)
                if not budget.allows(error):
                    raise
                self.log.warning("Checking again: %s", error)
                self._reconnect()
                time.sleep(min(RETRY_SECONDS, self.poke_interval))

    def resume_from_trigger(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> Any:
        """Return the value of the trigger's event, or raise its failure."""
        from airflow_kafka_spark.triggers import raise_failure

        if event["status"] == "success":
            return event["value"]
        if event["status"] == "timeout":
            raise AirflowSensorTimeout(f"Sensor has timed out after {self.timeout:g} s. {event['line']}")
        raise_failure(event)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except KafkaSparkError as error:
            self._skip_if_never_fail(error)
            raise

    # --- checks ---

    def _refuse_wrong_types(self, context: Mapping[str, Any]) -> None:
        """Make sure that arguments have the declared types, and that no template renders to ``None``.

        :raises ValidationError: they do not; names all other problems, too.
        """
        sound, wrong = replace_wrong_arguments(self)
        wrong = [*self.rendered_none, *wrong]
        if not wrong:
            return
        others: Sequence[Problem] = ()
        try:
            sound.make_trigger(context, sound._make_polling()).make_probe()
        except ValidationError as error:
            others = error.problems
        known = {problem.where for problem in wrong}
        raise ValidationError([*wrong, *(problem for problem in others if problem.where not in known)])

    def _check_or_defer(self, context: Mapping[str, Any]) -> Any:
        from airflow_kafka_spark.triggers import RetryBudget

        polling = self._make_polling(give_up_at=time.time() + self.timeout)
        trigger = self.make_trigger(context, polling)
        budget = RetryBudget.of(polling)
        try:
            observed = self._check(context)
            if observed.done:
                return observed.value
        except ValidationError:
            raise
        except KafkaSparkError as error:
            if not budget.allows(error):
                raise
            self.log.warning("Waiting in the triggerer: %s", error)
        self.defer(trigger=trigger, method_name="resume_from_trigger", timeout=timedelta(seconds=self.timeout + _SPARE_SECONDS))

    def _check(self, context: Mapping[str, Any]) -> ProbeResult:
        if self._open_probe is None:
            from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

            probe = self.make_trigger(context, self._make_polling()).make_probe()
            self._open_probe = probe, KafkaHook(self.kafka_conn_id)
        probe, hook = self._open_probe
        observed = probe.check(hook)
        self.log.info("%s", observed.line)
        return observed

    def _reconnect(self) -> None:
        """Let the next check look the connection up again, which may have been edited. The probe keeps what it has observed."""
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

        if self._open_probe is not None:
            probe, hook = self._open_probe
            hook.close()
            self._open_probe = probe, KafkaHook(self.kafka_conn_id)

    def _make_polling(self, give_up_at: float | None = None) -> Polling:
        from airflow_kafka_spark.triggers import Polling

        return Polling(
            self.kafka_conn_id, self.poke_interval, self.retry_timeout, self.wait_for_topic, give_up_at, self.silent_fail
        )

    def _is_awaited(self, error: KafkaSparkError) -> bool:
        from airflow_kafka_spark.errors import TopicMissing

        return self.wait_for_topic and isinstance(error, TopicMissing)

    def _skip_if_never_fail(self, error: KafkaSparkError) -> None:
        if self.never_fail:
            raise AirflowSkipException("Skipping due to never_fail is set to True.") from error

    def _close(self) -> None:
        if self._open_probe is not None:
            self._open_probe[1].close()
            self._open_probe = None


class KafkaLagSensor(KafkaSensor):
    """Waits until a consumer's lag is small enough, or large enough.

    The lag in records is counted from the first record that the consumer has not read to the last stable offset. It is an upper
    bound, since compacted and aborted records in between count; but it is 0 exactly if there is nothing to read: a trailing
    transaction marker does not count. The lag in seconds is the age of that first record by its own timestamp. For a group that
    has committed nothing, or whose offsets have expired, all records in the topics count, and the status is ``STOP``.

    Returns the lag: ``records``, ``seconds``, ``status`` and ``reason``, ``measured_at``, and these values by partition.

    :param group_id: consumer group whose committed offsets are compared with the topics; default None.
    :param pipeline: pipeline whose position in the ledger is compared with the topics. If ``group_id`` is given, too, the group
        is used until the ledger has the pipeline. Default None.
    :param topics: topic, or several; required for a group. Default None: for a pipeline, all topics that it has read.
    :param at_most_records: maximum number of unread records; default None.
    :param at_most_seconds: maximum age of the oldest unread record (seconds or a ``timedelta``); if both maxima are given,
        both have to hold. Default None.
    :param at_least_records: minimum number of unread records; default None.
    :param at_least_seconds: minimum age of the oldest unread record (seconds or a ``timedelta``); if both minima are given, one
        is enough. Default None.
    :param per: ``total`` (default) compares the sum of all partitions; ``partition`` compares each partition: none of them may
        exceed a maximum, and one that reaches a minimum is enough.
    :param schedule: time from one run of the consumer to the next (seconds or a ``timedelta``). A consumer that waits for its
        next run is not reported as stopped. Default for a pipeline: its usual interval, for a group: unknown.
    :param fail_on: statuses (``WARN``, ``STALL``, ``STOP``, ``REWIND``) that fail the sensor; with others it continues to wait.
        Default none.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param deferrable: True waits in the triggerer, False in a worker; default: Airflow's ``[operators] default_deferrable``.
    :param retry_timeout: seconds (or a ``timedelta``) for which brokers may be down before the sensor fails; default 300. At most
        ``timeout``.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic fails the sensor at once.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
    """

    template_fields: Sequence[str] = (
        "kafka_conn_id", "group_id", "pipeline", "topics", "at_most_records", "at_most_seconds", "at_least_records",
        "at_least_seconds", "per", "schedule", "fail_on", "ledger_topic",
    )  # fmt: skip

    def __init__(
        self,
        *,
        group_id: str | None = None,
        pipeline: str | None = None,
        topics: str | Sequence[str] | None = None,
        at_most_records: int | str | None = None,
        at_most_seconds: float | timedelta | str | None = None,
        at_least_records: int | str | None = None,
        at_least_seconds: float | timedelta | str | None = None,
        per: Per = "total",
        schedule: float | timedelta | str | None = None,
        fail_on: str | Sequence[str] = (),
        ledger_topic: str = "airflow-windows",
        kafka_conn_id: str = "kafka_default",
        deferrable: bool = DEFAULT_DEFERRABLE,
        retry_timeout: float | timedelta = 300.0,
        wait_for_topic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kafka_conn_id=kafka_conn_id,
            deferrable=deferrable,
            retry_timeout=retry_timeout,
            wait_for_topic=wait_for_topic,
            **kwargs,
        )
        self.group_id = group_id
        self.pipeline = pipeline
        self.topics = topics
        self.at_most_records = at_most_records
        self.at_most_seconds = at_most_seconds
        self.at_least_records = at_least_records
        self.at_least_seconds = at_least_seconds
        self.per = per
        self.schedule = schedule
        self.fail_on = fail_on
        self.ledger_topic = ledger_topic

    def make_trigger(self, context: Mapping[str, Any], polling: Polling) -> KafkaLagTrigger:
        from airflow_kafka_spark.triggers import KafkaLagTrigger

        return KafkaLagTrigger(
            group_id=self.group_id,
            pipeline=self.pipeline,
            topics=self.topics,
            at_most_records=self.at_most_records,
            at_most_seconds=self.at_most_seconds,
            at_least_records=self.at_least_records,
            at_least_seconds=self.at_least_seconds,
            per=self.per,
            schedule=self.schedule,
            fail_on=self.fail_on,
            ledger_topic=self.ledger_topic,
            once=True,
            **asdict(polling),
        )


_TIMETABLES = (
    'Give the DAG `schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC")` or `CronTriggerTimetable(..., '
    'timezone="UTC", interval=timedelta(hours=1))`: in Airflow 3 a cron text or a timedelta makes intervals without width. Or '
    "name the instant to wait for with `end=`"
)


class KafkaIntervalSensor(KafkaSensor):
    """Waits until no more records of an interval are expected in Kafka.

    A partition has passed the interval's end once it has a committed record whose timestamp is at or after the end. A partition
    without one is idle once ``grace`` is over after the end, unless an open transaction may still add records. The sensor
    succeeds when every partition has passed or is idle.

    Returns ``end``; ``offsets``, the first offset at or after the end of each partition that has passed; and the ``idle`` ones.

    :param topics: topic, or several.
    :param end: end of the interval: a ``datetime``, text in ISO 8601, or seconds since the epoch; default: the end of the DAG
        run's data interval.
    :param grace: seconds (or a ``timedelta``) after the end from which a partition without a record at or after the end counts as
        idle; default 60. It should cover the delay of records and the difference of clocks.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param deferrable: True waits in the triggerer, False in a worker; default: Airflow's ``[operators] default_deferrable``.
    :param retry_timeout: seconds (or a ``timedelta``) for which brokers may be down before the sensor fails; default 300. At most
        ``timeout``.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic fails the sensor at once.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
    :raises ValidationError: (by ``execute``) among other things, the DAG run has no data interval, or one without width.
    """

    template_fields: Sequence[str] = ("kafka_conn_id", "topics", "end", "grace")

    def __init__(
        self,
        *,
        topics: str | Sequence[str],
        end: datetime | str | float | None = None,
        grace: timedelta | float | str = timedelta(minutes=1),
        kafka_conn_id: str = "kafka_default",
        deferrable: bool = DEFAULT_DEFERRABLE,
        retry_timeout: float | timedelta = 300.0,
        wait_for_topic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kafka_conn_id=kafka_conn_id,
            deferrable=deferrable,
            retry_timeout=retry_timeout,
            wait_for_topic=wait_for_topic,
            **kwargs,
        )
        self.topics = topics
        self.end = end
        self.grace = grace

    def make_trigger(self, context: Mapping[str, Any], polling: Polling) -> KafkaIntervalTrigger:
        from airflow_kafka_spark.triggers import IntervalProbe, KafkaIntervalTrigger

        end: Instant = self.end
        problems: list[Problem] = []
        if end is None:
            end, problems = _find_end_of_run(context)
        if problems:
            from airflow_kafka_spark.triggers import raise_problems

            # Report all problems at once: the end of 0 is a placeholder for the missing one, and is not used.
            raise_problems([*problems, *IntervalProbe(topics=self.topics, end=0, grace=self.grace).find_problems()])
        return KafkaIntervalTrigger(topics=self.topics, end=end, grace=self.grace, **asdict(polling))


def _find_end_of_run(context: Mapping[str, Any]) -> tuple[datetime | None, list[Problem]]:
    dag_run = context.get("dag_run")
    start, end = (getattr(dag_run, f"data_interval_{side}", None) for side in ("start", "end"))
    if start is None or end is None:
        found = "this DAG run has no data interval (it was triggered by hand, by an asset, or is a partition's)"
        return None, [Problem("end", found, _TIMETABLES)]
    if start >= end:
        found = f"this DAG run's data interval has no width: it starts and ends at {end.isoformat()}"
        return None, [Problem("end", found, _TIMETABLES)]
    return end, []


class KafkaWindowSensor(KafkaSensor):
    """Waits until another pipeline has completed a window, according to its ledger.

    The window has to meet all of ``run`` (or ``external_task_id``), ``after`` and ``since`` that are given. If none is given, it
    is any window that was completed since this DAG run was due (``run_after``). A window belongs to the run that planned it, even
    if another run has finished it. The ledger keeps the last ``keep_windows`` windows.

    Returns ``pipeline``, ``window`` (its number as text, or the name of its data interval), ``run`` and its ``report``.

    :param pipeline: name of the upstream pipeline. Default None: with ``external_task_id``, it is ``<dag_id>.<task_id>``.
    :param run: run that planned the window, as ``<dag_id>/<run_id>/<task_id>``; default None, any run.
    :param external_task_id: task that planned the window, in the run of this DAG, or in the run of ``external_dag_id`` that has
        the same run id; default None.
    :param external_dag_id: DAG of ``external_task_id``; default: this DAG.
    :param after: lower bound of the window's number, exclusive, for example from a report; default None.
    :param since: earliest time of completion, a ``datetime`` or text in ISO 8601; default None.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param deferrable: True waits in the triggerer, False in a worker; default: Airflow's ``[operators] default_deferrable``.
    :param retry_timeout: seconds (or a ``timedelta``) for which brokers may be down before the sensor fails; default 300. At most
        ``timeout``.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic fails the sensor at once.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
    """

    template_fields: Sequence[str] = (
        "kafka_conn_id",
        "pipeline",
        "run",
        "external_task_id",
        "external_dag_id",
        "after",
        "since",
        "ledger_topic",
    )

    def __init__(
        self,
        *,
        pipeline: str | None = None,
        run: str | None = None,
        external_task_id: str | None = None,
        external_dag_id: str | None = None,
        after: int | str | None = None,
        since: datetime | str | None = None,
        ledger_topic: str = "airflow-windows",
        kafka_conn_id: str = "kafka_default",
        deferrable: bool = DEFAULT_DEFERRABLE,
        retry_timeout: float | timedelta = 300.0,
        wait_for_topic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kafka_conn_id=kafka_conn_id,
            deferrable=deferrable,
            retry_timeout=retry_timeout,
            wait_for_topic=wait_for_topic,
            **kwargs,
        )
        self.pipeline = pipeline
        self.run = run
        self.external_task_id = external_task_id
        self.external_dag_id = external_dag_id
        self.after = after
        self.since = since
        self.ledger_topic = ledger_topic

    def make_trigger(self, context: Mapping[str, Any], polling: Polling) -> KafkaWindowTrigger:
        from airflow_kafka_spark.triggers import KafkaWindowTrigger, WindowProbe, raise_problems
        from airflow_kafka_spark.windows.model import TaskInstanceKey

        ti, run, pipeline, since = context["ti"], self.run, self.pipeline, self.since
        problems = self._find_argument_problems()
        if self.external_task_id:
            dag_id = self.external_dag_id or ti.dag_id
            run = run or TaskInstanceKey(dag_id, ti.run_id, self.external_task_id).run
            pipeline = pipeline or f"{dag_id}.{self.external_task_id}"
        if not run and self.after is None and since is None:
            since = getattr(context.get("dag_run"), "run_after", None)
        if problems:
            named = {problem.where for problem in problems}
            after = 0 if "after" in named else self.after
            probe = WindowProbe(pipeline=pipeline or "", run=run, after=after, since=since, ledger_topic=self.ledger_topic)
            raise_problems([*problems, *(problem for problem in probe.find_problems() if problem.where not in named)])
        return KafkaWindowTrigger(
            pipeline=pipeline or "",
            run=run,
            after=self.after,
            since=since,
            ledger_topic=self.ledger_topic,
            **asdict(polling),
        )

    def _find_argument_problems(self) -> list[Problem]:
        problems = []
        if self.run and (self.external_task_id or self.external_dag_id):
            problems.append(Problem("run", "`run` and `external_task_id` are given together", "Give one of them"))
        if self.external_dag_id and not self.external_task_id:
            problems.append(Problem("external_dag_id", "it is given without a task", "Give `external_task_id` as well"))
        if isinstance(self.after, str) and not self.after.strip().isdecimal():
            # A template has rendered nothing. Without this check, any window would match.
            problems.append(Problem("after", f"`{self.after}` is not a window's number"))
        return problems


class SourceLogSensor(ChecksArguments, BaseSensorOperator):
    """Waits until a pipeline has read all but a number of bytes of a database's log, and fails if it is too far behind.

    At each check, the server measures the log after the last complete window, so the number is known also while the pipeline is
    paused. While the pipeline has no complete window, the sensor waits. It changes nothing, and does not wait in the triggerer.

    Returns ``pipeline``, ``bytes_behind`` and ``window``, the number of the last complete window.

    :param source: source of the pipeline: a ``PostgresCdcSource`` or a ``MySqlCdcSource``.
    :param pipeline: name of the pipeline, by default ``<dag_id>.<task_id>`` of its task.
    :param at_most_bytes: size in bytes of the log after the last complete window down to which the sensor waits; default None: it
        does not wait.
    :param fail_above_bytes: size in bytes of the log after the last complete window above which the sensor fails at once; default
        None: it does not fail. At least one of the two is required.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
    """

    template_fields: Sequence[str] = ("pipeline", "ledger_topic", "kafka_conn_id")
    rendered_parts = ("source",)

    def __init__(
        self,
        *,
        source: RowSource,
        pipeline: str,
        at_most_bytes: int | None = None,
        fail_above_bytes: int | None = None,
        ledger_topic: str = "airflow-windows",
        kafka_conn_id: str = "kafka_default",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.source = source
        self.pipeline = pipeline
        self.at_most_bytes = at_most_bytes
        self.fail_above_bytes = fail_above_bytes
        self.ledger_topic = ledger_topic
        self.kafka_conn_id = kafka_conn_id

    def poke(self, context: Mapping[str, Any]) -> PokeReturnValue:
        """Return the result of one check.

        :raises ValidationError: an argument is invalid.
        :raises LogBehind: the pipeline is more than ``fail_above_bytes`` behind.
        :raises SourceUnavailable: the database does not answer.
        :raises SourceRejected: the database no longer has the log after the last window, or is another one.
        """
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
        from airflow_kafka_spark.ledger.topic import LedgerReader

        self._refuse_wrong_arguments()
        with KafkaHook(self.kafka_conn_id) as hook:
            memory = LedgerReader(self.pipeline, self.ledger_topic).read(hook)
        position = memory.position.source
        if position is None:
            self.log.info("Pipeline %s has no complete window yet", self.pipeline)
            return PokeReturnValue(False)
        behind = self.source.count_bytes_behind(position)
        if behind is None:
            raise ValidationError([_make_no_log_problem(self.source)])
        self.log.info("%s bytes of the log lie after the last window of pipeline %s", f"{behind:,}", self.pipeline)
        if self.fail_above_bytes is not None and behind > self.fail_above_bytes:
            raise LogBehind(self.pipeline, behind, self.fail_above_bytes)
        value = {"pipeline": self.pipeline, "bytes_behind": behind, "window": memory.last_number}
        return PokeReturnValue(self.at_most_bytes is None or behind <= self.at_most_bytes, value)

    def _refuse_wrong_arguments(self) -> None:
        from airflow_kafka_spark.sources.base import RowSource

        sound, problems = replace_wrong_arguments(self)
        problems = [*self.rendered_none, *problems]
        if isinstance(self.source, RowSource) and type(self.source).count_bytes_behind is RowSource.count_bytes_behind:
            problems.append(_make_no_log_problem(self.source))
        if not sound.pipeline.strip():
            problems.append(Problem("pipeline", "it is empty", "Name the pipeline, as `<dag_id>.<task_id>`"))
        limits = {"at_most_bytes": sound.at_most_bytes, "fail_above_bytes": sound.fail_above_bytes}
        for where, value in limits.items():
            if value is not None and value < 0:
                problems.append(Problem(where, f"it is {value}; expected a number of bytes, at least 0"))
        if self.at_most_bytes is None and self.fail_above_bytes is None:
            problems.append(Problem("at_most_bytes", "nothing to wait for is given", "Give it, or `fail_above_bytes`"))
        if problems:
            raise ValidationError(problems)


def _make_no_log_problem(source: RowSource) -> Problem:
    found = f"it is a {type(source).__name__}, which reads no log of a database"
    return Problem("source", found, "Give the PostgresCdcSource or MySqlCdcSource of the pipeline")
