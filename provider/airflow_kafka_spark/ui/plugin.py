"""Registration of the pages with Airflow, and the addresses of the pages.

Every process of Airflow imports this module, task processes included, so it imports nothing heavy.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from airflow.sdk.plugins_manager import AirflowPlugin

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

URL_PREFIX = "/kafka-spark"
# Relative, because Airflow may be served below a path of its host.
BUNDLE = "kafka-spark/static/bundle.js"
ROUTE = "kafka-pipelines"
PAGE = f"plugin/{ROUTE}"
"""Path of the page of all pipelines, below Airflow's base URL."""


def make_pipeline_url(ledger: str, pipeline: str, window: int | str | None = None) -> str:
    """Return the address of a pipeline's page.

    Guarantee: the address is relative to Airflow's base URL, does not begin with a slash, and is ASCII that needs no further
    quoting, also if the names contain other characters.

    :param ledger: ``<kafka_conn_id>/<ledger_topic>``.
    :param pipeline: name of the pipeline.
    :param window: number of the window to open, or the name of its data interval. Default None: the page opens no window.
    :return: for example ``plugin/kafka-pipelines?ledger=kafka_default%2Fairflow-windows&pipeline=orders``.
    """
    names = {"ledger": ledger, "pipeline": pipeline, **({} if window is None else {"window": str(window)})}
    return f"{PAGE}?{urlencode(names, quote_via=quote, safe='')}"


class LazyApp:
    """ASGI application that creates the web application on the first request, since only the API server serves requests."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._lock = Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            with self._lock:
                if self._app is None:
                    from airflow_kafka_spark.ui.app import make_app

                    self._app = make_app()
        await self._app(scope, receive, send)


def _make_react_app(name: str, destination: str, url_route: str) -> dict[str, str]:
    """Return one entry of ``react_apps``. Airflow finds the component by the entry's name, so each name is unique."""
    return {"name": name, "bundle_url": BUNDLE, "destination": destination, "url_route": url_route}


class KafkaSparkPlugin(AirflowPlugin):
    """Adds a page of all pipelines, and tabs with the pipelines of a DAG, a run, a task and a task instance."""

    name = "airflow_kafka_spark"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": URL_PREFIX, "name": "Kafka pipelines"}]  # noqa: RUF012 - Airflow's contract
    react_apps = [  # noqa: RUF012
        {**_make_react_app("Kafka pipelines", "nav", ROUTE), "category": "browse"},
        _make_react_app("Pipelines", "dag", "kafka-dag"),
        _make_react_app("Pipelines of run", "dag_run", "kafka-run"),
        _make_react_app("Pipelines of task", "task", "kafka-task"),
        _make_react_app("Kafka window", "task_instance", "kafka-window"),
    ]
