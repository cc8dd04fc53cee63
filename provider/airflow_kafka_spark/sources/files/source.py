"""Files in a directory, or below a prefix of an object store, as frozen windows of rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, SourceRejected
from airflow_kafka_spark.formats.types import parse_ddl
from airflow_kafka_spark.sources.base import FrozenWindow, RowSource
from airflow_kafka_spark.sources.files.options import FilesSourceOptions
from airflow_kafka_spark.sources.files.reading import explain_read_error, read_frame, session_settings
from airflow_kafka_spark.sources.files.store import FileStore, open_store, read_footers
from airflow_kafka_spark.sources.files.windows import WindowPlanner, list_files
from airflow_kafka_spark.windows.binding import SERVER, Endpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilesSource(FilesSourceOptions, RowSource):
    """Reads the new files of a directory with Spark's file readers. Each window takes the files that arrived since the last one.

    Guarantee: every file is in exactly one window, and the window's splits give the same rows at every attempt, *as long as the
    directory keeps to three rules*:

    1. A file is complete when it is listed, and is never written to again. Objects of an object store are; on a file system let
       the writer rename the file into the directory (Spark, and :class:`~airflow_kafka_spark.sinks.FilesSink`, do), give it
       a name that begins with ``_`` or ``.`` until then, or set ``min_age``.
    2. A file's name is not used again. A file that was read and now has another size, modification time or etag is found when
       the next window is frozen (see ``on_change``); one that is changed or removed between freezing and reading is found before
       it is read, and fails the window.
    3. Beyond 10 000 files only: a file is listed within ``allowed_lateness`` after its own modification time.

    Up to 10 000 files nothing depends on clocks: each file is remembered by name, size, modification time and etag, and may
    arrive with any modification time. Above that number the oldest files are forgotten, and a file that is not newer than the
    newest forgotten one counts as read. So a directory may grow without limit; the ledger record does not (at most 320 KB). A
    file that is put into such a directory with its old modification time (``cp -p``, ``rsync -t``, ``mv``), later than rule 3
    allows, is not read. That is noticed, and fails the task, when more files of that age are there than before; if as many were
    removed meanwhile, it is not. Clocks of the store and of the worker that differ count against the lateness. A file that was
    read, removed from the directory and put back is recognized as long as it is remembered: within the lateness, and then as long
    as no more than 1 000 files are remembered.

    Windows take files in the order of modification time and name. Within a window no order is kept between splits. Empty files
    are passed over until they have content, hidden files (``_*`` without ``=``, ``.*``) always, in all directories. Directories
    named ``column=value`` are looked into when ``recursive``, but give no column. Links to directories are not followed.

    Parquet and ORC files, and text that can be read from its middle (not compressed, or bzip2), are cut into pieces of
    ``split_bytes``; small files are packed together, at most 64. Spark does the splitting. Before anything is read, its splits
    are compared with the frozen ones; not over Spark Connect, whose server cannot be asked and has to split as Spark 4.0 does.

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
    :param schema: the columns as Spark DDL. Required for json and csv; not allowed for text; parquet and orc files are read with
        the types they hold, which must be the same in all files of a window, unless it is given. Default None.
    :param options: options of Spark's reader, such as ``header``, ``delimiter``, ``multiLine``; default none.
    :param split_bytes: size of a split in bytes, and so of a Spark task and a Kafka transaction; default 64 MiB. A file that
        cannot be divided may be larger.
    :param max_files: maximum number of files in a window; None (default) for all new files, up to 5,000, or fewer if their names
        are long.
    :param max_bytes: maximum size of the files of a window, in bytes; None (default) for no maximum. A window has at least one
        file.
    :param min_age: seconds since its last modification, by the worker's clock, before a file is read; default 0.
    :param on_change: what to do about a file that was read and is another now: ``fail`` (default) the task, naming it; ``read``
        it as a new file, which publishes rows again that it had before; or ``ignore`` it.
    :param allowed_lateness: seconds between a file's modification time and its first listing, at most; default 6 hours. No more
        than 15 000 files may arrive in that time.
    :param conn_id: Airflow connection that an object store is listed with; default None. Templated.
    """

    template_fields: ClassVar[Sequence[str]] = ("path", "glob", "conn_id")

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings with which Spark splits as frozen, and fails on files and columns that it cannot read."""
        return session_settings(self._store, self.split_bytes)

    def validate(self) -> list[Problem]:
        """Return all that is wrong with options, schema, directory and the right to list it."""
        return self.option_problems()

    def origin(self) -> Endpoint:
        """Return the directory and the server of its object store: two servers may have buckets of one name.

        The window itself holds which of the directory's files it reads.
        """
        server = self._store.server
        return Endpoint({"path": self.uri, **({SERVER: server} if server else {})})

    def columns(self) -> tuple[str, ...] | None:
        """Return the columns of ``schema``, else those in the newest file's footer; None if there is no file yet."""
        if self.format == "text":
            return ("value",)
        if self.schema is not None:
            return tuple(column.name for column in parse_ddl(self.schema))
        try:
            files = list_files(self, self._store)
            newest = max((f for f in files if f.size), key=lambda f: f.key, default=None)
            return tuple(name for name, _ in read_footers(self._store, self.format, [newest])[0].columns) if newest else None
        except KafkaSparkError as error:
            log.info("The columns of %s are not known yet: %s", self.uri, error)
            return None

    def freeze(self, position: Mapping[str, Any] | None) -> FrozenWindow:
        """Decide the next window: the files that are new since ``position``. See :meth:`RowSource.freeze`.

        :raises SourceRejected: files have changed or come too late; footers differ or are damaged; the position is another
            directory's; more files would have to be remembered than fit.
        """
        return WindowPlanner(self, self._store).freeze(position)

    def frame(self, spark: SparkSession, splits: Sequence[Mapping[str, Any]]) -> DataFrame:
        """Return the rows of these splits. See :meth:`RowSource.frame`.

        All splits of a window are one scan. Only some of them are read one by one, and a slice of a large file then by reading
        all of it. Changes the session's settings to :attr:`settings`.

        :raises SourceUnavailable: the files cannot be listed.
        :raises SourceRejected: a file is gone or has changed, or Spark would split the files in another way.
        """
        return read_frame(self, self._store, spark, splits)

    def explain(self, error: BaseException) -> SourceRejected | None:
        """Return which file an error of the Spark job that read :meth:`frame` is about, and why; None if it is about none."""
        return explain_read_error(self.uri, error)

    @property
    def _store(self) -> FileStore:
        return open_store(self.path, self.conn_id)
