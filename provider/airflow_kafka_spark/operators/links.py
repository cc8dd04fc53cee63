"""Links beside a task in Airflow's UI: its window, its topic, its table, its dead letters, Spark.

Airflow takes links from XCom, and asks an operator for them once it has ended. So that they are there while a task runs, and
after it was killed, they are pushed as soon as they are known.
"""

from __future__ import annotations

import logging
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperatorLink, conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

SECTION = "kafka_spark"
"""Of Airflow's configuration."""


class KnownLink(BaseOperatorLink):
    """A link whose address the operator has found out while it ran; without one, Airflow shows no button."""

    name = ""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address; empty where there is none."""
        links: Links | None = getattr(operator, "links", None)
        return links.known.get(self.xcom_key, "") if links is not None else ""


class WindowLink(KnownLink):
    """The page of the window, or of its pipeline while no window is planned."""

    name = "Window"


class TopicLink(KnownLink):
    """The topic that is read or published to, in whatever ``[kafka_spark] topic_url`` leads to."""

    name = "Topic"


class TableLink(KnownLink):
    """What the other end of the window is, in whatever ``[kafka_spark] table_url`` leads to."""

    name = "Table"


class DeadLettersLink(KnownLink):
    """The dead letter topic; without ``[kafka_spark] topic_url``, the pipeline's page."""

    name = "Dead letters"


class SparkLink(KnownLink):
    """Spark's history server if ``[kafka_spark] history_server_url`` names one, else the UI of the session, if it has one."""

    name = "Spark UI"


ALL: tuple[KnownLink, ...] = (WindowLink(), TopicLink(), TableLink(), DeadLettersLink(), SparkLink())


class Links:
    """The links of one task instance.

    Guarantee: a link that cannot be made or pushed fails nothing.

    :param ti: pushes XComs; None where nobody can.
    """

    def __init__(self, ti: Any = None) -> None:
        self._push = getattr(ti, "xcom_push", None)
        self.known: dict[str, str] = {}

    def tell(self, link: type[KnownLink], url: str | None) -> None:
        """Show a link from now on.

        :param url: its address; nothing happens without one.
        """
        key = link().xcom_key
        if not url or self.known.get(key) == url:
            return
        self.known[key] = url
        try:
            if self._push is not None:
                self._push(key=key, value=url)
        except Exception as error:
            log.warning("The link `%s` was not told: %s", link.name, error)


def of_pipeline(context: Mapping[str, Any], kafka_conn_id: str, ledger_topic: str, pipeline: str) -> Links:
    """The links of a task that has to do with a pipeline, and moves no window of it."""
    found = Links(context.get("ti"))
    try:
        found.tell(WindowLink, pipeline_page(kafka_conn_id, ledger_topic, pipeline))
    except Exception as error:
        log.debug("No link: %s", error)
    return found


def pipeline_page(kafka_conn_id: str, ledger_topic: str, pipeline: str, window: str | None = None) -> str:
    """The address of a pipeline's page, or of one of its windows there: absolute where Airflow's ``[api] base_url`` is set.

    :param window: a window's number, or the name of its data interval.
    """
    from airflow_kafka_spark.ui.plugin import pipeline_url

    relative = pipeline_url(f"{kafka_conn_id}/{ledger_topic}", pipeline, window)
    base = conf.get("api", "base_url", fallback="") or ""
    return f"{base.rstrip('/')}/{relative.lstrip('/')}"


def topic_page(kafka_conn_id: str, topic: str) -> str | None:
    """The address of a topic by ``[kafka_spark] topic_url``, None where that is not set."""
    return filled("topic_url", {"topic": topic, "connection": kafka_conn_id})


def table_page(uri: str) -> str | None:
    """The address of a table or a directory by ``[kafka_spark] table_url``, None where that is not set.

    :param uri: as ``postgres://host:5432/db/schema/table``; it has no credentials.
    """
    parts = urllib.parse.urlsplit(uri)
    path = urllib.parse.unquote(parts.path)
    return filled(
        "table_url",
        {
            "uri": uri,
            "scheme": parts.scheme,
            "host": parts.netloc,
            "path": path.lstrip("/"),
            "name": path.strip("/").replace("/", "."),
            "table": path.rstrip("/").rpartition("/")[2],
        },
    )


def spark_page(session: SparkSession) -> str | None:
    """Where Spark shows this session: its history server, or its own UI; None where it has neither.

    :param session: a session whose driver runs here.
    """
    context = session.sparkContext
    history = conf.get(SECTION, "history_server_url", fallback="") or ""
    if history:
        return f"{history.rstrip('/')}/history/{urllib.parse.quote(str(context.applicationId), safe='')}/"
    return context.uiWebUrl


def filled(option: str, values: Mapping[str, str]) -> str | None:
    """A template of the configuration with its ``{placeholders}`` filled in, each quoted as part of a URL; None where it is not
    set."""
    url = str(conf.get(SECTION, option, fallback="") or "")
    for name, value in values.items():
        url = url.replace(f"{{{name}}}", urllib.parse.quote(value, safe=""))
    return url or None
