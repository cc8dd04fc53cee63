"""Base of the embedded servers: they have a directory for their files, and end with the process that started them."""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.testing._processes import Keeper, own_directory

if TYPE_CHECKING:
    from typing_extensions import Self

_ATTEMPTS = 5


class Embedded(ABC):
    """A server that is used as a context manager, or by `start` and `stop`. Its processes end with this one, however that ends.

    :cvar software: name of the software, for messages.
    :param directory: directory of its files, which is kept. Default: a temporary directory, removed by `stop`.
    """

    software: ClassVar[str]

    def __init__(self, directory: Path | str | None) -> None:
        self._given_directory = Path(directory).absolute() if directory else None
        self._directory: Path | None = None
        self._keeper: Keeper | None = None
        self._starting = False

    def start(self) -> Self:
        """Start the server, and return when it answers. Do nothing if it was started before."""
        if self._keeper is not None:
            return self
        own = self._given_directory is None
        self._directory = own_directory(self.software.lower()) if own else self._given_directory
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        self._keeper = Keeper(self.software)
        atexit.register(self.stop)
        if own:
            self._keeper.own(self._directory)
        self._starting = True
        try:
            self._prepare()
            for attempt in range(1, _ATTEMPTS + 1):
                if self._begin(last_attempt=attempt == _ATTEMPTS):
                    return self
            raise AssertionError("unreachable")
        except BaseException:
            self.stop()
            raise
        finally:
            self._starting = False

    def stop(self) -> None:
        """End the server. A temporary directory is removed, a given one is kept. It may be called again."""
        keeper, self._keeper = self._keeper, None
        # A fork of the process that started the server has a copy of this object and of its exit handler.
        if keeper is None or keeper.owner != os.getpid():
            return
        atexit.unregister(self.stop)
        self._shut_down()
        keeper.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def _files(self) -> Path:
        assert self._directory is not None, "it was not started"
        return self._directory

    @abstractmethod
    def _prepare(self) -> None:
        """Check the installed software, and make the files that every attempt at starting needs."""

    @abstractmethod
    def _begin(self, *, last_attempt: bool) -> bool:
        """Start the processes on ports that are free now. Return False if another process took a port first; never at the last
        attempt.
        """

    @abstractmethod
    def _shut_down(self) -> None:
        """End the processes that should not be killed. All others get SIGKILL afterwards."""
