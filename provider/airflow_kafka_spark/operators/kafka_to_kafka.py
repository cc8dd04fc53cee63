"""Kafka -> Kafka: windows of topics are published to another topic."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.arguments import find_choice_problems
from airflow_kafka_spark.bad_records.options import ErrorOptions, find_target_clashes
from airflow_kafka_spark.errors import KafkaSparkError, LedgerBehind, Problem, Unchecked, ValidationError
from airflow_kafka_spark.formats import Raw
from airflow_kafka_spark.formats.base import HEADERS, KEY, OFFSET, ORIGINAL, PARTITION, TIMESTAMP, VALUE, Format, NullValues
from airflow_kafka_spark.formats.types import quote_with_backticks
from airflow_kafka_spark.operators.base import find_analysis_problems, find_first_cause
from airflow_kafka_spark.operators.binding import Run
from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator
from airflow_kafka_spark.operators.options import (
    FollowOptions,
    LedgerOptions,
    ReadOptions,
    RecordOptions,
    SparkOptions,
    WindowOptions,
)
from airflow_kafka_spark.operators.publishing import (
    add_dead_letters,
    add_routes,
    check_target,
    describe_target,
    find_cluster_problems,
    find_ledger_problems,
    find_sink_problems,
    list_topic_uris,
    list_writer_classes,
    make_publisher,
    publish_splits,
    refuse_too_many,
    set_connection,
)
from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
from airflow_kafka_spark.sources.kafka.topics import find_compacted_topics, find_record_without_key
from airflow_kafka_spark.transforms.options import find_sql_problems
from airflow_kafka_spark.windows.model import OUTPUT, Applied, OffsetRange, Split, TopicPartition, Window, merge_landed
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, Written
from airflow_kafka_spark.windows.plan import DataLossPolicy, check_readable, make_whole_splits
from airflow_kafka_spark.windows.report import Report, sum_up_kafka_to_kafka
from airflow_kafka_spark.windows.times import UpstreamCounts, get_current_milliseconds

if TYPE_CHECKING:
    from airflow_kafka_spark.bad_records.dead_letters import DeadLetterTopic
    from airflow_kafka_spark.jobs.chain import TopicChain
    from airflow_kafka_spark.jobs.publish import SqlProjection, TopicPlan
    from airflow_kafka_spark.jobs.tasks.layout import RowLayout
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.sinks.kafka.tasks.publish import ConsumedOffsets, Publisher
    from airflow_kafka_spark.transforms.chain import TransformLike

log = logging.getLogger(__name__)

MAX_RECORDS = 10_000_000
"""The default of a window's offsets. A partition's share of them is one transaction, which has to end within its timeout."""

OWN_COLUMNS = "__kafka_"
"""The beginning of the names of the columns that carry a record past SQL."""


class KafkaToKafkaOperator(FromKafkaOperator):
    """Filter, transform, repartition or copy the next window of one or several topics to another topic, exactly once.

    One Spark task per partition reads its range. It publishes the result in one Kafka transaction, together with the group's
    offset of the partition and a marker in the ledger (KIP-98, KIP-447): a reader sees either both output and offset, or neither.
    The order within a partition is kept. When all partitions are published, the ledger says COMPLETE.

    Without ``filter``, ``columns``, ``transforms`` and the sink's ``key``, records are copied byte for byte, and no SQL runs.

    Guarantee: a ``read_committed`` reader of the topic sees the result of each record exactly once, also if attempts are killed,
    retried, paused or run twice at once. If bad records are tolerated, each record is either in the topic or in the dead letter
    topic. Some partitions of a window may be visible before the others.

    :param sink: topic to which the records are published, and the formats of new values and keys. The topic has to be on the same
        cluster, and must not be one of those that are read. ``value`` writes the result of ``columns``; default
        :class:`~airflow_kafka_spark.formats.Json`. Without ``columns``, it writes all columns of the operator's ``value``; with
        ``transforms``, it writes values that have changed, by default according to their type: structs as JSON, numbers and texts
        as text, bytes unchanged. ``key`` is the column of the new key, or several columns, of ``columns`` or of the record; None
        leaves keys unchanged. ``key_format`` writes these columns and, with ``transforms``, keys that have changed.
        ``topic_column``, ``value_columns``, ``headers``, ``partition`` and ``timestamp`` are refused: a record keeps its headers
        and its time, which transforms may change.
    :param value: format of the values that ``filter``, ``columns`` and ``transforms`` use; default
        :class:`~airflow_kafka_spark.formats.Raw`, a column ``value`` of bytes.
    :param key: format of the keys; None (default) reads no keys.
    :param metadata_columns: further parts of a record that ``filter`` and ``columns`` may use: names among ``key``, ``value``
        (raw bytes), ``topic``, ``partition``, ``offset``, ``timestamp``, ``timestampType``, ``headers``; as a list, or as a
        mapping name -> column. Default none.
    :param behavior_on_null_values: treatment of a record without a value (a tombstone): ``write`` (default) publishes a
        tombstone; ``ignore`` only counts it; ``fail`` fails the window (default if the sink's ``key`` needs columns that such a
        record does not have).

    :param filter: condition in Spark's SQL, as ``"amount > 100 and country = 'DE'"``. Records that do not meet it are left out,
        and counted. Records without a value are published. Default None. Templated.
    :param columns: columns of the new values, each with an expression in Spark's SQL. None (default) leaves values unchanged,
        unless the sink has a ``value``, which then writes all columns. Templated.
    :param transforms: changes of the records, in order: Kafka Connect's single message transforms
        (:mod:`airflow_kafka_spark.transforms`), ``Sql(...)``, or functions of a DataFrame; default none. They are used instead of
        ``filter``, ``columns`` and the sink's ``key``. A key or a value that no transform changes keeps its bytes. A record whose
        topic they change goes to that topic, which has to exist and to keep its number of partitions while a window is open. A
        record that a ``Filter(to=...)`` takes out goes to the topic that it names, as it was read, in the transaction of its
        partition's other records.
    :param preserve_partitions: True keeps the partition number of each record; default False: keys are placed as the Java client
        places them.
    :param preserve_timestamps: True (default) keeps the timestamp of each record; False sets the time of writing.
    :param preserve_headers: True (default) keeps the headers of each record.

    :param topics: topic to read, or several, as a list or as text separated by commas. Either this or ``topics_pattern`` is
        required. Default None. Templated.
    :param topics_pattern: regular expression of the topics to read, which has to match the whole name. A topic that appears later
        is read from its first record. Default None. Templated.
    :param group_id: consumer group to which the pipeline commits its position. No other consumer may use it. Templated.
    :param starting_offsets: where the first window begins. It counts only if neither the ledger nor the sink knows the pipeline,
        and its group holds no offsets that the pipeline has committed: ``CommittedOffsets(fallback="earliest")`` (default),
        ``"earliest"``, ``"latest"``, ``"none"`` (committed offsets; without any, the task fails), a time, or an offset per
        partition; see :func:`~airflow_kafka_spark.windows.offset_specs.parse_start`. Templated.
    :param ending_offsets: where a window ends at the latest: ``"latest"`` (default; the last stable offsets), a time, an offset
        per partition, or the committed offsets of another group; see
        :func:`~airflow_kafka_spark.windows.offset_specs.parse_stop`. Templated.
    :param max_records: maximum number of offsets in a window, shared among the partitions; default 10 million. The share of a
        partition is one transaction, which has to end within the sink's ``transaction_timeout``. None is no maximum, and the
        default with ``follows``. Templated.
    :param data_loss: treatment of records that were deleted before they were read: ``fail`` (default) fails the task; ``skip``
        continues after them, and records the gap in ledger and report.
    :param read_timeout: seconds without any progress after which a task stops waiting for the brokers, and fails; default 300.
    :param follows: name of another pipeline (:class:`~airflow_kafka_spark.operators.SourceToKafkaOperator`) of the same ledger
        topic. A window then ends with the records that this pipeline has published completely, and has to contain as many
        records. The numbers are not compared if the window begins in the middle of a window of that pipeline, because this
        pipeline is new or was moved by hand. None (default) follows no pipeline. Templated.
    :param on_mismatch: ``fail`` (default) or ``warn`` if the numbers of records differ, because another producer writes to the
        topic, or because records are gone.
    :param upstream_counts: numbers of records that were written, as counted upstream, by instant (ISO 8601, or milliseconds since
        the epoch). The report then contains the missing and the surplus records of each period. A difference fails nothing.
        Default None. Templated.

    :param errors_tolerance: treatment of bad records: those that cannot be decoded or transformed, or that do not fit the schema
        in which they are written. ``none`` (default): a bad record keeps its partition from being published, and fails the
        window. ``all``: the other records are published.
    :param errors_deadletterqueue_topic_name: with ``all``, the topic to which bad records are sent, byte for byte, each exactly
        once: in the transaction of its partition's other records. The topic is created with one partition if it is missing,
        before anything is published. Default None. Templated.
    :param errors_deadletterqueue_topic_replication_factor: number of replicas of a dead letter topic that is created; default -1,
        the brokers' default.
    :param errors_deadletterqueue_context_headers_enable: True (default) adds Connect's headers (KIP-298) to dead letters:
        ``__connect.errors.topic``, ``.partition``, ``.offset``, ``.connector.name`` (the pipeline), ``.stage``,
        ``.exception.message`` and others.
    :param errors_skip: with ``all`` and without a dead letter topic: True drops bad records, and only counts them;
        default False.
    :param max_errors: maximum number of bad records in a window, or their maximum share (a number below 1, as ``0.01``). If there
        are more, nothing of the window is published, and no dead letter is sent. With a maximum, the window is read twice. None
        (default): no maximum.

    :param pipeline: name of the pipeline in the ledger and in the sink; default ``<dag_id>.<task_id>``. Each task, and each
        Airflow deployment, needs names of its own. The ledger remembers which task moves a pipeline and where its windows go, and
        refuses another task. A mapped task needs a name per index. Templated.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``. Templated.
    :param spark_conn_id: Airflow connection of type ``spark`` or ``spark_connect``; default ``spark_default``. Templated.
    :param spark_conf: Spark settings, which override those of the connection; default none.
    :param ledger_topic: compacted topic that contains the ledgers; it is created if it is missing. Default ``airflow-windows``.
        Templated.
    :param keep_windows: number of complete windows that the ledger keeps, at least 1; default 100. Older ones are removed.
    :param kwargs: arguments of Airflow's ``BaseOperator``. ``max_active_tis_per_dag`` is 1 by default.
    """

    template_fields: Sequence[str] = (*FromKafkaOperator.template_fields, "filter", "columns")
    sink: KafkaSink
    ui_color = "#fff4de"

    def __init__(
        self,
        *,
        sink: KafkaSink,
        value: Format | None = None,
        key: Format | None = None,
        metadata_columns: Sequence[str] | Mapping[str, str] = (),
        behavior_on_null_values: Literal["write", "ignore", "fail"] | None = None,
        filter: str | None = None,
        columns: Mapping[str, str] | None = None,
        preserve_partitions: bool = False,
        preserve_timestamps: bool = True,
        preserve_headers: bool = True,
        topics: str | Sequence[str] | None = None,
        topics_pattern: str | None = None,
        group_id: str,
        starting_offsets: Written = CommittedOffsets(),  # noqa: B008 - a frozen value
        ending_offsets: Written = "latest",
        max_records: int | str | None = MAX_RECORDS,
        data_loss: DataLossPolicy = "fail",
        read_timeout: float = 300.0,
        follows: str | None = None,
        on_mismatch: Literal["fail", "warn"] = "fail",
        upstream_counts: UpstreamCounts | str | None = None,
        transforms: Sequence[TransformLike] = (),
        errors_tolerance: Literal["none", "all"] = "none",
        errors_deadletterqueue_topic_name: str | None = None,
        errors_deadletterqueue_topic_replication_factor: int = -1,
        errors_deadletterqueue_context_headers_enable: bool = True,
        errors_skip: bool = False,
        max_errors: int | float | None = None,
        pipeline: str | None = None,
        kafka_conn_id: str = "kafka_default",
        spark_conn_id: str = "spark_default",
        spark_conf: Mapping[str, str] | None = None,
        ledger_topic: str = "airflow-windows",
        keep_windows: int = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            sink=set_connection(sink, kafka_conn_id),
            record_options=RecordOptions(value or Raw(), key, metadata_columns, behavior_on_null_values),
            read_options=ReadOptions(
                topics,
                topics_pattern,
                group_id,
                starting_offsets,
                ending_offsets,
                None if follows and max_records == MAX_RECORDS else max_records,
                data_loss,
                read_timeout=read_timeout,
                upstream_counts=upstream_counts,
            ),
            # Published records cannot be replaced, so there are no windows of intervals, and no replays.
            window_options=WindowOptions(),
            follow_options=FollowOptions(follows, on_mismatch),
            transforms=transforms,
            errors=ErrorOptions(
                errors_tolerance,
                errors_deadletterqueue_topic_name,
                errors_deadletterqueue_topic_replication_factor,
                errors_deadletterqueue_context_headers_enable,
                errors_skip,
                max_errors,
            ),
            ledger_options=LedgerOptions(pipeline, kafka_conn_id, ledger_topic, keep_windows),
            spark_options=SparkOptions(spark_conn_id, spark_conf),
            **kwargs,
        )
        self.filter = filter
        self.columns = columns
        self.preserve_partitions = preserve_partitions
        self.preserve_timestamps = preserve_timestamps
        self.preserve_headers = preserve_headers
        self._plan: TopicPlan | None = None
        self.add_assets(self.topic_uris, list_topic_uris(self.sink))

    # --- 1. validate ---

    def find_problems(self, run: Run) -> list[Problem]:
        wrong = [*self.record_options.find_type_problems(), *find_sink_problems(self.sink)]
        decoding = self.find_decoding_problems(wrong)
        changes = self.find_transform_problems() if wrong else [*self._find_column_sink_problems(), *self._find_change_problems()]
        problems = [
            *self.find_reading_problems(run),
            *decoding,
            *changes,
            *self.find_server_problems(run),
            *self.find_error_problems(),
        ]
        problems += [] if wrong else self._find_target_problems()
        of_spark = [problem for problem in problems if problem.where == "spark_conn_id"]
        if not problems or not (self.transforms or self._sql):
            # Without a problem, Spark is asked when the window is planned, so that a run without records starts no Spark.
            return problems
        if self.transforms:
            cause = find_first_cause([*decoding, *self.find_transform_problems(), *of_spark])
            return problems + find_analysis_problems("transforms", self._find_fitting_problems, cause, problems)
        of_sql = [problem for problem in changes if problem.where.partition(".")[0] in ("filter", "columns")]
        cause = find_first_cause([*decoding, *wrong, *of_sql, *of_spark])
        check = partial(self._find_fitting_problems, sql_alone=bool(changes))
        return problems + find_analysis_problems(" and ".join(self._sql), check, cause, problems)

    @property
    def _sql(self) -> tuple[str, ...]:
        """The arguments with SQL, which only Spark can check."""
        return tuple(name for name, text in (("filter", self.filter), ("columns", self.columns)) if text is not None)

    def _find_fitting_problems(self, *, sql_alone: bool = False) -> list[Problem]:
        """Return the problems that Spark's analyzer finds.

        :param sql_alone: True leaves out the sink's key and formats, because they have problems of their own.
        :raises ValidationError: a transform does not fit its input, or its result cannot be written.
        """
        from airflow_kafka_spark.jobs.publish import SqlProjection, check_change

        change: SqlProjection | TopicChain = self._chain if self.transforms else self._projection
        if isinstance(change, SqlProjection) and sql_alone:
            change = replace(change, value=None, key=(), key_format=None)
        try:
            self._plan = check_change(change, self.spark)
        except ValidationError as error:
            if self.transforms:
                # The transforms after the first wrong one are not checked.
                raise
            return list(error.problems)
        return []

    def _find_column_sink_problems(self) -> list[Problem]:
        """Return a problem for each option of the sink that makes a record of the columns of a row. Here, records are read."""
        sink = self.sink
        given = {
            "topic_column": sink.topic_column,
            "value_columns": sink.value_columns,
            "headers": sink.headers or None,
            "partition": sink.partition,
            "timestamp": sink.timestamp,
        }
        found, action = "a record that is read has this part already", "Leave it out, or use `transforms`"
        return [Problem(f"sink.{name}", found, action) for name, value in given.items() if value is not None]

    def _find_change_problems(self) -> list[Problem]:
        if self.transforms:
            return [*self.find_transform_problems(), *self._find_problems_beside_transforms(), *self.sink.find_problems(None)]
        problems = []
        if self.filter is not None:
            problems += find_sql_problems("filter", self.filter, "a condition, for instance `amount > 10`")
        if self.columns is not None and not self.columns:
            problems.append(Problem("columns", "they are empty", "Name a column and its expression, or leave them out"))
        for name, text in (self.columns or {}).items():
            problems += find_sql_problems(f"columns.{name}", text, "an expression")
        by_case: dict[str, str] = {}
        for name in self.columns or ():
            if (other := by_case.setdefault(name.lower(), name)) != name:
                found = f"`{other}` and `{name}` are one name to Spark's SQL, which ignores case"
                problems.append(Problem("columns", found, "Rename one of them"))
        if self.columns is None and self.sink.value is not None and isinstance(self.value, Raw):
            found = "values are read as bytes, which cannot be written in another format"
            problems.append(Problem("sink.value", found, "Give the operator's `value` their format, or leave it out"))
        for name in (*(self.columns or ()), *self._list_record_columns()):
            if name.startswith(OWN_COLUMNS):
                problems.append(Problem("columns", f"`{name}` begins with `{OWN_COLUMNS}`", "Name it otherwise"))
        available = list(dict.fromkeys([*(self.columns or ()), *self._list_record_columns()]))
        # Only the new columns are written. The record's other columns may be used for the key.
        sink = replace(self.sink, value_columns=tuple(self._written)) if self._written else self.sink
        return [*problems, *sink.find_problems(available)]

    def _find_problems_beside_transforms(self) -> list[Problem]:
        instead = {
            "filter": (self.filter, "Sql(filter=...)"),
            "columns": (self.columns, "Sql({...})"),
            "sink.key": (self.sink.key_columns or None, "ValueToKey and ExtractField"),
            "metadata_columns": (
                self.record_options.metadata or None,
                "InsertField, or Sql, which sees `record.offset` and the like",
            ),
        }
        found = "it cannot be used together with `transforms`"
        used = {name: other for name, (given, other) in instead.items() if given is not None}
        return [Problem(name, found, f"Use {other} among the transforms") for name, other in used.items()]

    def _find_target_problems(self) -> list[Problem]:
        if not self.subscription.validate() and self.subscription.matches(str(self.sink.topic)):
            found = f"`{self.sink.topic}` is read, too: its records would be read again"
            return [Problem("sink.topic", found, "Write to another topic")]
        if of_ledger := find_ledger_problems(self.sink, self.ledger_topic):
            return of_ledger
        mixed = find_target_clashes(self.sink.topic, self.errors, self.list_routes())
        if of_cluster := find_cluster_problems(self.sink, self.kafka_conn_id):
            return [*mixed, *of_cluster, Unchecked("sink.topic", "sink.conn_id")]
        problems = [*mixed, *self.sink.find_server_problems(self.kafka), *self._find_partition_problems()]
        return problems or list(self._find_keyless_problems())

    def _find_keyless_problems(self) -> Iterator[Problem]:
        """Yield a problem if records without a key would be copied to a compacted topic, which takes none.

        Only the newest records are read. A filter or transforms may leave out what has no key, or give it one.
        """
        is_changed = bool(self.sink.key_columns or self.transforms) or self.filter is not None
        if is_changed or not self.sink.has_valid_name or self.subscription.validate():
            return
        target = str(self.sink.topic)
        try:
            if not find_compacted_topics(self.kafka, set(self.kafka.describe_topics([target], missing="omit"))):
                return
            read = self.kafka.describe_topics(self.resolve(), missing="omit")
            found = find_record_without_key(self.kafka, set(read) - find_compacted_topics(self.kafka, set(read)))
        except KafkaSparkError:
            return  # Brokers that do not answer, and missing rights, are problems of their own.
        if found:
            what = f"topic `{target}` is compacted (`cleanup.policy`) and takes no record without a key, as {found} is"
            yield Problem("sink.key", what, "Name the columns of a key, or a topic that is not compacted")

    def _find_partition_problems(self) -> Iterator[Problem]:
        """Yield a problem if records of a partition that is read have no such partition in the target."""
        if not (self.preserve_partitions and self.sink.has_valid_name) or self.subscription.validate():
            return
        try:
            found = self.kafka.describe_topics([*self.resolve(), str(self.sink.topic)], missing="omit")
        except KafkaSparkError:
            return  # Brokers that do not answer, and missing rights, are problems of their own.
        target = found.pop(str(self.sink.topic), None)
        most = max((len(topic.partitions) for topic in found.values()), default=0)
        count = len(target.partitions) if target else self.sink.partitions if self.sink.auto_create else -1
        if 0 < count < most:
            what = f"topic `{self.sink.topic}` has {count} partitions, and topics with {most} are read"
            yield Problem("preserve_partitions", what, "Add partitions to it, or leave `preserve_partitions` out")

    def find_null_value_problems(self) -> list[Problem]:
        behavior, where = self.record_options.behavior_on_null_values, "behavior_on_null_values"
        if behavior is not None and (unknown := find_choice_problems(where, behavior, ("fail", "ignore", "write"))):
            return unknown
        if behavior == "write" and self._key_needs_value:
            found = "a record without a value has no columns to make the sink's `key` of"
            return [Problem(where, found, 'Use "ignore" or "fail", or make the new key of the columns of `key` alone')]
        return []

    # --- 3. plan ---

    def plan(self, ledger: Ledger, run: Run) -> Window:
        window = super().plan(ledger, run)
        # No retry could finish a window whose SQL or transforms Spark refuses.
        if self.transforms or self._sql:
            is_needed = self.needs_analysis(window)
        else:
            is_needed = not (window.is_empty or self._projection.is_identity)
        if is_needed and (problems := self._find_fitting_problems()):
            raise ValidationError(problems)
        self.sink.ensure_topic(self.kafka)
        return replace(window, target=describe_target(self.kafka, self.sink))

    def redirect_window(self, window: Window, ledger: Ledger) -> Window:
        """Return an open window whose unpublished partitions go to the topic of this run. Published partitions are unchanged."""
        self.sink.ensure_topic(self.kafka)
        return replace(super().redirect_window(window, ledger), target=describe_target(self.kafka, self.sink))

    def read_record_of_sink(self, pipeline: str) -> Applied | None:
        """Return None: a topic has no record of windows. The group's committed offsets show them, since they moved with the
        records."""
        return None

    def check(self, window: Window) -> None:
        """Make sure that the partitions that are not published yet can be read, and that the target has not changed.

        Records of published partitions may be deleted by now. The group's offset lies after them, because it moved with the
        output.
        """
        assert window.target is not None
        committed = self.kafka.read_committed_offsets(self.group_id, window.ends, stable=False)
        left = tuple(r for r in window.ranges if not (there := committed[r.topic_partition]) or there.offset < r.end)
        unpublished = replace(window, ranges=left)
        check_readable(unpublished, self.read_compared_log(unpublished), self.read_options.data_loss)
        check_target(self.kafka, self.sink, window.target)

    def make_splits(self, window: Window) -> tuple[Split, ...]:
        return make_whole_splits(window, without=self.find_lost_topics(window))

    # --- 4. move, 5. commit ---

    def find_applied(self, window: Window) -> Applied | None:
        """Return None: partitions are published one by one, and the ledger remembers each."""
        return None

    def move(self, window: Window, ledger: Ledger) -> Report:
        splits = {split.index: split for split in self.make_splits(window)}

        def publish(left: tuple[int, ...]) -> None:
            unpublished = self._find_unpublished(window, ledger, {index: splits[index].range for index in left})
            if unpublished:
                self._publish_splits(window, ledger, tuple(splits[index] for index in unpublished))

        ranges = {split.index: split.range for split in make_whole_splits(window)}
        markers = publish_splits(ledger, window, list(splits), publish, [index for index in ranges if index not in splits])
        self.check(window)
        dead = merge_landed(part for marker in markers for part in marker.dead_letters)
        report = sum_up_kafka_to_kafka(
            window, markers, ranges, flushed=get_current_milliseconds(), upstream=self.read_options.counts, dead_letters=dead
        )
        unread = self.report_unread_gaps(window, (ranges[marker.split] for marker in markers))
        report = replace(report, gaps=(*report.gaps, *unread))
        if self.errors.tolerates and self.errors.most is None:  # else they were logged when they were counted
            self.errors.accept(window, [marker.result for marker in markers if marker.result])
        self.check_followed(window, report.records_read)
        return report

    def _find_unpublished(self, window: Window, ledger: Ledger, left: Mapping[int, OffsetRange]) -> tuple[int, ...]:
        """Return the splits that the group's offsets do not show as published: marker and offset are written in one transaction.

        A task does not look for markers from before the attempt's claim. A split that is missing in the ledger by mistake would
        be published twice.

        :param left: the ranges of the splits without a marker, by index.
        :raises LedgerBehind: the group's offset says that a split is published, and the ledger has no marker of it.
        """
        from airflow_kafka_spark.ledger.group import list_window_numbers

        committed = self.kafka.read_committed_offsets(self.group_id, [r.topic_partition for r in left.values()])
        named = list_window_numbers(ledger.pipeline, committed)

        def is_published(r: OffsetRange) -> bool:
            there = committed[r.topic_partition]
            return bool(there and there.offset >= r.end and named.get(r.topic_partition, 0) >= window.number)

        published = {index: r.topic_partition for index, r in left.items() if is_published(r)}
        if published:
            # The ledger was read before the group's offsets. Its records of the same transaction are there by now.
            ledger.topic.forget_reads()
            markers = ledger.read_published()
            for index, tp in published.items():
                if index not in markers:
                    to, known = f"committed:{self.group_id}", ledger.memory.last_number
                    raise LedgerBehind(ledger.pipeline, self.group_id, named[tp], known, self.ledger_topic, to)
                log.info("Split %d of window %s was published in between", index, window)
        return tuple(index for index in left if index not in published)

    def _publish_splits(self, window: Window, ledger: Ledger, left: tuple[Split, ...]) -> None:
        from airflow_kafka_spark.jobs.publish import TopicJob
        from airflow_kafka_spark.jobs.tasks.account import Tolerance

        letters = self.errors.make_dead_letter_topic(self.kafka, ledger.parent_pipeline, self.list_error_classes())
        # Dead letters are recorded in markers only: a split without a marker has sent none.
        tolerance = Tolerance(keep=letters is not None) if self.errors.tolerates else None
        job = TopicJob(
            spark=self.spark,
            window=window,
            publisher=self._make_publisher(ledger, self._make_consumed_offsets(window, ledger, left), letters),
            left=left,
            change=replace(self._chain, pipeline=ledger.parent_pipeline) if self.transforms else self._projection,
            plan=self._plan,
            reading=self.make_reading(window, tolerance),
        )
        with self.register_job(job):
            can_be_bad = bool(self.transforms) or not self._projection.is_identity or self.null_values == "fail"
            refuse_too_many(job, self.errors, window, ledger, can_be_bad)
            _, rejected = job.run()
        self.check_results(window, rejected)

    def _make_publisher(self, ledger: Ledger, consumed: ConsumedOffsets, letters: DeadLetterTopic | None) -> Publisher:
        made = add_routes(make_publisher(self.kafka, self.sink, ledger, consumed), self.kafka, self.list_routes().values())
        return add_dead_letters(made, self.kafka, letters) if self.errors.tolerates else made

    def list_error_classes(self) -> dict[str, str]:
        return super().list_error_classes() | list_writer_classes(self.sink, OUTPUT)

    def _make_consumed_offsets(self, window: Window, ledger: Ledger, left: Sequence[Split]) -> ConsumedOffsets:
        """Return the offset that the group commits with each partition; none for a partition whose committed offset is higher."""
        from airflow_kafka_spark.ledger.group import make_offset_metadata
        from airflow_kafka_spark.sinks.kafka.tasks.publish import ConsumedOffsets

        ends: dict[TopicPartition, int] = self.list_offsets_to_commit(window)
        places = {split.index: split.range.topic_partition for split in left}
        hint = ledger.claim_hint
        return ConsumedOffsets(
            self.group_id,
            {index: (tp, ends[tp], make_offset_metadata(window, tp.topic, hint)) for index, tp in places.items() if tp in ends},
        )

    # --- for the steps ---

    @property
    def null_values(self) -> NullValues:
        if (behavior := self.record_options.behavior_on_null_values) is not None:
            return behavior
        return "fail" if self._key_needs_value else "write"

    @property
    def _key_needs_value(self) -> bool:
        key = self.formats[1]
        of_key = set(key.get_arrow_schema().names) if key else set()
        return any(name in (self.columns or ()) or name not in of_key for name in self.sink.key_columns)

    @property
    def _written(self) -> Mapping[str, str] | None:
        """The columns of the new values: ``columns``, or all columns of the old values in another format; None if values stay
        unchanged."""
        if self.columns is not None or self.sink.value is None or self.transforms:
            return self.columns
        return {name: quote_with_backticks(name) for name in self.formats[0].get_arrow_schema().names}

    @property
    def _projection(self) -> SqlProjection:
        from airflow_kafka_spark.jobs.publish import SqlProjection

        columns = self._written
        written = self.sink.value_writer if columns is not None else None
        key_format = self.sink.key_writer if self.sink.key_columns else None
        return SqlProjection(self.make_layout(), self.filter, columns, written, self.sink.key_columns, key_format)

    @property
    def _chain(self) -> TopicChain:
        from airflow_kafka_spark.jobs.chain import SinkChain, TopicChain
        from airflow_kafka_spark.jobs.tasks.publish import TopicRules
        from airflow_kafka_spark.transforms.chain import as_transform

        value, key = self.formats
        originals = (("key", "key"), ("value", "value"))
        chain = SinkChain(value, key, tuple(map(as_transform, self.transforms)), originals, self.null_values)
        reserved = tuple(filter(None, (self.ledger_topic, self.errors.topic, *self.list_routes().values())))
        return TopicChain(
            chain,
            TopicRules(reserved, str(self.sink.topic), self.subscription),
            self.sink.value_writer if self.sink.value else None,
            self.sink.key_writer if self.sink.key_format else None,
            self.preserve_timestamps,
            self.preserve_headers,
            self.preserve_partitions,
        )

    def _list_record_columns(self) -> list[str]:
        value, key = self.formats
        of_key = key.get_arrow_schema().names if key else []
        return [*value.get_arrow_schema().names, *of_key, *(column for _, column in self.record_options.metadata)]

    def make_layout(self) -> RowLayout:
        """Return the conversion of records to rows: the columns for SQL, and those that are carried past it."""
        from airflow_kafka_spark.jobs.tasks.layout import RowLayout

        rewrites = self._written is not None
        copies = self.filter is None and not rewrites and not self.sink.key_columns
        wanted = {
            "key": KEY if not self.sink.key_columns else None,
            "value": VALUE if not rewrites and not copies else None,
            "timestamp": TIMESTAMP if self.preserve_timestamps else None,
            "headers": HEADERS if self.preserve_headers else None,
            "partition": PARTITION if self.preserve_partitions else None,
        }
        carried = tuple((name, column) for name, column in wanted.items() if column)
        written = [self.sink.value_writer] if rewrites else []
        written += [self.sink.key_writer] if self.sink.key_columns else []
        if any(format.encodes_in_tasks for format in written):
            # Records that cannot be written are found after the SQL, where the original record is needed.
            kept = ("key", "value", "headers", "timestamp") if self.errors.topic else ()
            carried += (("offset", OFFSET), *((name, ORIGINAL[name]) for name in kept))
        if copies:
            # Bytes are copied: no record is decoded, so none can be bad.
            nulls: NullValues = self.null_values
            return RowLayout.of(Raw(VALUE), None, carried, nulls)
        nulls = "delete" if self.null_values == "write" else self.null_values
        return RowLayout.of(*self.formats, (*self.record_options.metadata, *carried), nulls)
