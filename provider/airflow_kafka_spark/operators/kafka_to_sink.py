"""Kafka -> sink: the operator, and the move of a window into its sinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark import faults
from airflow_kafka_spark.arguments import find_choice_problems, find_parts_rendered_none
from airflow_kafka_spark.bad_records.options import ErrorOptions, make_resent_problem, refuse_forgotten
from airflow_kafka_spark.errors import (
    KafkaSparkError,
    Problem,
    SinkRecordMissing,
    TooManyOutOfInterval,
    Unchecked,
    ValidationError,
)
from airflow_kafka_spark.formats.base import Format, NullValues
from airflow_kafka_spark.operators.base import find_analysis_problems, find_first_cause, list_asset_uris
from airflow_kafka_spark.operators.binding import Run, has_same_destination
from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator
from airflow_kafka_spark.operators.options import (
    FollowOptions,
    LedgerOptions,
    ReadOptions,
    RecordOptions,
    SparkOptions,
    WindowOptions,
)
from airflow_kafka_spark.operators.publishing import refuse_lost_topics
from airflow_kafka_spark.operators.routed_sinks import (
    RoutedSink,
    RoutedSinks,
    add_routed_counts,
    find_routed_sink_problems,
    find_shared_place_problems,
    list_routed_sinks,
    refuse_rejected,
    refuse_removed_sinks,
    remove_routed_sinks,
)
from airflow_kafka_spark.sinks.base import Sink, find_unknown_window_problems
from airflow_kafka_spark.sources.kafka.topics import find_compacted_topics
from airflow_kafka_spark.windows.binding import Binding, Endpoint
from airflow_kafka_spark.windows.model import (
    ELSEWHERE,
    TASK_PUT,
    Applied,
    OffsetRange,
    Split,
    SplitResult,
    TopicPartition,
    Window,
)
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, Written
from airflow_kafka_spark.windows.plan import DataLossPolicy, make_splits
from airflow_kafka_spark.windows.report import Report, sum_up, sum_up_applied
from airflow_kafka_spark.windows.times import UpstreamCounts, get_current_milliseconds, parse_iso, to_milliseconds

if TYPE_CHECKING:
    from datetime import timedelta

    import pyarrow as pa
    from airflow.providers.common.compat.sdk import Context
    from jinja2 import Environment

    from airflow_kafka_spark.bad_records.dead_letters import DeadLetterTopic
    from airflow_kafka_spark.jobs.chain import SinkChain
    from airflow_kafka_spark.jobs.tasks.account import Tolerance
    from airflow_kafka_spark.jobs.tasks.write import OtherSink
    from airflow_kafka_spark.jobs.write import ReadWith, SinkJob
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.sinks.base import Shape, WindowWriter
    from airflow_kafka_spark.transforms import Transform
    from airflow_kafka_spark.transforms.chain import TransformLike
    from airflow_kafka_spark.windows.dead_letters import DeadLetters


FILTER = "filter"
"""The beginning of the names of facts on the sinks of filters, before their number."""
COMPARED_DAYS = 30
"""Days within which a sink has to have the record of a complete data interval. Older windows may have been removed on purpose."""


class KafkaToSinkOperator(FromKafkaOperator):
    """Move the next window of one or several topics into a sink, exactly once.

    A window begins at the position of the pipeline and ends at the last stable offsets (``read_committed``) that are found when
    it is planned, per partition. A partition that appears later is read from its first record. Spark's tasks decode the records
    and write them; the sink makes the window visible as a whole; then one Kafka transaction marks the window as COMPLETE in the
    ledger and moves the group's offsets (KIP-98).

    Columns: those of ``value``, then those of ``key`` (a column of both is read from the key), then ``metadata_columns``.

    Guarantee: the offsets of a window are written to the ledger before any work. The windows of a pipeline are applied in order,
    each once, and the consumer group's offsets move only after the sink has committed, also if attempts are killed, retried,
    cleared or paused.

    :param sink: destination of the window: a sink of :mod:`airflow_kafka_spark.sinks`, or one of your own.
    :param value: format of the values.
    :param key: format of the keys; None (default) reads no keys.
    :param metadata_columns: further parts of a record that become columns: names among ``key``, ``value`` (raw bytes), ``topic``,
        ``partition``, ``offset``, ``timestamp``, ``timestampType``, ``headers``; as a list, or as a mapping name -> column.
        Default none.
    :param behavior_on_null_values: treatment of a record without a value (a tombstone): ``delete`` deletes the row of its key
        (default if the sink deletes rows); ``write`` writes a row of nulls (default for formats that decode a null); ``ignore``
        only counts it; ``fail`` fails the window (default otherwise).

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
    :param max_records: maximum number of offsets in a window, shared among the partitions; None (default) is no maximum.
        Templated.
    :param data_loss: treatment of records that were deleted before they were read: ``fail`` (default) fails the task; ``skip``
        continues after them, and records the gap in ledger and report.
    :param read_with: component that reads the topics: ``task`` (used by ``auto``, the default), Spark's tasks with
        confluent-kafka; or ``spark``, Spark's own Kafka source, for executors without confluent-kafka. Both read the same
        records.
    :param split_records: approximate number of offsets that one Spark task reads, at least 1; default: a number that suits the
        sink. With ``read_with="spark"``, one task reads a whole partition instead.
    :param read_timeout: seconds without any progress after which a task stops waiting for the brokers, and fails; default 300.

    :param window: range of a window: ``progress`` (default) is all records after the position of the pipeline; ``interval`` is
        the DAG run's data interval, ``[start, end)``, between the offsets that Kafka has for both instants. Windows of intervals
        are moved in any order and concurrently.
    :param grace: seconds (or a timedelta) to wait after the end of an interval for a record from after it. The end is decided
        without one then. Default 60.
    :param on_missing_interval: behavior of a run without a data interval: ``fail`` (default), or ``progress``: it moves all
        records after the position.
    :param on_rerun: behavior of a cleared task whose window is complete: ``replay`` moves the same offsets again, and the sink
        replaces the rows of this window (default for intervals); ``skip`` does nothing (default otherwise).
    :param max_out_of_interval: maximum number of records in a data interval with timestamps outside of it (late records, wrong
        clocks). If there are more, the window fails, and nothing is committed. None (default): no maximum; the report has their
        number.
    :param follows: name of another pipeline (:class:`~airflow_kafka_spark.operators.SourceToKafkaOperator`) of the same ledger
        topic. A window then ends with the records that this pipeline has published completely, and has to contain as many
        records. The numbers are not compared if the window begins in the middle of a window of that pipeline, because this
        pipeline is new or was moved by hand. None (default) follows no pipeline. Templated.
    :param on_mismatch: ``fail`` (default) or ``warn`` if the numbers of records differ, because another producer writes to the
        topic, or because records are gone.
    :param upstream_counts: numbers of records that were written, as counted upstream, by instant (ISO 8601, or milliseconds since
        the epoch). The report then contains the missing and the surplus records of each period. A difference fails nothing.
        Default None. Templated.

    :param transforms: changes of the records between format and sink, in order: Kafka Connect's single message transforms
        (:mod:`airflow_kafka_spark.transforms`), ``Sql(...)``, or functions of a DataFrame; default none. The sink's columns are
        the columns of the result. The transforms run in the same Spark job. A record that a ``Filter(to=...)`` takes out goes to
        the topic that it names, exactly once, in the transaction of the dead letters; or to the sink that it names, which is
        written by the same Spark job and commits the window as a whole, just before this operator's own sink.
    :param errors_tolerance: treatment of bad records: those that cannot be decoded or transformed, or that the sink refuses.
        ``none`` (default): a bad record fails the window, and nothing of it is committed. ``all``: the other records are
        committed.
    :param errors_deadletterqueue_topic_name: with ``all``, the topic to which bad records are sent, byte for byte, each exactly
        once: in one Kafka transaction for the window, before the sink commits the other records. Its ledger record names the sent
        records. The topic is created with one partition if it is missing. Default None. Templated.
    :param errors_deadletterqueue_topic_replication_factor: number of replicas of a dead letter topic that is created; default -1,
        the brokers' default.
    :param errors_deadletterqueue_context_headers_enable: True (default) adds Connect's headers (KIP-298) to dead letters:
        ``__connect.errors.topic``, ``.partition``, ``.offset``, ``.connector.name`` (the pipeline), ``.stage``,
        ``.exception.message`` and others.
    :param errors_skip: with ``all`` and without a dead letter topic: True drops bad records, and only counts them;
        default False.
    :param max_errors: maximum number of bad records in a window, or their maximum share (a number below 1, as ``0.01``). If there
        are more, the window fails, and no dead letter is sent. None (default): no maximum.

    :param pipeline: name of the pipeline in the ledger and in the sink; default ``<dag_id>.<task_id>``. Each task, and each
        Airflow deployment, needs names of its own. The ledger remembers which task moves a pipeline and where its windows go, and
        refuses another task. A mapped task needs a name per index. Templated.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``. Templated.
    :param spark_conn_id: Airflow connection of type ``spark`` or ``spark_connect``; default ``spark_default``. Templated.
    :param spark_conf: Spark settings, which override those of the connection; default none.
    :param ledger_topic: compacted topic that contains the ledgers; it is created if it is missing. Default ``airflow-windows``.
        Templated.
    :param keep_windows: number of complete windows that the ledger keeps, at least 1; default 100. Older ones are removed.
    :param kwargs: arguments of Airflow's ``BaseOperator``. ``max_active_tis_per_dag`` is 1 by default, and unlimited with
        ``window="interval"``.
    """

    ui_color = "#e8f1ff"
    routes_to_sinks = True
    sink: Sink

    def __init__(
        self,
        *,
        sink: Sink,
        value: Format,
        key: Format | None = None,
        metadata_columns: Sequence[str] | Mapping[str, str] = (),
        behavior_on_null_values: NullValues | None = None,
        topics: str | Sequence[str] | None = None,
        topics_pattern: str | None = None,
        group_id: str,
        starting_offsets: Written = CommittedOffsets(),  # noqa: B008 - a frozen value
        ending_offsets: Written = "latest",
        max_records: int | str | None = None,
        data_loss: DataLossPolicy = "fail",
        read_with: ReadWith = "auto",
        split_records: int | None = None,
        read_timeout: float = 300.0,
        window: Literal["progress", "interval"] = "progress",
        grace: float | timedelta = 60.0,
        on_missing_interval: Literal["fail", "progress"] = "fail",
        on_rerun: Literal["skip", "replay"] | None = None,
        max_out_of_interval: int | None = None,
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
            sink=sink,
            record_options=RecordOptions(value, key, metadata_columns, behavior_on_null_values),
            read_options=ReadOptions(
                topics,
                topics_pattern,
                group_id,
                starting_offsets,
                ending_offsets,
                max_records,
                data_loss,
                read_with,
                split_records,
                read_timeout,
                upstream_counts,
            ),
            window_options=WindowOptions(window, grace, on_missing_interval, on_rerun, max_out_of_interval),
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
        self._has_checked_rows = False
        # Topics are this task's inlets and the sinks are its outlets, under names that need no connection to be looked up.
        self.add_assets(self.topic_uris, [uri for sink in self.sinks for uri in list_asset_uris(sink, Sink)])

    # --- 1. validate ---

    def find_problems(self, run: Run) -> list[Problem]:
        flow, changes = self.find_decoding_problems(self._find_type_problems()), self.find_transform_problems()
        problems = [
            *self.find_reading_problems(run),
            *flow,
            *self.find_server_problems(run),
            *self._find_election_problems(),
            *self.find_error_problems(),
        ]
        problems += [*self._find_sink_problems(), *changes, *self._find_routed_sink_problems()]
        of_spark = [problem for problem in problems if problem.where == "spark_conn_id"] if self.transforms else []
        if self.transforms and not problems and isinstance(self.sink, Sink) and not self._find_target_problems():
            # Without a problem, Spark is asked when the window has records, so that a run without any starts no Spark.
            return []
        return [*problems, *self._find_row_problems(run, find_first_cause([*flow, *changes, *of_spark]), problems)]

    def _find_row_problems(self, run: Run, cause: str, others: Sequence[Problem]) -> list[Problem]:
        """Return the problems that the sinks find in their rows. With transforms, only Spark knows the columns of these.

        :param cause: the argument whose problem keeps their columns from being known; "" if none does.
        :param others: all problems that were found so far.
        """
        if not isinstance(self.sink, Sink):
            return []
        check = partial(self._validate_sink, run)
        found: list[Problem] = [Unchecked("transforms", cause)] if self.transforms and cause else []
        found += find_analysis_problems("sink columns", check, cause, others, self._find_target_problems)
        # A Spark that did not answer is not asked again.
        cause = cause or next((problem.where for problem in found if problem.where == "spark_conn_id"), "")
        for routed in self._routed_sinks:
            check = partial(self._validate_routed, routed, run)
            instead = partial(routed.find_problems, None)
            found += find_analysis_problems(f"{routed.where} columns", check, cause, [*others, *found], instead)
        return found

    def _find_target_problems(self) -> list[Problem]:
        """Return the problems of the targets of all sinks, whose columns are not known."""
        found = self.sink.find_target_problems()
        return found + [problem for routed in self._routed_sinks for problem in routed.find_problems(None)]

    def _validate_sink(self, run: Run) -> list[Problem]:
        return self.sink.validate(self.make_shape(run))

    def _validate_routed(self, routed: RoutedSink, run: Run) -> list[Problem]:
        return routed.find_problems(self._make_shape_of(routed, routed.make_pipeline_name(self.get_pipeline_name(run))))

    def find_routed_type_problems(self) -> list[Problem]:
        return [problem for routed in self._routed_sinks for problem in routed.type_problems]

    def _find_type_problems(self) -> list[Problem]:
        found = self.record_options.find_type_problems()
        return found if isinstance(self.sink, Sink) else [*found, Problem("sink", f"`{self.sink!r}` is no Sink")]

    def _find_sink_problems(self) -> list[Problem]:
        """Return the options that this sink does not support."""
        if not isinstance(self.sink, Sink):
            return []
        problems = []
        if self.read_options.split_records and self.sink.whole_partitions:
            found = "this sink upserts split by split: each partition has to be one split"
            problems.append(Problem("split_records", found, 'Leave it out, or use `atomic="window"`'))
        if self.window_options.by_interval:
            problems += self.sink.find_unordered_problems()
        if self.window_options.max_out_of_interval is not None and self.sink.guarantee.by_split:
            found = "this sink commits split by split, before the records of a window are counted"
            problems.append(Problem("max_out_of_interval", found, 'Leave it out, or use `atomic="window"`'))
        return problems + (self.find_replay_problems() if self.on_rerun == "replay" else [])

    def _find_election_problems(self) -> list[Problem]:
        """Return topics whose log may be truncated while Spark's source reads it and splits are committed.

        Tasks that read a topic themselves compare the leader epoch of each record. Spark's source does not return it.
        """
        by_split = isinstance(self.sink, Sink) and self.sink.guarantee.by_split
        if self.read_options.read_with != "spark" or not by_split:
            return []
        try:
            config = self.kafka.read_topic_config(sorted(self.resolve()))
        except KafkaSparkError:
            return []  # Missing topics and rights are problems of their own.
        unsafe = [name for name, settings in config.items() if settings.get("unclean.leader.election.enable") == "true"]
        if not unsafe:
            return []
        found = f"splits are committed one by one, and topic `{unsafe[0]}` has `unclean.leader.election.enable=true`"
        action = 'Leave `read_with` out, so that tasks compare leader epochs, use `atomic="window"`, or set it to false'
        return [Problem("read_with", found, action)]

    def _find_routed_sink_problems(self) -> list[Problem]:
        """Return the problems of the sinks that transforms send records to."""
        if not isinstance(self.sink, Sink):
            return []
        problems = find_routed_sink_problems(self._routed_sinks, self.sink, unordered=self.window_options.by_interval)
        problems += find_shared_place_problems(self._routed_sinks, self.sink)
        if self.key is None:
            found = "a sink that deletes needs the key's columns: a tombstone has no others"
            deletes = (routed for routed in self._routed_sinks if routed.sink.takes_tombstones)
            problems += [Problem(routed.where, found, "Give the operator's `key=` a format") for routed in deletes]
        return problems

    def find_replay_problems(self) -> list[Problem]:
        others = [problem for c in self._routed_sinks for problem in c.add_place(c.sink.find_replay_problems())]
        return [*super().find_replay_problems(), *others]

    def find_unknown_window_problems(self, replay: Window) -> list[Problem]:
        found = super().find_unknown_window_problems(replay)
        for routed, part in self._list_routed_replays(replay):
            found += routed.add_place(find_unknown_window_problems(routed.sink, part))
        return found

    def find_window_replay_problems(self, replay: Window) -> list[Problem]:
        found = super().find_window_replay_problems(replay)
        for routed, part in self._list_routed_replays(replay):
            # A filter may be newer than the window: its sink has no rows of it to replace.
            if routed.sink.find_applied(replace(part, replay=0)) is not None:
                found += routed.add_place(routed.sink.find_window_replay_problems(part))
        return found

    def _list_routed_replays(self, replay: Window) -> Iterator[tuple[RoutedSink, Window]]:
        """Yield the sinks of filters, and the replay under the name that each of them records; none for a window without
        records."""
        for routed in self._routed_sinks if not replay.is_empty else ():
            yield routed, replace(replay, pipeline=routed.make_pipeline_name(replay.pipeline))

    def find_null_value_problems(self) -> list[Problem]:
        behavior, where = self.record_options.behavior_on_null_values, "behavior_on_null_values"
        if behavior is not None and (unknown := find_choice_problems(where, behavior, ("fail", "ignore", "write", "delete"))):
            return unknown
        if behavior == "delete" and not self.sink.takes_tombstones:
            return [Problem(where, "this sink does not delete", "Set `delete_enabled=True` on the sink")]
        if self.null_values == "delete" and self.key is None:
            return [
                Problem("key", "a sink that deletes needs the key's columns: a tombstone has no others", "Give `key=` a format")
            ]
        return []

    # --- 3. plan ---

    def plan(self, ledger: Ledger, run: Run) -> Window:
        window = super().plan(ledger, run)
        if self.needs_analysis(window):
            self._check_transformed_rows(run)
        return window

    def _check_transformed_rows(self, run: Run) -> None:
        """Check what :meth:`find_problems` has put off: transforms, and whether the sinks take their rows.

        :raises ValidationError: a transform does not fit, or a sink does not take its rows. Nothing was planned or moved.
        """
        if self.transforms and not self._has_checked_rows:
            if problems := self._find_row_problems(run, "", ()):
                raise ValidationError(problems)
            self._has_checked_rows = True

    def list_destinations(self) -> Endpoint:
        """Return the destination of the operator's own sink, and those of the sinks that a ``Filter(to=...)`` names, in order."""
        made = super().list_destinations()
        for number, routed in enumerate(self._routed_sinks, 1):
            made |= routed.sink.find_destination().add_prefix(f"{FILTER} {number}")
        return made

    def refuse_lost_records(self, ledger: Ledger, found: Binding) -> None:
        """Refuse a data interval if a sink has no record of the latest one that was committed there. The commit of an interval
        reads no other interval's record.

        :raises SinkRecordMissing: a sink has none, and no `rebind` was made since.
        """
        from airflow_kafka_spark.ledger.interval import IntervalLedger

        if not isinstance(ledger, IntervalLedger) or ledger.sink_has_it or (last := ledger.find_last_complete()) is None:
            return
        window, before, since = last.window, last.window.binding, (last.report or {}).get("completed_at", "")
        if before is None or before.decided != found.decided or not has_same_destination(before, found):
            return
        if not since or get_current_milliseconds() - to_milliseconds(parse_iso(since)) > COMPARED_DAYS * 86_400_000:
            return
        names = [(self.sink, window.pipeline), *((c.sink, c.make_pipeline_name(window.pipeline)) for c in self._routed_sinks)]
        for sink, name in names:
            if sink.has_lost(replace(window, pipeline=name)):
                interval = window.pipeline.removeprefix(f"{ledger.parent_pipeline}.")
                raise SinkRecordMissing(ledger.parent_pipeline, ledger.interval.name, interval, sink.uri)

    def read_record_of_sink(self, pipeline: str) -> Applied | None:
        found = self.sink.find_last_applied(pipeline)
        # With a template, each window has its own target, and the record is of all of them.
        return replace(found, elsewhere="") if found is not None and self._destination_is_free else found

    def make_splits(self, window: Window) -> tuple[Split, ...]:
        read = self.read_options
        whole = read.read_with == "spark" or self.sink.whole_partitions
        span = max(window.span, 1) if whole else read.split_records or self.sink.split_records
        return make_splits(window, span, without=self.find_lost_topics(window))

    # --- 4. move, 5. commit ---

    def find_applied(self, window: Window) -> Applied | None:
        """Return the record of the operator's own sink, which commits last. None if a ``rebind`` has given the window a sink of a
        filter that does not have its part yet."""
        found = self.sink.find_applied(window)
        if found is None or window.after != ELSEWHERE or window.binding is None:
            return found
        place = window.binding.destination.place
        for number, routed in enumerate(self._routed_sinks, 1):
            # A filter that was added while the window was open gets no record of the window.
            is_bound = any(fact.startswith(f"{FILTER} {number} ") for fact in place)
            if (
                is_bound
                and routed.sink.find_applied(replace(window, pipeline=routed.make_pipeline_name(window.pipeline))) is None
            ):
                return None
        return found

    def move(self, window: Window, ledger: Ledger) -> Report:
        if self.run_now is not None:
            # A window that an earlier attempt has planned, and one that is moved again.
            self._check_transformed_rows(self.run_now)
        return SinkMove.of(self, window, ledger).run()

    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        known = ledger.memory.dead.get(window.number)
        # If the sink had the window before, this attempt has not counted the records for topics and other sinks. The ledger has.
        if known and known.routes and not report.routed:
            report = replace(add_routed_counts(report, sum(part.records for part in known.routes)), routed=known.routes)
        # Without a filter, they are those of a destination that the window had before a `rebind`.
        if known and self._routed_sinks and (captured := known.list_captured(window.replay)) and not report.captured:
            report = replace(add_routed_counts(report, sum(part.records for part in captured)), captured=captured)
        return super().close(ledger, window, report)

    # --- the parts of a move ---

    def make_job(
        self,
        window: Window,
        splits: tuple[Split, ...],
        shape: Shape,
        tolerance: Tolerance | None,
        left_out: Mapping[TopicPartition, Set[int]],
        others: tuple[OtherSink, ...] = (),
    ) -> SinkJob:
        """Return the Spark job that moves splits of the window to the operator's own sink, and to others.

        :param left_out: offsets of records that are somewhere else already.
        :param others: the sinks that transforms send records to.
        """
        from airflow_kafka_spark.jobs.write import ChainJob, RowJob

        reading = self.make_reading(window, tolerance, left_out)
        if self.transforms:
            return ChainJob(
                spark=self.spark,
                window=window,
                splits=splits,
                reading=reading,
                chain=self._make_chain(self._transforms, self.null_values),
                schema=shape.schema,
                others=others,
            )
        return RowJob(
            spark=self.spark,
            window=window,
            splits=splits,
            reading=reading,
            kafka=self.kafka,
            layout=self.make_layout(),
            read_with=self.read_options.read_with,
        )

    def list_routed_sinks_and_shapes(self, pipeline: str) -> list[tuple[RoutedSink, Shape]]:
        """Return the sinks that transforms send records to, with their rows.

        :param pipeline: the pipeline's name.
        """
        return [(routed, self._make_shape_of(routed, routed.make_pipeline_name(pipeline))) for routed in self._routed_sinks]

    def make_dead_letter_topic(self, pipeline: str) -> DeadLetterTopic | None:
        """Return the dead letter topic; None without one."""
        sinks = dict.fromkeys(f"{type(sink).__module__}.{type(sink).__name__}" for sink in self.sinks)
        classes = {**self.list_error_classes(), TASK_PUT: ", ".join(sinks)}
        return self.errors.make_dead_letter_topic(self.kafka, pipeline, classes)

    @property
    def null_values(self) -> NullValues:
        if (behavior := self.record_options.behavior_on_null_values) is not None:
            return behavior
        if self.sink.takes_tombstones:
            return "delete"
        return "write" if self.value.decodes_null else "fail"

    def make_shape(self, run: Run) -> Shape:
        """Return the rows that the sink gets in a run."""
        return self.make_shape_for(self.get_pipeline_name(run))

    def make_shape_for(self, pipeline: str) -> Shape:
        """Return the rows that the sink gets of a pipeline's windows."""
        from airflow_kafka_spark.sinks.base import Shape

        schema = self._find_schema(remove_routed_sinks(self._transforms), self.null_values)
        # If other sinks take parts of the window, the rows that this sink refuses have to be known before they commit.
        asked = self.errors.tolerates or bool(self._routed_sinks)
        return Shape(pipeline, schema, has_tombstones=self.null_values == "delete", tolerates=asked)

    def _make_shape_of(self, routed: RoutedSink, pipeline: str) -> Shape:
        """Return the rows that another sink gets."""
        from airflow_kafka_spark.sinks.base import Shape

        chain = routed.make_chain(remove_routed_sinks(self._transforms[: routed.index]))
        schema = self._find_schema(chain, routed.null_values)
        return Shape(pipeline, schema, has_tombstones=routed.null_values == "delete", tolerates=True)

    def _find_schema(self, transforms: tuple[Transform, ...], null_values: NullValues) -> pa.Schema:
        """Return the columns of the result of transforms."""
        if not self.transforms:
            return self.make_layout().schema
        return self._make_chain(transforms, null_values).plan(self.spark).schema

    def _make_chain(self, transforms: tuple[Transform, ...], null_values: NullValues) -> SinkChain:
        """Return the chain of some transforms: for equal ones the same, which Spark analyzes once."""
        from airflow_kafka_spark.jobs.chain import SinkChain

        made = SinkChain(*self.formats, transforms, self.record_options.metadata, null_values)
        known = next((chain for chain in self._chains if chain == made), None)
        if known is None:
            self._chains.append(made)
        return known or made

    @cached_property
    def _chains(self) -> list[SinkChain]:
        return []

    @property
    def _transforms(self) -> tuple[Transform, ...]:
        from airflow_kafka_spark.transforms.chain import as_transform

        return tuple(map(as_transform, self.transforms))

    @property
    def _routed_sinks(self) -> tuple[RoutedSink, ...]:
        """The sinks that transforms send records to."""
        return list_routed_sinks(self.transforms)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return (self.sink, *(routed.sink for routed in self._routed_sinks))

    def get_written_schema(self) -> pa.Schema | None:
        if self.transforms and not self._has_checked_rows:
            # Only Spark knows the columns, and a run without records starts none.
            return None
        # The columns are known since the validation, so no server is asked for them.
        try:
            return self.make_shape(self.run_now).schema if self.run_now is not None else None
        except Exception as error:
            self.log.debug("No columns for OpenLineage: %s", error)
            return None

    def render_parts(self, context: Context, jinja_env: Environment) -> list[Problem]:
        """Render the templates of sink and formats, and of the sinks that transforms send records to."""
        found, made = super().render_parts(context, jinja_env), list(self.transforms) if self._routed_sinks else []
        for routed in self._routed_sinks:
            sink = self.render_part(routed.sink, context, jinja_env)
            made[routed.index] = replace(routed.filter, to=sink)
            found += find_parts_rendered_none(f"{routed.where}.", routed.sink, sink)
        self.transforms = made or self.transforms
        return found


@dataclass
class SinkMove:
    """One attempt at moving a window into its sink, and into the sinks that transforms send records to.

    :meth:`run` takes the steps in their order. No reader of a sink sees anything of the window before the sinks commit.

    :param operator: makes the Spark jobs and checks their results.
    :param window: the window.
    :param ledger: the pipeline's ledger, in which this attempt has claimed the window.
    :param splits: the splits of the window, one for each Spark task.
    :param shape: the rows of the operator's own sink.
    :param letters: the dead letter topic; None without one.
    :param tolerance: how tasks handle bad records; None if they fail the window.
    :param known: the records that earlier attempts at the window have sent to topics and other sinks.
    :param results: the accounts of the splits for the operator's own sink.
    :param removed: number of records that an earlier attempt has committed, and that are no longer in their topic.
    :param refused: the accounts of the records that other sinks refuse.
    :param sent: the dead letters and routed records, with their offsets in their topics.
    """

    operator: KafkaToSinkOperator
    window: Window
    ledger: Ledger
    splits: tuple[Split, ...]
    shape: Shape
    letters: DeadLetterTopic | None
    tolerance: Tolerance | None
    known: DeadLetters | None
    results: list[SplitResult] = field(default_factory=list)
    removed: int = 0
    refused: list[SplitResult] = field(default_factory=list)
    sent: DeadLetters | None = None

    @classmethod
    def of(cls, operator: KafkaToSinkOperator, window: Window, ledger: Ledger) -> SinkMove:
        """Read the results of earlier attempts, and make sure that this attempt may continue.

        :raises ValidationError: records that were sent to a topic or another sink would be sent or written once more.
        :raises TopicRecreated: a topic that has such records was deleted since.
        :raises Fenced: a newer attempt has taken over.
        """
        from airflow_kafka_spark.bad_records.dead_letters import find_known_dead_letters, find_resent
        from airflow_kafka_spark.jobs.tasks.account import Tolerance
        from airflow_kafka_spark.windows.dead_letters import unite_offsets

        splits, shape = operator.make_splits(window), operator.make_shape_for(window.pipeline)
        letters = operator.make_dead_letter_topic(ledger.parent_pipeline)
        # A cheap check for an attempt that was suspended after the plan. The broker and the sink would refuse it anyway.
        ledger.verify()
        known, tolerance = find_known_dead_letters(ledger), None
        resent = find_resent(ledger) if window.replay else {}
        if operator.errors.tolerates:
            sent = known.list_sent(window.replay) if known and letters else {}
            tolerance = Tolerance(letters is not None, unite_offsets(sent, resent))
        elif resent:
            raise ValidationError([make_resent_problem(window, resent)])
        if known is not None:
            refuse_lost_topics(operator.kafka, window, known.list_topic_ids(window.replay))
        refuse_forgotten(window, known, has_dead_letters=letters is not None, has_routes=bool(operator.list_routes()))
        refuse_removed_sinks(list_routed_sinks(operator.transforms), known, window)
        return cls(operator, window, ledger, splits, shape, letters, tolerance, known)

    def run(self) -> Report:
        """Take all steps, and return the report of the window."""
        with ExitStack() as opened:
            writer = opened.enter_context(self.operator.sink.begin(self.window, self.splits, self.shape))
            others = self._begin_other_sinks(opened)
            self._fill_sinks(writer, others)
            faults.reached("job.done")
            self._check(others)
            self._sort_out_refused(writer, others)
            if (applied := self._find_applied_meanwhile()) is not None:
                return sum_up_applied(self.window, applied, self.known)
            # Before any sink commits: by then, the destination of every other record has to be final and recorded.
            self._send_elsewhere(others)
            # The operator's own sink commits last: if it has the window, all other sinks have their parts.
            others.commit()
            applied = writer.commit(self.results)
        return self._report(applied, others, writer.list_kept_ranges())

    def _begin_other_sinks(self, opened: ExitStack) -> RoutedSinks:
        sent_before = self.known.list_routed(self.window.replay) if self.known else {}
        others = RoutedSinks(opened, self.known, sent_before, partial(find_compacted_topics, self.operator.kafka))
        for routed, shape in self.operator.list_routed_sinks_and_shapes(self.window.pipeline):
            others.begin(routed, self.window, self.splits, shape)
        return others

    def _fill_sinks(self, writer: WindowWriter, others: RoutedSinks) -> None:
        """Write all rows to a place that no reader sees, then the splits that the sink has deferred."""
        from airflow_kafka_spark.bad_records.dead_letters import replace_results

        make = partial(self.operator.make_job, self.window, shape=self.shape, tolerance=self.tolerance, left_out=others.left_out)
        results: list[SplitResult] = []
        if self.splits:
            with self.operator.register_job(make(self.splits, others=others.make_outputs())) as job:
                results = job.run(writer.make_split_writer())
        if others.parts and self.tolerance is None:
            # A split with a bad record was aborted in all sinks, so it has no account of theirs.
            self.operator.check_results(self.window, results)
        self.results = others.keep(results)
        # Only a sink that commits splits one by one defers some. It is then the only sink.
        if put_off := tuple(writer.list_deferred(self.results)):
            self.operator.progress.begin_step("move")
            with self.operator.register_job(make(put_off)) as job:
                self.results = replace_results(self.results, job.run(writer.make_split_writer()))

    def _check(self, others: RoutedSinks) -> None:
        """Compare all counts, and check again that no topic was recreated and no newer attempt has taken over."""
        operator, window = self.operator, self.window
        if operator.sink.guarantee.by_split:
            self._count_as_committed()
        if self.tolerance is None:
            operator.check_results(window, self.results)
        operator.check_counts(window, self.results)
        for part in others.parts:
            operator.check_counts(part.window, part.results)
        others.check(window, self.results)
        self._refuse_out_of_interval()
        operator.check_followed(window, sum(result.records for result in self.results))
        # After everything is read: a topic that was recreated meanwhile would have returned other records.
        operator.check(window)
        self.ledger.verify()

    def _refuse_out_of_interval(self) -> None:
        """Check the number of records with timestamps outside of the window's data interval.

        :raises TooManyOutOfInterval: there are more than ``max_out_of_interval``.
        """
        count, limit = sum(r.out_of_interval for r in self.results), self.operator.window_options.max_out_of_interval
        if limit is not None and count > limit:
            farthest = max(r.farthest for r in self.results)
            records = sum(r.records for r in self.results)
            raise TooManyOutOfInterval(str(self.window), count, records, limit, farthest / 1000)

    def _count_as_committed(self) -> None:
        """Count splits that an earlier attempt has committed separately as that attempt did. Their topic may contain fewer of
        their records by now: it is compacted, or retention has deleted some and ``data_loss`` is ``skip``.

        Nothing else is corrected. A split that was committed had no bad and no routed records, and as many rows as were read: one
        that has such records now, or more rows than before, is decoded or transformed differently, which
        :meth:`~airflow_kafka_spark.operators.base.WindowOperator.check_counts` refuses.
        """
        ranges, removed = {split.index: split.range for split in self.splits}, {}
        for result in self.results:
            count = int(result.token.get("rows", 0)) - result.handed_over
            is_shorter = 0 < count <= ranges[result.index].span - result.records
            if is_shorter and not (result.rejected or result.routed):
                removed[result.index] = count
        kept = {result.index for result in self.results if result.gaps}
        compacted = find_compacted_topics(self.operator.kafka, {ranges[index].topic for index in removed.keys() - kept})
        removed = {i: count for i, count in removed.items() if i in kept or ranges[i].topic in compacted}
        if not removed:
            return
        self.operator.log.warning(
            "%s records of %d splits that an earlier attempt has committed are no longer in their topic: the splits stay as "
            "they are, and count as they did then",
            f"{sum(removed.values()):,}",
            len(removed),
        )
        self.removed = sum(removed.values())
        self.results = [
            replace(r, records=r.records + removed[r.index], gaps=()) if r.index in removed else r for r in self.results
        ]

    def _sort_out_refused(self, writer: WindowWriter, others: RoutedSinks) -> None:
        """Count the rows that the sinks refuse as bad records.

        :raises SinkRejected: there are some, and bad records are not tolerated.
        :raises TooManyBadRecords: there are more than ``max_errors``.
        """
        from airflow_kafka_spark.bad_records.dead_letters import add_refused

        operator, tolerated = self.operator, self.tolerance is not None
        hook = operator.kafka if self.letters else None
        found = writer.find_refused_records(self.results)
        refuse_rejected(found, operator.sink.uri, str(self.window), tolerated=tolerated)
        self.results = add_refused(self.results, found, self.splits, hook)
        self.refused = others.find_refused(hook, tolerated=tolerated)
        if tolerated:
            by_split = operator.sink.guarantee.by_split
            operator.errors.accept(self.window, [*self.results, *self.refused], by_split=by_split)

    def _find_applied_meanwhile(self) -> Applied | None:
        """Return the record of the sink if an earlier attempt has committed the window just before this one has begun, which no
        earlier attempt can do any more. Ask only if records are about to be sent elsewhere: that attempt may have written them to
        the sink, because it has read them with another schema."""
        if not any(result.rejected or result.routed for result in [*self.results, *self.refused]):
            return None
        return self.operator.find_applied(self.window)

    def _send_elsewhere(self, others: RoutedSinks) -> None:
        """Send dead letters and routed records in one transaction, in which the ledger records their offsets."""
        from airflow_kafka_spark.bad_records.dead_letters import SideOutputs

        aside = SideOutputs(self.operator.kafka, self.ledger.parent_pipeline, self.letters)
        self.sent = aside.send([*self.results, *self.refused], self.ledger, others.decided)

    def _report(self, applied: Applied, others: RoutedSinks, kept: Sequence[OffsetRange]) -> Report:
        """Return the report of the window.

        :param kept: the offsets that the sink has of topics that are gone.
        """
        report = sum_up(
            self.window,
            self.results,
            applied,
            {split.index: split.range for split in self.splits},
            flushed=get_current_milliseconds(),
            upstream=self.operator.read_options.counts,
        )
        refused = sum(account.rejected for account in self.refused)
        unread = self.operator.report_unread_gaps(self.window, [*(split.range for split in self.splits), *kept])
        return replace(
            report,
            gaps=(*report.gaps, *unread),
            records_rejected=report.records_rejected + refused,
            records_routed=report.records_routed - refused,
            dead_letters=self.sent.landed if self.sent else (),
            routed=self.sent.routes if self.sent else (),
            captured=others.decided,
            records_removed=self.removed,
        )
