"""The web application of the pages: security headers, error handlers and the script. Only the API server imports it."""

# No `from __future__ import annotations` in modules with routes, because FastAPI has to resolve their annotations.

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.ui.responses import RequestRefused, make_error_response, make_response

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
    # Responses are data and one script, never a document of their own.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'self'",
}

E = TypeVar("E", bound=Exception)


class SecurityHeaders:
    """Middleware that adds security headers to every response, and ``no-store`` to those without a ``cache-control``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message.get("headers", [])}
                added = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
                missing = [(k.lower().encode(), v.encode()) for k, v in added.items() if k.lower().encode() not in given]
                message["headers"] = [*message.get("headers", []), *missing]
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


def make_app() -> ASGIApp:
    """Return the application, to be mounted below Airflow's.

    Guarantee: every route except the script's requires an authenticated user; every response is JSON, errors included.
    """
    from airflow.api_fastapi.app import get_auth_manager

    from airflow_kafka_spark.ui import routes

    # FastAPI's documentation pages are off, because they would need no login.
    app = FastAPI(title="Kafka pipelines", openapi_url=None, docs_url=None, redoc_url=None)
    # Airflow's own dependencies expect the auth manager on the app in which they run.
    app.state.auth_manager = get_auth_manager()
    app.include_router(routes.router)

    @app.get("/static/bundle.js")
    def script(request: Request) -> Response:
        """Return the script of the pages. It contains no data, so it needs no login."""
        found = read_bundle()
        # `no-cache` lets the browser keep the script, and revalidate it with one small request.
        headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if found.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(found.body, media_type="text/javascript; charset=utf-8", headers=headers)

    _handle_errors(app)
    return SecurityHeaders(app)


def _handle_errors(app: FastAPI) -> None:
    def on(kind: type[E], respond: Callable[[E], JSONResponse]) -> None:
        async def handler(request: Request, error: Exception) -> JSONResponse:
            assert isinstance(error, kind)
            return respond(error)

        app.add_exception_handler(kind, handler)

    on(RequestRefused, make_response)
    on(KafkaSparkError, make_response)
    on(RequestValidationError, _respond_to_invalid)
    on(StarletteException, lambda error: make_error_response(error.status_code, str(error.detail)))
    on(Exception, _respond_to_failure)


def _respond_to_invalid(error: RequestValidationError) -> JSONResponse:
    wrong = "; ".join(f"`{'.'.join(map(str, found['loc'][1:]))}`: {found['msg']}" for found in error.errors())
    return make_error_response(400, f"The request is invalid: {wrong}", action="Correct the request")


def _respond_to_failure(error: Exception) -> JSONResponse:
    # The text of an unexpected error goes to the log only: it may contain what the user may not see.
    log.exception("A page of Kafka pipelines failed", exc_info=error)
    return make_error_response(500, "An unexpected error occurred", action="See the log of the API server")


# --- the script ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptBundle:
    """The script of all pages.

    :param body: its bytes.
    :param etag: its entity tag, quoted as in HTTP.
    """

    body: bytes
    etag: str


_bundles: dict[tuple[tuple[str, int, int], ...], ScriptBundle] = {}


def read_bundle(directory: Path = STATIC) -> ScriptBundle:
    """Return the files of ``directory`` as one script, in the order of their names. They are read again when one has changed.

    All files share one function scope, so that none of their names is visible to the page that embeds the script. Nothing is
    minified.
    """
    files = sorted(directory.glob("*.js"), key=lambda file: file.name)
    stats = [(file, file.stat()) for file in files]
    state = tuple((str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats)
    if state not in _bundles:
        parts = [b"(() => {\n'use strict';\n", *(_read_part(file) for file in files), b"})();\n"]
        body = b"".join(parts)
        _bundles.clear()
        _bundles[state] = ScriptBundle(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return _bundles[state]


def _read_part(file: Path) -> bytes:
    return f"// {file.name}\n".encode() + file.read_bytes().rstrip() + b"\n\n"
