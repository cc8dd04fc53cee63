"""What Airflow is told of the UI. Imported in every process of Airflow, tasks included: it imports nothing heavy."""

from __future__ import annotations

from threading import Lock
from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin

URL_PREFIX = "/kafka-spark"
# Relative: Airflow may live below a path of its host.
BUNDLE = "kafka-spark/static/bundle.js"
PAGE = "kafka-pipelines"


class LazyApp:
    """The web application, made when the first request comes: only the api-server ever needs it."""

    def __init__(self) -> None:
        self._app: Any = None
        self._lock = Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            with self._lock:
                if self._app is None:
                    from airflow_kafka_spark.ui.app import make_app

                    self._app = make_app()
        await self._app(scope, receive, send)


def _react_app(name: str, destination: str, url_route: str) -> dict[str, Any]:
    """The host finds a component by the app's name, so names are unique; one bundle defines them all."""
    return {"name": name, "bundle_url": BUNDLE, "destination": destination, "url_route": url_route}


class KafkaSparkPlugin(AirflowPlugin):
    """The pages of this provider: all pipelines, and beside a DAG, a run or a task those that belong to it."""

    name = "airflow_kafka_spark"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": URL_PREFIX, "name": "Kafka pipelines"}]  # noqa: RUF012 - Airflow's contract
    react_apps = [  # noqa: RUF012
        {**_react_app("Kafka pipelines", "nav", PAGE), "category": "browse"},
        _react_app("Pipelines", "dag", "kafka-dag"),
        _react_app("Pipelines of run", "dag_run", "kafka-run"),
        _react_app("Pipelines of task", "task", "kafka-task"),
        _react_app("Kafka window", "task_instance", "kafka-window"),
    ]
