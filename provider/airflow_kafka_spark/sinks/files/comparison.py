"""The files of complete windows as ``VerifyOperator`` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sinks.base import ComparedTable, ReadPiece
from airflow_kafka_spark.sinks.files.manifest import DATA, open_manifests
from airflow_kafka_spark.sinks.files.options import FilesSinkOptions

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.fs

    from airflow_kafka_spark.sinks.storage.store import TableStore


@dataclass(frozen=True)
class ComparedFiles(ComparedTable):
    """Parquet files of complete windows. Columns of ``partition_by`` are texts, from the names of directories.

    :param sink: the sink that names their location.
    """

    sink: FilesSinkOptions

    @property
    def name(self) -> str:
        return self.sink.uri

    def find_problems(self, condition: str) -> list[Problem]:
        """Return the problems of files that are not Parquet, and of a condition."""
        found = super().find_problems(condition)
        if self.sink.format != "parquet":
            found.insert(0, Problem("sink.format", f"it is `{self.sink.format}`; only files of `parquet` can be compared"))
        return found

    def load_schema(self) -> pa.Schema | None:
        files = self._load()
        return None if files is None else files[0]

    def read_pieces(self, columns: Sequence[str], condition: str) -> Iterator[ReadPiece]:
        """Yield each file."""
        import pyarrow.dataset as ds

        if (files := self._load()) is None:
            return
        schema, fragments = files

        def read_file(opened: Callable[[], ds.Fragment]) -> Iterator[pa.RecordBatch]:
            return ds.Scanner.from_fragment(opened(), schema=schema, columns=list(columns), use_threads=False).to_batches()

        for opened in fragments:
            yield partial(read_file, opened)

    def _load(self) -> tuple[pa.Schema, Sequence[Callable[[], ds.Fragment]]] | None:
        """Return the columns of complete windows, and functions that open their files; None if there are none."""
        import pyarrow as pa
        import pyarrow.dataset as ds
        import pyarrow.fs

        sink = self.sink
        partitions = pa.schema([(name, pa.string()) for name in (sink.window_column, *sink.partition_by)])
        hive = ds.HivePartitioning(partitions)
        found: pyarrow.fs.FileSelector | list[str]
        if sink.renames:
            if not sink.directory.exists():
                return None
            base = str(sink.directory)
            found = pyarrow.fs.FileSelector(base, recursive=True)
        else:
            table = open_manifests(sink)
            base = table.store.make_full_path(DATA)
            paths = [file["path"] for record in table.list_visible_records() for file in record.files]
            if not table.store.location.is_local:
                opened = [partial(_open_object, table.store, hive, path) for path in paths]
                schemas = [one().physical_schema for one in (opened if sink.auto_evolve else opened[:1])]
                return (pa.unify_schemas([*schemas, partitions], promote_options="permissive"), opened) if opened else None
            found = [table.store.make_full_path(path) for path in paths]
        given = ds.FileSystemFactoryOptions(partition_base_dir=base, partitioning=hive, selector_ignore_prefixes=[".", "_"])
        factory = ds.FileSystemDatasetFactory(pyarrow.fs.LocalFileSystem(), found, ds.ParquetFileFormat(), given)
        files = factory.finish(factory.inspect(promote_options="permissive", fragments=None if sink.auto_evolve else 1))
        return (files.schema, [partial(_open_fragment, fragment) for fragment in files.get_fragments()]) if files.files else None


def _open_fragment(fragment: ds.Fragment) -> ds.Fragment:
    """Return a file that is opened when it is read."""
    return fragment


def _open_object(store: TableStore, hive: ds.HivePartitioning, path: str) -> ds.Fragment:
    """Return a file in an object store, with the values of its directories."""
    import pyarrow.dataset as ds

    below = path.removeprefix(f"{DATA}/").rpartition("/")[0]
    return ds.ParquetFileFormat().make_fragment(store.open_input(path), partition_expression=hive.parse(f"{below}/"))
