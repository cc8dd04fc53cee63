"""Snapshots of an Iceberg table as the sink uses them: the record of a window in each, and commits that are refused if anything
of the branch or of the pipeline was committed since the table was loaded.

Each snapshot of a pipeline has the window in its summary, and the tag ``airflow.<pipeline>`` names the last of them, which no
expiry of snapshots removes. The tag is set in the commit of the snapshot. A commit requires that the branch and the tag are still
what they were when the table was loaded, so an attempt that was overtaken can commit nothing.
"""

from __future__ import annotations

import json
import re
import secrets
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import WindowConflict
from airflow_kafka_spark.sinks.lake.sink import REPLACED, LoadedTable
from airflow_kafka_spark.sinks.storage.attempts import make_data_directory, make_marker_name
from airflow_kafka_spark.sinks.storage.window_record import make_commit_metadata, parse_recorded_window
from airflow_kafka_spark.windows.interval import remove_interval
from airflow_kafka_spark.windows.model import ELSEWHERE, Applied, Window

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.refs import SnapshotRefType
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.table.update import AddSnapshotUpdate, TableRequirement, TableUpdate

    from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable
    from airflow_kafka_spark.sinks.lake.tasks.rewrite import TableFile, Upsert

PIPELINE = "airflow.pipeline"
WINDOW = "airflow.window"
NEWEST = "airflow.newest"
FENCED = "airflow.fenced"
"""Keys of a snapshot's summary: the pipeline, the window that was written last and the window with the highest number (JSON), and
the attempts that can no longer commit."""


_FOREVER = (1 << 63) - 1
"""The age in milliseconds at which a tag is removed that is never removed."""
INTERVAL_TAG_DAYS = 90
"""Days for which the tag of a data interval keeps its snapshot. Older intervals cannot be replayed once snapshots are expired."""


def make_tag_name(pipeline: str) -> str:
    """Return the name of a pipeline's tag."""
    return f"airflow.{pipeline}"


def make_snapshot_id() -> int:
    """Return the id of a snapshot that will be written."""
    return secrets.randbelow((1 << 63) - 1) + 1


@dataclass(frozen=True)
class Recorded:
    """The record of a window in a snapshot.

    :param applied: the window that was written.
    :param snapshot_id: the snapshot that has added its files. Another one may carry a copy of the record.
    :param text: the record as it is stored.
    :param branch: the branch to which it was committed; empty if unknown.
    """

    applied: Applied
    snapshot_id: int
    text: str
    branch: str = ""

    @classmethod
    def of(cls, window: Window, rows: int, deleted: int, snapshot_id: int, branch: str) -> Recorded:
        """Return the record of a window that is going to be committed."""
        place = {"snapshot": snapshot_id, "branch": branch}
        return cls.load(json.dumps({**make_commit_metadata(window, rows, deleted), **place}, ensure_ascii=False))

    @classmethod
    def load(cls, text: str) -> Recorded:
        """Return the record that a text holds.

        :raises WindowConflict: the text cannot be understood.
        """
        try:
            found = json.loads(text)
            return cls(parse_recorded_window(found), found["snapshot"], text, found.get("branch", ""))
        except (ValueError, KeyError, TypeError) as error:
            raise WindowConflict("of a snapshot's summary", f"`{text[:200]}` cannot be understood", "a record") from error


@dataclass(frozen=True)
class PipelineSnapshots:
    """The windows of a pipeline that a table's metadata records.

    :param tag: the snapshot that the pipeline's tag names; None if there is no tag.
    :param records: the record of the newest replay of each window whose snapshot is still there, by number.
    """

    tag: int | None
    records: Mapping[int, Recorded]

    @classmethod
    def of(cls, metadata: TableMetadata, pipeline: str, branch: str | None = None) -> PipelineSnapshots:
        """Return the state that a table's metadata shows.

        :param branch: leaves out records of other branches, unless this branch has their snapshots. Default: all records.
        :raises WindowConflict: a record cannot be understood.
        """
        records: dict[int, Recorded] = {}
        here = {snapshot.snapshot_id for snapshot in list_ancestors(metadata, branch)} if branch is not None else set()
        for snapshot in metadata.snapshots:
            summary = snapshot.summary.additional_properties if snapshot.summary else {}
            if summary.get(PIPELINE) != pipeline:
                continue
            for text in {summary[key] for key in (WINDOW, NEWEST) if key in summary}:
                found = Recorded.load(text)
                if branch is not None and found.branch not in ("", branch) and found.snapshot_id not in here:
                    continue
                known = records.get(found.applied.number)
                if known is None or known.applied.replay < found.applied.replay:
                    records[found.applied.number] = found
        tag = metadata.refs.get(make_tag_name(pipeline))
        return cls(tag.snapshot_id if tag else None, records)

    @property
    def newest(self) -> Recorded | None:
        """The record of the window with the highest number."""
        return self.records[max(self.records)] if self.records else None

    def find(self, number: int) -> Recorded | None:
        """Return the record of a window; None if it is not applied, or if its snapshot has expired."""
        return self.records.get(number)

    def make_summary(self, pipeline: str, written: Recorded | None = None) -> dict[str, str]:
        """Return the summary of the pipeline's next snapshot.

        :param written: the window that it applies; None for a fence, which keeps the records.
        """
        last = written or next((r for r in self.records.values() if r.snapshot_id == self.tag), None)
        newest = max((r for r in (written, self.newest) if r is not None), key=lambda r: r.applied.number, default=None)
        found = {PIPELINE: pipeline}
        if last is not None:
            found[WINDOW] = last.text
        if newest is not None and newest is not last:
            found[NEWEST] = newest.text
        return found


@dataclass(frozen=True)
class LoadedIceberg(LoadedTable[Recorded, "DataFile"]):
    """An Iceberg table as it was loaded once.

    :param table: the table of pyiceberg.
    :param lake: the table in its catalog.
    :param branch: the branch that the sink writes to.
    """

    table: Table
    lake: IcebergTable
    branch: str
    _states: dict[str, PipelineSnapshots] = field(default_factory=dict, repr=False)

    @property
    def columns(self) -> Sequence[str]:
        return [column.name for column in self.table.schema().fields]

    def find_state(self, pipeline: str) -> PipelineSnapshots:
        """Return the windows of a pipeline that the table's metadata records.

        :raises WindowConflict: a record cannot be understood.
        """
        if pipeline not in self._states:
            self._states[pipeline] = PipelineSnapshots.of(self.table.metadata, pipeline)
        return self._states[pipeline]

    def find(self, pipeline: str, number: int) -> Recorded | None:
        return self.find_state(pipeline).find(number)

    def find_window(self, window: Window) -> Recorded | None:
        if window.after != ELSEWHERE:
            return super().find_window(window)
        return PipelineSnapshots.of(self.table.metadata, window.pipeline, self.branch).find(window.number)

    def find_newest(self, pipeline: str) -> Recorded | None:
        return self.find_state(pipeline).newest

    def list_windows(self) -> Iterator[Applied]:
        for snapshot in sorted(self.table.metadata.snapshots, key=lambda snapshot: snapshot.timestamp_ms, reverse=True):
            summary = snapshot.summary.additional_properties if snapshot.summary else {}
            if PIPELINE in summary and (text := summary.get(WINDOW) or summary.get(NEWEST)):
                yield Recorded.load(text).applied

    def has_history_since(self, instant: int) -> bool:
        """Return True if no snapshot of the branch has expired that is younger than an instant.

        :param instant: milliseconds since the epoch.
        """
        *_, oldest = (None, *list_ancestors(self.table.metadata, self.branch))
        # Some programs remove the parent of a snapshot with the parent itself.
        return oldest is None or oldest.timestamp_ms <= instant or (oldest.sequence_number or 0) <= 1

    def count_rows(self, pipeline: str) -> int:
        """Return the number of rows in the data files that a pipeline has written to the branch, without those that others have
        rewritten.

        :raises Exception: the store did not answer.
        """
        first = make_data_directory(make_marker_name(pipeline, 0))
        directories = re.compile(re.escape(first.removesuffix("0" * 20)) + r"\d{20}")
        files = list_data_files(self.table, [self.table.metadata.snapshot_by_name(self.branch)], directories)
        return sum(file.record_count for file in files)

    def list_files_of(self, window: Window, found: Recorded) -> list[DataFile]:
        if not found.applied.written:
            return []
        directory = make_data_directory(make_marker_name(window.pipeline, found.snapshot_id))
        files = list_data_files(self.table, [self.table.metadata.snapshot_by_name(self.branch)], directory)
        rows = sum(file.record_count for file in files)
        if rows != found.applied.written:
            what = (
                f"branch `{self.branch}` has {rows:,} of its {found.applied.written:,} rows in the files that they were written "
                "to: rewrite_data_files, DELETE or MERGE has rewritten the others, or the window is on another branch"
            )
            raise WindowConflict(str(window), what, REPLACED)
        return files

    def find_files_with(self, upsert: Upsert) -> Sequence[TableFile]:
        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import list_table_files

        return list_table_files(
            self.table, find_head(self.table.metadata, self.branch), upsert, {name: name for name in upsert.key}
        )

    def flush(self) -> None:
        self.lake.flush(self.table, self.table.metadata_location)


def list_ancestors(metadata: TableMetadata, branch: str) -> Iterator[Snapshot]:
    """Yield the snapshots of a branch, the newest first, up to the first one that has expired."""
    snapshot = metadata.snapshot_by_name(branch)
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = metadata.snapshot_by_id(parent) if parent is not None else None


# --- commits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotCommit:
    """One commit to try.

    :param requirements: its requirements.
    :param updates: its changes.
    :param written: the manifests and manifest lists that were written for it.
    :param named: those of them that the snapshot names. A manifest that was merged into another one is not among them.
    """

    requirements: tuple[TableRequirement, ...]
    updates: tuple[TableUpdate, ...]
    written: tuple[str, ...]
    named: tuple[str, ...]


def make_manifest_prefix(snapshot_id: int) -> tuple[str, str]:
    """Return the beginning of the names of the manifests and of the manifest list of a snapshot."""
    return str(_make_commit_uuid(snapshot_id))[:18], f"snap-{snapshot_id}-"


def _make_commit_uuid(snapshot_id: int) -> uuid.UUID:
    """Return an id for one try of a commit. Its first half is derived from the snapshot's id."""
    return uuid.UUID(int=snapshot_id << 64 | secrets.randbits(64))


def find_head(metadata: TableMetadata, branch: str) -> int | None:
    """Return the snapshot that a branch names; None if there is no such branch."""
    found = metadata.refs.get(branch)
    return found.snapshot_id if found else None


@dataclass(frozen=True)
class NewSnapshot:
    """A snapshot that is going to be committed.

    :param id: its id, which stays unchanged when the commit is tried again.
    :param summary: its summary.
    :param branch: the branch that gets it; None for a snapshot that only the tag names.
    :param tag: a tag that names it, too; default none.
    :param added: the data files that it adds; default none.
    :param removed: the data files that it removes; default none.
    :param rewrites: True if the rows of ``added`` are those of ``removed``. Readers of changes ignore such a snapshot.
    """

    id: int
    summary: Mapping[str, str]
    branch: str | None
    tag: str | None = None
    added: Sequence[DataFile] = ()
    removed: Sequence[DataFile] = ()
    rewrites: bool = False


def make_commit(table: Table, snapshot: NewSnapshot) -> SnapshotCommit:
    """Write the manifests of a snapshot, and return the commit that makes it visible.

    :param table: the table as it was loaded. The commit requires that branch, tag and partition spec have not changed since.
    :raises Exception: catalog or store did not answer.
    """
    from pyiceberg.table import Transaction
    from pyiceberg.table.refs import SnapshotRefType
    from pyiceberg.table.update import AssertDefaultSpecId
    from pyiceberg.table.update.snapshot import _MergeAppendFiles

    class Look(Transaction):
        """A transaction without changes. pyiceberg would copy all metadata each time that it is asked for it."""

        @property
        def table_metadata(self) -> TableMetadata:
            return self._table.metadata

    metadata = table.metadata
    update = Look(table).update_snapshot(snapshot_properties=dict(snapshot.summary), branch=snapshot.branch)
    added, removed = snapshot.added, snapshot.removed
    producer = update.overwrite() if removed else update.merge_append() if added else update.fast_append()
    if isinstance(producer, _MergeAppendFiles):
        # Enabled unless the table disables it, as in Spark and Flink, because windows are many and small.
        producer._merge_enabled = metadata.properties.get("commit.manifest-merge.enabled", "true").lower() == "true"
    # The id is known before any file is written, and stays the same when the commit is tried again.
    producer._snapshot_id, producer.commit_uuid = snapshot.id, _make_commit_uuid(snapshot.id)
    for file in added:
        producer.append_data_file(file)
    for file in removed:
        producer.delete_data_file(file)
    updates, _ = producer._commit()
    requirements: list[TableRequirement] = [AssertDefaultSpecId.model_validate({"default-spec-id": metadata.default_spec_id})]
    made = _complete_snapshot(updates[0], metadata, snapshot.rewrites)
    changes: list[TableUpdate] = [made]
    for name, kind in ((snapshot.branch, SnapshotRefType.BRANCH), (snapshot.tag, SnapshotRefType.TAG)):
        if name is not None:
            requirements.append(require_ref(name, find_head(metadata, name)))
            changes.append(set_ref(metadata, name, kind, snapshot.id))
    written = (*producer._written_manifests, *producer._written_manifest_lists)
    named = written
    if isinstance(producer, _MergeAppendFiles) and len(producer._written_manifests) > 1:
        # pyiceberg does not say which of them it has merged.
        merged = made.snapshot.manifests(table.io)
        named = (made.snapshot.manifest_list, *(manifest.manifest_path for manifest in merged))
    return SnapshotCommit(tuple(requirements), tuple(changes), written, named)


def _complete_snapshot(update: TableUpdate, metadata: TableMetadata, rewrites: bool) -> AddSnapshotUpdate:
    """Return a snapshot that is younger than earlier ones, even if the clocks of two writers differ: Iceberg's readers in Java
    refuse a table whose snapshots go back in time by more than a minute.
    """
    from pyiceberg.table.snapshots import Operation, Summary
    from pyiceberg.table.update import AddSnapshotUpdate

    assert isinstance(update, AddSnapshotUpdate) and update.snapshot.summary is not None
    logged = [entry.timestamp_ms for entry in metadata.snapshot_log[-1:]]
    logged += [entry.timestamp_ms for entry in metadata.metadata_log[-1:]]
    # One millisecond more: pyiceberg gives metadata of an equal time the time of its own clock.
    earliest = max((metadata.last_updated_ms, *logged)) + 1
    changed: dict[str, object] = {"timestamp_ms": max(update.snapshot.timestamp_ms, earliest)}
    if rewrites:
        changed["summary"] = Summary(Operation.REPLACE, **update.snapshot.summary.additional_properties)
    return AddSnapshotUpdate(snapshot=update.snapshot.model_copy(update=changed))


def require_ref(name: str, snapshot_id: int | None) -> TableRequirement:
    """Return the requirement that a branch or tag names a snapshot.

    :param snapshot_id: None if there may be no such branch or tag.
    """
    from pyiceberg.table.update import AssertRefSnapshotId

    return AssertRefSnapshotId.model_validate({"ref": name, "snapshot-id": snapshot_id})


def set_ref(metadata: TableMetadata, name: str, kind: SnapshotRefType, snapshot_id: int) -> TableUpdate:
    """Return the change that lets a branch or tag name a snapshot. Its retention of snapshots is unchanged.

    A new tag never expires, independent of the table's ``history.expire.max-ref-age-ms``. That of a data interval expires after
    :data:`INTERVAL_TAG_DAYS`: otherwise the number of tags and of their snapshots would grow for ever.
    """
    from pyiceberg.table.refs import SnapshotRefType
    from pyiceberg.table.update import SetSnapshotRefUpdate

    there = metadata.refs.get(name)
    options = ("max_ref_age_ms", "max_snapshot_age_ms", "min_snapshots_to_keep")
    kept = {option: getattr(there, option) for option in options if there is not None}
    if there is None and kind == SnapshotRefType.TAG:
        kept["max_ref_age_ms"] = INTERVAL_TAG_DAYS * 86_400_000 if remove_interval(name) != name else _FOREVER
    return SetSnapshotRefUpdate(**{"ref_name": name, "type": kind, "snapshot_id": snapshot_id, **kept})


def list_metadata_files(table: Table, snapshot_id: int) -> set[str] | None:
    """Return the manifest list and the manifests of a snapshot; None if there is no such snapshot.

    :raises Exception: the store did not answer.
    """
    snapshot = table.snapshot_by_id(snapshot_id)
    if snapshot is None:
        return None
    return {snapshot.manifest_list, *(manifest.manifest_path for manifest in snapshot.manifests(table.io))}


def list_data_files(table: Table, snapshots: Iterable[Snapshot | None], directory: str | re.Pattern[str]) -> list[DataFile]:
    """Return the data files of snapshots in a directory, each once.

    :param directory: its name, or a pattern of names.
    :raises Exception: the store did not answer.
    """
    from pyiceberg.manifest import ManifestContent

    manifests = {m.manifest_path: m for s in snapshots if s is not None for m in s.manifests(table.io)}
    inside = re.compile(f"/{directory.pattern if isinstance(directory, re.Pattern) else re.escape(directory)}/")
    found: dict[str, DataFile] = {}
    for manifest in manifests.values():
        if manifest.content == ManifestContent.DATA:
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                if inside.search(entry.data_file.file_path):
                    found[entry.data_file.file_path] = entry.data_file
    return list(found.values())


def is_referenced(table: Table, directory: str) -> bool:
    """Return True if a snapshot of the table names a data file in a directory.

    :raises Exception: the store did not answer.
    """
    return bool(list_data_files(table, table.metadata.snapshots, directory))
