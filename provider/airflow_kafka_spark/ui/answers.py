"""What the UI answers when it cannot do what it was asked for: always the same shape, and never a secret."""

from __future__ import annotations

import re

from fastapi.responses import JSONResponse

from airflow_kafka_spark.errors import (
    ConnectionInvalid,
    GroupHasMembers,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    PipelineUnknown,
    TopicMissing,
    ValidationError,
)


class Refused(Exception):
    """A request that is not done.

    :param status: the HTTP status.
    :param found: what was found, as in :class:`~airflow_kafka_spark.errors.KafkaSparkError`, as are the others.
    """

    def __init__(self, status: int, found: str, *, expected: str = "", action: str = "") -> None:
        super().__init__(found)
        self.status, self.found, self.expected, self.action = status, found, expected, action


_SECRETS = re.compile(r"((?:password|passwd|secret|token|sasl\.jaas\.config)[\"']?\s*[=:]\s*)([^\s,;&]+)", re.IGNORECASE)
_USERINFO = re.compile(r"(\w+://)[^/\s@]+@")


def cleaned(text: str) -> str:
    """A text of an error without what looks like a secret."""
    return _USERINFO.sub(r"\1***@", _SECRETS.sub(r"\1***", text))


def detail(status: int, found: str, expected: str = "", action: str = "") -> JSONResponse:
    """An error as the pages read it."""
    sentences = [found, f"Expected {expected}" if expected else "", action]
    message = " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)
    facts = {"message": message, "found": found, "expected": expected, "action": action}
    return JSONResponse({"detail": {name: cleaned(text) for name, text in facts.items()}}, status_code=status)


def status_of(error: KafkaSparkError) -> int:
    """404: there is no such thing; 503: Kafka does not answer; 409: everything else that is refused."""
    if isinstance(error, PipelineUnknown):
        return 404
    if isinstance(error, (KafkaUnavailable, ConnectionInvalid, KafkaRefused)):
        return 503
    if isinstance(error, ValidationError):
        return 400
    assert isinstance(error, (GroupHasMembers, TopicMissing, KafkaSparkError))
    return 409


def answer_for(error: Refused | KafkaSparkError) -> JSONResponse:
    """The answer to what could not be done."""
    status = error.status if isinstance(error, Refused) else status_of(error)
    return detail(status, error.found, error.expected, error.action)
