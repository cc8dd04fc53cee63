"""The contract of all sources of rows: subclass :class:`RowSourceContract` and give it a ``case``.

::

    class TestJdbcSource(RowSourceContract):
        @pytest.fixture(params=["incrementing", "bulk"])
        def case(self, request, postgres): return JdbcCase(...)      # a RowSourceCase, with an empty source
        @pytest.fixture
        def spark(self): return spark_session(packages=...)          # only where Spark needs more than it has
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import urllib.parse
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from airflow.sdk import Asset
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from airflow_kafka_spark.formats.base import END, ERROR
from airflow_kafka_spark.sources.base import MAX_SPLITS, FrozenWindow, RowSource, SplitReader

ROWS = 400
_PARTITION = "__partition"


class RowSourceCase(ABC):
    """A source under test, and what adds rows to it.

    :ivar source: takes all rows into one window, in splits of at most a hundred rows or so.
    :ivar limited: the source with windows of at most half of :data:`ROWS`.
    :ivar incremental: True if a second window has new rows only; False for a mode like ``bulk``.
    """

    source: RowSource
    limited: RowSource
    incremental: bool = True

    @abstractmethod
    def add(self, rows: int) -> list[Any]:
        """Add new rows. Return the identity (:meth:`identity`) that each has when it is read."""

    @abstractmethod
    def identity(self, row: Row) -> Any:
        """Return the identity of a row: hashable, and different for each value that matters."""


INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Settings of a session: a plan of some hundred rows is interpreted sooner than it is compiled."""


def spark_session(packages: Sequence[str] = ()) -> SparkSession:
    """Return the Spark session of this process.

    :param packages: Maven coordinates; only those of the first call count.
    """
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: Any = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    for key, value in {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(key, value)
    if packages:
        builder = builder.config("spark.jars.packages", ",".join(packages))
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


@contextlib.contextmanager
def applied(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set SQL settings of a session while this context is open."""
    before = {key: spark.conf.get(key, None) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            spark.conf.unset(key) if value is None else spark.conf.set(key, value)


def rows_of(frame: DataFrame) -> DataFrame:
    """Return the rows of a source without the rows that end a split, and without the column of reasons why a row is bad."""
    return (frame.where(F.col(END).isNull()).drop(END) if END in frame.columns else frame).drop(ERROR)


def by_partition(frame: DataFrame) -> list[list[Row]]:
    """Return the rows of each partition in their order, also of empty partitions."""
    found: list[list[Row]] = [[] for _ in range(frame.rdd.getNumPartitions())]
    for row in frame.withColumn(_PARTITION, F.spark_partition_id()).collect():
        found[row[_PARTITION]].append(row)
    return found


def read(spark: SparkSession, source: RowSource, splits: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Return the rows per split that one attempt reads, after its splits have been converted to JSON and back."""
    with applied(spark, source.settings):
        return by_partition(rows_of(source.read_frame(spark, json.loads(json.dumps(splits)))))


def windows(source: RowSource, position: Mapping[str, Any] | None, most: int = 100) -> Iterator[FrozenWindow]:
    """Yield windows until there is nothing new."""
    for _ in range(most):
        window = source.freeze(position)
        if not window.splits:
            assert not window.remaining
            return
        yield window
        position = json.loads(json.dumps(window.position))
    raise AssertionError(f"still new rows after {most} windows")


class _Contract:
    """The functions that both parts of the contract use."""

    @pytest.fixture
    def spark(self) -> SparkSession:
        return spark_session()

    def names(self, case: RowSourceCase, partitions: Sequence[Sequence[Row]]) -> list[list[Any]]:
        return [[case.identity(row) for row in rows] for rows in partitions]

    def names_of(self, spark: SparkSession, case: RowSourceCase, splits: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        return self.names(case, read(spark, case.source, splits))

    def flat(self, partitions: Sequence[Sequence[Any]]) -> Counter[Any]:
        return Counter(name for names in partitions for name in names)


class SplitsContract(_Contract):
    """The part of the contract about one window: its splits, and the rows that are read of them."""

    def test_splits_tile_the_window_and_every_attempt_reads_the_same_rows_of_each_in_the_order_given(self, spark, case):
        added = case.add(ROWS)
        assert case.source.validate() == []
        assert pickle.loads(pickle.dumps(case.source)) == case.source
        window, other = case.source.freeze(None), case.source.freeze(None)
        assert 3 <= len(window.splits) <= MAX_SPLITS
        assert not window.remaining
        found = self.names_of(spark, case, window.splits)
        assert len(found) == len(window.splits), "partition i is split i"
        assert sum(1 for names in found if names) >= 3
        assert self.flat(found) == Counter(added), "the splits tile the window"
        assert window.rows in (None, ROWS)
        some = [len(found) - 1, 0, len(found) // 2]
        again = self.names_of(spark, case, [window.splits[index] for index in some])
        assert [Counter(names) for names in again] == [Counter(found[index]) for index in some], "in the order given"
        [alone] = self.names_of(spark, case, [window.splits[some[-1]]])
        assert Counter(alone) == Counter(found[some[-1]]), "one split alone"
        reader = case.source.make_reader(window.splits, None)
        if isinstance(reader, SplitReader):
            in_task = pickle.loads(pickle.dumps(reader))
            batches = [list(in_task.read(index)) for index in range(len(window.splits))]
            names = [[case.identity(Row(**line)) for batch in of_split for line in batch.to_pylist()] for of_split in batches]
            assert [Counter(of_split) for of_split in names] == [Counter(of_split) for of_split in found], "as Spark reads them"
            assert {tuple(batch.schema.names) for of_split in batches for batch in of_split} == {tuple(dict(reader.columns))}
        if other.splits != window.splits:
            assert self.flat(self.names_of(spark, case, other.splits)) == Counter(added), "freezing decides and changes nothing"
        case.add(ROWS)
        again = self.names_of(spark, case, window.splits)
        assert [Counter(names) for names in again] == [Counter(names) for names in found], "whatever was added since"

    def test_a_plan_holds_json_only_fits_into_a_record_and_columns_are_those_of_the_frame(self, spark, case):
        case.add(ROWS)
        window, columns = case.source.freeze(None), case.source.find_columns()
        assert json.loads(json.dumps(window.splits)) == [dict(split) for split in window.splits]
        assert json.loads(json.dumps(window.position)) == dict(window.position)
        assert len(json.dumps([*window.splits, window.position])) < 800_000
        assert all(isinstance(value, str) for value in case.source.settings.values())
        with applied(spark, case.source.settings):
            frame, empty = rows_of(case.source.read_frame(spark, window.splits)), case.source.make_empty_frame(spark)
        assert columns is None or columns == tuple(frame.columns)
        assert empty is None or rows_of(empty).schema == frame.schema

    def test_its_uri_is_an_asset_of_its_own(self, case):
        uri = case.source.asset_uri
        assert Asset(uri=uri).uri == uri, "Airflow would change it, so that several sources might be one asset"
        parts = urllib.parse.urlsplit(uri)
        assert parts.scheme and not parts.query and not parts.fragment, "Airflow drops a fragment"
        assert case.source.find_origin() == pickle.loads(pickle.dumps(case.source)).find_origin()


class WindowsContract(_Contract):
    """The part of the contract about windows that follow each other."""

    def test_windows_that_follow_each_other_give_each_row_once_and_nothing_new_gives_no_splits(self, spark, case):
        empty = case.source.freeze(None)
        assert (empty.splits, empty.remaining) == ((), False), "an empty source"
        json.dumps(empty.position)
        if not case.incremental:
            pytest.skip("every window of this case is the whole source")
        added, found, position = Counter(case.add(ROWS)), Counter(), None
        for _ in range(2):
            window = case.source.freeze(position)
            before = Counter(added)
            added += Counter(case.add(ROWS // 4))
            found += self.flat(self.names_of(spark, case, window.splits))
            assert found == before
            position = json.loads(json.dumps(window.position))
        for window in windows(case.source, position):
            found += self.flat(self.names_of(spark, case, window.splits))
            position = json.loads(json.dumps(window.position))
        assert found == added
        for _ in range(2):
            window = case.source.freeze(position)
            assert (window.splits, window.remaining) == ((), False), "nothing new"
            position = json.loads(json.dumps(window.position))

    def test_limited_windows_give_each_row_once_and_say_what_remains(self, spark, case):
        if not case.incremental:
            pytest.skip("every window of this case is the whole source")
        added, found, remaining = case.add(ROWS), Counter(), []
        for window in windows(case.limited, None):
            found += self.flat(self.names(case, read(spark, case.limited, window.splits)))
            remaining.append(window.remaining)
        assert found == Counter(added)
        assert len(remaining) >= 2
        assert all(remaining[:-1])


class RowSourceContract(SplitsContract, WindowsContract):
    """The whole contract."""
