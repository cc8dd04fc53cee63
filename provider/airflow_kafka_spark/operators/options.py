"""Options of the operators, in groups by subject. Each group is frozen, and returns the problems of its options.

Operators take these options one by one, as arguments of their constructors, and store them in groups. Airflow renders templates
by attribute: :class:`option` makes a field of a group such an attribute. ``tests/test_signatures.py`` compares names, types,
defaults and descriptions of the constructors with each other and with the groups.
"""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload

from airflow_kafka_spark.arguments import find_choice_problems
from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.formats.base import METADATA, Format, NullValues
from airflow_kafka_spark.sources.kafka.topics import Subscription
from airflow_kafka_spark.windows.model import TOPIC_NAME
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, Latest, Written, parse_start, parse_stop
from airflow_kafka_spark.windows.plan import DataLossPolicy
from airflow_kafka_spark.windows.times import UpstreamCounts, parse_counts

if TYPE_CHECKING:
    from airflow_kafka_spark.jobs.write import ReadWith

T = TypeVar("T")

LEDGER_RIGHTS = ("Describe", "Read", "Write", "Create", "DescribeConfigs")
"""Rights on the ledger topic that an operator needs which moves records."""
READ_RIGHTS = ("Describe", "Read")
"""Rights on a topic that is read, and on the group that commits offsets."""


class option(Generic[T]):  # noqa: N801 - used like `property`
    """An attribute of an operator that reads, and replaces, a field of a group of options.

    :param group: the operator's attribute that holds the group.
    :param field: the group's field; default the attribute's own name.
    """

    def __init__(self, group: str, field: str | None = None) -> None:
        self._group = group
        self._field = field

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = self._field or name

    @overload
    def __get__(self, operator: None, owner: type) -> option[T]: ...

    @overload
    def __get__(self, operator: object, owner: type) -> T: ...

    def __get__(self, operator: object | None, owner: type) -> Any:
        return self if operator is None else getattr(getattr(operator, self._group), str(self._field))

    def __set__(self, operator: object, value: T) -> None:
        setattr(operator, self._group, replace(getattr(operator, self._group), **{str(self._field): value}))


@dataclass(frozen=True)
class LedgerOptions:
    """The name of the pipeline that an operator moves, and the ledger that stores it.

    :param pipeline: the pipeline's name; None is ``<dag_id>.<task_id>``. Default None.
    :param kafka_conn_id: connection of type ``kafka``; default ``kafka_default``.
    :param ledger_topic: the compacted topic that holds the ledgers; default ``airflow-windows``.
    :param keep_windows: complete windows that the ledger remembers; default 100.
    """

    pipeline: str | None = None
    kafka_conn_id: str = "kafka_default"
    ledger_topic: str = "airflow-windows"
    keep_windows: int = 100

    def find_problems(self) -> list[Problem]:
        """Return the problems of these options."""
        problems = list(_count_problems({"keep_windows": self.keep_windows}))
        if not TOPIC_NAME.fullmatch(self.ledger_topic):
            action = "Use letters, digits, `.`, `_` and `-`, at most 249 of them"
            problems.append(Problem("ledger_topic", f"`{self.ledger_topic}` cannot be a topic's name", action))
        return problems


@dataclass(frozen=True)
class SparkOptions:
    """The options of the Spark session.

    :param conn_id: connection of type ``spark`` or ``spark_connect``; default ``spark_default``.
    :param conf: Spark settings that take precedence over the connection's; default None.
    """

    ARGUMENTS: ClassVar[Mapping[str, str]] = {"conn_id": "spark_conn_id", "conf": "spark_conf"}

    conn_id: str = "spark_default"
    conf: Mapping[str, str] | None = None

    def find_problems(self) -> list[Problem]:
        """Return the problems of settings that Spark would ignore, and of those that the connection decides."""
        problems = []
        for name in self.conf or {}:
            if not name.startswith("spark."):
                problems.append(Problem("spark_conf", f"Spark ignores `{name}`", f"Write `spark.{name}`, or leave it out"))
            elif name in ("spark.master", "spark.remote"):
                action = "Leave it out, and name another connection as `spark_conn_id`"
                problems.append(Problem("spark_conf", f"`{name}` is the host of the connection `{self.conn_id}`", action))
        return problems


@dataclass(frozen=True)
class ReadOptions:
    """The options of reading from Kafka: topics, start, end, and the way in which records are read.

    :param topics: topic, or several; None for a pattern.
    :param topics_pattern: regular expression of the topics; None for names.
    :param group_id: consumer group to which the pipeline commits its position.
    :param starting_offsets: where the first window begins; default ``CommittedOffsets(fallback="earliest")``.
    :param ending_offsets: where a window ends at the latest; default ``latest``, the last stable offsets.
    :param max_records: maximum number of offsets in a window, or the text of it; default None, no maximum.
    :param data_loss: ``fail`` (default) or ``skip`` for records that were deleted before they were read.
    :param read_with: component that reads the topics: ``task``, ``spark`` or ``auto`` (default).
    :param split_records: number of offsets that one Spark task reads; default None, a number that suits the sink.
    :param read_timeout: seconds without any progress after which a task fails; default 300.
    :param upstream_counts: numbers of records by instant, as counted upstream, or the text of such a mapping; default None.
    """

    CHECKED: ClassVar[frozenset[str]] = frozenset({"starting_offsets", "ending_offsets", "upstream_counts"})

    topics: str | Sequence[str] | None
    topics_pattern: str | None
    group_id: str
    starting_offsets: Written = CommittedOffsets()
    ending_offsets: Written = "latest"
    max_records: int | str | None = None
    data_loss: DataLossPolicy = "fail"
    read_with: ReadWith = "auto"
    split_records: int | None = None
    read_timeout: float = 300.0
    upstream_counts: UpstreamCounts | str | None = None

    @property
    def subscription(self) -> Subscription:
        """The topics, or the pattern of their names."""
        return Subscription.of(self.topics, self.topics_pattern)

    @property
    def record_limit(self) -> int | None:
        """``max_records`` as a number; a template renders to text."""
        given: Any = self.max_records
        if isinstance(given, str) and given.strip().isdecimal():
            return int(given)
        return None if given == "" else given

    @property
    def skips_lost(self) -> bool:
        """True if records that were deleted before they were read are skipped."""
        return self.data_loss == "skip"

    @property
    def counts(self) -> dict[int, int] | None:
        """``upstream_counts`` by milliseconds since the epoch; a template renders to the text of a mapping, Python's or JSON's.

        :raises ValueError: it cannot be understood.
        """
        given = self.upstream_counts
        if isinstance(given, str):
            try:
                given = literal_eval(given) if given.strip().startswith("{'") else json.loads(given or "null")
            except SyntaxError:
                raise ValueError(f"`{given}` is not a mapping") from None
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ValueError(f"`{given}` is not a mapping")
        return parse_counts(given)

    def find_problems(self) -> list[Problem]:
        """Return the problems of these options, without asking a server."""
        return [
            *self.subscription.validate(),
            *self._find_option_problems(),
            *self._find_range_problems(),
            *self._count_problems(),
        ]

    def _find_option_problems(self) -> Iterator[Problem]:
        yield from find_choice_problems("data_loss", self.data_loss, ("fail", "skip"))
        yield from find_choice_problems("read_with", self.read_with, ("auto", "task", "spark"))
        if not isinstance(self.group_id, str) or not self.group_id.strip() or not self.group_id.isprintable():
            found = f"{self.group_id!r} is not the name of a consumer group"
            yield Problem("group_id", found, "Name one in printable characters, as `orders-warehouse`")
        yield from _count_problems({"max_records": self.record_limit, "split_records": self.split_records})
        if not self.read_timeout > 0:
            yield Problem("read_timeout", f"it is {self.read_timeout!r}; expected seconds, more than 0")

    def _find_range_problems(self) -> Iterator[Problem]:
        try:
            parse_start(self.starting_offsets)
        except ValueError as error:
            yield Problem("starting_offsets", str(error))
        try:
            stop = parse_stop(self.ending_offsets)
        except ValueError as error:
            yield Problem("ending_offsets", str(error))
            return
        if isinstance(stop, CommittedOffsets) and stop.group_id == self.group_id:
            found = f"`{stop.group_id}` is this pipeline's own group: no window would ever get past it"
            yield Problem("ending_offsets", found, "Name another group")

    def _count_problems(self) -> Iterator[Problem]:
        try:
            _ = self.counts
        except ValueError as error:
            yield Problem("upstream_counts", str(error), 'Give {"2026-01-01T00:00:00Z": 500, ...}, or JSON of it')

    @property
    def has_end(self) -> bool:
        """True if ``ending_offsets`` names an end before the last stable offsets."""
        try:
            return parse_stop(self.ending_offsets) != Latest()
        except ValueError:
            return False


@dataclass(frozen=True)
class FollowOptions:
    """The options of windows that end with the records that another pipeline has published.

    :param follows: name of the other pipeline; None (default) follows no pipeline.
    :param on_mismatch: ``fail`` (default) or ``warn`` if the numbers of records differ.
    """

    follows: str | None = None
    on_mismatch: Literal["fail", "warn"] = "fail"

    def find_problems(self, read: ReadOptions) -> list[Problem]:
        """Return the problems of these options, and of other options that exclude them."""
        problems = find_choice_problems("on_mismatch", self.on_mismatch, ("fail", "warn"))
        if self.follows and read.max_records is not None:
            found = "a window that follows another pipeline is as large as the windows of that pipeline"
            problems.append(Problem("max_records", found, "Leave it out, or `follows`"))
        if self.follows and read.has_end:
            found = "a window that follows another pipeline ends with the records that it has published"
            problems.append(Problem("ending_offsets", found, "Leave it out, or `follows`"))
        return problems


@dataclass(frozen=True)
class WindowOptions:
    """The options of windows: new records, or those of the DAG run's data interval; and the effect of clearing the task.

    :param window: ``progress`` or ``interval``; default ``progress``.
    :param grace: seconds, or a timedelta, to wait after the end of an interval for a later record; default 60.
    :param on_missing_interval: ``fail`` (default), or ``progress``: a run without a data interval moves new records.
    :param on_rerun: ``skip`` or ``replay``; default None, which is ``replay`` for intervals and ``skip`` otherwise.
    :param max_out_of_interval: maximum number of records with timestamps outside of the interval; default None, no maximum.
    """

    window: Literal["progress", "interval"] = "progress"
    grace: float | timedelta = 60.0
    on_missing_interval: Literal["fail", "progress"] = "fail"
    on_rerun: Literal["skip", "replay"] | None = None
    max_out_of_interval: int | None = None

    @property
    def by_interval(self) -> bool:
        """True if a window has the records of the DAG run's data interval."""
        return self.window == "interval"

    @property
    def grace_seconds(self) -> float:
        """``grace`` in seconds."""
        return self.grace if isinstance(self.grace, (int, float)) else self.grace.total_seconds()

    def find_problems(self, read: ReadOptions, follow: FollowOptions) -> list[Problem]:
        """Return the problems of these options, and of other options that exclude them."""
        problems: list[Problem] = [
            *find_choice_problems("window", self.window, ("progress", "interval")),
            *find_choice_problems("on_rerun", self.on_rerun, (None, "skip", "replay")),
            *find_choice_problems("on_missing_interval", self.on_missing_interval, ("fail", "progress")),
        ]
        if not self.grace_seconds >= 0:
            problems.append(Problem("grace", f"it is {self.grace!r}; expected seconds or a timedelta, not negative"))
        most = self.max_out_of_interval
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            problems.append(Problem("max_out_of_interval", f"`{most!r}` is not a number of records, at least 0"))
        elif most is not None and not self.by_interval:
            found = "only a window of a data interval can have records outside of it"
            problems.append(Problem("max_out_of_interval", found, 'Leave it out, or use `window="interval"`'))
        if self.by_interval:
            given = (("max_records", read.max_records), ("follows", follow.follows))
            found = "a window of a data interval contains all records of the interval"
            action = 'Leave it out, or use `window="progress"`'
            problems += [Problem(where, found, action) for where, value in given if value]
            if read.has_end:
                problems.append(Problem("ending_offsets", "a window of a data interval ends with the interval", "Leave it out"))
        return problems


@dataclass(frozen=True)
class RecordOptions:
    """The options of converting records to rows.

    :param value: format of the values.
    :param key: format of the keys; None (default) reads no keys.
    :param metadata_columns: further parts of a record that become columns: names, or name -> column; default none.
    :param behavior_on_null_values: treatment of a record without a value; default None, the default of the operator.
    """

    value: Format
    key: Format | None = None
    metadata_columns: Sequence[str] | Mapping[str, str] = ()
    behavior_on_null_values: NullValues | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """``metadata_columns`` as pairs of name and column."""
        columns = self.metadata_columns
        return tuple(columns.items()) if isinstance(columns, Mapping) else tuple((name, name) for name in columns)

    def find_type_problems(self) -> list[Problem]:
        """Return a problem for each format that is not a :class:`Format`."""
        problems: list[Problem] = (
            [Problem("value", f"`{self.value!r}` is not a Format")] if not isinstance(self.value, Format) else []
        )
        if not isinstance(self.key, (Format, type(None))):
            problems.append(Problem("key", f"`{self.key!r}` is not a Format"))
        return problems

    def find_column_problems(self, value: Format, key: Format | None) -> list[Problem]:
        """Return the problems of ``metadata_columns``.

        :param value: the format of the values of the topics that are read.
        :param key: the format of their keys.
        """
        problems = [
            Problem("metadata_columns", f"`{name}` is not one of {', '.join(METADATA)}")
            for name, _ in self.metadata
            if name not in METADATA
        ]
        taken = set(value.get_arrow_schema().names) | set(key.get_arrow_schema().names if key else ())
        for name, column in self.metadata:
            if column in taken:
                action = f'Name it otherwise: {{"{name}": "kafka_{name}"}}'
                problems.append(Problem("metadata_columns", f"column `{column}` exists already", action))
            taken.add(column)
        return problems


def _count_problems(numbers: Mapping[str, object]) -> Iterator[Problem]:
    for where, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield Problem(where, f"`{value}` is not a whole number of at least 1")
