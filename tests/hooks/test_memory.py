"""Python workers use freed memory again. In processes of their own, because the settings are those of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A thread allocates megabytes, as with each fetch, and another one frees them; the page faults of that are printed.
COUNT_FAULTS = """
import resource
from concurrent.futures import ThreadPoolExecutor
from airflow_kafka_spark.hooks.tasks.memory import keep_freed_memory
print(keep_freed_memory())
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def allocate():
    return [bytes(100_000) for _ in range(200)]
with ThreadPoolExecutor(1) as pool:
    for _ in range(5):
        before = faults()
        kept = pool.submit(allocate).result()
        del kept
        last = faults() - before
print(last)
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="no glibc")
@pytest.mark.parametrize(
    "more, is_set, keeps",
    [
        ({}, "True", True),
        ({"MALLOC_TRIM_THRESHOLD_": "65536"}, "True", False),
        ({"GLIBC_TUNABLES": "glibc.malloc.x=1"}, "False", False),
    ],
    ids=["default", "a setting of the user", "tunables of the user"],
)
def test_freed_memory_is_used_again_unless_the_user_has_settings(more: dict[str, str], is_set: str, keeps: bool):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS], env={**env, **more}, capture_output=True, text=True, check=True)
    said, faults = done.stdout.split()
    assert said == is_set
    assert (int(faults) < 200) is keeps, faults
