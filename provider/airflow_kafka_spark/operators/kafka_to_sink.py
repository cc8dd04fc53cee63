"""Kafka -> sink: what flows into what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.operators.base import Run, asset_uris
from airflow_kafka_spark.operators.tolerance import refuse_forgotten, topic_problems
from airflow_kafka_spark.operators.tolerant import TolerantOperator
from airflow_kafka_spark.road.columns import NullValues
from airflow_kafka_spark.sinks.base import Sink
from airflow_kafka_spark.windows.instants import now_ms
from airflow_kafka_spark.windows.model import (
    TASK_PUT,
    Split,
    TopicPartition,
    Window,
)
from airflow_kafka_spark.windows.report import Report, sum_up

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.hooks.ledger import Ledger
    from airflow_kafka_spark.road.job import SinkJob
    from airflow_kafka_spark.road.shaping import Shaping
    from airflow_kafka_spark.road.tolerance import Tolerance
    from airflow_kafka_spark.sinks.base import Shape
    from airflow_kafka_spark.sinks.dead_letters import DeadLetterTopic


class KafkaToSinkOperator(TolerantOperator):
    """Move the next window of one or several topics into a sink, exactly once.

    The window reaches from where the pipeline stands to the last stable offsets found now (``read_committed``), per partition;
    partitions that appear later are read from their first record. Records are decoded, and written by Spark's tasks; the sink
    takes the window whole; then, in one Kafka transaction, the ledger says COMPLETE and the group's offsets move (KIP-98).

    Columns: those of ``value``, then those of ``key`` (a column both have is taken from the key), then ``metadata_columns``.

    :param value: how values are decoded.
    :param key: how keys are decoded; None leaves them.
    :param metadata_columns: what else of a record becomes a column: names among ``key``, ``value`` (raw bytes), ``topic``,
        ``partition``, ``offset``, ``timestamp``, ``timestampType``, ``headers``; as a list, or as a mapping name -> column.
    :param behavior_on_null_values: what a record without a value means: ``delete`` (default where the sink deletes), ``write``
        (default for formats that have null values), ``ignore`` (counted), or ``fail`` (default otherwise).

    :param transforms: what becomes of records between format and sink, in order: Kafka Connect's single message transforms
        (:mod:`airflow_kafka_spark.transforms`), ``Sql(...)``, or functions of a DataFrame. The sink's columns are those that come
        out of them. Spark computes them, in the same job. Records that a ``Filter(to=...)`` takes out go to its topic, each
        exactly once, in the transaction of the dead letters.
    :param errors_tolerance: ``none`` (default): a bad record, one that cannot be decoded, fails the window, and nothing of it is
        committed; ``all``: the other records are.
    :param errors_deadletterqueue_topic_name: with ``all``, the topic that bad records go to, byte for byte as they are, each
        exactly once: one Kafka transaction takes a window's letters there before the sink takes the rest, and the ledger
        remembers in it which they were. Created with one partition when it is missing. Templated.
    :param errors_deadletterqueue_topic_replication_factor: of a topic that is created; default -1, the brokers' default.
    :param errors_deadletterqueue_context_headers_enable: dead letters carry Connect's headers ``__connect.errors.topic``,
        ``.partition``, ``.offset``, ``.connector.name`` (the pipeline), ``.stage``, ``.exception.message`` and so on (KIP-298);
        default True.
    :param errors_skip: with ``all`` and without a topic: bad records are left out for good, and only counted.
    :param max_errors: how many records of a window may be bad: a number, or a share of its records below 1 (``0.01``); with more
        the window fails, and no letter is sent. None (default): any.

    ``topics`` or ``topics_pattern``, ``group_id``, ``starting_offsets``, ``ending_offsets``, ``max_records``, ``data_loss``,
    ``read_with``, ``split_records``, ``follows``, ``on_mismatch`` and ``read_timeout`` are those of
    :class:`~airflow_kafka_spark.operators.from_kafka.FromKafkaOperator`;
    ``sink``, ``pipeline``, ``kafka_conn_id``, ``spark_conn_id``, ``spark_conf``, ``ledger_topic`` and ``keep_windows`` those of
    :class:`~airflow_kafka_spark.operators.base.WindowOperator`.
    """

    template_fields: Sequence[str] = (
        "topics",
        "topics_pattern",
        "group_id",
        "pipeline",
        "kafka_conn_id",
        "ledger_topic",
        "max_records",
        "starting_offsets",
        "ending_offsets",
        "follows",
        "upstream_counts",
        "errors_deadletterqueue_topic_name",
    )
    ui_color = "#e8f1ff"
    routes_records = True

    def __init__(
        self,
        *,
        sink: Sink,
        value: Format,
        **kwargs: Any,
    ) -> None:
        super().__init__(sink=sink, value=value, **kwargs)
        # Topics are this task's inlets and the sink is its outlet, under names that need no connection to be looked up.
        self.add_assets(self.topic_uris, asset_uris(self.sink, Sink))

    # --- 1. validate ---

    def problems(self, run: Run) -> list[Problem]:
        flow = self._type_problems() or self.decoding_problems()
        problems = [*self.reading_problems(run), *flow, *self.server_problems(), *self._aside_problems()]
        if self.split_records and getattr(self.sink, "whole_partitions", False):
            found = "this sink upserts split by split: each partition has to be one"
            problems.append(Problem("split_records", found, 'Leave it out, or use `atomic="window"`'))
        problems += self.transform_problems()
        # A sink is asked about the columns it will get, so those have to be known. Where there are transforms, Spark knows them.
        if flow or (self.transforms and problems):
            return problems
        try:
            return [*problems, *self.sink.validate(self.shape(run))]
        except ValidationError as error:
            return [*problems, *error.problems]

    def _type_problems(self) -> list[Problem]:
        expected = (("value", self.value, Format), ("key", self.key, (Format, type(None))), ("sink", self.sink, Sink))
        return [
            Problem(where, f"`{value!r}` is no {getattr(kind, '__name__', 'Format')}")
            for where, value, kind in expected
            if not isinstance(value, kind)
        ]

    def _aside_problems(self) -> list[Problem]:
        """Of the topics that records go to which do not go to the sink."""
        dead, problems = self.errors.topic, self.error_problems()
        for where, topic in self._routes().items():
            if topic == dead and self.errors.tolerates:
                problems.append(Problem(where, f"`{topic}` is the dead letter topic, too", "Name another topic"))
            else:
                problems += topic_problems(self.kafka, where, topic, self.taken(topic), "records")
        return problems

    def _routes(self) -> dict[str, str]:
        """The topics that transforms send records to, by the argument that names them."""
        if not self.transforms or isinstance(self.transforms, str):
            return {}
        from airflow_kafka_spark.transforms import Transform

        found = {f"transforms[{n}] {t.name}.to": t.routes_to for n, t in enumerate(self.transforms) if isinstance(t, Transform)}
        return {where: topic for where, topic in found.items() if isinstance(topic, str)}

    def null_value_problems(self) -> list[Problem]:
        behavior, where = self.behavior_on_null_values, "behavior_on_null_values"
        if behavior not in (None, "fail", "ignore", "write", "delete"):
            return [Problem(where, f"`{behavior}` is not one of fail, ignore, write, delete")]
        if behavior == "delete" and not self.sink.takes_tombstones:
            return [Problem(where, "this sink does not delete", "Set `delete_enabled=True` on the sink")]
        if self.null_values == "delete" and self.key is None:
            return [
                Problem("key", "a sink that deletes needs the key's columns: a tombstone has no others", "Give `key=` a format")
            ]
        return []

    # --- 4. move, 5. commit ---

    def move(self, window: Window, ledger: Ledger) -> Report:
        from airflow_kafka_spark.road.refused import with_refused
        from airflow_kafka_spark.sinks.dead_letters import SetAside, known_to

        splits, shape = self.splits(window), self._shape(window.pipeline)
        letters = self._dead_letters(ledger.family_name)
        aside = SetAside(self.kafka, ledger.family_name, letters)
        # A zombie that has been asleep since the plan learns here, cheaply, that it is one; the broker and the sink know anyway.
        ledger.verify()
        tolerance, known = self.errors.in_tasks(letters, ledger), known_to(ledger)
        refuse_forgotten(window, known, buries=letters is not None, routes=bool(self._routes()))
        routed = known.routed(window.replay) if known else {}
        with self.sink.begin(window, splits, shape) as writer:
            with self.running(self._road(window, splits, shape, tolerance, routed)) as job:
                results = job.run(writer.split_writer()) if splits else []
            faults.reached("job.done")
            if tolerance is None:
                self.check_results(window, results)
            self.check_counts(window, results)
            self.check_followed(window, sum(result.records for result in results))
            # Once more, now that everything is read: a topic recreated meanwhile would have given other records.
            self.check(window)
            ledger.verify()
            if tolerance is not None:
                results = with_refused(results, writer.refused(results), splits, self.kafka if letters else None)
                self.errors.accept(window, results)
            # Before the sink takes the rest: what does not go there has to be decided and remembered by then.
            sent = aside.send(results, ledger)
            applied = writer.commit(results)
        ranges = {split.index: split.range for split in splits}
        landed = {"dead_letters": sent.landed, "routed": sent.routes} if sent else {}
        return sum_up(window, results, applied, ranges, flushed=now_ms(), upstream=self.upstream(), **landed)

    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        known = ledger.memory.dead.get(window.number)
        if known and known.routes and not report.routed:
            # The sink had taken the window before: its reader and its count of what was routed are gone.
            count = sum(part.records for part in known.routes)
            report = replace(report, records_read=report.records_read + count, records_routed=count, routed=known.routes)
        return super().close(ledger, window, report)

    def _road(
        self,
        window: Window,
        splits: tuple[Split, ...],
        shape: Shape,
        tolerance: Tolerance | None,
        routed: Mapping[TopicPartition, frozenset[int]],
    ) -> SinkJob:
        from airflow_kafka_spark.road.job import Job
        from airflow_kafka_spark.road.shaping import ShapingJob

        options: dict[str, Any] = {
            "kafka": self.kafka,
            "spark": self.spark,
            "window": window,
            "splits": splits,
            "skip_lost": self.data_loss == "skip",
            "patience": self.read_timeout,
            "tolerance": tolerance,
        }
        if self.transforms:
            return ShapingJob(shaping=self._shaping, schema=shape.schema, routed=routed, **options)
        return Job(layout=self.layout(), read_with=self.read_with, **options)

    def _dead_letters(self, pipeline: str) -> DeadLetterTopic | None:
        classes = {**self.error_classes(), TASK_PUT: f"{type(self.sink).__module__}.{type(self.sink).__name__}"}
        return self.errors.dead_letters(self.kafka, pipeline, classes)

    # --- what the parts are made of ---

    @property
    def null_values(self) -> NullValues:
        if self.behavior_on_null_values:
            return self.behavior_on_null_values
        if self.sink.takes_tombstones:
            return "delete"
        return "write" if self.value.decodes_null else "fail"

    def shape(self, run: Run) -> Shape:
        return self._shape(self.pipeline_name(run))

    def _shape(self, pipeline: str) -> Shape:
        from airflow_kafka_spark.sinks.base import Shape

        schema = self._shaped_schema if self.transforms else self.layout().schema
        return Shape(pipeline, schema, has_tombstones=self.null_values == "delete", tolerates=self.errors.tolerates)

    @property
    def _shaping(self) -> Shaping:
        from airflow_kafka_spark.road.shaping import Shaping
        from airflow_kafka_spark.transforms.base import as_transform

        transforms = tuple(map(as_transform, self.transforms))
        return Shaping(*self.formats, transforms, self.metadata, self.null_values)

    @cached_property
    def _shaped_schema(self) -> pa.Schema:
        return self._shaping.schema(self.spark)
