"""Recognise in a driver's message that the database server has ended the session."""

from __future__ import annotations

import re

SESSION_ENDED = "the database server ended the session, as an administrator, a shutdown or a newer attempt at this window does"

_ENDED = re.compile(
    # PostgreSQL itself, then libpq and its clients
    "terminating connection due to administrator command|server closed the connection unexpectedly"
    "|the connection is (?:lost|closed)|SSL connection has been closed unexpectedly|SSL SYSCALL error: EOF detected"
    # MariaDB and MySQL, then PyMySQL
    r"|Connection was killed|MySQL server has gone away|Lost connection to MySQL server during query(?! \(timed out)"
    # their JDBC drivers
    "|An I/O error occurred while sending to the backend|unexpected end of stream"
)
_NEVER_BEGAN = "connection to server at"
"""The beginning of libpq's message about a session that could not be opened."""


def is_session_ended(message: str) -> bool:
    """Return True if the message of a driver, or a stack trace with it, says that the server ended an open session."""
    return _NEVER_BEGAN not in message and _ENDED.search(message) is not None


def described(message: str) -> str:
    """Return the message of a driver; :data:`SESSION_ENDED` if the server ended the session."""
    return SESSION_ENDED if is_session_ended(message) else message


def action_for(found: str, otherwise: str) -> str:
    """Return the action for a problem that a validation has found: to run the task again, if the server ended the session."""
    return "Run the task again" if SESSION_ENDED in found else otherwise
