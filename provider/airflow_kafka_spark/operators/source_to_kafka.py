"""Source -> Kafka: what flows into what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem, RowsRejected, SourceRejected
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.operators.base import asset_uris
from airflow_kafka_spark.operators.publishing import (
    accounts,
    burying,
    check_target,
    hold_to_limit,
    publish_splits,
    publisher,
    routing,
    target,
    topic_uris,
    writer_classes,
)
from airflow_kafka_spark.operators.run import Run
from airflow_kafka_spark.operators.tolerance import SHOWN
from airflow_kafka_spark.operators.tolerant import TolerantOperator
from airflow_kafka_spark.operators.transforming import route_problems, routed_to, routes_of, target_problems
from airflow_kafka_spark.sinks.kafka import KafkaSink
from airflow_kafka_spark.sources.base import MAX_SPLITS, RowSource
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.model import TRANSFORMATION, Applied, SourcePlan, Target, TopicPartition, Window, first_bad
from airflow_kafka_spark.windows.report import Report, sum_up_published

if TYPE_CHECKING:
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.road.publish import ReadWith
    from airflow_kafka_spark.road.publish_shaping import RowShaping
    from airflow_kafka_spark.sinks.kafka_worker import Publisher
    from airflow_kafka_spark.transforms.chaining import TransformLike


class SourceToKafkaOperator(TolerantOperator):
    """Publish the next window of a table or of files to Kafka, exactly once.

    The source's end is frozen and cut into splits, both written to the ledger before any work. Spark reads one split per task,
    and each task publishes its split in one Kafka transaction together with a marker (KIP-98); a split whose marker is there is
    never published again. When all are, the ledger says COMPLETE and holds counts, and the first and last offset per partition.

    Guarantee: a ``read_committed`` reader sees each row of a window exactly once, whatever is killed, retried, run twice at once
    or paused on the way, as far as the source keeps its rows (see there); where bad rows are tolerated, it or the dead letter
    topic, never both. It may see some splits of a window before the others.

    :param source: where rows come from.
    :param topic: where they go; or give ``topic_column``, a column that names each row's topic.
    :param value: how rows become values: the columns ``value_columns``, or all of them.
    :param key: the key's column, or several; None for records without a key.
    :param key_format: how they become a key; default :class:`~airflow_kafka_spark.formats.String` for one column,
        :class:`~airflow_kafka_spark.formats.Json` for several.
    :param headers: header name -> column.
    :param transforms: what becomes of the records that rows are, in order: Kafka Connect's single message transforms
        (:mod:`airflow_kafka_spark.transforms`), ``Sql(...)``, or functions of a DataFrame. What comes to the first is what the
        other arguments make of a row; what comes out of the last is written by ``value`` and ``key_format``, a key without the
        latter by its type. A record whose topic they change goes there: such topics have to exist, and to keep their partitions
        while a window is open. What a ``Filter(to=...)`` takes out goes to that topic in JSON, as the source gave it, in the
        transaction of its split's other records.
    :param partition: a column that says each record's partition; without it keys are placed as the Java client places them.
    :param timestamp: a column of the record's time; default the time of writing.
    :param auto_create: create the topic when it is missing, with ``partitions``, ``replication_factor`` and ``topic_config``.
    :param producer_config: producer settings in librdkafka's names, as Connect's ``producer.override.*``.
    :param transaction_timeout: seconds that one split may take, at most the brokers' ``transaction.max.timeout.ms``; default 300.
    :param allow_new_partitions: go on with a window whose topic was given more partitions meanwhile: keys then move.
    :param read_with: ``task``: Spark's tasks read and encode their splits by themselves, which is fastest; ``spark``: the JVM
        does, for executors without the driver that this takes, and always where there are ``transforms``; ``auto`` (default):
        ``task`` where it is certain to make the same records, byte for byte, else ``spark``.
    :param errors_tolerance: ``none`` (default): a bad row, one that cannot be transformed, or does not fit the schema of
        ``value`` or ``key_format`` (Avro, Protobuf, JsonSchema), keeps its split from being published, and fails the window;
        ``all``: the other rows are published.
    :param errors_deadletterqueue_topic_name: with ``all``, the topic that bad rows go to as JSON, each exactly once: in the
        transaction of its split's records. Created with one partition, before anything is published, when it is missing.
        Templated.
    :param errors_deadletterqueue_topic_replication_factor: of a topic that is created; default -1, the brokers' default.
    :param errors_deadletterqueue_context_headers_enable: whether dead letters carry Connect's headers (KIP-298); default True.
    :param errors_skip: with ``all`` and without a topic: bad rows are left out for good, and only counted.
    :param max_errors: how many rows of a window may be bad: a number, or a share of its rows below 1 (``0.01``); with more
        nothing of the window is published, and no letter is sent. To know that, the window is read twice. None (default): any.

    ``pipeline``, ``kafka_conn_id``, ``spark_conn_id``, ``spark_conf``, ``ledger_topic`` and ``keep_windows`` are those of
    :class:`~airflow_kafka_spark.operators.base.WindowOperator`.
    """

    template_fields: Sequence[str] = ("pipeline", "kafka_conn_id", "ledger_topic", "errors_deadletterqueue_topic_name")
    sink: KafkaSink
    ui_color = "#eaf7e6"

    def __init__(
        self,
        *,
        source: RowSource,
        topic: str | None = None,
        value: Format,
        key: str | Sequence[str] | None = None,
        key_format: Format | None = None,
        topic_column: str | None = None,
        value_columns: Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        transforms: Sequence[TransformLike] = (),
        partition: str | None = None,
        timestamp: str | None = None,
        auto_create: bool = False,
        partitions: int = -1,
        replication_factor: int = -1,
        topic_config: Mapping[str, str] | None = None,
        producer_config: Mapping[str, Any] | None = None,
        transaction_timeout: float = 300.0,
        allow_new_partitions: bool = False,
        read_with: ReadWith = "auto",
        kafka_conn_id: str = "kafka_default",
        **kwargs: Any,
    ) -> None:
        sink = KafkaSink(
            topic=topic,
            value=value,
            topic_column=topic_column,
            value_columns=tuple(value_columns) if value_columns is not None else None,
            key=(key,) if isinstance(key, str) else tuple(key or ()),
            key_format=key_format,
            headers=dict(headers or {}),
            partition=partition,
            timestamp=timestamp,
            auto_create=auto_create,
            partitions=partitions,
            replication_factor=replication_factor,
            topic_config=dict(topic_config or {}),
            producer_config=dict(producer_config or {}),
            transaction_timeout=transaction_timeout,
            allow_new_partitions=allow_new_partitions,
            conn_id=kafka_conn_id,
        )
        super().__init__(sink=sink, kafka_conn_id=kafka_conn_id, **kwargs)
        self.source = source
        self.transforms = transforms
        self.read_with = read_with
        self.add_assets(asset_uris(source, RowSource), topic_uris(kafka_conn_id, self.sink))

    # --- 1. validate ---

    def problems(self, run: Run) -> list[Problem]:
        wrong = [
            Problem(where, f"`{value!r}` is no {kind.__name__}")
            for where, value, kind in (("source", self.source, RowSource), ("value", self.sink.value, Format))
            if not isinstance(value, kind)
        ]
        if wrong:
            return [*self.pipeline_problems(run), *wrong]
        of_source = self.source.validate()
        unknown = []
        if self.read_with not in ("auto", "task", "spark"):
            unknown.append(Problem("read_with", f"`{self.read_with}` is not one of auto, task, spark"))
        # Without a source nobody knows its columns; what else is wrong is told all the same.
        columns = None if of_source else self.source.columns()
        return [
            *self.pipeline_problems(run),
            *unknown,
            *of_source,
            *self.sink.problems(columns, transformed=bool(self.transforms)),
            *self._transform_problems(),
            *self.sink.server_problems(self.kafka),
            *self._error_problems(),
            *self.spark_problems(),
        ]

    def _transform_problems(self) -> list[Problem]:
        """What is wrong with the transforms' options, without Spark."""
        if not self.transforms:
            return []
        from airflow_kafka_spark.transforms import InsertField, TimestampRouter, problems

        found = problems(self.transforms)
        if self.read_with == "task":
            found.append(Problem("read_with", "Spark reads for transforms, not each task by itself", 'Use "auto"'))
        for index, transform in enumerate(() if found else self.transforms):
            if isinstance(transform, InsertField) and transform.offset_field:
                what = "a row has no offset before it is written"
                found.append(Problem(f"transforms[{index}] InsertField.offset_field", what, "Leave it out"))
            if isinstance(transform, TimestampRouter) and not self.sink.timestamp:
                what = "without `timestamp` a row has no time before it is written"
                found.append(Problem(f"transforms[{index}] TimestampRouter", what, "Give the operator a `timestamp` column"))
        return found

    def _error_problems(self) -> list[Problem]:
        routes, taken = routes_of(self.transforms), (self.ledger_topic,)
        mixed = target_problems(self.sink.topic, self.errors, routes, "rows")
        wrong = self.errors.problems() or self.errors.server_problems(self.kafka, taken)
        return [*mixed, *wrong, *route_problems(self.kafka, routes, self.errors, lambda topic: taken)]

    # --- 2. fence and look ---

    def open_ledger(self, run: Run) -> Ledger:
        from airflow_kafka_spark.ledger.attempt import Ledger

        pipeline = self.pipeline_name(run)
        # A group of the pipeline's own, which nobody consumes with: its offset carries the short cut into the ledger.
        return Ledger(
            self.kafka,
            pipeline,
            run.id,
            group_id=f"{self.ledger_topic}.{pipeline}",
            topic=self.ledger_topic,
            keep_windows=self.keep_windows,
            hint_topics=(self.ledger_topic,),
        )

    # --- 3. plan ---

    def destinations(self) -> Endpoint:
        """Its topic, the one that bad rows go to, and those that transforms send records to."""
        return super().destinations() | routed_to(routes_of(self.transforms))

    def origin(self) -> Endpoint:
        return self.source.origin()

    def plan(self, ledger: Ledger, run: Run) -> Window:
        from airflow_kafka_spark.ledger.attempt import utc_now

        self.sink.ensure_topic(self.kafka)
        frozen = self.source.freeze(ledger.memory.position.source)
        if len(frozen.splits) > MAX_SPLITS:
            found = f"the window has {len(frozen.splits)} splits, more than {MAX_SPLITS}"
            raise SourceRejected(self.source.uri, found, "Make splits larger, or windows smaller")
        targets = [target(self.kafka, self.sink)] if self.sink.topic else []
        self._check_transforms(frozen.splits[:1])
        return Window(
            pipeline=ledger.pipeline,
            number=ledger.memory.last_used + 1,
            ranges=(),
            run=run.id,
            planned_at=utc_now(),
            cluster_id=self.kafka.cluster_id(),
            topic_ids={found.topic: found.topic_id for found in targets},
            source=SourcePlan(
                frozen.splits,
                frozen.position,
                frozen.rows,
                frozen.remaining,
                {found.topic: found.partitions for found in targets},
            ),
        )

    def _check_transforms(self, bounds: Sequence[Mapping[str, Any]]) -> None:
        """Before anything is written down: a chain that does not fit the rows would hold the window up. Nothing is read for it.

        :param bounds: of splits.
        :raises ValidationError: it does not, or what comes out cannot be written.
        """
        from airflow_kafka_spark.road.publish import reading

        if bounds and (shaping := self._shaping) is not None:
            with reading(self.spark, self.source) as session:
                shaping.check(self.source.frame(session, bounds))

    def check(self, window: Window) -> None:
        """The topic is the one the window was planned for, with the partitions it had.

        :raises TopicRecreated: it is another one of this name: what was published to it is gone.
        :raises PartitionsChanged: it has more partitions now, so that keys would be placed elsewhere.
        """
        assert window.source is not None
        for name, count in window.source.partitions.items():
            check_target(self.kafka, self.sink, Target(name, window.topic_ids.get(name, ""), count))

    # --- 4. move, 5. commit ---

    def applied(self, window: Window) -> Applied | None:
        """Splits are published one by one, and the ledger remembers each."""
        return None

    def move(self, window: Window, ledger: Ledger) -> Report:
        assert window.source is not None
        splits = range(len(window.source.splits))
        markers = publish_splits(ledger, window, splits, lambda left: self._publish(window, ledger, left))
        self.check(window)
        report = sum_up_published(window, markers)
        if self.errors.tolerates and self.errors.most is None:  # else it was said when they were counted
            self.errors.accept(window, accounts(markers))
        if window.source.rows not in (None, report.records_read):
            self.log.warning(
                "%s rows were counted when window %s was planned, %s were there when they were read: the source has changed",
                f"{window.source.rows:,}", window, f"{report.records_read:,}",
            )  # fmt: skip
        return report

    def _publish(self, window: Window, ledger: Ledger, left: tuple[int, ...]) -> None:
        from airflow_kafka_spark.road.publish import PublishJob

        how = self._publisher(window, ledger)
        shaping = self._shaping and self._shaping.telling(ledger.parent_pipeline, self.source.uri, str(window))
        job = PublishJob(self.spark, window, self.source, self.sink, how, left, self.read_with, shaping)
        with self.running(job):
            hold_to_limit(job, self.errors, window, ledger)
            _, rejected = job.run()
        if count := sum(result.rejected for result in rejected):
            raise RowsRejected(str(window), count, first_bad(rejected, SHOWN))

    @property
    def _shaping(self) -> RowShaping | None:
        from airflow_kafka_spark.road.publish_shaping import RowShaping

        reserved = tuple(filter(None, (self.ledger_topic, self.errors.topic, *routes_of(self.transforms).values())))
        return RowShaping(tuple(self.transforms), self.sink, reserved) if self.transforms else None

    def _publisher(self, window: Window, ledger: Ledger) -> Publisher:
        from airflow_kafka_spark.sinks.kafka_fitting_worker import RowEnvelope

        topics = routes_of(self.transforms).values()
        made = routing(publisher(self.kafka, self.sink, ledger), self.kafka, self.sink, topics)
        if not self.errors.tolerates:
            return made
        classes = writer_classes(self.sink) | ({TRANSFORMATION: "airflow_kafka_spark.transforms"} if self.transforms else {})
        letters = self.errors.dead_letters(self.kafka, ledger.parent_pipeline, classes)
        if letters is not None:
            envelope = RowEnvelope(**vars(letters.envelope), source=self.source.uri, window=str(window))
            letters = replace(letters, envelope=envelope)
        return burying(made, self.kafka, self.sink, letters)

    # --- 6. close ---

    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        from airflow_kafka_spark.ledger.attempt import utc_now

        report = replace(report, completed_at=utc_now(), source=self.source.uri)
        place = ledger.place
        ledger.close(report.to_dict(), {TopicPartition(place.topic, place.partition): place.offset})
        return report
