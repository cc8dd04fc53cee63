"""Kafka -> sink: what flows into what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.operators.base import asset_uris
from airflow_kafka_spark.operators.capturing import (
    Capture,
    Capturing,
    Part,
    captures_of,
    dropping,
    option_problems,
    refuse,
    refuse_lost,
    remaining,
    with_routed,
)
from airflow_kafka_spark.operators.run import Run
from airflow_kafka_spark.operators.tolerance import refuse_forgotten
from airflow_kafka_spark.operators.transforming import TransformingOperator
from airflow_kafka_spark.road.columns import NullValues
from airflow_kafka_spark.sinks.base import Sink
from airflow_kafka_spark.sources.kafka import compacted_topics
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.instants import now_ms
from airflow_kafka_spark.windows.model import TASK_PUT, Split, SplitResult, TopicPartition, Window
from airflow_kafka_spark.windows.report import Report, sum_up

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.road.job import SinkJob
    from airflow_kafka_spark.road.shaping import Shaping
    from airflow_kafka_spark.road.tolerance import Tolerance
    from airflow_kafka_spark.sinks.base import Shape, SplitWriter
    from airflow_kafka_spark.sinks.dead_letters import DeadLetterTopic
    from airflow_kafka_spark.transforms import Transform


class KafkaToSinkOperator(TransformingOperator):
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
        exactly once, in the transaction of the dead letters; or to its sink, which takes the window whole, just before this
        operator's own does, and costs a Spark job of its own.
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
    captures_records = True

    def __init__(
        self,
        *,
        sink: Sink,
        value: Format,
        **kwargs: Any,
    ) -> None:
        super().__init__(sink=sink, value=value, **kwargs)
        # Topics are this task's inlets and the sink is its outlet, under names that need no connection to be looked up.
        self.add_assets(self.topic_uris, [uri for sink in (self.sink, *self.other_sinks) for uri in asset_uris(sink, Sink)])

    # --- 1. validate ---

    def problems(self, run: Run) -> list[Problem]:
        flow = self._type_problems() or self.decoding_problems()
        problems = [*self.reading_problems(run), *flow, *self.server_problems(), *self.error_problems()]
        if self.split_records and getattr(self.sink, "whole_partitions", False):
            found = "this sink upserts split by split: each partition has to be one"
            problems.append(Problem("split_records", found, 'Leave it out, or use `atomic="window"`'))
        problems += [*self.transform_problems(), *self._capture_problems()]
        # A sink is asked about the columns it will get, so those have to be known. Where there are transforms, Spark knows them.
        if flow or (self.transforms and problems):
            return problems
        try:
            problems += self.sink.validate(self.shape(run))
            for capture in self._captures:
                problems += capture.problems(self._shape_of(capture, capture.pipeline(self.pipeline_name(run))))
        except ValidationError as error:
            problems += error.problems
        return problems

    def _type_problems(self) -> list[Problem]:
        expected = (("value", self.value, Format), ("key", self.key, (Format, type(None))), ("sink", self.sink, Sink))
        return [
            Problem(where, f"`{value!r}` is no {getattr(kind, '__name__', 'Format')}")
            for where, value, kind in expected
            if not isinstance(value, kind)
        ]

    def _capture_problems(self) -> list[Problem]:
        """Of the sinks that records go to instead of this operator's own."""
        if not isinstance(self.sink, Sink):
            return []
        problems = option_problems(self._captures, self.sink, unordered=self.window == "interval")
        if self.key is None:
            found = "a sink that deletes needs the key's columns: a tombstone has no others"
            deletes = (capture for capture in self._captures if capture.sink.takes_tombstones)
            problems += [Problem(capture.where, found, "Give the operator's `key=` a format") for capture in deletes]
        return problems

    def replay_problems(self) -> list[Problem]:
        others = [problem for c in self._captures for problem in c.told(c.sink.replay_problems())]
        return [*super().replay_problems(), *others]

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

    # --- 3. plan ---

    def destinations(self) -> Endpoint:
        """Its own sink's, and those of the sinks that a ``Filter(to=...)`` names, in their order."""
        made = super().destinations()
        for number, capture in enumerate(self._captures, 1):
            made |= capture.sink.destination().under(f"filter {number}")
        return made

    # --- 4. move, 5. commit ---

    def move(self, window: Window, ledger: Ledger) -> Report:
        from airflow_kafka_spark.road.refused import replaced, with_refused
        from airflow_kafka_spark.sinks.dead_letters import SetAside, known_to

        splits, shape = self.splits(window), self._shape(window.pipeline)
        letters = self._dead_letters(ledger.parent_pipeline)
        aside = SetAside(self.kafka, ledger.parent_pipeline, letters)
        # A zombie that has been asleep since the plan learns here, cheaply, that it is one; the broker and the sink know anyway.
        ledger.verify()
        tolerance, known = self.errors.in_tasks(letters, ledger), known_to(ledger)
        refuse_forgotten(window, known, buries=letters is not None, routes=bool(self.routes()))
        refuse_lost(self._captures, known, window)
        hook, tolerated = self.kafka if letters else None, tolerance is not None
        with ExitStack() as opened:
            writer = opened.enter_context(self.sink.begin(window, splits, shape))
            sent_before = known.routed(window.replay) if known else {}
            others = Capturing(opened, known, sent_before, partial(compacted_topics, self.kafka))
            for capture in self._captures:
                others.begin(*self._part(capture, window))
            others.run(lambda part, out, left_out: self._capture(part, window, out, left_out, tolerance))
            road = partial(self._road, window, shape=shape, tolerance=tolerance, left_out=others.left_out)
            with self.running(road(splits)) as job:
                results = job.run(writer.split_writer()) if splits else []
            if put_off := tuple(writer.put_off(results)):
                self.progress.step("move")
                with self.running(road(put_off)) as job:
                    results = replaced(results, job.run(writer.split_writer()))
            faults.reached("job.done")
            results, removed = self._as_committed(splits, results)
            if not tolerated:
                self.check_results(window, results)
            self.check_counts(window, results)
            others.check(window, results)
            self.check_followed(window, sum(result.records for result in results))
            # Once more, now that everything is read: a topic recreated meanwhile would have given other records.
            self.check(window)
            ledger.verify()
            found = writer.refused(results)
            refuse(found, self.sink.uri, str(window), tolerated=tolerated)
            results = with_refused(results, found, splits, hook)
            elsewhere = others.refused(hook, tolerated=tolerated)
            if tolerated:
                self.errors.accept(window, [*results, *elsewhere], by_split=self.sink.guarantee.by_split)
            # Before any sink takes anything: what does not go there has to be decided and remembered by then.
            sent = aside.send([*results, *elsewhere], ledger, others.decided)
            # This operator's own sink is the last one: where that has the window, all have their part of it.
            others.commit()
            applied = writer.commit(results)
        ranges = {split.index: split.range for split in splits}
        landed: dict[str, Any] = {"dead_letters": sent.landed, "routed": sent.routes} if sent else {}
        landed |= {"captured": others.decided, "records_removed": removed}
        report = sum_up(window, results, applied, ranges, flushed=now_ms(), upstream=self.upstream(), **landed)
        refused = sum(account.rejected for account in elsewhere)
        rejected, routed = report.records_rejected + refused, report.records_routed - refused
        return replace(report, records_rejected=rejected, records_routed=routed)

    def _as_committed(self, splits: Sequence[Split], results: list[SplitResult]) -> tuple[list[SplitResult], int]:
        """Count splits that an earlier attempt has committed by themselves as that attempt did: their topic may hold fewer of
        their records by now, since it is compacted, or since retention has deleted some and ``data_loss`` is ``skip``.

        Nothing else is corrected. A split that was committed had no bad and no routed records, and as many rows as were read: one
        that has such records now, or more rows than before, is decoded or transformed differently, which
        :meth:`check_counts` refuses.

        :return: the results, and how many records were removed since they were committed.
        """
        if not self.sink.guarantee.by_split:
            return results, 0
        ranges, removed = {split.index: split.range for split in splits}, {}
        for result in results:
            count = int(result.token.get("rows", 0)) - result.handed_over
            is_shorter = 0 < count <= ranges[result.index].span - result.records
            if is_shorter and not (result.rejected or result.routed):
                removed[result.index] = count
        kept = {result.index for result in results if result.gaps}
        compacted = compacted_topics(self.kafka, {ranges[index].topic for index in removed.keys() - kept})
        removed = {i: count for i, count in removed.items() if i in kept or ranges[i].topic in compacted}
        if removed:
            self.log.warning(
                "%s records of %d splits that an earlier attempt has committed are no longer in their topic: the splits stay as "
                "they are, and count as they did then",
                f"{sum(removed.values()):,}",
                len(removed),
            )
        made = [replace(r, records=r.records + removed[r.index], gaps=()) if r.index in removed else r for r in results]
        return made, sum(removed.values())

    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        known = ledger.memory.dead.get(window.number)
        # Where the sink had taken the window before, its reader and its counts of what went elsewhere are gone.
        if known and known.routes and not report.routed:
            report = with_routed(report, sum(part.records for part in known.routes), routed=known.routes)
        if known and (captured := known.captures(window.replay)) and not report.captured:
            report = with_routed(report, sum(part.records for part in captured), captured=captured)
        return super().close(ledger, window, report)

    def _part(self, capture: Capture, window: Window) -> tuple[Capture, Window, tuple[Split, ...], Shape]:
        shape = self._shape_of(capture, capture.pipeline(window.pipeline))
        return capture, window, self.splits_for(window, capture.sink), shape

    def _capture(
        self,
        part: Part,
        window: Window,
        writer: SplitWriter,
        left_out: Mapping[TopicPartition, Set[int]],
        tolerance: Tolerance | None,
    ) -> list[SplitResult]:
        """Move what goes to another sink to where nobody sees it yet."""
        before = remaining(self._transforms[: part.capture.index])
        shaping = self._shaping(part.capture.chain(before), part.capture.null_values)
        job = self._shaping_job(shaping, part.window, part.splits, part.shape, tolerance, left_out)
        with self.running(job):
            results = job.run(writer) if part.splits else []
        if tolerance is None:
            self.check_results(window, results)
        self.check_counts(part.window, results)
        self.progress.step("move")
        return results

    def _road(
        self,
        window: Window,
        splits: tuple[Split, ...],
        shape: Shape,
        tolerance: Tolerance | None,
        left_out: Mapping[TopicPartition, Set[int]],
    ) -> SinkJob:
        from airflow_kafka_spark.road.job import Job

        if self.transforms:
            shaping = self._shaping(remaining(self._transforms), self.null_values)
            return self._shaping_job(shaping, window, splits, shape, tolerance, left_out)
        options = self._job_options(window, splits, tolerance)
        return Job(layout=self.layout(), read_with=self.read_with, **options)

    def _shaping_job(
        self,
        shaping: Shaping,
        window: Window,
        splits: tuple[Split, ...],
        shape: Shape,
        tolerance: Tolerance | None,
        left_out: Mapping[TopicPartition, Set[int]],
    ) -> SinkJob:
        from airflow_kafka_spark.road.shaping import ShapingJob

        options = {**self._job_options(window, splits, tolerance), "routed": left_out}
        return ShapingJob(shaping=shaping, schema=shape.schema, **options)

    def _job_options(self, window: Window, splits: tuple[Split, ...], tolerance: Tolerance | None) -> dict[str, Any]:
        return {
            "kafka": self.kafka,
            "spark": self.spark,
            "window": window,
            "splits": splits,
            "skip_lost": self.data_loss == "skip",
            "patience": self.read_timeout,
            "tolerance": tolerance,
        }

    def _dead_letters(self, pipeline: str) -> DeadLetterTopic | None:
        sinks = dict.fromkeys(f"{type(sink).__module__}.{type(sink).__name__}" for sink in (self.sink, *self.other_sinks))
        classes = {**self.error_classes(), TASK_PUT: ", ".join(sinks)}
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

        schema = self._schema(dropping(self._transforms), self.null_values)
        # Where other sinks have a part in it, what this one refuses has to be known before they take theirs.
        asked = self.errors.tolerates or bool(self._captures)
        return Shape(pipeline, schema, has_tombstones=self.null_values == "delete", tolerates=asked)

    def _shape_of(self, capture: Capture, pipeline: str) -> Shape:
        """What flows into another sink."""
        from airflow_kafka_spark.sinks.base import Shape

        chain = capture.chain(dropping(self._transforms[: capture.index]))
        schema = self._schema(chain, capture.null_values)
        return Shape(pipeline, schema, has_tombstones=capture.null_values == "delete", tolerates=True)

    def _schema(self, transforms: tuple[Transform, ...], null_values: NullValues) -> pa.Schema:
        """The columns behind transforms."""
        return self._shaping(transforms, null_values).plan(self.spark).schema if self.transforms else self.layout().schema

    def _shaping(self, transforms: tuple[Transform, ...], null_values: NullValues) -> Shaping:
        """The same one for the same chain: what a chain means is asked once, since that takes Spark a moment."""
        from airflow_kafka_spark.road.shaping import Shaping

        made = Shaping(*self.formats, transforms, self.metadata, null_values)
        known = next((shaping for shaping in self._shapings if shaping == made), None)
        if known is None:
            self._shapings.append(made)
        return known or made

    @cached_property
    def _shapings(self) -> list[Shaping]:
        return []

    @property
    def _transforms(self) -> tuple[Transform, ...]:
        from airflow_kafka_spark.transforms.chaining import as_transform

        return tuple(map(as_transform, self.transforms))

    @property
    def _captures(self) -> tuple[Capture, ...]:
        """What transforms send to other sinks."""
        return captures_of(self.transforms)

    @property
    def other_sinks(self) -> tuple[Sink, ...]:
        """The sinks that transforms send records to, beside the operator's own."""
        return tuple(capture.sink for capture in self._captures)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return (self.sink, *self.other_sinks)

    def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
        """Renders the templates of other sinks, too."""
        super().render_template_fields(context, jinja_env)
        env, made = jinja_env or self.get_template_env(), list(self.transforms) if self._captures else []
        for capture in self._captures:
            made[capture.index] = replace(capture.filter, to=self.rendered(capture.sink, context, env))
        self.transforms = made or self.transforms
