"""Kafka -> Kafka: what flows into what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import LedgerBehind, Problem, ValidationError
from airflow_kafka_spark.formats import Json, Raw
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.formats.ddl import backticked
from airflow_kafka_spark.operators.publishing import (
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
from airflow_kafka_spark.operators.transforming import TransformingOperator, target_problems
from airflow_kafka_spark.road.columns import NullValues
from airflow_kafka_spark.sinks.kafka import KafkaSink
from airflow_kafka_spark.windows.instants import now_ms
from airflow_kafka_spark.windows.model import OUTPUT, Applied, OffsetRange, Split, TopicPartition, Window, merge_landed
from airflow_kafka_spark.windows.plan import check_readable, whole_splits
from airflow_kafka_spark.windows.report import Report, sum_up_relayed

if TYPE_CHECKING:
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.road.columns import Layout
    from airflow_kafka_spark.road.relay import Change
    from airflow_kafka_spark.road.relay_shaping import Reshaping
    from airflow_kafka_spark.sinks.dead_letters import DeadLetterTopic
    from airflow_kafka_spark.sinks.kafka_worker import Consumed, Publisher

MAX_RECORDS = 10_000_000
"""A window's offsets by default: a partition's share of them is one transaction, and has to fit into its timeout."""

OWN_COLUMNS = "__kafka_"


class KafkaToKafkaOperator(TransformingOperator):
    """Filter, transform, repartition or copy the next window of one or several topics to another topic, exactly once.

    One Spark task a partition reads its range, and publishes what becomes of it in ONE Kafka transaction together with the
    consumed offset of the group and a marker in the ledger (KIP-98, KIP-447): output and offset are there both or not at all, and
    the order of a partition is kept. When all partitions are, the ledger says COMPLETE.

    Without ``filter``, ``columns``, ``output_key`` and ``transforms`` records are copied byte for byte, and no SQL runs.

    Guarantee: a ``read_committed`` reader of ``topic`` sees what became of each record exactly once, whatever is killed, retried,
    run twice at once or paused on the way; where bad records are tolerated, it or the dead letter topic, never both. It may see
    some partitions of a window before the others.

    :param topic: where records go, on the same cluster; not one of those that are read.
    :param value: how values are decoded for ``filter``, ``columns`` and ``transforms``; default
        :class:`~airflow_kafka_spark.formats.Raw`, a column ``value`` of bytes.
    :param filter: a condition of Spark's SQL (``"amount > 100 and country = 'DE'"``); the others are left out, and counted.
        Records without a value pass.
    :param columns: column -> expression of Spark's SQL: what the new values hold. None (default) leaves values as they are, but
        for an ``output_value``, which then writes all columns of ``value``.
    :param transforms: what becomes of records, in order: Kafka Connect's single message transforms
        (:mod:`airflow_kafka_spark.transforms`), ``Sql(...)``, or functions of a DataFrame, in place of ``filter``, ``columns``
        and ``output_key``. A key or a value that none of them changes keeps its bytes. A record whose topic they change goes
        there: such topics have to exist, and to keep their partitions while a window is open. What a ``Filter(to=...)`` takes
        out goes to that topic as it was read, in the transaction of its partition's other records.
    :param output_value: how ``columns`` are written; default :class:`~airflow_kafka_spark.formats.Json`. Behind ``transforms``:
        how a changed value is; default by its type, structs as JSON, numbers and texts as text, bytes as they are.
    :param output_key: the column of the new key, or several, of ``columns`` or of the record; None (default) leaves keys as they
        are.
    :param output_key_format: how they become a key; default :class:`~airflow_kafka_spark.formats.String` for one column,
        :class:`~airflow_kafka_spark.formats.Json` for several. Behind ``transforms``: how a changed key is written.
    :param preserve_partitions: every record keeps its partition's number; else keys are placed as the Java client places them.
    :param preserve_timestamps: records keep their time; else it is the time of writing.
    :param preserve_headers: records keep their headers.
    :param behavior_on_null_values: what becomes of a record without a value: ``write`` (default: it stays one), ``ignore``
        (counted), or ``fail`` (default where ``output_key`` needs columns that it does not have).
    :param max_records: offsets per window, default 10 million, shared among the partitions: one partition's share is one
        transaction, which has to end within ``transaction_timeout``.
    :param auto_create: create the topic when it is missing, with ``partitions``, ``replication_factor`` and ``topic_config``.
    :param producer_config: producer settings in librdkafka's names, as Connect's ``producer.override.*``.
    :param transaction_timeout: seconds that one partition may take, at most the brokers' ``transaction.max.timeout.ms``;
        default 300.
    :param allow_new_partitions: go on with a window whose target was given more partitions meanwhile: keys then move.
    :param errors_tolerance: ``none`` (default): a bad record, one that cannot be decoded or transformed, or that does not fit the
        schema it is written in, keeps its partition from being published, and fails the window; ``all``: the others are
        published.
    :param errors_deadletterqueue_topic_name: with ``all``, the topic that bad records go to, byte for byte as they are, each
        exactly once: in the transaction of its partition's other records. Created with one partition, before anything is
        published, when it is missing. Templated.
    :param max_errors: how many records of a window may be bad: a number, or a share of its records below 1 (``0.01``); with more
        nothing of the window is published, and no letter is sent. To know that, the window is read twice. None (default): any.

    ``errors_deadletterqueue_topic_replication_factor``, ``errors_deadletterqueue_context_headers_enable``, ``errors_skip``,
    ``key`` and ``metadata_columns`` are those of :class:`~airflow_kafka_spark.operators.KafkaToSinkOperator`; ``topics`` or
    ``topics_pattern``, ``group_id``, ``starting_offsets``, ``ending_offsets``, ``data_loss``, ``follows``, ``on_mismatch`` and
    ``read_timeout`` of :class:`~airflow_kafka_spark.operators.from_kafka.FromKafkaOperator`; ``pipeline``, ``kafka_conn_id``,
    ``spark_conn_id``, ``spark_conf``, ``ledger_topic`` and ``keep_windows`` those of
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
        "filter",
        "columns",
        "errors_deadletterqueue_topic_name",
    )
    sink: KafkaSink  # type: ignore[assignment]
    ui_color = "#fff4de"

    def __init__(
        self,
        *,
        topic: str,
        value: Format | None = None,
        filter: str | None = None,
        columns: Mapping[str, str] | None = None,
        output_value: Format | None = None,
        output_key: str | Sequence[str] | None = None,
        output_key_format: Format | None = None,
        preserve_partitions: bool = False,
        preserve_timestamps: bool = True,
        preserve_headers: bool = True,
        auto_create: bool = False,
        partitions: int = -1,
        replication_factor: int = -1,
        topic_config: Mapping[str, str] | None = None,
        producer_config: Mapping[str, Any] | None = None,
        transaction_timeout: float = 300.0,
        allow_new_partitions: bool = False,
        kafka_conn_id: str = "kafka_default",
        **kwargs: Any,
    ) -> None:
        sink = KafkaSink(
            topic=topic,
            value=output_value or Json(),
            key=(output_key,) if isinstance(output_key, str) else tuple(output_key or ()),
            key_format=output_key_format,
            auto_create=auto_create,
            partitions=partitions,
            replication_factor=replication_factor,
            topic_config=dict(topic_config or {}),
            producer_config=dict(producer_config or {}),
            transaction_timeout=transaction_timeout,
            allow_new_partitions=allow_new_partitions,
            conn_id=kafka_conn_id,
        )
        if not kwargs.get("follows"):
            kwargs.setdefault("max_records", MAX_RECORDS)
        super().__init__(sink=sink, value=value or Raw(), kafka_conn_id=kafka_conn_id, **kwargs)
        self.filter = filter
        self.columns = columns
        self.output_value = output_value
        self.preserve_partitions = preserve_partitions
        self.preserve_timestamps = preserve_timestamps
        self.preserve_headers = preserve_headers
        self.add_assets(self.topic_uris, topic_uris(kafka_conn_id, sink))

    # --- 1. validate ---

    def problems(self, run: Run) -> list[Problem]:
        kinds = (
            ("value", self.value, Format),
            ("key", self.key, (Format, type(None))),
            ("output_value", self.sink.value, Format),
        )
        wrong = [Problem(where, f"`{found!r}` is no Format") for where, found, kind in kinds if not isinstance(found, kind)]
        own = wrong or [*self.decoding_problems(), *self._change_problems()]
        problems = [*self.reading_problems(run), *own, *self.server_problems(), *self._target_problems(), *self.error_problems()]
        if self.transforms and not problems:
            try:
                self._reshaping.check(self.spark)
            except ValidationError as error:
                return list(error.problems)
        return problems

    def _change_problems(self) -> list[Problem]:
        if self.transforms:
            return [*self.transform_problems(), *self._beside_transforms(), *self.sink.problems(None)]
        problems = []
        if self.columns is not None and not self.columns:
            problems.append(Problem("columns", "they are empty", "Name a column and its expression, or leave them out"))
        if self.columns is None and self.output_value is not None and isinstance(self.value, Raw):
            found = "values are read as bytes, which nobody can write in another format"
            problems.append(Problem("output_value", found, "Say by `value` what they are, or leave it out"))
        for name in (*(self.columns or ()), *self._record_columns()):
            if name.startswith(OWN_COLUMNS):
                problems.append(Problem("columns", f"`{name}` begins with `{OWN_COLUMNS}`", "Name it otherwise"))
        if self.read_with == "spark":
            problems.append(Problem("read_with", "between topics tasks read by themselves", "Leave it out"))
        available = list(dict.fromkeys([*(self.columns or ()), *self._record_columns()]))
        # Written are the new columns; the record's others are there for the key.
        sink = replace(self.sink, value_columns=tuple(self._written)) if self._written else self.sink
        return [*problems, *sink.problems(available)]

    def _beside_transforms(self) -> list[Problem]:
        instead = {
            "filter": (self.filter, "Sql(filter=...)"),
            "columns": (self.columns, "Sql({...})"),
            "output_key": (self.sink.key or None, "ValueToKey and ExtractField"),
            "metadata_columns": (self.metadata or None, "InsertField, or Sql, which sees `record.offset` and the like"),
        }
        found = "there are `transforms`, too"
        return [
            Problem(name, found, f"Use {other}, among those") for name, (given, other) in instead.items() if given is not None
        ]

    def _target_problems(self) -> list[Problem]:
        if not self.subscription.validate() and self.subscription.matches(str(self.sink.topic)):
            return [Problem("topic", f"`{self.sink.topic}` is read, too: its records would go round", "Write to another topic")]
        mixed = target_problems(self.sink.topic, self.errors, self.routes())
        return [*mixed, *self.sink.server_problems(self.kafka)]

    def null_value_problems(self) -> list[Problem]:
        behavior, where = self.behavior_on_null_values, "behavior_on_null_values"
        if behavior not in (None, "fail", "ignore", "write"):
            return [Problem(where, f"`{behavior}` is not one of fail, ignore, write")]
        if behavior == "write" and self._key_needs_value:
            found = "a record without a value has no columns to make `output_key` of"
            return [Problem(where, found, 'Use "ignore" or "fail", or make the new key of the columns of `key` alone')]
        return []

    # --- 3. plan ---

    def plan(self, ledger: Ledger, run: Run) -> Window:
        self.sink.ensure_topic(self.kafka)
        return replace(super().plan(ledger, run), target=target(self.kafka, self.sink))

    def record_of_sink(self, pipeline: str) -> Applied | None:
        """A topic remembers no window; the group's committed offsets do, since they moved with the records."""
        return None

    def check(self, window: Window) -> None:
        """As for every window that is read from Kafka, but for partitions that are published: their records may be gone by now.
        The group stands behind them, since its offset moved with the output.
        """
        assert window.target is not None
        committed = self.kafka.committed(self.group_id, window.ends, stable=False)
        left = tuple(r for r in window.ranges if not (there := committed[r.topic_partition]) or there.offset < r.end)
        unpublished = replace(window, ranges=left)
        check_readable(unpublished, self.compared_log(unpublished), self.data_loss)
        check_target(self.kafka, self.sink, window.target)

    def splits(self, window: Window) -> tuple[Split, ...]:
        return whole_splits(window, without=self.lost_topics(window))

    # --- 4. move, 5. commit ---

    def applied(self, window: Window) -> Applied | None:
        """Partitions are published one by one, and the ledger remembers each."""
        return None

    def move(self, window: Window, ledger: Ledger) -> Report:
        splits = {split.index: split for split in self.splits(window)}

        def publish(left: tuple[int, ...]) -> None:
            self._refuse_unmarked(window, ledger, [splits[index].range for index in left])
            self._relay(window, ledger, tuple(splits[index] for index in left))

        markers = publish_splits(ledger, window, list(splits), publish)
        self.check(window)
        ranges = {index: split.range for index, split in splits.items()}
        dead = merge_landed(part for marker in markers for part in marker.dead_letters)
        report = sum_up_relayed(window, markers, ranges, flushed=now_ms(), upstream=self.upstream(), dead_letters=dead)
        if self.errors.tolerates and self.errors.most is None:  # else it was said when they were counted
            self.errors.accept(window, [marker.result for marker in markers if marker.result])
        self.check_followed(window, report.records_read)
        return report

    def _refuse_unmarked(self, window: Window, ledger: Ledger, left: Sequence[OffsetRange]) -> None:
        """Make sure that what the ledger does not know to be published is not: its marker and the group's offset are written in
        one transaction.

        :raises LedgerBehind: the group says that it is.
        """
        from airflow_kafka_spark.ledger.group import windows_of

        committed = self.kafka.committed(self.group_id, [r.topic_partition for r in left])
        named = windows_of(ledger.pipeline, committed)
        for r in left:
            tp, there = r.topic_partition, committed[r.topic_partition]
            if there and there.offset >= r.end and named.get(tp, 0) >= window.number:
                to, known = f"committed:{self.group_id}", ledger.memory.last_number
                raise LedgerBehind(ledger.pipeline, self.group_id, named[tp], known, self.ledger_topic, to)

    def _relay(self, window: Window, ledger: Ledger, left: tuple[Split, ...]) -> None:
        from airflow_kafka_spark.road.relay import RelayJob
        from airflow_kafka_spark.road.tolerance import Tolerance

        letters = self.errors.dead_letters(self.kafka, ledger.parent_pipeline, self.error_classes())
        # Nothing is remembered of dead letters but in markers: a split without one has sent none.
        tolerance = Tolerance(keep=letters is not None) if self.errors.tolerates else None
        job = RelayJob(
            self.spark,
            window,
            left,
            replace(self._reshaping, pipeline=ledger.parent_pipeline) if self.transforms else self._change,
            self._publisher(ledger, self._consumed(window, ledger, left), letters),
            self.kafka.consumer_config(),
            skip_lost=self.data_loss == "skip",
            patience=self.read_timeout,
            tolerance=tolerance,
        )
        with self.running(job):
            can_be_bad = bool(self.transforms) or not self._change.is_none or self.null_values == "fail"
            hold_to_limit(job, self.errors, window, ledger, can_be_bad)
            _, rejected = job.run()
        self.check_results(window, rejected)

    def _publisher(self, ledger: Ledger, consumed: Consumed, letters: DeadLetterTopic | None) -> Publisher:
        made = routing(publisher(self.kafka, self.sink, ledger, consumed), self.kafka, self.sink, self.routes().values())
        return burying(made, self.kafka, self.sink, letters) if self.errors.tolerates else made

    def error_classes(self) -> dict[str, str]:
        return super().error_classes() | writer_classes(self.sink, OUTPUT)

    def _consumed(self, window: Window, ledger: Ledger, left: Sequence[Split]) -> Consumed:
        """What the group commits with each partition; nothing where it stands further ahead already."""
        from airflow_kafka_spark.ledger.group import offset_metadata
        from airflow_kafka_spark.sinks.kafka_worker import Consumed

        ends: dict[TopicPartition, int] = self.offsets_to_commit(window)
        places = {split.index: split.range.topic_partition for split in left}
        hint = ledger.place_hint
        return Consumed(
            self.group_id,
            {index: (tp, ends[tp], offset_metadata(window, tp.topic, hint)) for index, tp in places.items() if tp in ends},
        )

    # --- what the parts are made of ---

    @property
    def null_values(self) -> NullValues:
        if self.behavior_on_null_values:
            return self.behavior_on_null_values
        return "fail" if self._key_needs_value else "write"

    @property
    def _key_needs_value(self) -> bool:
        key = self.formats[1]
        of_key = set(key.arrow_schema().names) if key else set()
        return any(name in (self.columns or ()) or name not in of_key for name in self.sink.key)

    @property
    def _written(self) -> Mapping[str, str] | None:
        """What the new values hold: ``columns``, or all that the old ones do, in another format; None where they stay."""
        if self.columns is not None or self.output_value is None or self.transforms:
            return self.columns
        return {name: backticked(name) for name in self.formats[0].arrow_schema().names}

    @property
    def _change(self) -> Change:
        from airflow_kafka_spark.road.relay import Change

        columns = self._written
        written = self.sink.value_writer if columns is not None else None
        key_format = self.sink.key_writer if self.sink.key else None
        return Change(self.layout(), self.filter, columns, written, tuple(self.sink.key), key_format)

    @property
    def _reshaping(self) -> Reshaping:
        from airflow_kafka_spark.road.relay_shaping import Reshaping
        from airflow_kafka_spark.road.relay_shaping_worker import Routing
        from airflow_kafka_spark.road.shaping import Shaping
        from airflow_kafka_spark.transforms.chaining import as_transform

        value, key = self.formats
        originals = (("key", "key"), ("value", "value"))
        shaping = Shaping(value, key, tuple(map(as_transform, self.transforms)), originals, self.null_values)
        reserved = tuple(filter(None, (self.ledger_topic, self.errors.topic, *self.routes().values())))
        return Reshaping(
            shaping,
            Routing(str(self.sink.topic), self.subscription, reserved),
            self.sink.value_writer if self.output_value else None,
            self.sink.key_writer if self.sink.key_format else None,
            self.preserve_timestamps,
            self.preserve_headers,
            self.preserve_partitions,
        )

    def _record_columns(self) -> list[str]:
        value, key = self.formats
        of_key = key.arrow_schema().names if key else []
        return [*value.arrow_schema().names, *of_key, *(column for _, column in self.metadata)]

    def layout(self) -> Layout:
        """How records become rows: what the SQL may see of them, and what is carried past it."""
        from airflow_kafka_spark.road.columns import Layout
        from airflow_kafka_spark.road.relay_worker import HEADERS, KEY, PARTITION, TIMESTAMP, VALUE
        from airflow_kafka_spark.road.shaping_worker import OFFSET, ORIGINAL

        rewrites = self._written is not None
        copies = self.filter is None and not rewrites and not self.sink.key
        wanted = {
            "key": KEY if not self.sink.key else None,
            "value": VALUE if not rewrites and not copies else None,
            "timestamp": TIMESTAMP if self.preserve_timestamps else None,
            "headers": HEADERS if self.preserve_headers else None,
            "partition": PARTITION if self.preserve_partitions else None,
        }
        carried = tuple((name, column) for name, column in wanted.items() if column)
        written = [self.sink.value_writer] if rewrites else []
        written += [self.sink.key_writer] if self.sink.key else []
        if any(format.encodes_in_tasks for format in written):
            # What cannot be written is found behind the SQL: it has to be known there what it was.
            kept = ("key", "value", "headers", "timestamp") if self.errors.topic else ()
            carried += (("offset", OFFSET), *((name, ORIGINAL[name]) for name in kept))
        if copies:
            # Bytes as they are: nothing is decoded, so nothing can be bad.
            nulls: NullValues = self.null_values
            return Layout.of(Raw(VALUE), None, carried, nulls)
        nulls = "delete" if self.null_values == "write" else self.null_values
        return Layout.of(*self.formats, (*self.metadata, *carried), nulls)
