"""What a task of a paused pipeline does: nothing, and it says why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import AirflowSkipException

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_kafka_spark.ledger.attempt import Ledger

log = logging.getLogger(__name__)


def skip_paused(ledger: Ledger) -> None:
    """:raises AirflowSkipException: the pipeline is paused, as far as this ledger was looked at."""
    pause = ledger.parent_memory.pause
    if pause is None:
        return
    left = ledger.memory.open_entry
    raise AirflowSkipException(
        f"Pipeline `{ledger.parent_pipeline}` is paused since {pause.at}, by {pause.who}: {pause.why}. Nothing was moved. "
        + (f"Window {left.window} stays as it was planned. " if left else "")
        + "Resume it, in the UI or with `python -m airflow_kafka_spark resume`, and it goes on with the next run"
        + ("; clear this task then: no other run moves its interval." if ledger.parent_pipeline != ledger.pipeline else ".")
    )


def skip_though_invalid(open_ledger: Callable[[], Ledger]) -> None:
    """A sink that is down, say, may be what the pipeline was paused for.

    :param open_ledger: the ledger, which is only looked at.
    :raises AirflowSkipException: the pipeline is paused.
    """
    try:
        ledger = open_ledger()
        ledger.peek()
    except Exception:
        # What is wrong is told in any case; whatever else goes wrong here would only hide it.
        log.debug("The ledger was not asked whether the pipeline is paused", exc_info=True)
    else:
        skip_paused(ledger)
