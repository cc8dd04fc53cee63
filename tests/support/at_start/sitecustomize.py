"""Python imports this module when it starts: what tests start has this directory on its path (tests/conftest.py).

Imports make many objects and little garbage. Python looks for some after each 700 objects, which takes a tenth of the CPU time in
which Airflow starts.
"""

import gc

gc.set_threshold(50_000)
