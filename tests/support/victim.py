"""One task attempt, in a separate process that was forked for it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
from typing import Any

from airflow_kafka_spark import faults
from tests.support import engine, spark_daemon, warm

TIMEOUT = "TEST_EXECUTION_TIMEOUT"
"""Variable with the seconds after which the attempt is interrupted, wherever it is, as Airflow's ``execution_timeout`` does."""


def main(payload: str) -> None:
    """Build the operator and execute it.

    :param payload: ``(make, options, run_id, facts)``, pickled, in hex.
    """
    make, options, run_id, facts = pickle.loads(bytes.fromhex(payload))
    from tests.support.runs import context

    if engine.FOUND_BY in os.environ:
        engine.take()
    elif warm.is_on() and faults.FAULT in os.environ:
        # The workers of a warm process are none of this one's: they get its faults as those of an engine do.
        wanted = {name: os.environ[name] for name in (faults.FAULT, faults.ONCE) if name in os.environ}
        spark_daemon.set_variables(os.environ[spark_daemon.FILE], wanted)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    operator = make(**options)
    # As Airflow's task runner: it raises nothing, and calls the operator's `on_kill`.
    signal.signal(signal.SIGTERM, lambda *_: operator.on_kill())
    if seconds := os.environ.get(TIMEOUT):
        report = with_timeout(operator, float(seconds), context(run_id, **facts))
    else:
        report = operator.execute(context(run_id, **facts))
    print("REPORT " + json.dumps(report), flush=True)


def with_timeout(operator: Any, seconds: float, facts: Any) -> dict[str, Any]:
    """Execute an operator and interrupt it after some seconds, like Airflow's task runner."""
    from airflow.sdk.exceptions import AirflowTaskTimeout
    from airflow.sdk.execution_time.timeout import timeout

    try:
        with timeout(seconds):
            report: dict[str, Any] = operator.execute(facts)
            return report
    except AirflowTaskTimeout:
        operator.on_kill()
        raise
