"""Errors that a Kafka client reports beside its answers: errors that belong to no request, and log lines.

librdkafka retries in the background without end, and reports the reason only to ``error_cb`` and its log, while the call itself
times out.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

log = logging.getLogger(__name__)

CONNECTION_LOG = "log"
"""Name under which failed connections that only the log reports are stored."""
REFUSED_LOGIN = frozenset(
    {"_AUTHENTICATION", "_SSL", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE"}
)
"""Names of the errors with which a broker refuses a login or a TLS handshake."""
_REFUSED_RIGHT = re.compile(r"\b[A-Z_]+_AUTHORIZATION_FAILED\b")


@dataclass(frozen=True)
class _Seen:
    first: float
    last: float
    text: str


class ClientEvents:
    """Collects what a client of librdkafka reports besides its answers: errors and log lines.

    Pass it as ``logger=events`` and ``error_cb=events.on_error`` to a client of confluent-kafka. Log lines then go to this
    module's logger at debug level instead of stderr, and ``reason()`` returns the reason for missing answers.

    :param error_cb: a callback of the connection, which is called with every error, too.
    """

    def __init__(self, error_cb: Callable[[KafkaError], None] | None = None) -> None:
        self._error_cb = error_cb
        self._seen: dict[str, _Seen] = {}

    def log(self, level: int, message: str, *args: Any) -> None:
        """Record a log line of librdkafka."""
        log.debug("librdkafka: " + message, *args)
        if args and args[0] == "FAIL":
            self._note(CONNECTION_LOG, str(args[-1]).partition("]: ")[2])
        # Only the log names the reason of a failed transaction: its records fail as "purged in queue", or by the client's state.
        elif args and args[0] == "TXNERR" and (refused := _REFUSED_RIGHT.search(str(args[-1]))):
            self._note(refused[0], str(args[-1]))

    def on_error(self, error: KafkaError) -> None:
        """Record an error that belongs to no request."""
        # A broker that rejects the client's certificate sends a TLS alert, which librdkafka reports as a lost connection.
        self._note("_SSL" if "SSL alert number" in error.str() else error.name(), error.str())
        if self._error_cb:
            self._error_cb(error)

    def _note(self, name: str, text: str) -> None:
        now = time.monotonic()
        self._seen[name] = _Seen(self._seen[name].first if name in self._seen else now, now, text)

    def first(self, names: Collection[str], since: float) -> float | None:
        """Return the time of the first error with one of these names since ``since`` (monotonic clock); None without one."""
        begun = [max(seen.first, since) for name, seen in list(self._seen.items()) if name in names and seen.last >= since]
        return min(begun, default=None)

    def reason(self, since: float = 0.0) -> tuple[str, str]:
        """Return Kafka's name and the text of the most specific error; ("", "") without errors.

        :param since: time on the monotonic clock; earlier errors are ignored.
        """
        seen = {name: (error.last, error.text) for name, error in list(self._seen.items()) if error.last >= since}
        for names in (REFUSED_LOGIN, {"_RESOLVE"}, {"_TRANSPORT"}, {CONNECTION_LOG}, seen.keys()):
            found = [(seen[name], name) for name in names & seen.keys()]
            if found:
                (_, text), name = max(found)
                return name, text
        return "", ""
