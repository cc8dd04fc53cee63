"""The commands of ``airflow_kafka_spark.control``, which tests call with the parts of a request as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airflow_kafka_spark.control import lifecycle as _forget
from airflow_kafka_spark.control import lifecycle as _pause
from airflow_kafka_spark.control import lifecycle as _rebind
from airflow_kafka_spark.control import lifecycle as _rename
from airflow_kafka_spark.control import position as _reset
from airflow_kafka_spark.control import position as _skip
from airflow_kafka_spark.control import replay as _replay
from airflow_kafka_spark.control import replay as _resend
from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.topic import TOPIC

Command = Callable[..., ChangeResult]


def with_request(command: Command) -> Command:
    def call(
        hook: KafkaHook,
        pipeline: str,
        *arguments: Any,
        why: str,
        who: str = "",
        ledger_topic: str = TOPIC,
        dry_run: bool = False,
        **options: Any,
    ) -> ChangeResult:
        return command(hook, ChangeRequest(pipeline, why, who, ledger_topic, dry_run), *arguments, **options)

    return call


forget = with_request(_forget.forget)
pause, resume = with_request(_pause.pause), with_request(_pause.resume)
rebind = with_request(_rebind.rebind)
rename = with_request(_rename.rename)
replay = with_request(_replay.replay)
resend = with_request(_resend.resend_dead_letters)
reset = with_request(_reset.reset)
skip = with_request(_skip.skip)
