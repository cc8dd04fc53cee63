"""A Spark session that a thread starts while the task is still validated."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


class EarlyStart:
    """Starts a session in a thread if the window will need one.

    :param start: starts the session.
    :param is_needed: called in the thread; returns True if the window will have records. An error counts as False: the task
        reports it by itself.
    """

    def __init__(self, start: Callable[[], SparkSession], is_needed: Callable[[], bool]) -> None:
        self._start, self._is_needed = start, is_needed
        self._deciding = threading.Lock()
        self._is_given_up = self._has_begun = False
        self._session: SparkSession | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spark start", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Start no session if its start has not begun yet."""
        with self._deciding:
            self._is_given_up = True

    def result(self) -> SparkSession | None:
        """Return the session as soon as it is ready; None if its start has not begun, and then it will not begin.

        :raises SparkUnavailable: it could not be started.
        """
        self.give_up()
        if not self._has_begun:
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._session

    def _run(self) -> None:
        try:
            is_needed = self._is_needed()
        except Exception:
            log.debug("Whether the window will have records is not known yet", exc_info=True)
            return
        with self._deciding:
            if self._is_given_up or not is_needed:
                return
            self._has_begun = True
        try:
            self._session = self._start()
        except BaseException as error:
            self._error = error
