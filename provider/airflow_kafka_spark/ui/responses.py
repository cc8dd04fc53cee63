"""Responses of the API: JSON of plain values, and errors of one shape from which secrets are removed."""

from __future__ import annotations

import json
import math
import re

from fastapi.responses import JSONResponse

from airflow_kafka_spark.errors import (
    ConnectionInvalid,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    PipelineUnknown,
    ValidationError,
)


class RequestRefused(Exception):
    """Raised when a request is not carried out.

    :param status: the HTTP status of the response.
    :param found: what was found. ``expected`` and ``action`` are those of :class:`~airflow_kafka_spark.errors.KafkaSparkError`.
    """

    def __init__(self, status: int, found: str, *, expected: str = "", action: str = "") -> None:
        super().__init__(found)
        self.status, self.found, self.expected, self.action = status, found, expected, action


class PlainJSONResponse(JSONResponse):
    """JSON of plain values, without FastAPI's conversion. Names need not be valid Unicode, since the text is escaped to ASCII."""

    def render(self, content: object) -> bytes:
        try:
            return json.dumps(content, separators=(",", ":"), allow_nan=False, default=str).encode()
        except ValueError:
            return json.dumps(_replace_non_finite(content), separators=(",", ":"), default=str).encode()


def _replace_non_finite(value: object) -> object:
    """Return ``value`` with None in place of NaN and infinity, which a ledger's record may contain and JSON may not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _replace_non_finite(item) for name, item in value.items()}
    return [_replace_non_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


# --- errors -------------------------------------------------------------------------------------------------------------

_SECRETS = re.compile(r"((?:password|passwd|secret|token|sasl\.jaas\.config)[\"']?\s*[=:]\s*)([^\s,;&]+)", re.IGNORECASE)
_USERINFO = re.compile(r"(\w+://)[^/\s@]+@")


def redact_text(text: str) -> str:
    """Return the text of an error with everything that looks like a secret replaced by ``***``."""
    return _USERINFO.sub(r"\1***@", _SECRETS.sub(r"\1***", text))


def make_error_response(status: int, found: str, expected: str = "", action: str = "") -> JSONResponse:
    """Return an error in the shape that the pages expect, redacted."""
    sentences = [found, f"Expected {expected}" if expected else "", action]
    message = " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)
    facts = {"message": message, "found": found, "expected": expected, "action": action}
    return JSONResponse({"detail": {name: redact_text(text) for name, text in facts.items()}}, status_code=status)


def find_status(error: KafkaSparkError) -> int:
    """Return 404 for an unknown pipeline, 503 if Kafka does not answer, 400 for invalid arguments, and 409 for other refusals."""
    if isinstance(error, PipelineUnknown):
        return 404
    if isinstance(error, (KafkaUnavailable, ConnectionInvalid, KafkaRefused)):
        return 503
    return 400 if isinstance(error, ValidationError) else 409


def make_response(error: RequestRefused | KafkaSparkError) -> JSONResponse:
    """Return the response to an expected error."""
    status = error.status if isinstance(error, RequestRefused) else find_status(error)
    return make_error_response(status, error.found, error.expected, error.action)
