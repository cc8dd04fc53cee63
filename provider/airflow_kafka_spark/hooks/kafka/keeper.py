"""Where a client of librdkafka ends: always on a thread of our own.

librdkafka aborts the process when a client is destroyed on the client's own background thread. Answers of an ``AdminClient``
arrive there, so Python may come to collect garbage there: with a client in it that hangs in a cycle, or in a traceback that
nobody keeps any more, that would be the end of a whole triggerer.
"""

from __future__ import annotations

import sys
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any

_released: SimpleQueue[Any] = SimpleQueue()
_reaper: threading.Thread | None = None
_starting = threading.Lock()

_POLL_SECONDS = (0.1, 0.2, 0.5, 1.0, 5.0)


def keep(client: Any, owner: object) -> weakref.finalize:
    """Keep a client for as long as its owner lives, or until what is returned is called; after that, until nobody else holds it.

    :param client: of confluent-kafka.
    :param owner: whoever uses it; must not be reachable from it.
    :return: to be called to let go of the client; on any thread.
    """
    _start()
    letting_go = weakref.finalize(owner, _released.put, client)
    letting_go.atexit = False
    return letting_go


def _start() -> None:
    global _reaper
    with _starting:
        # Not alive, too, in a process that was forked from the one in which it was started.
        if _reaper is None or not _reaper.is_alive():
            _reaper = threading.Thread(target=_reap, name="airflow-kafka-spark-clients", daemon=True)
            _reaper.start()


def _reap() -> None:
    waiting: list[Any] = []
    looks = 0
    while True:
        try:
            waiting.append(_released.get(timeout=_POLL_SECONDS[min(looks, len(_POLL_SECONDS) - 1)] if waiting else None))
            looks = 0
        except Empty:
            looks += 1
        for at in reversed(range(len(waiting))):
            # This list's reference and that of the call itself: nobody else can come to hold it any more.
            if sys.getrefcount(waiting[at]) <= 2:
                del waiting[at]
