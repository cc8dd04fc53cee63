"""One task attempt, in a process of its own that has been forked for it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys

from airflow_kafka_spark import faults
from tests.support import engine, spark_daemon, warm


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
    # As Airflow's task runner does: nothing is raised, the operator is told.
    signal.signal(signal.SIGTERM, lambda *_: operator.on_kill())
    print("REPORT " + json.dumps(operator.execute(context(run_id, **facts))), flush=True)
