"""Compare a table with the table that pipelines have filled from it, and name the rows that differ."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from airflow.providers.common.compat.sdk import BaseOperator

from airflow_kafka_spark.arguments import (
    ChecksArguments,
    as_names,
    find_template_problems,
    find_type_problems,
    replace_wrong_arguments,
    unwrap_literals,
)
from airflow_kafka_spark.errors import SinkDiffers, ValidationError
from airflow_kafka_spark.hooks.task_state import find_task_state_store
from airflow_kafka_spark.operators.visibility.links import Links, TableLink, make_table_page
from airflow_kafka_spark.sinks.base import Sink
from airflow_kafka_spark.sources import JdbcSource

if TYPE_CHECKING:
    from airflow_kafka_spark.verification.plan import VerificationOptions, VerificationPlan
    from airflow_kafka_spark.verification.report import VerificationReport

log = logging.getLogger(__name__)

REPORT_KEY = "verification"
"""The XCom that has the report, also of a task that fails because rows differ."""


class VerifyOperator(ChecksArguments, BaseOperator):
    """Compare the rows of a source with those of a sink: counts and checksums per chunk, and the keys of the rows that differ.

    Guarantee: if neither table changes meanwhile, a row that is missing, extra, doubled or different in a compared column is
    found and counted, up to a chance of 2^-60 per chunk that two checksums are equal although rows differ. Where too many rows
    differ to read them (only by buckets), the report has the number of chunks that are left. Nothing is written.

    Databases compute a count and a checksum per chunk of the key, and send nothing else. The checksum adds up a part of the
    MD5 of each row: it does not depend on the order of rows, and a duplicate row changes it. A chunk that differs is divided
    into smaller ones, and at last its rows are read from both sides. So no Spark is started: the databases do the work, and the
    number of their sessions is the limit, not the number of executors. Tables in Delta or Iceberg, files and the tables of other
    sinks are read by the task, a batch at a time.

    Values are equal if they are equal as values: numbers of any scale, ``timestamp`` with and without time zone by microsecond
    (without one, as UTC), ``char(n)`` without blanks at its end, floating-point numbers by bit (a single in a double as a
    single), JSON by content. NULL and an empty text differ. ``docs/verification.md`` has the table of types.

    Tables are cut by *ranges* of the key if both databases have an index for it and sort its values the same way: numbers,
    dates, timestamps and bytes; ``uuid`` and text of one collation in PostgreSQL. Other keys are compared by *buckets* of their
    hashes: each table is read once, and once more to name the rows of the buckets that differ.

    Rows that change while they are compared, or that the pipeline has not moved yet, differ. Compare only rows that no longer
    change (``where="updated_at < '{{ data_interval_start }}'"``), or give the pipeline time (``rechecks``).

    In Airflow 3.3 and later, a retry continues after the chunks that are compared (by ranges). After a success, after
    differences, and with other arguments, it starts from the beginning.

    :param source: the table with the expected rows: its connection, ``table`` or ``query``, ``key`` (default: its primary key)
        and ``include_columns``; the other options have no effect here.
    :param sink: the table that is compared with it: a ``PostgresSink``, ``DeltaSink``, ``IcebergSink`` or ``FilesSink`` (Parquet)
        as the pipeline has it, another sink whose ``find_compared_table`` (``sinks.base.Sink``) returns its table, or a
        ``JdbcSource`` that reads it. Columns that only the sink has are not compared.
    :param columns: source column -> sink column, where the names differ; default none.
    :param exclude_columns: columns of the source that are not compared; default none.
    :param where: a condition for the source's rows, in its SQL; default empty, all rows.
    :param sink_where: a condition for the sink's rows, in its SQL (for Iceberg, a ``row_filter`` of pyiceberg; another sink
        documents its own); None (default): as ``where``.
    :param chunk_rows: number of rows of a chunk; None (default): 100,000, or without ``rechecks`` a part in 32 of a larger table.
        Rows of a chunk may lie all over a table, and many chunks would read each of its pages many times.
    :param parallel: number of chunks that are compared at a time, and of sessions in each database; default 4.
    :param rechecks: number of times that differing chunks are compared again before their rows are named; default 0.
    :param recheck_delay: seconds before each recheck; default 30.
    :param max_keys: maximum number of keys that are named; all differing rows are counted. Default 100.
    :param on_difference: ``fail`` (default) fails the task if rows differ, ``warn`` only logs them.
    :param kwargs: arguments of Airflow's ``BaseOperator``.

    :return: the report, as JSON; also in the XCom ``verification``, if the task fails because rows differ.
    """

    rendered_parts = ("source", "sink")
    template_fields: Sequence[str] = ("where", "sink_where", "columns", "exclude_columns")
    ui_color = "#dcfce7"

    operator_extra_links = (TableLink(),)
    links: Links | None = None

    def __init__(
        self,
        *,
        source: JdbcSource,
        sink: Sink | JdbcSource,
        columns: Mapping[str, str] | None = None,
        exclude_columns: str | Sequence[str] = (),
        where: str = "",
        sink_where: str | None = None,
        chunk_rows: int | None = None,
        parallel: int = 4,
        rechecks: int = 0,
        recheck_delay: float = 30.0,
        max_keys: int = 100,
        on_difference: Literal["fail", "warn"] = "fail",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.source = unwrap_literals(source)
        self.sink = unwrap_literals(sink)
        self.columns = columns
        self.exclude_columns = exclude_columns
        self.where = where
        self.sink_where = sink_where
        self.chunk_rows = chunk_rows
        self.parallel = parallel
        self.rechecks = rechecks
        self.recheck_delay = recheck_delay
        self.max_keys = max_keys
        self.on_difference = on_difference
        self._stopped = Event()

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Compare both tables, and return the report as JSON.

        :raises ValidationError: arguments, connections, tables or columns that cannot be; nothing was compared.
        :raises SinkDiffers: rows differ, with ``on_difference="fail"``.
        :raises SourceUnavailable: a database did not answer.
        :raises SinkUnavailable: the store or the catalog of a lake did not answer.
        :raises SourceRejected: a database refuses a statement.
        """
        from airflow_kafka_spark.verification.comparison import verify
        from airflow_kafka_spark.verification.concurrency import ConcurrentWork

        options, plan = self._make_plan()
        self.links = Links(context.get("ti"))
        self.links.show(TableLink, make_table_page(options.sink.uri))
        report = verify(plan, options, ConcurrentWork(options.parallel, self._stopped), find_task_state_store(context))
        found = report.to_json()
        self._log(report)
        if report.is_equal or options.on_difference == "warn":
            return found
        if (ti := context.get("ti")) is not None and hasattr(ti, "xcom_push"):
            ti.xcom_push(key=REPORT_KEY, value=found)
        raise SinkDiffers(report.sink, report.source, report.summary, report.differences)

    def on_kill(self) -> None:
        """Stop before the next chunk."""
        self._stopped.set()

    def _make_plan(self) -> tuple[VerificationOptions, VerificationPlan]:
        """Return the options, and the plan of the comparison.

        :raises ValidationError: the arguments have problems; all of them are named.
        """
        from airflow_kafka_spark.verification.plan import VerificationOptions, make_plan

        sound, problems = replace_wrong_arguments(self)
        problems = [*self.rendered_none, *problems]
        where = sound.where or ""
        options = VerificationOptions(
            source=sound.source,
            sink=sound.sink,
            columns=sound.columns or {},
            exclude_columns=as_names(sound.exclude_columns),
            where=where,
            sink_where=where if sound.sink_where is None else sound.sink_where,
            chunk_rows=sound.chunk_rows,
            parallel=sound.parallel,
            rechecks=sound.rechecks,
            recheck_delay=sound.recheck_delay,
            max_keys=sound.max_keys,
            on_difference=sound.on_difference,
        )
        for name, side in (("source.", options.source), ("sink.", options.sink)):
            problems += [*find_type_problems(side, name), *find_template_problems(side, name)]
        problems += options.find_problems()
        plan, of_tables = make_plan(options) if not any(p.where.startswith(("source", "sink")) for p in problems) else (None, [])
        if problems or plan is None:
            none = {problem.where for problem in self.rendered_none}
            raise ValidationError([*problems, *(problem for problem in of_tables if problem.where not in none)])
        return options, plan

    @staticmethod
    def _log(report: VerificationReport) -> None:
        level = logging.INFO if report.is_equal else logging.WARNING
        log.log(
            level,
            "%s against %s: %s. Compared %d rows with %d, in %.1f s. "
            "Chunks: %d compared, %d differed at first, %d of these were equal later",
            report.sink, report.source, report.summary, report.sink_rows, report.source_rows, report.seconds, report.chunks,
            report.differing_chunks, report.settled_chunks,
        )  # fmt: skip
        if report.differences:
            log.warning(
                "The rows that differ, %d named:%s", len(report.differences), "".join(f"\n  {d}" for d in report.differences)
            )
