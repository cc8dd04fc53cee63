"""The base of operators whose tasks show links in Airflow's UI, progress while they run, and lineage; and their configuration.

The configuration of an operator is JSON for the pages: its arguments without secrets, its connections and its guarantee. Airflow
stores it with the serialized DAG. It must not change between two parses of one DAG file, because Airflow would create a new
version of the DAG each time.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowSkipException, AirflowTaskTimeout, BaseOperator, BaseOperatorLink

from airflow_kafka_spark.hooks.task_state import find_task_state_store
from airflow_kafka_spark.jobs.watch import follow_jobs
from airflow_kafka_spark.operators.options import LedgerOptions
from airflow_kafka_spark.operators.visibility import links
from airflow_kafka_spark.operators.visibility.lineage import Dataflow, make_lineage
from airflow_kafka_spark.operators.visibility.progress import Progress, get_window_name

if TYPE_CHECKING:
    import pyarrow as pa
    from airflow.providers.openlineage.extractors import OperatorLineage
    from pyspark import SparkContext

    from airflow_kafka_spark.operators.binding import Run
    from airflow_kafka_spark.windows.model import Window

log = logging.getLogger(__name__)

SECRET = re.compile(r"secret|password|passphrase|token|jaas|credential|access[._]?key|keystore[._]key|dsn", re.IGNORECASE)
"""Names of settings whose values are not shown."""
HIDDEN = "***"
"""Stands for a value that is not shown."""
MAX_TEXT = 20_000
"""Largest text that is stored, in characters; a longer one is replaced by its length."""
CONNECTION = re.compile(r"(^|_)conn_id$|^registry$")
"""Names of arguments that name an Airflow connection."""

_USERINFO = re.compile(r"(\w+://)[^/\s@]+@")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe_configuration(operator: BaseOperator) -> dict[str, Any]:
    """Return the configuration of an operator.

    :return: ``operator``: name of its class; ``guarantee``: that of its sink; ``connections``: the Airflow connections by
        argument; ``arguments``: the arguments that differ from their defaults.
    """
    given = get_arguments(operator)
    defaults = _list_parameters(type(operator))
    arguments = {
        name: convert_argument(given[name], name)
        for name in defaults
        if name in given and not _is_equal(given[name], defaults[name])
    }
    everything = {name: convert_argument(given.get(name, default), name) for name, default in defaults.items()}
    guarantee = getattr(getattr(operator, "sink", None), "guarantee", None)
    return {
        "operator": type(operator).__name__,
        "guarantee": guarantee.value if guarantee is not None else None,
        "connections": dict(sorted(_find_connections(everything))),
        "arguments": arguments,
    }


def get_arguments(operator: BaseOperator) -> Mapping[str, Any]:
    """Return the arguments that an operator was made with. Templates in them are not rendered."""
    found: Mapping[str, Any] = getattr(operator, "_BaseOperator__init_kwargs", {})
    return found


def convert_argument(value: object, name: str = "") -> Any:
    """Return a value as JSON, without secrets.

    An object of options, as a sink or a format, becomes ``{"class": name, "arguments": {...}}`` with the arguments that differ
    from their defaults.

    :param name: name of the argument or the setting.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return HIDDEN if value and SECRET.search(name) else _format_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        options = ((f, getattr(value, f.name)) for f in fields(value) if f.init)
        arguments = {f.name: convert_argument(option, f.name) for f, option in options if not _is_default(f, option)}
        return {"class": type(value).__name__, "arguments": arguments}
    if isinstance(value, Mapping):
        return {str(key): convert_argument(item, str(key)) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((convert_argument(item, name) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [convert_argument(item, name) for item in value]
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return _format_text(_ADDRESS.sub("", str(value)))


def _format_text(value: str) -> str:
    return _USERINFO.sub(rf"\1{HIDDEN}@", value) if len(value) <= MAX_TEXT else f"({len(value):,} characters)"


def _list_parameters(operator: type) -> dict[str, Any]:
    """Return the named parameters of an operator's constructors with their defaults, without those of Airflow's operators."""
    found: dict[str, Any] = {}
    for cls in operator.__mro__:
        if cls is BaseOperator or not issubclass(cls, BaseOperator):
            break
        if "__init__" not in vars(cls):
            continue
        for name, parameter in inspect.signature(vars(cls)["__init__"]).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                default = parameter.default
                found.setdefault(name, None if default is inspect.Parameter.empty else default)
        if cls.__module__.startswith(__name__.partition(".")[0] + "."):
            # A concrete operator has all options; the classes above it take them in groups.
            break
    return found


def _is_default(option: Field[Any], value: object) -> bool:
    if option.default is not MISSING:
        return _is_equal(value, option.default)
    return option.default_factory is not MISSING and _is_equal(value, option.default_factory())


def _is_equal(value: object, other: object) -> bool:
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        # The truth of a comparison may be undefined, as that of Spark's columns.
        return False


def _find_connections(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the connections that the JSON of an argument names, by argument."""
    if isinstance(value, Mapping):
        inner = value["arguments"] if value.keys() == {"class", "arguments"} else value
        for name, item in inner.items():
            where = f"{path}.{name}" if path else str(name)
            if isinstance(item, str) and item and CONNECTION.search(str(name)):
                yield where, item
            else:
                yield from _find_connections(item, where)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _find_connections(item, f"{path}[{number}]")


class VisibleOperator(BaseOperator):
    """An operator whose task shows links, progress and lineage.

    Guarantee: an error of these never fails a window.
    """

    operator_extra_links: Collection[BaseOperatorLink] = links.ALL

    ledger_options: LedgerOptions

    # Set while a task runs; None in a DAG file.
    links: links.Links | None = None
    progress: Progress = Progress()
    window_now: Window | None = None
    reported: Mapping[str, Any] | None = None
    run_now: Run | None = None

    @property
    def configuration(self) -> str:
        """The arguments of this operator without secrets, its connections and its guarantee, as the text of a JSON object.
        Airflow stores it with the DAG, for the pages."""
        try:
            return json.dumps(describe_configuration(self), ensure_ascii=False)
        except Exception as error:
            log.debug("The configuration of task %s cannot be shown: %s", self.task_id, error)
            return "{}"

    @classmethod
    def get_serialized_fields(cls) -> frozenset[str]:
        """Return the attributes that Airflow stores with the DAG."""
        return frozenset(super().get_serialized_fields() | {"configuration"})

    def show(self, context: Mapping[str, Any], run: Run) -> None:
        """Show the links that are known when the task begins, and open the store of its progress."""
        self.run_now = run
        self.links = shown = links.Links(context.get("ti"))
        self.progress = Progress(find_task_state_store(context), self._show_application)
        if run.map_index >= 0 or self._pipeline_is_templated:
            # The pages cannot find the task of this pipeline in the serialized DAG.
            self.progress.publish_configuration(self.configuration)
        _try(lambda: shown.show(links.WindowLink, self._make_page_url()))
        _try(lambda: shown.show(links.TopicLink, self._make_topic_page_url(self.describe_dataflow().topic)))
        _try(lambda: shown.show(links.TableLink, links.make_table_page(self.describe_dataflow().other_end)))
        if letters := self.describe_dataflow().dead_letter_topic:
            _try(lambda: shown.show(links.DeadLettersLink, self._make_topic_page_url(letters) or self._make_page_url()))

    @property
    def _pipeline_is_templated(self) -> bool:
        return "{{" in str(get_arguments(self).get("pipeline"))

    @contextmanager
    def publish_progress(self, window: Window) -> Iterator[None]:
        """Show the link of a planned window, and its progress while this context is open."""
        self.window_now = window
        shown = self.links
        if shown is not None:
            _try(lambda: shown.show(links.WindowLink, self._make_page_url(get_window_name(window))))
        self.progress.begin(window)
        with follow_jobs(self.progress):
            yield

    @contextmanager
    def show_failures(self) -> Iterator[None]:
        """Publish an error that leaves this context, for the pages. A skipped or deferred task has no error."""
        try:
            yield
        except AirflowSkipException:
            raise
        except (Exception, AirflowTaskTimeout) as error:
            self.progress.publish_error(error)
            raise

    def _show_application(self, context: SparkContext) -> None:
        shown = self.links
        if shown is not None:
            _try(lambda: shown.show(links.SparkLink, links.find_spark_page(context)))

    def _make_page_url(self, window: str | None = None) -> str:
        assert self.run_now is not None
        options = self.ledger_options
        return links.make_pipeline_page(options.kafka_conn_id, options.ledger_topic, self.get_pipeline_name(self.run_now), window)

    def _make_topic_page_url(self, topic: str | None) -> str | None:
        return links.make_topic_page(self.ledger_options.kafka_conn_id, topic) if topic else None

    @abstractmethod
    def describe_dataflow(self) -> Dataflow:
        """Return the inputs and outputs of the task."""

    @abstractmethod
    def get_pipeline_name(self, run: Run) -> str:
        """Return the name of the pipeline in the ledger."""

    # --- lineage ---

    @abstractmethod
    def get_bootstrap_servers(self) -> str:
        """Return the brokers' addresses."""

    def get_written_schema(self) -> pa.Schema | None:
        """Return the columns that the sink was given in this task; None if they were not needed yet."""
        return None

    def make_openlineage(
        self, *, window: Window | None = None, report: Mapping[str, Any] | None = None, with_schema: bool = False
    ) -> OperatorLineage:
        """Return inputs, outputs and facets of this task.

        :param window: its window; default None, before one is planned.
        :param report: the window's report, once it is complete.
        :param with_schema: name the columns of the sink's table, too.
        """
        schema = self.get_written_schema() if with_schema else None
        return make_lineage(self.describe_dataflow(), self.get_bootstrap_servers(), window=window, report=report, schema=schema)

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        """Return the lineage before the window is planned: inputs and outputs."""
        return self.make_openlineage()

    def get_openlineage_facets_on_complete(self, task_instance: object) -> OperatorLineage:
        """Return the lineage of a complete window, with its offsets and counts."""
        return self.make_openlineage(window=self.window_now, report=self.reported, with_schema=True)

    def get_openlineage_facets_on_failure(self, task_instance: object) -> OperatorLineage:
        """Return the lineage of a window that failed, with its planned offsets, if it was planned."""
        return self.make_openlineage(window=self.window_now)


def _try(show: Callable[[], object]) -> None:
    """Show a link, unless it cannot be built. A connection that is missing or invalid yields no link; the task itself reports
    that error."""
    try:
        show()
    except Exception as error:
        log.debug("No link: %s", error)
