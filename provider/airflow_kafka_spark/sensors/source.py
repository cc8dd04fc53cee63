"""Wait until a pipeline has read the log of a database, or fail when it is too far behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseSensorOperator, PokeReturnValue

from airflow_kafka_spark.errors import LogBehind, Problem, ValidationError
from airflow_kafka_spark.errors.arguments import with_sound_arguments

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.base import RowSource


class SourceLogSensor(BaseSensorOperator):
    """Waits until a pipeline has read a database's log but for a number of bytes, and fails if it is too far behind.

    At each check, the server measures the log behind the last complete window, so the number is known also while the pipeline is
    paused. While the pipeline has no complete window, the sensor waits. It changes nothing, and does not wait in the triggerer.

    Returns ``pipeline``, ``bytes_behind`` and ``window``, the number of the last complete window.

    :param source: source of the pipeline: a ``PostgresCdcSource`` or a ``MySqlCdcSource``.
    :param pipeline: name of the pipeline, by default ``<dag_id>.<task_id>`` of its task.
    :param at_most_bytes: maximum size of the log behind the pipeline, in bytes, for which the sensor waits; default None: it does
        not wait.
    :param fail_above_bytes: size of the log behind the pipeline, in bytes, above which the sensor fails at once; default None: it
        does not fail. At least one of the two is required.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
    """

    template_fields: Sequence[str] = ("pipeline", "ledger_topic", "kafka_conn_id")

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
        :raises SourceRejected: the database no longer has the log behind the last window, or is another one.
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
        behind = self.source.bytes_behind(position)
        if behind is None:
            raise ValidationError([Problem("source", "it is no source of a database's log", "Give a source of captured changes")])
        self.log.info("%s bytes of the log lie behind the last window of pipeline %s", f"{behind:,}", self.pipeline)
        if self.fail_above_bytes is not None and behind > self.fail_above_bytes:
            raise LogBehind(self.pipeline, behind, self.fail_above_bytes)
        value = {"pipeline": self.pipeline, "bytes_behind": behind, "window": memory.last_number}
        return PokeReturnValue(self.at_most_bytes is None or behind <= self.at_most_bytes, value)

    def _refuse_wrong_arguments(self) -> None:
        _, problems = with_sound_arguments(self)
        if self.at_most_bytes is None and self.fail_above_bytes is None:
            problems = [*problems, Problem("at_most_bytes", "nothing to wait for is given", "Give it, or `fail_above_bytes`")]
        if problems:
            raise ValidationError(problems)
