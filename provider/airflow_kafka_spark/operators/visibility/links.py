"""Links beside a task in Airflow's UI: its window, its topic, its table, its dead letters, Spark.

Airflow reads links from XCom, and asks an operator for them when its task has ended. Links are pushed as soon as they are known,
so that they are also shown while a task runs, and after it was killed.
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
    from pyspark import SparkContext

log = logging.getLogger(__name__)

SECTION = "kafka_spark"
"""The section of Airflow's configuration."""


class KnownLink(BaseOperatorLink):
    """A link whose address the operator finds while it runs. Without an address, Airflow shows no button."""

    name = ""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address; empty without one."""
        links: Links | None = getattr(operator, "links", None)
        return links.known.get(self.xcom_key, "") if links is not None else ""


class WindowLink(KnownLink):
    """The page of the window, or of its pipeline while no window is planned."""

    name = "Window"


class TopicLink(KnownLink):
    """The topic that is read or published to, in the tool that ``[kafka_spark] topic_url`` names."""

    name = "Topic"


class TableLink(KnownLink):
    """The table or directory at the other end of the window, in the tool that ``[kafka_spark] table_url`` names."""

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

    Guarantee: a link that cannot be built or pushed does not fail the task.

    :param ti: the task instance, which pushes XComs; None without one.
    """

    def __init__(self, ti: object = None) -> None:
        self._push = getattr(ti, "xcom_push", None)
        self.known: dict[str, str] = {}

    def show(self, link: type[KnownLink], url: str | None) -> None:
        """Show a link from now on.

        :param url: its address; None or empty shows nothing.
        """
        key = link().xcom_key
        if not url or self.known.get(key) == url:
            return
        self.known[key] = url
        try:
            if self._push is not None:
                self._push(key=key, value=url)
        except Exception as error:
            log.warning("The link `%s` was not pushed: %s", link.name, error)


def make_pipeline_links(context: Mapping[str, Any], kafka_conn_id: str, ledger_topic: str, pipeline: str) -> Links:
    """Return the links of a task that controls a pipeline without moving a window."""
    found = Links(context.get("ti"))
    try:
        found.show(WindowLink, make_pipeline_page(kafka_conn_id, ledger_topic, pipeline))
    except Exception as error:
        log.debug("No link: %s", error)
    return found


def make_pipeline_page(kafka_conn_id: str, ledger_topic: str, pipeline: str, window: str | None = None) -> str:
    """Return the address of a pipeline's page, or of one of its windows; absolute if Airflow's ``[api] base_url`` is set.

    :param window: a window's number, or the name of its data interval.
    """
    from airflow_kafka_spark.ui.plugin import make_pipeline_url

    relative = make_pipeline_url(f"{kafka_conn_id}/{ledger_topic}", pipeline, window)
    base = conf.get("api", "base_url", fallback="") or ""
    return f"{base.rstrip('/')}/{relative.lstrip('/')}"


def make_topic_page(kafka_conn_id: str, topic: str) -> str | None:
    """Return the address of a topic by ``[kafka_spark] topic_url``; None if that is not set."""
    return fill_placeholders("topic_url", {"topic": topic, "connection": kafka_conn_id})


def make_table_page(uri: str) -> str | None:
    """Return the address of a table or a directory by ``[kafka_spark] table_url``; None if that is not set.

    :param uri: as ``postgres://host:5432/db/schema/table``; it has no credentials.
    """
    parts = urllib.parse.urlsplit(uri)
    path = urllib.parse.unquote(parts.path)
    return fill_placeholders(
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


def find_spark_page(context: SparkContext) -> str | None:
    """Return the address of an application in Spark's history server, or of its own UI; None if it has neither.

    :param context: the context of the application, whose driver runs here.
    """
    history = conf.get(SECTION, "history_server_url", fallback="") or ""
    if history:
        return f"{history.rstrip('/')}/history/{urllib.parse.quote(str(context.applicationId), safe='')}/"
    return context.uiWebUrl


def fill_placeholders(option: str, values: Mapping[str, str]) -> str | None:
    """Return an option of the configuration with its ``{placeholders}`` filled in, quoted for a URL; None if it is not set."""
    url = str(conf.get(SECTION, option, fallback="") or "")
    for name, value in values.items():
        url = url.replace(f"{{{name}}}", urllib.parse.quote(value, safe=""))
    return url or None
