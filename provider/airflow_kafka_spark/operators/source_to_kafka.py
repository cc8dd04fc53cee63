"""Source -> Kafka: windows of rows are published to a topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.arguments import find_choice_problems, unwrap_literals
from airflow_kafka_spark.bad_records.options import SHOWN, ErrorOptions, find_route_problems, find_target_clashes
from airflow_kafka_spark.errors import (
    ClusterChanged,
    KafkaSparkError,
    LedgerBehind,
    PipelineInOtherLedger,
    Problem,
    RightMissing,
    RowsRejected,
    SourceChanged,
    SourceOwned,
    SourceRejected,
    Unchecked,
    ValidationError,
)
from airflow_kafka_spark.errors.base import format_command
from airflow_kafka_spark.operators.base import WindowOperator, find_analysis_problems, find_first_cause, list_asset_uris
from airflow_kafka_spark.operators.binding import Run, is_same_flow
from airflow_kafka_spark.operators.options import LEDGER_RIGHTS, READ_RIGHTS, LedgerOptions, SparkOptions
from airflow_kafka_spark.operators.publishing import (
    add_dead_letters,
    add_routes,
    check_target,
    describe_target,
    find_cluster_problems,
    find_ledger_problems,
    find_sink_problems,
    list_accounts,
    list_topic_uris,
    list_writer_classes,
    make_publisher,
    publish_splits,
    refuse_too_many,
    set_connection,
)
from airflow_kafka_spark.operators.visibility.lineage import Dataflow
from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
from airflow_kafka_spark.sources.base import MAX_SPLITS, RowSource
from airflow_kafka_spark.windows.binding import Endpoint, compare_endpoints
from airflow_kafka_spark.windows.model import (
    GIVEN_UP,
    TRANSFORMATION,
    Applied,
    SourcePlan,
    TargetTopic,
    TopicPartition,
    Window,
    select_first_bad_records,
)
from airflow_kafka_spark.windows.report import Report, format_pass_progress, sum_up_published

if TYPE_CHECKING:
    from airflow_kafka_spark.jobs.chain import SourceChain
    from airflow_kafka_spark.jobs.write import ReadWith
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher
    from airflow_kafka_spark.transforms.chain import TransformLike


COPIED_LEDGER = (
    "Correct `bootstrap.servers`. If the ledger topic was copied to a new cluster, compare the topics with the source first: the "
    "copies may have fewer records than the ledger says, or more. To continue at its position: `airflow kafka-spark rebind "
    "<pipeline> --not-running --why ...`. To publish all rows to the new cluster, give the operator a new `pipeline=` name"
)
"""The action of the error if the ledger names another cluster."""
MAX_TARGETS = 3
"""Maximum number of topics at which the group names the last window, if a column names the topics."""
RECORD_OPTIONS = frozenset(
    f"sink.{name}" for name in ("key", "value_columns", "headers", "topic_column", "partition", "timestamp")
)
"""Options of the sink that name the columns of which a record is made, before transforms get it."""
KIND_NAMES = {
    "text": "texts", "binary": "bytes", "boolean": "booleans", "date": "dates", "zoned": "timestamps", "local": "timestamps",
    "integer": "integers",
}  # fmt: skip
"""Words for the kinds of columns that are refused."""
UNFIT = frozenset({"text", "binary", "boolean", "date"})
"""Kinds of columns that hold neither numbers nor times."""
EXPECTED_KINDS = {
    "topic_column": ("a text", frozenset(KIND_NAMES) - {"text"}),
    "partition": ("an integer", UNFIT | {"zoned", "local"}),
    "timestamp": ("a timestamp, or milliseconds as a bigint", UNFIT),
}
"""Options of the sink that name one column: what it has to hold, for messages, and the kinds of columns that do not."""
SPARK_KINDS = {
    "string": "text", "binary": "binary", "boolean": "boolean", "date": "date", "timestamp": "zoned", "timestamp_ntz": "local",
    "byte": "integer", "short": "integer", "integer": "integer", "long": "integer",
}  # fmt: skip
"""Kinds of columns by the names of Spark's types; other types have none."""


class SourceToKafkaOperator(WindowOperator):
    """Publish the next window of rows of a table, of files or of a database's log to Kafka, exactly once.

    The source determines the end of the window and divides it into splits. Both are written to the ledger before any work. Spark
    reads one split per task. Each task publishes its split in one Kafka transaction together with a marker (KIP-98); a split that
    has a marker is never published again. When all splits are published, the ledger says COMPLETE, and contains the counts and
    the first and last offset per partition.

    Guarantee: a ``read_committed`` reader sees each row of a window exactly once, also if attempts are killed, retried, paused or
    run twice at once, as far as the source keeps its rows (see the source). If bad rows are tolerated, each row is either in the
    topic or in the dead letter topic. Some splits of a window may be visible before the others.

    :param source: source of the rows: a source of :mod:`airflow_kafka_spark.sources`, or one of your own.
    :param sink: topic to which the rows are published, and the conversion of a row to a record.
    :param transforms: changes of the records, in order: Kafka Connect's single message transforms
        (:mod:`airflow_kafka_spark.transforms`), ``Sql(...)``, or functions of a DataFrame; default none. The first one gets the
        record that the sink makes of a row. The result of the last one is written by the sink's ``value`` and ``key_format``;
        without ``key_format``, a key is written according to its type. A record whose topic they change goes to that topic, which
        has to exist and to keep its number of partitions while a window is open. A record that a ``Filter(to=...)`` takes out
        goes to the topic that it names, in JSON as the source gave it, in the transaction of its split's other records.
    :param read_with: component that reads and encodes the splits: ``task``, Spark's tasks themselves, which is fastest;
        ``spark``, the JVM, for executors without the Python driver of the source, and always with ``transforms``; ``auto``
        (default): ``task`` if both give the same bytes, else ``spark``.

    :param errors_tolerance: treatment of bad rows: those of files with bytes that are not in their encoding, that cannot be
        transformed, or that do not fit the schema of the sink's ``value`` or ``key_format`` (Avro, Protobuf, JsonSchema).
        ``none`` (default): a bad row keeps its split from being published, and fails the window. ``all``: the other rows are
        published.
    :param errors_deadletterqueue_topic_name: with ``all``, the topic to which bad rows are sent as JSON, each exactly once: in
        the transaction of its split's records. The topic is created with one partition if it is missing, before anything is
        published. Default None. Templated.
    :param errors_deadletterqueue_topic_replication_factor: number of replicas of a dead letter topic that is created; default -1,
        the brokers' default.
    :param errors_deadletterqueue_context_headers_enable: True (default) adds Connect's headers (KIP-298) to dead letters:
        ``__connect.errors.topic``, ``.partition``, ``.offset``, ``.connector.name`` (the pipeline), ``.stage``,
        ``.exception.message`` and others.
    :param errors_skip: with ``all`` and without a dead letter topic: True drops bad rows, and only counts them;
        default False.
    :param max_errors: maximum number of bad rows in a window, or their maximum share (a number below 1, as ``0.01``). If there
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

    template_fields: Sequence[str] = (
        "pipeline",
        "kafka_conn_id",
        "ledger_topic",
        "spark_conn_id",
        "errors_deadletterqueue_topic_name",
    )
    rendered_parts = ("sink", "source")
    typed_parts = {**WindowOperator.typed_parts, "source": "source."}
    sink: KafkaSink
    ui_color = "#eaf7e6"

    def __init__(
        self,
        *,
        source: RowSource,
        sink: KafkaSink,
        read_with: ReadWith = "auto",
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
        self.source = unwrap_literals(source)
        self.read_with = read_with
        self.add_assets(list_asset_uris(source, RowSource), list_topic_uris(self.sink))

    # --- 1. validate ---

    def find_problems(self, run: Run) -> list[Problem]:
        wrong_sink, of_source = find_sink_problems(self.sink), self._find_source_problems()
        of_cluster = [] if wrong_sink else find_cluster_problems(self.sink, self.kafka_conn_id)
        problems = [*self.find_pipeline_problems(run), *of_source, *wrong_sink, *of_cluster]
        problems += find_choice_problems("read_with", self.read_with, ("auto", "task", "spark"))
        of_schemas = [] if wrong_sink else list(self._find_schema_problems())
        problems += of_schemas
        of_spark, changes = self.find_spark_problems(), self._find_transform_problems()
        if wrong_sink:
            return [*problems, *changes, *self._find_error_problems(), *of_spark]
        columns = self._find_known_columns(of_source)
        if of_source and columns is None:
            problems.append(Unchecked("sink columns", find_first_cause(of_source)))
        connect = () if columns is None else self.source.connect_columns
        of_options = self.sink.find_problems(columns, connect=connect, transformed=bool(self.transforms))
        problems += [
            *of_options,
            *changes,
            *(self._find_topic_problems() if not of_cluster else [Unchecked("sink.topic", "sink.conn_id")]),
            *self._find_error_problems(),
            *of_spark,
        ]
        if not any(problem.where == "kafka_conn_id" for problem in problems):
            problems += self._find_right_problems(run)
        if self.transforms and problems:
            # Without a problem, Spark is asked when there are rows to read.
            of_records = [problem for problem in of_options if problem.where in RECORD_OPTIONS]
            cause = find_first_cause([*of_source, *of_schemas, *of_records, *changes, *of_spark])
            check = partial(self._find_fitting_problems, find_first_cause(problems))
            problems += find_analysis_problems("transforms", check, cause, problems)
        return problems

    def _find_source_problems(self) -> list[Problem]:
        if not isinstance(self.source, RowSource):
            return [Problem("source", f"`{self.source!r}` is no RowSource")]
        return self.source.validate()

    def _find_schema_problems(self) -> Iterator[Problem]:
        """Yield the options with which events cannot be written with the schemas of their tables."""
        from airflow_kafka_spark.sources.cdc.source import WITH_SCHEMA, LogSource

        if not isinstance(self.source, LogSource) or not self.sink.keeps_schemas(WITH_SCHEMA):
            return
        if not self.source.schemas_enable:
            found = "the sink writes each event with the schema of its table, and the source leaves schemas out"
            yield Problem("source.schemas_enable", found, "Set `schemas_enable=True`")
        found = "only Spark's tasks write events with the schemas of their tables"
        if self.transforms:
            yield Problem("transforms", found, "Let a KafkaToKafkaOperator transform the topics' records")
        if self.read_with == "spark":
            yield Problem("read_with", found, 'Use "auto"')
        if self.errors.tolerates:
            yield Problem("errors_tolerance", f"{found}, and these tolerate no bad row", "Leave it out")

    def _find_topic_problems(self) -> list[Problem]:
        # Transforms may give the records keys.
        keyless = not self.sink.key_columns and not self.transforms
        return find_ledger_problems(self.sink, self.ledger_topic) or self.sink.find_server_problems(self.kafka, keyless=keyless)

    def _add_missing_topics(self, found: Sequence[str]) -> Sequence[str]:
        """Return the topics that do not exist, with those of all named tables of a log. A task finds one at a time."""
        from airflow_kafka_spark.sources.cdc.source import LogSource

        if not isinstance(self.source, LogSource) or self.transforms or not self.sink.topic_column:
            return found
        named = self.source.named_topics
        try:
            return sorted({*found, *(named - self.kafka.describe_topics(named, missing="omit").keys())})
        except KafkaSparkError as error:
            self.log.warning("The topics of other tables were not checked: %s", error)
            return found

    def _find_right_problems(self, run: Run) -> list[Problem]:
        """Return the rights that are missing on the ledger and on the pipeline's group. Without the right on the group, a window
        would be published, and not be closed."""
        if self.find_pipeline_problems(run):
            return []
        try:
            lacking = self.kafka.check_topics({self.ledger_topic: LEDGER_RIGHTS}, optional=(self.ledger_topic,))[1]
            of_group = self.kafka.check_group(self.own_group, READ_RIGHTS)[1]
        except KafkaSparkError as error:
            return [Problem.of("kafka_conn_id", error)]
        named = {"ledger_topic": lacking.get(self.ledger_topic), "consumer group": of_group}
        return [Problem.of(where, error) for where, error in named.items() if error]

    def _find_known_columns(self, of_source: Sequence[Problem]) -> tuple[str, ...] | None:
        """Return the columns of the source; None if only Spark can find them, or if the source has problems.

        :param of_source: the problems of the source.
        """
        if not isinstance(self.source, RowSource):
            return None
        try:
            return self.source.find_columns()
        except Exception:
            if not of_source:
                raise
            return None

    def _find_fitting_problems(self, cause: str) -> list[Problem]:
        """Return an empty list, or an ``Unchecked`` if the columns of the source are unknown before there are rows.

        :param cause: the argument whose problem prevents reading the source.
        :raises ValidationError: a transform does not fit its input, or its result cannot be written.
        """
        from airflow_kafka_spark.jobs.publish import open_session_for

        shaping = self._chain
        assert shaping is not None
        with open_session_for(self.spark, self.source) as session:
            if (rows := self.source.make_empty_frame(session)) is None:
                return [Unchecked("transforms", cause)]
            shaping.check(rows)
        return []

    def _find_transform_problems(self) -> list[Problem]:
        """Return the problems of the transforms' options, without Spark."""
        if not self.transforms:
            return []
        from airflow_kafka_spark.transforms import InsertField, TimestampRouter, find_chain_problems

        found = find_chain_problems(self.transforms)
        if self.read_with == "task":
            found.append(Problem("read_with", "with `transforms`, the JVM reads the source", 'Use "auto"'))
        for index, transform in enumerate(() if found else self.transforms):
            if isinstance(transform, InsertField) and transform.offset_field:
                what = "a row has no offset before it is written"
                found.append(Problem(f"transforms[{index}] InsertField.offset_field", what, "Leave it out"))
            if isinstance(transform, TimestampRouter) and isinstance(self.sink, KafkaSink) and not self.sink.timestamp:
                what = "without `timestamp` a row has no time before it is written"
                found.append(Problem(f"transforms[{index}] TimestampRouter", what, "Give the sink a `timestamp` column"))
        return found

    def _find_error_problems(self) -> list[Problem]:
        routes, taken = self.list_routes(), (self.ledger_topic,)
        mixed = find_target_clashes(getattr(self.sink, "topic", None), self.errors, routes, "rows")
        wrong = self.errors.find_problems() or self.errors.find_server_problems(self.kafka, taken)
        return [*mixed, *wrong, *find_route_problems(self.kafka, routes, self.errors, lambda topic: taken)]

    @property
    def own_group(self) -> str:
        return f"{self.ledger_topic}.{self.pipeline or f'{self.dag_id}.{self.task_id}'}"

    # --- 2. fence and read ---

    def open_ledger(self, run: Run) -> Ledger:
        from airflow_kafka_spark.ledger.attempt import Ledger

        # A group without consumers: the metadata of its offset is the short cut into the ledger.
        ledger = Ledger(
            self.kafka,
            self.get_pipeline_name(run),
            run.id,
            group_id=self.own_group,
            topic=self.ledger_topic,
            keep_windows=self.ledger_options.keep_windows,
            hint_topics=(self.ledger_topic,),
        )
        ledger.exclusive_of = self.source.get_exclusive_object
        ledger.owned = lambda name, owner: SourceOwned(ledger.pipeline, self.source.uri, owner, self.ledger_topic)
        return ledger

    # --- 3. plan ---

    def find_origin(self) -> Endpoint:
        return self.source.find_origin()

    def describe_dataflow(self) -> Dataflow:
        return Dataflow(self.sinks, source=self.source, dead_letter_topic=self.errors.topic)

    def plan(self, ledger: Ledger, run: Run) -> Window:
        from airflow_kafka_spark.ledger.attempt import format_utc_now

        if ledger.memory.find_rebind_after(ledger.memory.binding) is None:
            self._refuse_other_cluster(ledger.memory.position.cluster_id)
        self.sink.ensure_topic(self.kafka)
        targets = self._list_target_topics()
        self._refuse_lost(ledger, targets)
        ledger.refuse_taken()
        frozen = self.source.freeze(self._read_source_position(ledger))
        if len(frozen.splits) > MAX_SPLITS:
            found = f"the window has {len(frozen.splits)} splits, more than {MAX_SPLITS}"
            raise SourceRejected(self.source.uri, found, "Make splits larger, or windows smaller")
        self._check_kinds(frozen.splits[:1])
        self._check_records(frozen.splits[:1])
        ledger.plan_offsets = self._find_offsets_in_targets(ledger.memory.published or ())
        if targets and not ledger.plan_offsets and ledger.memory.is_blank:
            self.log.warning(
                "The user of connection `%s` may not read topic `%s`. If ledger topic `%s` is lost, this pipeline publishes all "
                "rows again, without an error; with the right Read on the topic, it is refused",
                self.kafka_conn_id, self.sink.topic, self.ledger_topic,
            )  # fmt: skip
        return Window(
            pipeline=ledger.pipeline,
            number=ledger.memory.last_used + 1,
            ranges=(),
            run=run.id,
            planned_at=format_utc_now(),
            cluster_id=self.kafka.read_cluster_id(),
            topic_ids={found.topic: found.topic_id for found in targets},
            source=SourcePlan(
                frozen.splits,
                frozen.position,
                frozen.rows,
                frozen.remaining,
                {found.topic: found.partitions for found in targets},
                frozen.ahead,
            ),
        )

    def _list_target_topics(self) -> list[TargetTopic]:
        """Return the sink's topic as it is now; none if each row names its own."""
        return [describe_target(self.kafka, self.sink)] if self.sink.topic else []

    def redirect_window(self, window: Window, ledger: Ledger) -> Window:
        """Return an open window whose unpublished splits go to the topic of this run. Published splits are unchanged.

        :raises SourceChanged: the run has another source. The splits are parts of the old one: its rows would be left out, and
            those of the new source would be taken for them.
        """
        assert window.source is not None
        assert window.binding is not None
        changed = compare_endpoints(window.binding.origin, self.source.find_origin())
        if other := [difference for difference in changed if difference.what not in self.source.movable]:
            raise SourceChanged(ledger.parent_pipeline, f"window {window}", window.run, other, is_fixed=True)
        self.sink.ensure_topic(self.kafka)
        targets = self._list_target_topics()
        return replace(
            super().redirect_window(window, ledger),
            cluster_id=self.kafka.read_cluster_id(),
            topic_ids={found.topic: found.topic_id for found in targets},
            source=replace(window.source, partitions={found.topic: found.partitions for found in targets}),
        )

    def _read_source_position(self, ledger: Ledger) -> Mapping[str, Any] | None:
        """Return the position of the source. After a window that was given up, it contains the notes of the window's published
        splits."""
        position = ledger.memory.position.source
        if position is None or GIVEN_UP not in position:
            return position
        frozen = {name: value for name, value in position.items() if name != GIVEN_UP}
        return self.source.compute_position_after(position[GIVEN_UP]["splits"], frozen, position[GIVEN_UP]["tokens"])

    def _refuse_other_cluster(self, known: str) -> None:
        """Refuse a ledger that was copied from another cluster. It does not say which records the topics of this cluster have.

        :param known: id of the cluster that the ledger names; empty if unknown.
        :raises ClusterChanged: it names another cluster.
        """
        if known not in ("", found := self.kafka.read_cluster_id()):
            raise ClusterChanged(known, found, COPIED_LEDGER)

    def _refuse_lost(self, ledger: Ledger, targets: Sequence[TargetTopic]) -> None:
        """Make sure that the ledger has every window that the group names, and that a new pipeline has published nothing.

        :raises LedgerBehind: it lacks a window, whose rows would be published again.
        :raises PipelineInOtherLedger: the pipeline has published to these topics with another ledger topic.
        """
        from airflow_kafka_spark.ledger.group import find_source_window

        memory, group, ids = ledger.memory, self.own_group, {found.topic: found.topic_id for found in targets}
        of_ledger = [TopicPartition(self.ledger_topic, number) for number in ledger.topic.partitions]
        # Only a ledger that was lost as a whole needs the other partitions. With a column of topics, they may be in any topic.
        names = ids or (self.kafka.list_topics() if memory.is_blank else ())
        places = [TopicPartition(name, 0) for name in names if name != self.ledger_topic]
        committed = self.kafka.read_committed_offsets(group, [*of_ledger, *places])
        named = find_source_window(ledger.pipeline, committed, ids)
        if named is None and memory.is_blank:
            self._refuse_other_ledger(ledger, places, ids)
        known = max((memory.last_used, *memory.entries))
        if named is None or named.number <= known:
            return
        to, only = f"committed:{group}", [place.topic for place in places if committed[place]]
        error = LedgerBehind(ledger.pipeline, group, named.number, known, self.ledger_topic, to, only)
        in_part = f"Window {named.number} may be published in part, and is published again by it. " if named.is_planned else ""
        options = ("--ledger-topic", self.ledger_topic, "--delete-group", "--group-id", group, "--why", "...")
        again = f"To publish all rows again: {format_command('forget', ledger.pipeline, *options)}"
        go_on = f"{error.action}. {in_part}" if named.knows_position else "The position in the source is too long for the group. "
        error.action = f"{go_on}{again}"
        raise error

    def _refuse_other_ledger(self, ledger: Ledger, places: Sequence[TopicPartition], ids: Mapping[str, str]) -> None:
        """Make sure that no pipeline of this name publishes these rows to this topic with another ledger topic. This pipeline
        would publish all of them again.

        :param places: the partitions at which a group may name the last window.
        :param ids: the ids of the topics that are published to, if they are known.
        :raises PipelineInOtherLedger: there is one, or there was one whose ledger topic is gone.
        """
        from airflow_kafka_spark.ledger.group import find_source_window
        from airflow_kafka_spark.ledger.topic import LedgerTopic

        pipeline, mine = ledger.pipeline, ledger.bound
        topics = self.kafka.list_topics()
        for group in sorted(self.kafka.list_groups()):
            name, found, _ = group.rpartition(f".{pipeline}")
            if not found or group != f"{name}.{pipeline}" or name == self.ledger_topic or not name:
                continue
            other = LedgerTopic(self.kafka, name)
            try:
                # The client would search for a missing topic for a second.
                if name in topics and other.find_existing():
                    there = other.read_without_waiting(pipeline).memory
                    is_same = not there.is_blank and is_same_flow(there.binding, mine)
                else:
                    is_same = find_source_window(pipeline, self.kafka.read_committed_offsets(group, places), ids) is not None
            except RightMissing as error:
                self.log.info("Group %s is not compared, because a right is missing: %s", group, error.found)
                continue
            if is_same:
                raise PipelineInOtherLedger(pipeline, self.ledger_topic, name)

    def _find_offsets_in_targets(self, published: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return partitions of target topics, with the offsets that the group commits there. The metadata of such an offset names
        the window that was planned and published last.

        They are needed if the ledger topic is lost, together with the group's offset in it. Topics that the user may not read are
        left out, because brokers refuse offsets of such topics.

        :param published: partitions that have records of the pipeline; a few of their topics are used if the sink has none.
        """
        topics = [self.sink.topic] if self.sink.topic else sorted({tp.topic for tp in published})[:MAX_TARGETS]
        known, _ = self.kafka.check_topics(dict.fromkeys(topics, ("Read",)))
        targets = [TopicPartition(topic, 0) for topic, found in known.items() if "Read" in found.rights]
        return {target: found.lso for target, found in self.kafka.read_offsets(targets).items()} if targets else {}

    def _check_kinds(self, bounds: Sequence[Mapping[str, Any]]) -> None:
        """Make sure that the columns of topic, partition and timestamp are texts, numbers and times. Reads no rows.

        :param bounds: the bounds of some splits.
        :raises ValidationError: they are of other kinds, so that no window could be published.
        """
        columns = {option: name for option in EXPECTED_KINDS if (name := getattr(self.sink, option)) is not None}
        if not bounds or not columns:
            return
        kinds = self._find_kinds(bounds)
        problems = []
        for option, name in columns.items():
            wanted, unfit = EXPECTED_KINDS[option]
            if (kind := kinds.get(name)) in unfit:
                found = f"column `{name}` holds {KIND_NAMES[kind]}; expected {wanted}"
                problems.append(Problem(f"sink.{option}", found, "Name another column, or leave it out"))
        if problems:
            raise ValidationError(problems)

    def _find_kinds(self, bounds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the kinds of the source's columns, as far as they have one. If only Spark can read the source, it is asked."""
        from airflow_kafka_spark.jobs.publish import open_session_for

        if self.source.fixed_kinds:
            return dict(self.source.fixed_kinds)
        reader = self.source.make_reader(bounds, self.sink.columns)
        if not isinstance(reader, str):
            return dict(reader.columns)
        with open_session_for(self.spark, self.source) as session:
            fields = self.source.read_frame(session, bounds).schema.fields
        return {field.name: kind for field in fields if (kind := SPARK_KINDS.get(field.dataType.typeName()))}

    def _check_records(self, bounds: Sequence[Mapping[str, Any]]) -> None:
        """Make sure that the transforms fit the rows, and that the types of the columns fit the formats and the schemas of a
        registry, before the window is written to the ledger. Reads no rows, and registers no schema.

        :param bounds: the bounds of some splits.
        :raises ValidationError: they do not fit, or the resulting records cannot be written.
        :raises KafkaSparkError: the registry does not answer.
        """
        from airflow_kafka_spark.jobs.publish import open_session_for
        from airflow_kafka_spark.sinks.kafka.sink import find_struct_problems

        sink, chain = self.sink, self._chain
        # The types of a log's events are fixed, and their tasks register the schemas of tables.
        needs_types = sink.may_refuse and not self.source.fixed_kinds
        if not bounds or not (chain is not None or needs_types):
            return
        with open_session_for(self.spark, self.source) as session:
            rows = self.source.read_frame(session, bounds)
            if chain is not None:
                chain.check(rows)
            elif problems := find_struct_problems(sink.make_records(rows).schema, sink.value_writer, sink.key_writer):
                raise ValidationError(problems)

    def check(self, window: Window) -> None:
        """Make sure that the topic is the one that the window was planned for, with the same number of partitions.

        :raises ClusterChanged: the window was planned for another cluster.
        :raises TopicRecreated: the topic was deleted and created again: the records that were published to it are gone.
        :raises PartitionsChanged: the topic has more partitions now, so that keys would be placed elsewhere.
        """
        assert window.source is not None
        self._refuse_other_cluster(window.cluster_id)
        for name, count in window.source.partitions.items():
            check_target(self.kafka, self.sink, TargetTopic(name, window.topic_ids.get(name, ""), count))

    # --- 4. move, 5. commit ---

    def find_applied(self, window: Window) -> Applied | None:
        """Return None: splits are published one by one, and the ledger remembers each."""
        return None

    def move(self, window: Window, ledger: Ledger) -> Report:
        assert window.source is not None
        splits = range(len(window.source.splits))
        markers = publish_splits(ledger, window, splits, lambda left: self._publish(window, ledger, left))
        self.check(window)
        plan = window.source
        self.source.check_published(plan.splits, plan.position)
        tokens = [marker.result.token if marker.result else {} for marker in markers]
        after = replace(plan, position=self.source.compute_position_after(plan.splits, plan.position, tokens))
        if plan.remaining and (end := self._find_final_position(after.position)):
            after = replace(plan, position=end, remaining=False)
            window = replace(window, source=after)
        ledger.move_source(after)
        report = sum_up_published(window, markers)
        if self.errors.tolerates and self.errors.most is None:  # else they were logged when they were counted
            self.errors.accept(window, list_accounts(markers))
        if plan.rows not in (None, report.records_read):
            self.log.warning(
                "%s rows were counted when window %s was planned, %s were there when they were read: the source has changed",
                f"{plan.rows:,}", window, f"{report.records_read:,}",
            )  # fmt: skip
        return report

    def _find_final_position(self, position: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the source's last position, if it has nothing more after the published window. After an error the next run
        finds it."""
        try:
            return self.source.find_final_position(position)
        except KafkaSparkError as error:
            self.log.warning("The next window will find out whether the source has more: %s", error)
            return None

    def _publish(self, window: Window, ledger: Ledger, left: tuple[int, ...]) -> None:
        from airflow_kafka_spark.jobs.publish import SourceJob

        chain = self._chain
        if chain is not None:
            chain = replace(chain, pipeline=ledger.parent_pipeline, source=self.source.uri, window=str(window))
        job = SourceJob(
            spark=self.spark,
            window=window,
            publisher=self._make_publisher(window, ledger),
            source=self.source,
            sink=self.sink,
            left=left,
            read_with=self.read_with,
            chain=chain,
        )
        with self.register_job(job):
            refuse_too_many(job, self.errors, window, ledger)
            _, rejected = job.run()
        if count := sum(result.rejected for result in rejected):
            raise RowsRejected(str(window), count, select_first_bad_records(rejected, SHOWN))

    @property
    def _chain(self) -> SourceChain | None:
        from airflow_kafka_spark.jobs.chain import SourceChain

        reserved = tuple(filter(None, (self.ledger_topic, self.errors.topic, *self.list_routes().values())))
        return SourceChain(tuple(self.transforms), self.sink, reserved) if self.transforms else None

    def _make_publisher(self, window: Window, ledger: Ledger) -> Publisher:
        from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import RowEnvelope

        topics = self.list_routes().values()
        made = add_routes(make_publisher(self.kafka, self.sink, ledger), self.kafka, topics)
        if not self.errors.tolerates:
            return made
        classes = list_writer_classes(self.sink) | ({TRANSFORMATION: "airflow_kafka_spark.transforms"} if self.transforms else {})
        letters = self.errors.make_dead_letter_topic(self.kafka, ledger.parent_pipeline, classes)
        if letters is not None:
            envelope = RowEnvelope(**vars(letters.envelope), source=self.source.uri, window=str(window))
            letters = replace(letters, envelope=envelope)
        return add_dead_letters(made, self.kafka, letters)

    # --- 6. close ---

    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        from airflow_kafka_spark.ledger.attempt import format_utc_now

        report = replace(report, completed_at=format_utc_now(), source=self.source.uri)
        claim = ledger.ledger_claim
        landed = [*(ledger.memory.published or ()), *(part.topic_partition for part in report.published)]
        offsets = {TopicPartition(claim.topic, claim.partition): claim.offset, **self._find_offsets_in_targets(landed)}
        summary = report.to_dict()
        ledger.close(summary, offsets)
        if progress := summary.get("source_progress"):
            self.log.info("All tables: %s", format_pass_progress(progress))
        closed = ledger.claimed.window.source
        assert closed is not None
        self.source.finish_window(closed.position)
        return report
