"""Splits of files as a DataFrame, one Spark partition each; and what Spark's errors about files mean."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.files.splits import File, Pack, cut, escaped, in_spark_order, is_splittable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.sources.files.store import Store

_FILE = re.compile(r"path: (\S+), range: (\d+)-(\d+), partition values")
_FAILED = re.compile(r"\[FAILED_READ_FILE\.(\w+)\].*?\bfile:? (\S+?)\.?\s", re.S)
_MALFORMED = re.compile(r"(Malformed records are detected in record parsing: .*?)\s*\n?Parse Mode", re.S)
_HEADER = re.compile(r"CSV header does not conform to the schema\.\s*(Header:[^\n]*)\s*(Schema:[^\n]*)")
_CAUSE = re.compile(r"Caused by: (?:[\w.$]+(?:Exception|Error): )?([^\n]+)")
_SHOWN = 300


@dataclass(frozen=True)
class Reader:
    """Spark's reader of a files source.

    :param store: where the files are.
    :param format: theirs.
    :param schema: DDL; None lets Spark look into the files.
    :param options: the reader's, as :func:`~.reader_options.reader_options` gives them.
    :param split_bytes: what the splits were cut with.
    """

    store: Store
    format: str
    schema: str | None
    options: Mapping[str, str]
    split_bytes: int

    def frame(self, spark: SparkSession, packs: Sequence[Pack]) -> DataFrame:
        """Exactly one partition per pack, in this order.

        :raises SourceRejected: Spark does not find the files, cannot take their types, or cuts them in another way.
        """
        files = list({piece.file.name: piece.file for pack in packs for piece in pack}.values())
        if self._cut(files) == tuple(packs):
            # All of a window: this is how Spark packs these files, given the settings.
            frame = self._load(spark, files)
            self._check(frame, packs)
            return frame
        frames = [self._one(spark, pack) for pack in packs]
        return reduce(lambda left, right: left.union(right), frames)

    def _cut(self, files: Sequence[File]) -> tuple[Pack, ...]:
        whole = {f.name for f in files if not is_splittable(f.name, self.format, self.options)}
        return cut(files, self.split_bytes, whole)

    def _load(self, spark: SparkSession, files: Sequence[File]) -> DataFrame:
        # In the order that cut() takes them: Spark keeps it among pieces of one length.
        names = [file.name for file in in_spark_order(files)]
        reader = spark.read.format(self.format).options(**self.options).options(**self.store.reader_options(names))
        if self.schema:
            reader = reader.schema(self.schema)
        try:
            return reader.load([escaped(f"{self.store.root}/{name}") for name in names])
        except Exception as error:
            if (told := explain(self.store.uri, error)) is not None:
                raise told from error
            raise

    def _one(self, spark: SparkSession, pack: Pack) -> DataFrame:
        """One split alone. A part of a file is found by reading the file: Spark cannot be told to leave out the rest."""
        frames = []
        if whole := [piece.file for piece in pack if piece.is_whole]:
            frames.append(self._load(spark, whole))
        for piece in pack:
            if not piece.is_whole:
                frame = self._load(spark, [piece.file])
                frames.append(frame.where(frame["_metadata.file_block_start"] == piece.start))
        return reduce(lambda left, right: left.union(right), frames).coalesce(1)

    def _check(self, frame: DataFrame, packs: Sequence[Pack]) -> None:
        """Ask Spark how it has cut. A server that is only connected to cannot be asked."""
        if type(frame).__module__.startswith("pyspark.sql.connect"):
            return
        partitions: Any = frame._jdf.queryExecution().toRdd().partitions()
        describe: Any = frame.sparkSession._jvm.scala.runtime.ScalaRunTime.stringOf  # type: ignore[union-attr]
        found = [
            [(urllib.parse.unquote(path), int(start), int(end)) for path, start, end in _FILE.findall(describe(p.files()))]
            for p in partitions
        ]
        expected = [[(p.file.name, p.start, p.start + p.length) for p in pack] for pack in packs]
        alike = len(found) == len(expected) and all(
            len(there) == len(here)
            and all(t[1:] == h[1:] and t[0].endswith(f"/{h[0]}") for t, h in zip(there, here, strict=True))
            for there, here in zip(found, expected, strict=True)
        )
        if not alike:
            raise SourceRejected(
                self.store.uri,
                f"Spark cuts the files of this window into {len(found)} partitions, which are not the {len(expected)} splits "
                "they were frozen as",
                "Either a file has just been changed, or this Spark packs files in another way than 4.0: please report it",
            )


def explain(source: str, error: BaseException) -> SourceRejected | None:
    """What an error of a Spark job means for a source of files; None when it is not about a file.

    :param error: as pyspark raised it.
    """
    text = str(error)
    failed = _FAILED.search(text)
    if failed is None:
        if "[PATH_NOT_FOUND]" in text:
            return SourceRejected(
                source,
                f"Spark does not find files that this worker sees: {text.splitlines()[0][:_SHOWN]}",
                "Mount the directory on Spark's machines too, or run both on the same",
            )
        return None
    kind, name = failed[1], urllib.parse.unquote(failed[2])
    if header := _HEADER.search(text):
        detail, action = f"its header is not the schema's: {header[1]}. {header[2]}", "Correct the file, or the order in `schema`"
    elif malformed := _MALFORMED.search(text):
        detail = malformed[1][:_SHOWN]
        action = "Correct the file, `schema` or `options`. To see such records rather than to stop at them, see `mode` there"
    elif kind == "FILE_NOT_EXIST":
        detail, action = "it is gone", "Put it back, or give the operator a new `pipeline=` name"
    else:
        causes = _CAUSE.findall(text)
        detail = (causes[-1] if causes else text)[:_SHOWN]
        action = "Replace the damaged file by a whole one of another name, or correct `format` and `schema`"
    return SourceRejected(source, f"`{name}` cannot be read: {detail}", action)
