"""What all sensors here have in common: Airflow's contract of a sensor, poking or deferred, over one watch."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    AirflowSensorTimeout,
    AirflowSkipException,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)

from airflow_kafka_spark.errors import KafkaSparkError, ValidationError

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.triggers.base import KafkaTrigger, Sight, Watch

# How much later than the trigger Airflow itself ends the waiting, should the trigger not come to it.
_SPARE_SECONDS = 60.0


class KafkaSensor(BaseSensorOperator):
    """A sensor that looks at a Kafka cluster, and returns what it saw when that is what it waits for.

    It keeps the contract of Airflow's sensors: ``mode``, ``poke_interval``, ``timeout``, ``soft_fail`` (a timeout is a skip),
    ``never_fail``, ``silent_fail``; deferred, too, where ``poke_interval`` is how often the trigger looks. It looks at once
    when it starts, and defers only if there is something to wait for.

    :param kafka_conn_id: connection of type ``kafka``.
    :param deferrable: wait in the triggerer rather than in a worker; default: Airflow's ``[operators] default_deferrable``.
    :param retry_timeout: seconds that brokers may be down before that is a failure; default 300. At most ``timeout``.
    :param wait_for_topic: whether a topic that does not exist is waited for; default: that is a failure at once.
    """

    def __init__(
        self,
        *,
        kafka_conn_id: str = "kafka_default",
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        retry_timeout: float | timedelta = 300.0,
        wait_for_topic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.kafka_conn_id = kafka_conn_id
        self.deferrable = deferrable
        self.retry_timeout = retry_timeout.total_seconds() if isinstance(retry_timeout, timedelta) else retry_timeout
        self.wait_for_topic = wait_for_topic
        self._looking: tuple[Watch, KafkaHook] | None = None

    # --- what a concrete sensor says ---

    @abstractmethod
    def make_trigger(self, context: Mapping[str, Any], **options: Any) -> KafkaTrigger:
        """The trigger that waits for the same, from the rendered arguments.

        :param options: of :class:`~airflow_kafka_spark.triggers.base.KafkaTrigger`.
        :raises ValidationError: something is wrong that the trigger's watch does not know of.
        """

    # --- Airflow's contract ---

    def execute(self, context: Any) -> Any:
        """Wait; the last look's value.

        :raises ValidationError: all that is wrong with the arguments, at once.
        :raises AirflowSensorTimeout: it did not come in time.
        :raises KafkaSparkError: it cannot be found out: a missing topic, brokers that are down for good.
        """
        try:
            if self.deferrable:
                return self._look_or_defer(context)
            return super().execute(context)
        except KafkaSparkError as error:
            self._never(error)
            raise
        finally:
            self._let_go()

    def poke(self, context: Mapping[str, Any]) -> PokeReturnValue:
        """One look, which bears brokers that are down for ``retry_timeout``."""
        from airflow_kafka_spark.triggers.base import RETRY_SECONDS, Patience

        patience = Patience(min(self.retry_timeout, self.timeout))
        while True:
            try:
                sight = self._look(context)
                return PokeReturnValue(sight.done, sight.value)
            except KafkaSparkError as error:
                if self._is_awaited(error):
                    self.log.info("%s", error)
                    return PokeReturnValue(False)
                if not patience.borne(error):
                    raise
                self.log.warning("Looking again: %s", error)
                time.sleep(min(RETRY_SECONDS, self.poke_interval))

    def resumed(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> Any:
        """After the trigger has fired."""
        from airflow_kafka_spark.triggers.base import raise_failure

        if event["status"] == "success":
            return event["value"]
        if event["status"] == "timeout":
            raise AirflowSensorTimeout(f"Sensor has timed out after {self.timeout:g} s. {event['line']}")
        raise_failure(event)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except KafkaSparkError as error:
            self._never(error)
            raise

    # --- how ---

    def _look_or_defer(self, context: Mapping[str, Any]) -> Any:
        from airflow_kafka_spark.triggers.base import Patience

        trigger = self.make_trigger(context, **self._trigger_options())
        patience = Patience(trigger.retry_timeout, wait_for_topic=self.wait_for_topic, silent=self.silent_fail)
        trigger.give_up_at = time.time() + self.timeout
        try:
            sight = self._look(context)
            if sight.done:
                return sight.value
        except ValidationError:
            raise
        except KafkaSparkError as error:
            if not patience.borne(error):
                raise
            self.log.warning("Waiting in the triggerer: %s", error)
        self.defer(trigger=trigger, method_name="resumed", timeout=timedelta(seconds=self.timeout + _SPARE_SECONDS))

    def _look(self, context: Mapping[str, Any]) -> Sight:
        if self._looking is None:
            from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

            watch = self.make_trigger(context, **self._trigger_options()).checked_watch()
            self._looking = watch, KafkaHook(self.kafka_conn_id)
        watch, hook = self._looking
        sight = watch.look(hook)
        self.log.info("%s", sight.line)
        return sight

    def _trigger_options(self) -> dict[str, Any]:
        return {
            "kafka_conn_id": self.kafka_conn_id,
            "poll_interval": self.poke_interval,
            "retry_timeout": self.retry_timeout,
            "wait_for_topic": self.wait_for_topic,
            "silent": self.silent_fail,
        }

    def _is_awaited(self, error: KafkaSparkError) -> bool:
        from airflow_kafka_spark.errors import TopicMissing

        return self.wait_for_topic and isinstance(error, TopicMissing)

    def _never(self, error: KafkaSparkError) -> None:
        if self.never_fail:
            raise AirflowSkipException("Skipping due to never_fail is set to True.") from error

    def _let_go(self) -> None:
        if self._looking is not None:
            self._looking[1].close()
            self._looking = None
