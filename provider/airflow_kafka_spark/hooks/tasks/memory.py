"""Memory of Spark's Python workers."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_SETTINGS = {
    "MALLOC_ARENA_MAX": (-8, 1),
    "MALLOC_TRIM_THRESHOLD_": (-1, 256 << 20),
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20),
}
"""Environment variables of glibc, with the numbers of their parameters (``malloc.h``) and the values that are set here."""


@cache
def keep_freed_memory() -> bool:
    """Let this process use freed memory again, instead of returning it to the system. Return False where that cannot be set.

    The threads of librdkafka allocate what the main thread frees, some megabytes with each fetch. glibc returns that to the
    system each time, and gets it back page by page: a fifth of the CPU time of reading and decoding. Therefore all threads share
    one arena here, and up to 256 MB of freed memory are kept. Settings in the environment have precedence.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    return all([mallopt(number, value) == 1 for name, (number, value) in _SETTINGS.items() if name not in os.environ])
