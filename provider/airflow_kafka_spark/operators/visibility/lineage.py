"""The lineage of a window: topics and tables by the names of OpenLineage's specification, with offsets and counts.

Only OpenLineage's provider uses it, and OpenLineage is not imported before. The provider calls it in a process that is forked
from the task's process. This module may therefore use no client of Kafka and no session of Spark, which do not work in a fork.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.sinks.base import Sink
from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
from airflow_kafka_spark.sources.base import RowSource
from airflow_kafka_spark.windows.times import format_instant

if TYPE_CHECKING:
    import pyarrow as pa
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import InputDataset, OutputDataset

    from airflow_kafka_spark.windows.model import Window

OFFSETS, WINDOW = "kafkaSpark_offsets", "kafkaSpark_window"
"""Facets of this provider: of a topic, and of the run."""

_SCHEMES = {"s3a": "s3", "s3n": "s3", "postgresql": "postgres", "mariadb": "mysql"}


@dataclass(frozen=True)
class Dataflow:
    """The inputs and outputs of a task.

    :param sinks: the sinks of the rows, the operator's own sink first.
    :param topics: the topics that are read, as far as their names are known.
    :param source: the source of rows that are not read from Kafka; default None.
    :param dead_letter_topic: the topic of bad records; default None.
    """

    sinks: tuple[Sink | KafkaSink, ...]
    topics: tuple[str, ...] = ()
    source: RowSource | None = None
    dead_letter_topic: str | None = None

    @property
    def topic(self) -> str | None:
        """The topic that is read, or else published to; None for a pattern or a column of topics."""
        written = [sink.topic for sink in self.sinks if isinstance(sink, KafkaSink) and self.source is not None]
        return next((topic for topic in (*self.topics, *written) if topic), None)

    @property
    def other_end(self) -> str:
        """The URI of the source or the sink that is not :attr:`topic`."""
        return self.source.uri if self.source is not None else self.sinks[0].uri


def make_lineage(
    flow: Dataflow,
    bootstrap_servers: str,
    *,
    window: Window | None = None,
    report: Mapping[str, Any] | None = None,
    schema: pa.Schema | None = None,
) -> OperatorLineage:
    """Return inputs, outputs and facets of a window's task.

    :param flow: the inputs and outputs of the task.
    :param bootstrap_servers: the addresses of the brokers.
    :param window: the window; None if none is planned yet.
    :param report: its report, once it is complete.
    :param schema: the columns of the sink's table, where they are known.
    """
    from airflow.providers.openlineage.extractors import OperatorLineage

    broker = get_broker(bootstrap_servers)
    if flow.source is not None:
        inputs = [_make_input(parse_dataset((report or {}).get("source") or flow.source.uri), report)]
    else:
        ranges = _list_ranges(window, report)
        topics = sorted({r["topic"] for r in ranges}) or list(flow.topics)
        inputs = [_make_topic_input(broker, topic, ranges, report) for topic in topics]
    outputs = _list_outputs(flow, broker, report, schema)
    run_facets = {WINDOW: _make_facet_classes()["run"](**_list_window_facts(window, report))} if window or report else {}
    return OperatorLineage(inputs=inputs, outputs=outputs, run_facets=run_facets)


def get_broker(bootstrap_servers: str) -> str:
    """Return the namespace of a cluster's topics: its first bootstrap server, as ``kafka://host:port``."""
    first = bootstrap_servers.split(",")[0].strip().rpartition("://")[2]
    return f"kafka://{first}" if first.rpartition(":")[2].isdecimal() else f"kafka://{first}:9092"


def parse_dataset(uri: str) -> tuple[str, str]:
    """Return namespace and name, as OpenLineage's specification has them for each system.

    :param uri: the URI of a source or a sink: ``postgres://host:port/db/schema/table``, ``file:///path``, ``s3a://bucket/path``.
    """
    parts = urllib.parse.urlsplit(uri)
    scheme, path = _SCHEMES.get(parts.scheme, parts.scheme), urllib.parse.unquote(parts.path)
    if scheme in ("", "file"):
        return "file", path
    if scheme in ("s3", "gs", "abfs", "abfss", "hdfs"):
        return f"{scheme}://{parts.netloc}", path.strip("/") or "/"
    return f"{scheme}://{parts.netloc}", ".".join(urllib.parse.unquote(part) for part in parts.path.strip("/").split("/"))


def _list_ranges(window: Window | None, report: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if report is not None:
        return [dict(r) for r in report["ranges"]]
    return [
        {"topic": r.topic, "partition": r.partition, "start": r.start, "end": r.end} for r in (window.ranges if window else ())
    ]


def _list_window_facts(window: Window | None, report: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of the run's facet: the window's name and its results."""
    reported = report or {}
    facts: dict[str, Any] = {
        name: reported.get(name)
        for name in (
            "records_read", "records_written", "records_deleted", "records_rejected", "gaps", "guarantee", "attempts",
            "planned_at", "completed_at",
        )
    }  # fmt: skip
    if report is not None:
        return {"pipeline": report["pipeline"], "window": report["window"], "interval": report.get("interval"), **facts}
    assert window is not None
    interval = list(map(format_instant, window.interval)) if window.interval else None
    return {**facts, "pipeline": window.pipeline, "window": window.id, "interval": interval, "planned_at": window.planned_at}


def _make_topic_input(
    broker: str, topic: str, ranges: Sequence[Mapping[str, Any]], report: Mapping[str, Any] | None
) -> InputDataset:
    from openlineage.client.event_v2 import InputDataset

    of_topic = [{k: v for k, v in r.items() if k != "topic"} for r in ranges if r["topic"] == topic]
    facets: dict[str, Any] = {}
    if of_topic:
        facets[OFFSETS] = _make_facet_classes()["input"](partitions=of_topic)
    if report is not None:
        facets |= _make_statistics(sum(r["records"] for r in of_topic))
    return InputDataset(namespace=broker, name=topic, inputFacets=facets)


def _make_input(dataset: tuple[str, str], report: Mapping[str, Any] | None) -> InputDataset:
    from openlineage.client.event_v2 import InputDataset

    namespace, name = dataset
    return InputDataset(namespace=namespace, name=name, inputFacets=_make_statistics(report["records_read"]) if report else {})


def _make_statistics(rows: int) -> dict[str, Any]:
    """Return the facet of a number of rows that were read; none if OpenLineage has no such facet."""
    try:
        from openlineage.client.facet_v2 import input_statistics_input_dataset as facet
    except ImportError:
        return {}
    return {"inputStatistics": facet.InputStatisticsInputDatasetFacet(rowCount=rows)}


def _list_outputs(flow: Dataflow, broker: str, report: Mapping[str, Any] | None, schema: pa.Schema | None) -> list[OutputDataset]:
    own, *others = flow.sinks
    outputs = []
    if isinstance(own, KafkaSink):
        landed = list((report or {}).get("published", ()))
        topics = sorted({part["topic"] for part in landed}) or [str(t) for t in [own.topic] if t]
        outputs += [_make_topic_output(broker, topic, landed, report is not None) for topic in topics]
    else:
        namespace, name = parse_dataset((report or {}).get("sink") or own.uri)
        rows = None if report is None else report["records_written"]
        outputs.append(_make_output(namespace, name, rows, {}, _make_schema_facet(schema) if schema is not None else {}))
    counts = {part["sink"]: part["records"] for part in (report or {}).get("captured", ())}
    uris = [sink.uri for sink in others]
    outputs += [_make_output(*parse_dataset(uri), counts.get(uri, 0) if report is not None else None, {}, {}) for uri in uris]
    if letters := flow.dead_letter_topic:
        outputs.append(_make_topic_output(broker, letters, list((report or {}).get("dead_letters", ())), report is not None))
    return outputs


def _make_topic_output(broker: str, topic: str, landed: Sequence[Mapping[str, Any]], is_complete: bool) -> OutputDataset:
    of_topic = [{k: v for k, v in part.items() if k != "topic"} for part in landed if part["topic"] == topic]
    facets = {OFFSETS: _make_facet_classes()["output"](partitions=of_topic)} if of_topic else {}
    return _make_output(broker, topic, sum(part["records"] for part in of_topic) if is_complete else None, facets, {})


def _make_output(
    namespace: str, name: str, rows: int | None, output_facets: dict[str, Any], facets: dict[str, Any]
) -> OutputDataset:
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    if rows is not None:
        facet = statistics.OutputStatisticsOutputDatasetFacet(rowCount=rows)
        output_facets = {**output_facets, "outputStatistics": facet}
    return OutputDataset(namespace=namespace, name=name, facets=facets, outputFacets=output_facets)


def _make_schema_facet(columns: pa.Schema) -> dict[str, Any]:
    """Return the facet of a table's columns."""
    from openlineage.client.facet_v2 import schema_dataset

    fields = [schema_dataset.SchemaDatasetFacetFields(name=column.name, type=str(column.type)) for column in columns]
    return {"schema": schema_dataset.SchemaDatasetFacet(fields=fields)}


@cache
def _make_facet_classes() -> dict[str, Any]:
    """Return the classes of this provider's facets. OpenLineage is imported only when they are needed."""
    import attr
    from openlineage.client.generated.base import InputDatasetFacet, OutputDatasetFacet, RunFacet

    @attr.define
    class KafkaOffsetsInputDatasetFacet(InputDatasetFacet):
        """Per partition: the offsets that were read, ``[start, end)``, and the number of records."""

        partitions: list[dict[str, Any]] = attr.field(factory=list)

    @attr.define
    class KafkaOffsetsOutputDatasetFacet(OutputDatasetFacet):
        """Per partition: the first and the last offset that were written, and the number of records."""

        partitions: list[dict[str, Any]] = attr.field(factory=list)

    @attr.define
    class KafkaSparkWindowRunFacet(RunFacet):
        """The window's name and results."""

        pipeline: str = attr.field(default="")
        window: str = attr.field(default="")
        interval: list[str] | None = attr.field(default=None)
        records_read: int | None = attr.field(default=None)
        records_written: int | None = attr.field(default=None)
        records_deleted: int | None = attr.field(default=None)
        records_rejected: int | None = attr.field(default=None)
        gaps: list[dict[str, Any]] | None = attr.field(default=None)
        guarantee: str | None = attr.field(default=None)
        attempts: int | None = attr.field(default=None)
        planned_at: str | None = attr.field(default=None)
        completed_at: str | None = attr.field(default=None)

    return {"input": KafkaOffsetsInputDatasetFacet, "output": KafkaOffsetsOutputDatasetFacet, "run": KafkaSparkWindowRunFacet}
