"""Compaction after a window: joins the small files of a branch.

A compaction is a separate attempt with a separate directory. Its snapshot moves the pipeline's tag as that of a window does. So a
compaction that died or was overtaken can no longer commit once the next attempt at a window has begun, and that attempt removes
its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced
from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable
from airflow_kafka_spark.sinks.iceberg.snapshots import (
    NewSnapshot,
    PipelineSnapshots,
    find_head,
    make_commit,
    make_snapshot_id,
    tag_name,
)
from airflow_kafka_spark.sinks.iceberg.table import make_table_columns
from airflow_kafka_spark.sinks.storage.attempts import TableAttempt, make_marker_name
from airflow_kafka_spark.windows.model import Window

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import FileScanTask, Table

    from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec

_TARGET_SIZE = "write.target-file-size-bytes"
_DEFAULT_SIZE = 512 << 20


@dataclass(frozen=True)
class Compaction:
    """A compaction of one branch.

    :param lake: the table.
    :param branch: the branch.
    :param window: the window after which it is done.
    :param base: the snapshot of this window, which the pipeline's tag names.
    :param spec: the codec and options that files are written with.
    """

    lake: IcebergTable
    branch: str
    window: Window
    base: int
    spec: FileSpec

    def run(self) -> tuple[int, int]:
        """Join the small files, in one commit that is tried once.

        :return: the number of files that were joined, and the number of files that hold their rows now.
        :raises Fenced: another attempt of the pipeline has committed or fenced since the window.
        :raises Exception: another writer has committed meanwhile, or catalog or store did not answer. The next attempt at a
            window removes the files.
        """
        from airflow_kafka_spark.sinks.lake.tasks import compaction

        pipeline = self.window.pipeline
        table = self.lake.loaded("compacting")
        groups = list(list_small_files(table, find_head(table.metadata, self.branch)))
        if not groups:
            return 0, 0
        state = PipelineSnapshots.of(table.metadata, pipeline)
        if state.tag != self.base:
            raise Fenced(pipeline, "compacting")
        snapshot_id = make_snapshot_id()
        data = self.lake.get_data_store(table)
        attempt = TableAttempt(self.window, make_marker_name(pipeline, snapshot_id), self.lake.store(table), data)
        with compaction.run_compaction(attempt, base=self.base):
            added, removed = [], [task.file for group in groups for task in group]
            for group in groups:
                added += self._join(table, group, attempt)
            faults.reached("sink.compacting")
            summary, tag = state.summary(pipeline), tag_name(pipeline)
            snapshot = NewSnapshot(snapshot_id, summary, self.branch, tag, added, removed, rewrites=True)
            commit = make_commit(table, snapshot)
            if (error := self.lake.try_commit(table, commit.requirements, commit.updates)) is not None:
                raise error
        return len(removed), len(added)

    def _join(self, table: Table, group: list[FileScanTask], attempt: TableAttempt) -> list[DataFile]:
        """Write the rows of files into one file."""
        from airflow_kafka_spark.sinks.iceberg.tasks.data_files import IcebergSplitWriter, IcebergTarget
        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import IcebergFile, describe_layout, make_data_file
        from airflow_kafka_spark.sinks.lake.tasks import compaction

        file_schema, columns = make_table_columns(table.metadata)
        common: dict[str, Any] = {**attempt.target(self.lake.uri), "file_schema": file_schema, "spec": self.spec}
        writer = IcebergSplitWriter(IcebergTarget(**common, **describe_layout(table, columns)))
        files, rows = [IcebergFile(table, task, {}) for task in group], sum(task.file.record_count for task in group)
        made = compaction.join_files(writer, files, rows, self.window.number)
        store = self.lake.get_data_store(table)
        return [make_data_file(file, store.named(file["path"]), table.metadata.default_spec_id) for file in made]


def list_small_files(table: Table, snapshot_id: int | None) -> Iterator[list[FileScanTask]]:
    """Yield groups of small files of one partition, none larger than the table's target size together.

    Files that others have deleted rows of are left as they are, and those of an older partition spec.

    :param snapshot_id: the snapshot whose files are read.
    :raises Exception: the store did not answer.
    """
    from airflow_kafka_spark.sinks.lake.tasks.compaction import group_small_files

    if snapshot_id is None:
        return
    tasks = [
        task
        for task in table.scan(snapshot_id=snapshot_id).plan_files()
        if not task.delete_files and task.file.spec_id == table.metadata.default_spec_id
    ]
    fields, target = range(len(table.spec().fields)), int(table.properties.get(_TARGET_SIZE, _DEFAULT_SIZE))
    yield from group_small_files(
        tasks, lambda task: tuple(task.file.partition[at] for at in fields), lambda task: task.file.file_size_in_bytes, target
    )
