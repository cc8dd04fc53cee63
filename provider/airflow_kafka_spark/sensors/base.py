"""Base of all sensors: Airflow's contract of a sensor, poking or deferred, implemented with a probe."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    AirflowSensorTimeout,
    AirflowSkipException,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)

from airflow_kafka_spark.errors import KafkaSparkError, Problem, ValidationError
from airflow_kafka_spark.errors.arguments import with_sound_arguments

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.triggers.base import KafkaTrigger, Polling, Probe, ProbeResult

DEFAULT_DEFERRABLE: bool = conf.getboolean("operators", "default_deferrable", fallback=False)
"""Value of Airflow's option ``[operators] default_deferrable``."""

_SPARE_SECONDS = 60.0
"""Seconds after the trigger's own timeout at which Airflow ends the wait, if the trigger has not."""


class KafkaSensor(BaseSensorOperator):
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
        from airflow_kafka_spark.triggers.base import RETRY_SECONDS, RetryBudget

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
                time.sleep(min(RETRY_SECONDS, self.poke_interval))

    def resumed(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> Any:
        """Return the value of the trigger's event, or raise its failure."""
        from airflow_kafka_spark.triggers.base import raise_failure

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
        """Make sure that arguments have the declared types.

        :raises ValidationError: they do not; names all other problems, too.
        """
        sound, wrong = with_sound_arguments(self)
        if not wrong:
            return
        others: Sequence[Problem] = ()
        try:
            sound.make_trigger(context, sound._polling()).valid_probe()
        except ValidationError as error:
            others = error.problems
        known = {problem.where for problem in wrong}
        raise ValidationError([*wrong, *(problem for problem in others if problem.where not in known)])

    def _check_or_defer(self, context: Mapping[str, Any]) -> Any:
        from airflow_kafka_spark.triggers.base import RetryBudget

        polling = self._polling(give_up_at=time.time() + self.timeout)
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
        self.defer(trigger=trigger, method_name="resumed", timeout=timedelta(seconds=self.timeout + _SPARE_SECONDS))

    def _check(self, context: Mapping[str, Any]) -> ProbeResult:
        if self._open_probe is None:
            from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

            probe = self.make_trigger(context, self._polling()).valid_probe()
            self._open_probe = probe, KafkaHook(self.kafka_conn_id)
        probe, hook = self._open_probe
        observed = probe.check(hook)
        self.log.info("%s", observed.line)
        return observed

    def _polling(self, give_up_at: float | None = None) -> Polling:
        from airflow_kafka_spark.triggers.base import Polling

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
