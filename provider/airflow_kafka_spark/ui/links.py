"""Addresses of the pages. All that a page needs is in its address, so a reload, or somebody else, gets the same page."""

from __future__ import annotations

from urllib.parse import quote, urlencode

PAGE = "plugin/kafka-pipelines"
"""Where the host shows the page of all pipelines, below its base URL."""


def pipeline_url(ledger: str, pipeline: str, window: int | str | None = None) -> str:
    """The address of a pipeline's page.

    Guarantee: relative to Airflow's base URL, without a slash before it, and made of ASCII that needs no further quoting,
    whatever the names are.

    :param ledger: ``<kafka_conn_id>/<ledger_topic>``.
    :param pipeline: its name.
    :param window: the window that is shown: its number, or the name of its data interval; None shows the pipeline.
    :return: as ``plugin/kafka-pipelines?ledger=kafka_default%2Fairflow-windows&pipeline=orders``.
    """
    names = {"ledger": ledger, "pipeline": pipeline, **({} if window is None else {"window": str(window)})}
    return f"{PAGE}?{urlencode(names, quote_via=quote, safe='')}"
