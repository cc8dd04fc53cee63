"""One task attempt in a process of its own: ``python -m tests.support.victim <pickled (make, options, run_id) in hex>``."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import sys


def main() -> None:
    make, options, run_id = pickle.loads(bytes.fromhex(sys.argv[1]))
    from tests.support.runs import context

    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    operator = make(**options)
    # As Airflow's task runner does: nothing is raised, the operator is told.
    signal.signal(signal.SIGTERM, lambda *_: operator.on_kill())
    print("REPORT " + json.dumps(operator.execute(context(run_id))), flush=True)


if __name__ == "__main__":
    main()
