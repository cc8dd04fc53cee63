"""Files in a directory, or below a prefix of an object store, as frozen windows of rows.

Tasks read Parquet files of a directory by themselves if they give the values that Spark gives (``tasks/read.py``). Spark reads
all others (``frames.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, SourceRejected
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.formats.types import parse_ddl
from airflow_kafka_spark.sources.base import FrozenWindow, RowSource, SplitReader
from airflow_kafka_spark.sources.files.frames import explain_read_error, make_session_settings, read_frame, require_unchanged
from airflow_kafka_spark.sources.files.options import FilesSourceOptions
from airflow_kafka_spark.sources.files.splits import decode_split
from airflow_kafka_spark.sources.files.store import (
    FileStore,
    ListedFile,
    LocalStore,
    open_store,
    read_footers,
    translate_footer_errors,
)
from airflow_kafka_spark.sources.files.windows import WindowPlanner, list_selected_files, require_partition_directories
from airflow_kafka_spark.windows.binding import SERVER, Endpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilesSource(FilesSourceOptions, RowSource):
    """Reads the new files of a directory. Each window takes the files that arrived since the last one.

    Spark's readers read the files, except Parquet files that tasks can read as Spark does: see :meth:`make_reader`.

    Guarantee: each file is in exactly one window, and each attempt at the window reads the same rows. The directory has to keep
    three rules:

    1. A file is complete when it is listed, and is never written to again. An object of an object store always is. On a file
       system, let the writer rename the complete file into the directory, as Spark and
       :class:`~airflow_kafka_spark.sinks.FilesSink` do. Or give the file a name that begins with ``_`` or ``.`` until then. Or
       set ``min_age``.
    2. A file's name is not used again. If a file that was read has another size, modification time or etag, the next window is
       refused (see ``on_change``). If a file of a window changes or disappears before it is read, the window fails.
    3. In a directory of more than 10 000 files, each file is listed within ``allowed_lateness`` after its modification time.

    Up to 10 000 files are remembered, by name, size, modification time and etag. A new one may have any modification time, and no
    clock is compared. Above that number, the oldest files are forgotten: a file that is not newer than the newest forgotten file
    counts as read. The directory may therefore grow without limit, while the ledger record has at most 320 KB.

    ``cp -p``, ``rsync -t`` and ``mv`` keep the modification time of a file. In such a large directory, a file that comes later
    than rule 3 allows is not read. The next window detects it and fails the task, if the directory has more files of that age
    than before. It is not detected if as many files were removed meanwhile. If the clocks of the store and of the worker differ,
    the allowed lateness is shorter by the difference.

    A file that was read may be missing for a while, for instance if the share of a subdirectory is not mounted. When it comes
    back, it is not read again. Up to 1 000 remembered files, this holds for any time. Up to 10 000, it holds for 7 days, and
    above that number for the allowed lateness.

    Windows take files in the order of modification time and name. Within a window, no order is kept between splits, nor between
    the files of a split. Empty files are ignored until they have content. Hidden files and directories (``_*`` without ``=``,
    ``.*``) are always ignored. Links to directories are not followed.

    With ``recursive``, files in directories named ``column=value`` (the layout of Hive and Spark) are read, too. The directories
    give columns if ``partition_columns`` names them. Each file of a window then has to lie in directories of exactly these
    columns, in this order; directories of another form may lie between them.

    Parquet and ORC files are cut into pieces of ``split_bytes``, and so are texts that are not compressed, or with bzip2. Small
    files are packed together, at most 64. Spark computes the splits. Before anything is read, they are compared with the frozen
    ones. This is not possible with Spark Connect, whose server has to split as Spark 4.0 does.

    A malformed record of JSON or CSV fails the window (``FAILFAST``). So does a second value on a line of JSON, a CSV header that
    does not name the columns of ``schema`` in their order, a quote within a quoted value that is not escaped, and a damaged file.
    JSON fields that ``schema`` does not name are left out.

    A row with a text that is not in the files' encoding is a bad row, and so is a row of JSON or CSV with a number that a decimal
    of ``schema`` cannot hold exactly. A bad row fails its split, or becomes a dead letter (``errors_tolerance``).

    The encoding is UTF-8, or that of the option ``encoding``. For CSV with another encoding, with ``multiLine`` or ``locale``,
    and with options or a header beyond ASCII, Spark's reader puts U+FFFD in place of bytes that are not in the encoding. A row
    with U+FFFD is then bad, also if the file holds that character itself. A line of JSON with such bytes is malformed.

    :param path: an absolute path or ``file://`` URI of a directory that the worker and Spark both have mounted; or a URI of an
        object store, as ``s3a://bucket/prefix`` (``s3``, ``gs``, ``abfs``, ``hdfs``...), which the worker lists by the Airflow
        provider of that store, and which Spark reads with the jars and credentials of its own configuration. Templated.
    :param format: ``parquet`` (default), ``json`` (one object per line, unless ``multiLine``), ``csv``, ``orc`` or ``text`` (a
        column ``value`` of lines).
    :param glob: a pattern that names of files have to match, with ``*``, ``?`` and ``[...]``; default all. Also with
        ``recursive``, the name is compared without its directories. Templated.
    :param recursive: True to read files in directories below, too; default False.
    :param schema: the columns as Spark DDL. Required for json and csv; not allowed for text; parquet and orc files are read with
        the types they hold, which have to be equal in all files of a window, unless ``schema`` is given. Default None.
    :param partition_columns: names and types of the columns that directories such as ``day=2026-11-01`` give, as Spark DDL in the
        order of the directories: ``day date, region string``. Types: string, boolean, date and integers. They follow the columns
        of the files. Needs ``recursive``. Escapes such as ``%20`` are decoded, and ``__HIVE_DEFAULT_PARTITION__`` is NULL.
        Default None: directories give no columns.
    :param options: options of Spark's reader, such as ``header``, ``delimiter``, ``multiLine``; default none.
    :param split_bytes: size of a split in bytes, and so of a Spark task and a Kafka transaction; default 64 MiB. A file that
        cannot be divided may be larger.
    :param max_files: maximum number of files in a window; None (default) for all new files, up to 5,000, or fewer if their names
        are long.
    :param max_bytes: maximum size of the files of a window, in bytes; None (default) for no maximum. A window has at least one
        file.
    :param min_age: seconds since its last modification, by the worker's clock, before a file is read; default 0. A file with a
        modification time more than five minutes in the future is then refused.
    :param on_change: the treatment of a file that was changed after it was read: ``fail`` (default) fails the task and names the
        file; ``read`` reads it as a new file, which publishes its earlier rows again; ``ignore`` ignores it.
    :param allowed_lateness: seconds between a file's modification time and its first listing, at most; default 6 hours. No more
        than 15 000 files may arrive in that time.
    :param conn_id: Airflow connection that an object store is listed with; default None. Templated.
    """

    template_fields: ClassVar[Sequence[str]] = ("path", "glob", "conn_id")

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings with which Spark splits as frozen, and fails on files and columns that it cannot read."""
        return make_session_settings(self._store, self.split_bytes)

    @property
    def may_be_unreadable(self) -> bool:
        """True: a row may have a text that is not in the files' encoding."""
        return True

    def validate(self) -> list[Problem]:
        """Return the problems of options, schema, directory and the right to list it."""
        return self.find_option_problems()

    def find_origin(self) -> Endpoint:
        """Return the directory and the server of its object store: two servers may have buckets of one name.

        The window itself contains the names of its files.
        """
        server = self._store.server
        return Endpoint({"path": self.uri, **({SERVER: server} if server else {})})

    def find_columns(self) -> tuple[str, ...] | None:
        """Return the columns of ``schema``, else those in the newest file's footer; None if there is no file yet."""
        given = tuple(column.name for column in self.partitions.columns)
        if self.format == "text":
            return ("value", *given)
        if self.schema is not None:
            return (*(column.name for column in parse_ddl(self.schema)), *given)
        try:
            files = list_selected_files(self, self._store)
            newest = max((f for f in files if f.size), key=lambda f: f.key, default=None)
            if newest is None:
                return None
            return (*(name for name, _ in read_footers(self._store, self.format, [newest])[0].columns), *given)
        except KafkaSparkError as error:
            log.info("The columns of %s are not known yet: %s", self.uri, error)
            return None

    def freeze(self, position: Mapping[str, Any] | None) -> FrozenWindow:
        """Decide the next window: the files that are new since ``position``. See :meth:`RowSource.freeze`.

        :raises SourceRejected: files have changed or come too late; footers differ or are damaged; the position is another
            directory's; more files would have to be remembered than fit.
        """
        return WindowPlanner(self, self._store).freeze(position)

    def make_reader(self, splits: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> SplitReader | str:
        """Return the reader with which tasks read these splits, or the reason why only Spark can.

        See :meth:`RowSource.make_reader`.

        Tasks read Parquet files of a directory, without ``schema`` and ``options``, if no needed column is nested, binary, or
        of a type that Arrow and Spark read in two ways.

        :raises SourceUnavailable: the files cannot be listed or opened.
        :raises SourceRejected: a file is gone, has changed or is damaged.
        """
        store = self._store
        if self.format != "parquet":
            return f"its files are {self.format}"
        if not isinstance(store, LocalStore):
            return "its files are in an object store"
        if self.schema is not None or self.options:
            return "`schema` and `options` are those of Spark's reader"
        from airflow_kafka_spark.sources.files.tasks.read import ParquetSplitReader

        decoded = tuple(decode_split(split) for split in splits)
        require_unchanged(store, {part.file.name: part.file for split in decoded for part in split})
        require_partition_directories(self, (part.file.name for split in decoded for part in split))
        given = dict(self.partitions.kinds)
        in_files = None if columns is None else [name for name in columns if name not in given]
        if in_files == []:
            return "no column of its files is needed"
        found = _find_task_columns(store, decoded[0][0].file, in_files)
        if isinstance(found, str):
            return found
        kinds = {**dict(found), **given}
        wanted = tuple((name, kinds[name]) for name in columns or kinds)
        return ParquetSplitReader(self.uri, store.directory, wanted, decoded, self.partitions)

    def read_frame(self, spark: SparkSession, splits: Sequence[Mapping[str, Any]]) -> DataFrame:
        """Return the rows of these splits. See :meth:`RowSource.read_frame`.

        All splits of a window are one scan. Only some of them are read one by one, and a slice of a large file then by reading
        all of it. Changes the session's settings to :attr:`settings`.

        :raises SourceUnavailable: the files cannot be listed.
        :raises SourceRejected: a file is gone or has changed, or Spark would split the files in another way.
        """
        return read_frame(self, self._store, spark, splits)

    def explain(self, error: BaseException) -> SourceRejected | None:
        """Return the file that an error of the Spark job reading :meth:`read_frame` concerns, and the cause; None if it concerns
        no file.
        """
        return explain_read_error(self.uri, error)

    @property
    def _store(self) -> FileStore:
        return open_store(self.path, self.conn_id)


def _find_task_columns(store: FileStore, file: ListedFile, names: Sequence[str] | None) -> tuple[tuple[str, Kind], ...] | str:
    """Return names and kinds of the columns of a Parquet file that tasks read, or the reason why only Spark can read them.

    :param names: the needed columns; None for all.
    :raises SourceRejected: it is not a Parquet file, or is damaged.
    :raises SourceUnavailable: it is gone, or cannot be opened.
    """
    import pyarrow.parquet as pq

    from airflow_kafka_spark.sources.files.tasks.read import find_column_kinds

    with translate_footer_errors(store, "parquet", file), store.open(file.name) as opened, pq.ParquetFile(opened) as found:
        return find_column_kinds(found, names)
