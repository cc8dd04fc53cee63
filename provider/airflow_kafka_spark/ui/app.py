"""The UI's web application. Imported only in the api-server."""

# No `from __future__ import annotations` where routes are: FastAPI has to resolve what they are annotated with.

import logging
from collections.abc import Callable, MutableMapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteException

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.ui.answers import Refused, answer_for, detail
from airflow_kafka_spark.ui.bundle import bundle

log = logging.getLogger(__name__)

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
    # Answers are data and one script, never a page of their own.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'self'",
}


class Headers:
    """Puts the security headers on every answer, and ``no-store`` on those that say nothing of caches."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message.get("headers", [])}
                added = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
                missing = [(k.lower().encode(), v.encode()) for k, v in added.items() if k.lower().encode() not in given]
                message["headers"] = [*message.get("headers", []), *missing]
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


def make_app() -> Any:
    """The application, to be mounted below Airflow's.

    Guarantee: every route but the script's asks who the user is; an answer is JSON, an error too.
    """
    from airflow.api_fastapi.app import get_auth_manager

    from airflow_kafka_spark.ui import routes

    # No documentation pages: they would be open to everybody.
    app = FastAPI(title="Kafka pipelines", openapi_url=None, docs_url=None, redoc_url=None)
    # Airflow's own dependencies look for it on the app they run in.
    app.state.auth_manager = get_auth_manager()
    app.include_router(routes.router)

    @app.get("/static/bundle.js")
    def script(request: Request) -> Response:
        """The pages' script. It holds no data, so anybody may have it."""
        found = bundle()
        # `no-cache`: may be kept, but is asked for again, which costs one small answer.
        headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if found.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(found.body, media_type="text/javascript; charset=utf-8", headers=headers)

    _answer_errors(app)
    return Headers(app)


def _answer_errors(app: FastAPI) -> None:
    def on(kind: type[Exception], answer: Callable[[Any], JSONResponse]) -> None:
        async def handler(request: Request, error: Exception) -> JSONResponse:
            return answer(error)

        app.add_exception_handler(kind, handler)

    on(Refused, answer_for)
    on(KafkaSparkError, answer_for)
    on(RequestValidationError, lambda error: _invalid(error))
    on(StarletteException, lambda error: detail(error.status_code, str(error.detail)))
    on(Exception, _failed)


def _invalid(error: RequestValidationError) -> JSONResponse:
    wrong = "; ".join(f"`{'.'.join(map(str, found['loc'][1:]))}`: {found['msg']}" for found in error.errors())
    return detail(400, f"The request cannot be understood: {wrong}", action="Correct it")


def _failed(error: Exception) -> JSONResponse:
    # What an unexpected error says is for the log: it may hold what a user may not see.
    log.exception("A page of Kafka pipelines failed", exc_info=error)
    return detail(500, "Something unexpected happened", action="The log of the api-server says more")
