"""Files in a directory, or below a prefix of an object store, as frozen windows of rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats.ddl import parse_ddl
from airflow_kafka_spark.sources.base import MAX_SPLITS, Frozen, RowSource
from airflow_kafka_spark.sources.files.memory import MOST, Listing, Memory, TooMany
from airflow_kafka_spark.sources.files.options import FilesSettings
from airflow_kafka_spark.sources.files.reader_options import lowered, reader_options
from airflow_kafka_spark.sources.files.splits import (
    File,
    cut,
    decode,
    encode,
    is_splittable,
    size_in_plan,
    spark_settings,
    why_unreadable,
)
from airflow_kafka_spark.sources.files.store import LocalStore, Selection, Store, store_of
from airflow_kafka_spark.windows.binding import SERVER, Endpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

MAX_PLAN_BYTES = 400_000
"""Of a window's splits, as JSON: about 4 000 files of usual names."""
MAX_FILES = 5_000
"""Of one window."""
_FOOTERS = ("parquet", "orc")
_NAMED = 5


@dataclass(frozen=True)
class FilesSource(FilesSettings, RowSource):
    """Reads the new files of a directory, with Spark's own file readers; each window takes those that came since the last.

    Guarantee: every file is in exactly one window, and the window's splits give the same rows at every attempt, *as long as the
    directory keeps to three rules*:

    1. A file is complete when it is listed, and is never written to again. Objects of an object store are; on a file system let
       the writer rename the file into the directory (Spark, and :class:`~airflow_kafka_spark.sinks.files.FilesSink`, do), give it
       a name that begins with ``_`` or ``.`` until then, or set ``min_age``.
    2. A file's name is not used again. A file that was read and now has another size, modification time or etag is found when
       the next window is frozen (see ``on_change``); one that is changed or removed between freezing and reading is found before
       it is read, and fails the window.
    3. Beyond 10 000 files only: a file is listed within ``allowed_lateness`` after its own modification time.

    Up to 10 000 files nothing depends on clocks: each file is remembered by name, size, modification time and etag, and may
    arrive with whatever modification time. Beyond them the oldest are forgotten, and whatever is older than the newest forgotten
    one counts as read. So a directory may grow for ever, and what is remembered of it does not (at most 320 KB of a ledger
    record). A file that is put into such a directory with its old modification time (``cp -p``, ``rsync -t``, ``mv``), later than
    rule 3 allows, is not read. That is noticed, and fails the task, when more files of that age are there than before; if as many
    were removed meanwhile, it is not. Clocks of the store and of the worker that differ count against the lateness.
    A file that was read, removed from the directory and put back is recognized as long as it is remembered: within the lateness,
    and then as long as no more than 1 000 files are remembered.

    Files are read in the order of modification time and name as far as windows go; within one, split follows split from the
    largest to the smallest, and no order is kept between splits. Empty files are passed over, until there is something in them.
    Hidden files (``_*`` without ``=``, ``.*``) are too, also in directories. Directories named ``column=value`` are looked into
    when ``recursive``, but give no column. Links to directories are not followed.

    Parquet and ORC files, and text that can be read from its middle (not compressed, or bzip2), are cut into pieces of
    ``split_bytes``; small files are packed together, at most 64. Spark does the cutting; that it cuts as frozen is checked before
    anything is read, except over Spark Connect, where the server cannot be asked and has to be a Spark that packs as 4.0 does.

    A malformed record of JSON or CSV fails the window (``FAILFAST``); so does a CSV header that does not name the columns of
    ``schema`` in their order, and a damaged file. JSON fields that ``schema`` does not name are left out.

    :param path: an absolute path or ``file://`` URI of a directory that the worker and Spark both have mounted; or a URI of an
        object store, as ``s3a://bucket/prefix`` (``s3``, ``gs``, ``abfs``, ``hdfs``...), which the worker lists by the Airflow
        provider of that store, and which Spark reads with the jars and credentials of its own configuration. Templated.
    :param format: ``parquet`` (default), ``json`` (one object per line, unless ``multiLine``), ``csv``, ``orc`` or ``text`` (a
        column ``value`` of lines).
    :param glob: what names of files have to match; ``*``, ``?`` and ``[...]``, default all. Templated. With ``recursive`` too
        it is the name without its directories.
    :param recursive: look into directories below; default False.
    :param schema: the columns as Spark DDL. Required for json and csv; not taken for text; parquet and orc files are read
        with the types they hold, which must be the same in all files of a window, unless it is given.
    :param options: options of Spark's reader, such as ``header``, ``delimiter``, ``multiLine``.
    :param split_bytes: of a split, and so of a Spark task and Kafka transaction; default 64 MiB. A file that cannot be cut may be
        larger.
    :param max_files: per window; None (default) for as many as there are, up to 5 000, or fewer of long names.
    :param max_bytes: of files per window; None (default) for no limit. A window takes one file at least.
    :param min_age: seconds since its last modification, by the worker's clock, before a file is read; default 0.
    :param on_change: what to do about a file that was read and is another now: ``fail`` (default) the task, naming it; ``read``
        it as a new file, which publishes rows again that it had before; or ``ignore`` it.
    :param allowed_lateness: seconds between a file's modification time and its first listing, at most; default 6 hours. No more
        than 15 000 files may arrive in that time.
    :param conn_id: Airflow connection that an object store is listed with. Templated.
    """

    template_fields: ClassVar[Sequence[str]] = ("path", "glob", "conn_id")

    @property
    def settings(self) -> Mapping[str, str]:
        """How Spark has to cut, and that it must neither pass over files nor columns that it cannot read."""
        return self._settings(self.split_bytes)

    def validate(self) -> list[Problem]:
        """Options, schema, place and the right to list it, all at once."""
        from airflow_kafka_spark.sources.files.validation import problems

        return problems(self)

    def origin(self) -> Endpoint:
        """The directory, and which object store it is of: two may have buckets of one name. Which of its files a window holds is
        frozen with it."""
        server = self._store.server
        return Endpoint({"path": self.uri, **({SERVER: server} if server else {})})

    def columns(self) -> tuple[str, ...] | None:
        """Those of ``schema``, else those of the newest file's footer; None as long as there is no file."""
        if self.format == "text":
            return ("value",)
        if self.schema is not None:
            return tuple(column.name for column in parse_ddl(self.schema))
        from airflow_kafka_spark.sources.files.schema import footers

        try:
            files = self._list()
            newest = max((f for f in files if f.size), key=lambda f: f.key, default=None)
            return tuple(name for name, _ in footers(self._store, self.format, [newest])[0].columns) if newest else None
        except KafkaSparkError as error:
            log.info("The columns of %s are not known yet: %s", self.uri, error)
            return None

    # --- a window -------------------------------------------------------------------------------------------------------

    def freeze(self, position: Mapping[str, Any] | None) -> Frozen:
        """The files that are new since ``position``. See :meth:`RowSource.freeze`.

        :raises SourceRejected: files have changed or come too late; footers differ or are damaged; the position is another
            directory's; more files would have to be remembered than fit.
        """
        now = time.time()
        memory = self._memory(position)
        before = int((now - self.min_age) * 1e6) if self.min_age else None
        listing = self._changed(memory.sort((f for f in self._list() if f.size), before))
        self._refuse_late(listing, memory)
        taken, splits = self._take(listing.new)
        if not taken:
            return Frozen((), self._position(memory))
        rows = self._footers(taken)
        try:
            memory = memory.after(listing, taken, int((now - self.allowed_lateness) * 1e6))
        except TooMany as error:
            raise self._rejected(
                f"{error.count:,} files arrived within the allowed lateness of {self.allowed_lateness:,.0f} s",
                f"Lower `allowed_lateness`, which lets all but {MOST:,} be forgotten; or have fewer and larger files written",
            ) from error
        return Frozen(splits, self._position(memory), rows, remaining=len(taken) < len(listing.new))

    def frame(self, spark: SparkSession, splits: Sequence[Mapping[str, Any]]) -> DataFrame:
        """See :meth:`RowSource.frame`. All splits of a window are one scan; some of them are read one by one, and pieces of a
        large file then by reading all of it. Sets :attr:`settings` where the session has others.

        :raises SourceUnavailable: the files cannot be looked at.
        :raises SourceRejected: a file is gone or has changed, or Spark would read the files in another way than they were frozen.
        """
        from airflow_kafka_spark.sources.files.reading import Reader

        if not splits:
            raise ValueError("there is nothing to read: a window without splits has no rows")
        packs = [decode(split) for split in splits]
        split_bytes = int(splits[0]["split_bytes"])  # not self.split_bytes, which may have been edited since
        self._refuse_changed({piece.file.name: piece.file for pack in packs for piece in pack})
        for name, value in self._settings(split_bytes).items():
            if spark.conf.get(name, None) != value:
                spark.conf.set(name, value)
        return Reader(self._store, self.format, self._ddl, reader_options(self.format, self.options), split_bytes).frame(
            spark, packs
        )

    def explain(self, error: BaseException) -> SourceRejected | None:
        """What an error of the Spark job that read :meth:`frame` says about a file: which, and why. None if it is about none."""
        from airflow_kafka_spark.sources.files.reading import explain

        return explain(self.uri, error)

    # --- parts ----------------------------------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        return store_of(self.path, self.conn_id)

    @property
    def _ddl(self) -> str | None:
        return ", ".join(map(str, parse_ddl(self.schema))) if self.schema is not None else None

    def _settings(self, split_bytes: int) -> dict[str, str]:
        local = isinstance(self._store, LocalStore)
        return {
            **spark_settings(split_bytes),
            "spark.sql.files.ignoreCorruptFiles": "false",
            "spark.sql.files.ignoreMissingFiles": "false",
            "spark.sql.csv.parser.columnPruning.enabled": "false",
            "spark.sql.sources.useV1SourceList": "avro,csv,json,kafka,orc,parquet,text",
            # Many files of an object store are looked at by a Spark job; a local disk is faster than that.
            "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000" if local else "32",
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": "64",
        }

    def _rejected(self, detail: str, action: str) -> SourceRejected:
        return SourceRejected(self.uri, detail, action)

    def _list(self) -> list[File]:
        try:
            files = list(self._store.files(Selection(self.glob, self.recursive)))
        except Exception as error:  # an object store's client has errors of its own
            raise SourceUnavailable(self.uri, "listing files", f"{type(error).__name__}: {error}") from error
        below = self._store.root.partition(":")[2]
        for file in files:
            if reason := why_unreadable(f"{below}/{file.name}"):
                raise self._rejected(f"the file {file.name!r} {reason}, and Spark cannot open it", "Rename it")
        return files

    def _position(self, memory: Memory) -> dict[str, Any]:
        return {"version": 1, "source": self.uri, "glob": self.glob, "recursive": self.recursive, **memory.dump()}

    def _memory(self, position: Mapping[str, Any] | None) -> Memory:
        if not position:
            return Memory()
        if position.get("version") != 1:
            raise self._rejected(f"the position is of version {position.get('version')}, not 1", "Use the release that wrote it")
        if position.get("source") != self.uri:
            raise self._rejected(
                f"this pipeline has read {position.get('source')} so far, and its position says nothing about another directory",
                "Give the operator a new `pipeline=` name for the other directory",
            )
        try:
            memory = Memory.load(position)
        except ValueError as error:
            advice = "Give the operator a new `pipeline=` name"
            raise self._rejected(f"the position cannot be understood: {error}", advice) from error
        if memory.horizon and (position["glob"], position["recursive"]) != (self.glob, self.recursive):
            raise self._rejected(
                f"it was read with `glob={position['glob']!r}` and `recursive={position['recursive']}` so far, and so many files "
                "that old ones which only the new options select would be taken for read",
                "Set them back, or give the operator a new `pipeline=` name",
            )
        return memory

    def _changed(self, listing: Listing) -> Listing:
        """Do with changed files what ``on_change`` says."""
        if not listing.changed or self.on_change == "ignore":
            return listing
        if self.on_change == "read":
            new = sorted((*listing.new, *listing.changed), key=lambda f: f.key)
            return replace(listing, new=tuple(new), changed=())
        raise self._rejected(
            f"{_names(listing.changed)} changed after being read: size, modification time or etag is another",
            'Write changed data to a file of a new name. Set `on_change="read"` for one run to publish all rows of what changed '
            'once more, or "ignore" to leave it',
        )

    def _refuse_late(self, listing: Listing, memory: Memory) -> None:
        if listing.late and memory.horizon:
            newest = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(memory.horizon[0] / 1e6))
            raise self._rejected(
                f"{listing.late} files have appeared with modification times up to {newest} UTC, where all files count as read",
                "Find them by what the file system knows of their arrival (`find -newerct`), and give them a new modification "
                "time (`touch`): they are then read. If files like these are expected, raise `allowed_lateness`",
            )

    def _take(self, new: Sequence[File]) -> tuple[tuple[File, ...], tuple[dict[str, Any], ...]]:
        """As many of the new files, from the oldest, as fit into a window."""
        most, size = 0, 0
        for file in new[: min(MAX_FILES, self.max_files or MAX_FILES)]:
            size += file.size
            if self.max_bytes and size > self.max_bytes and most:
                break
            most += 1
        fits, too_many = 0, most + 1
        splits: tuple[dict[str, Any], ...] = ()
        while too_many - fits > 1:
            count = most if too_many > most else (fits + too_many) // 2
            tried = self._splits(new[:count])
            if len(tried) <= MAX_SPLITS and size_in_plan(tried) <= MAX_PLAN_BYTES:
                fits, splits = count, tried
            else:
                too_many = count
        if most and not fits:
            raise self._rejected(
                f"`{new[0].name}` of {new[0].size:,} bytes makes more than {MAX_SPLITS:,} splits of {self.split_bytes:,} bytes, "
                "the most that a window's plan can hold",
                "Raise `split_bytes`, or have smaller files written",
            )
        return tuple(new[:fits]), splits

    def _splits(self, files: Sequence[File]) -> tuple[dict[str, Any], ...]:
        options = lowered(self.options)
        whole = {f.name for f in files if not is_splittable(f.name, self.format, options)}
        return tuple(encode(pack, self.split_bytes) for pack in cut(files, self.split_bytes, whole))

    def _footers(self, files: Sequence[File]) -> int | None:
        """Check what can be known before Spark starts, and count rows where that is cheap."""
        if self.format not in _FOOTERS:
            return None
        from airflow_kafka_spark.sources.files.schema import footers, refuse_differences

        found = footers(self._store, self.format, files)
        if self.schema is None:
            refuse_differences(self.uri, files, found)
        return sum(footer.rows for footer in found)

    def _refuse_changed(self, frozen: Mapping[str, File]) -> None:
        try:
            there = self._store.stat(frozen)
        except Exception as error:
            raise SourceUnavailable(self.uri, "looking at a window's files", f"{type(error).__name__}: {error}") from error
        gone = [file for name, file in frozen.items() if name not in there]
        other = [file for name, file in frozen.items() if name in there and there[name] != file]
        if gone:
            raise self._rejected(
                f"{_names(gone)} vanished since the window was frozen",
                "Put back what is missing, with its modification time, and run the task again: the window cannot be read without",
            )
        if other:
            now = there[other[0].name]
            raise self._rejected(
                f"{_names(other)} changed since the window was frozen: `{now.name}` had {_version(other[0])}, and has "
                f"{_version(now)}",
                "Put the file back as it was, with its modification time, and run the task again. Writers must not touch files "
                "that are listed: see `min_age`",
            )


def _names(files: Sequence[File]) -> str:
    named = ", ".join(f"`{file.name}`" for file in files[:_NAMED])
    more = f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
    return f"{named}{more} {'has' if len(files) == 1 else 'have'}"


def _version(file: File) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(file.mtime / 1e6))
    return f"{file.size:,} bytes of {moment}.{file.mtime % 1_000_000:06} UTC" + (f", etag {file.etag}" if file.etag else "")
