"""Validation of a files sink: find all problems that would prevent writing a window, before anything runs."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, Problem, Unchecked
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.hooks.object_stores import find_provider_problem, find_unwritable_directory_problem
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.files.directory import list_column_types
from airflow_kafka_spark.sinks.files.manifest import DATA, find_records, open_manifests
from airflow_kafka_spark.sinks.storage.attempts import ATTEMPTS
from airflow_kafka_spark.sinks.storage.store import UploadStore, escape

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.files.options import FilesSinkOptions
    from airflow_kafka_spark.sinks.storage.store import TableLocation
    from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec

FORMATS = ("parquet", "json", "csv", "orc")
_LIMITS = ("max_open_files", "max_rows_per_group", "max_bytes_per_group")


def find_files_sink_problems(sink: FilesSinkOptions, shape: Shape) -> list[Problem]:
    """Return the problems of directory, columns, options and types. See :meth:`.FilesSink.validate`."""
    return [*_write_problems(sink, shape), *_find_column_problems(sink, shape.schema), *_find_file_problems(sink, shape.schema)]


def find_target_problems(sink: FilesSinkOptions) -> list[Problem]:
    """Return the problems of the directory and of the options, independent of the rows. See
    :meth:`.FilesSink.find_target_problems`."""
    import pyarrow as pa

    return [*_find_location_problems(sink), *_find_file_problems(sink, pa.schema([]))]


# --- location -----------------------------------------------------------------------------------------------------------


def _write_problems(sink: FilesSinkOptions, shape: Shape) -> Iterator[Problem]:
    found = list(_find_location_problems(sink))
    yield from found
    if not found:
        yield from _find_neighbour_problems(sink, shape)


def _find_location_problems(sink: FilesSinkOptions) -> Iterator[Problem]:
    """Yield the problems of the location of the table, of its connection, and of the way in which windows are published."""
    visibility: object = sink.visibility
    if visibility not in (None, "rename", "manifest", "listing"):
        what = f"it is {visibility!r}; expected `rename`, `manifest` or `listing`"
        yield Problem("sink.visibility", what, "Leave it out: the default fits the path")
        sink = replace(sink, visibility=None)
    try:
        location, renames = sink.location, sink.renames
    except ValueError as error:
        yield Problem(
            "sink.path",
            f"{error}. Expected an absolute path or a file:// URI on a local disk, NFS or another mount, s3://bucket/prefix, "
            "gs://bucket/prefix, or abfss://container@account.dfs.core.windows.net/prefix",
            "HDFS and other stores are not supported",
        )
        return
    if sink.visibility == "listing" and location.scheme != "s3":
        what = f"it is `listing`, and {location.uri} is not in S3, where tasks can begin files and the driver complete them"
        yield Problem("sink.visibility", what, "Leave it out: the default fits the path")
        sink = replace(sink, visibility=None)
        renames = sink.renames
    if not location.is_local:
        yield from _find_object_store_problems(sink, location)
        return
    if sink.conn_id:
        yield Problem("sink.conn_id", "a mounted directory needs no connection", "Leave it out")
    yield from _find_right_problems(Path(location.path), beside=renames)


def _find_object_store_problems(sink: FilesSinkOptions, location: TableLocation) -> Iterator[Problem]:
    if sink.visibility == "rename":
        what = f"it is `rename`, and nothing can be renamed in {location.uri}"
        yield Problem("sink.visibility", what, "Leave it out: windows are published by manifests there")
        return
    if importlib.util.find_spec("obstore") is None:
        action = 'Install "airflow-provider-kafka-spark[object-stores]" on the Airflow worker and on Spark\'s executors'
        yield Problem("sink.path", "the package `obstore`, which writes to object stores, is not installed", action)
        return
    if sink.visibility == "listing" and importlib.util.find_spec("boto3") is None:
        action = "Install boto3 on the Airflow worker and on Spark's executors"
        yield Problem("sink.visibility", "the package `boto3`, which completes uploads, is not installed", action)
        return
    if missing := find_provider_problem("sink.conn_id", location.scheme, sink.conn_id):
        yield missing
        return
    try:
        store = open_manifests(sink).store
        store.probe()
        if sink.visibility == "listing":
            UploadStore(store).list_pending(ATTEMPTS)
    except ConnectionInvalid as error:
        yield Problem.of("sink.conn_id", error)
    except Exception as error:  # an error of any library that reaches the store
        yield Problem("sink.path", f"{location.uri} cannot be listed: {error}", "Check path, `conn_id` and its rights")


def _find_right_problems(directory: Path, *, beside: bool) -> Iterator[Problem]:
    """Yield the reasons why this user cannot write a table in a directory.

    :param beside: True if attempts write beside the table, from where their windows are renamed into it.
    """
    for path in (directory, *directory.parents):
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            yield Problem("sink.path", f"{path} cannot be read: {error}", "Give the worker's user the right to")
            return
        if not path.is_dir():
            yield Problem("sink.path", f"{path} is not a directory", "Name a directory, or remove the file")
            return
        for writable in (path, path.parent) if path == directory and beside else (path,):
            if problem := find_unwritable_directory_problem("sink.path", writable):
                yield problem
        break
    if beside and directory.is_dir() and os.stat(directory).st_dev != os.stat(directory.parent).st_dev:
        yield Problem(
            "sink.path",
            f"{directory} is the root of a file system of its own, so nothing can be renamed into it from beside it",
            f"Name a directory within it, for instance {directory}/{directory.name}",
        )


def _find_neighbour_problems(sink: FilesSinkOptions, shape: Shape) -> Iterator[Problem]:
    """Yield problems of existing windows, which must have the format, partition columns and visibility of this sink."""
    directory = Path(sink.location.path) if sink.location.is_local else None
    try:
        latest = find_records(sink).find_latest_record(shape.pipeline)
        names = os.listdir(directory) if directory and directory.exists() else []
    except (KafkaSparkError, OSError) as error:
        action = getattr(error, "action", "")
        yield Problem("sink.path", f"{sink.uri} cannot be read: {getattr(error, 'found', error)}", action)
        return
    # A table has one kind of windows: readers of the one would not see the other.
    other = [
        name for name in names if (name == "_windows" if sink.renames else name.startswith(f"{escape(sink.window_column)}="))
    ]
    if other:
        there, here = ("manifest", "rename") if sink.renames else ("rename", "manifest")
        what = f"{directory} holds {other[0]}, so its windows are published by `{there}`, and those of this sink by `{here}`"
        yield Problem("sink.visibility", what, f'Set `visibility="{there}"`, or name another directory')
        return
    if latest and latest.files and not sink.renames:
        there = "manifest" if str(latest.files[0]["path"]).startswith(f"{DATA}/") else "listing"
        here = sink.visibility or "manifest"
        if there != here:
            what = f"the windows of {sink.uri} are published by `{there}`, and those of this sink by `{here}`"
            yield Problem("sink.visibility", what, f'Set `visibility="{there}"`, or name another prefix')
            return
    columns = {name.split("=", 1)[0] for name in names if "=" in name and name[0] not in "_."}
    if others := sorted(columns - {escape(sink.window_column)}):
        yield Problem(
            "sink.path",
            f"{sink.uri} is already partitioned by `{'`, `'.join(others)}`, and readers need one first partition column",
            f'Name another directory, or set `window_column="{others[0]}"` if these are windows of this sink',
        )
    if latest and (latest.format, latest.partition_by) != (sink.format, tuple(sink.partition_by)):
        there = f"{latest.format} files of this pipeline, partitioned by {list(latest.partition_by)}"
        yield Problem("sink.path", f"{sink.uri} holds {there}; readers need one kind", "Name another directory")
    elif latest:
        yield from find_changed_column_problems(sink, latest.columns, shape.schema)


# --- columns ------------------------------------------------------------------------------------------------------------


def _find_column_problems(sink: FilesSinkOptions, schema: pa.Schema) -> Iterator[Problem]:
    names = Counter(schema.names)
    if doubled := [n for n, count in names.items() if count > 1]:
        yield Problem("schema", f"there is more than one column `{'`, `'.join(doubled)}`", "Rename all but one of them")
    yield from _find_window_column_problems(sink, schema.names)
    for name, count in Counter(sink.partition_by).items():
        if count > 1:
            yield Problem("sink.partition_by", f"`{name}` is named {count} times", "Name it once")
        if name not in names:
            known = quote_names(schema.names)
            yield Problem("sink.partition_by", f"there is no column `{name}`; there are {known}", "Name one of these")
        elif names[name] == 1:
            yield from _find_partition_column_problems(name, schema.field(name).type)
    if names and set(names) <= set(sink.partition_by):
        yield Problem("sink.partition_by", "it names all columns, so that none is left for the files", "Leave out at least one")


def _find_window_column_problems(sink: FilesSinkOptions, names: list[str]) -> Iterator[Problem]:
    column: Any = sink.window_column
    if not isinstance(column, str) or not column or column[0] in "_.":
        skipped = "readers skip directories that begin with _ or ."
        yield Problem("sink.window_column", f"{column!r} cannot be the name of a partition column: {skipped}")
    elif same := [n for n in names if n.casefold() == column.casefold()]:
        # Compared as Spark compares names.
        yield Problem(
            "sink.window_column",
            f"the records have a column `{same[0]}`, and the directories of windows would be a second one",
            'Give the directories another name, for instance `window_column="loaded_in"`',
        )


def _find_partition_column_problems(name: str, kind: pa.DataType) -> Iterator[Problem]:
    from airflow_kafka_spark.sinks.storage.tasks.write import find_partition_type_problem

    if problem := find_partition_type_problem(name, kind):
        yield problem
    if name[:1] in ("_", "."):
        skipped = "readers skip directories that begin with _ or ."
        yield Problem("sink.partition_by", f"column `{name}` cannot name a directory: {skipped}", "Rename it")


# --- files --------------------------------------------------------------------------------------------------------------


def _find_file_problems(sink: FilesSinkOptions, schema: pa.Schema) -> Iterator[Problem]:
    if sink.format not in FORMATS:
        yield Problem("sink.format", f"`{sink.format}` is not known; expected one of {', '.join(FORMATS)}")
        given = {"sink.compression": sink.compression, "sink.options": sink.options}
        yield from (Unchecked(where, "sink.format") for where, value in given.items() if value)
        return
    spec = sink.spec
    codecs = spec.writer.codecs
    if sink.compression not in codecs:
        known = ", ".join(c for c in codecs if c)
        yield Problem("sink.compression", f"`{sink.compression}` is not known for {sink.format}; expected one of {known}")
        spec = replace(spec, compression=None)
    wrong = list(_find_option_problems(sink, spec))
    yield from wrong
    yield from _find_type_problems(replace(spec, options={}) if wrong else spec, schema, set(sink.partition_by))


def _find_option_problems(sink: FilesSinkOptions, spec: FileSpec) -> Iterator[Problem]:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.storage.tasks.formats import try_writing

    for name in _LIMITS:
        value = sink.options.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield Problem("sink.options", f"`{name}` is {value!r}; expected a whole number from 1")
    timestamps = sink.options.get("timestamps", "utc")
    if "timestamps" in sink.options and (sink.format != "orc" or timestamps not in ("utc", "instant")):
        yield Problem("sink.options", f"`timestamps` is {timestamps!r}; expected `utc` or `instant`, with format orc")
    if reserved := sorted(spec.writer.reserved & set(sink.options)):
        yield Problem("sink.options", f"`{'`, `'.join(reserved)}` cannot be set: the sink sets it itself", "Leave it out")
    elif error := try_writing(spec, pa.schema([("a", pa.int64())])):
        yield Problem("sink.options", f"the {sink.format} writer does not take {dict(spec.format_options)}: {error}")


def _find_type_problems(spec: FileSpec, schema: pa.Schema, in_path: set[str]) -> Iterator[Problem]:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.storage.tasks.formats import try_writing

    for column in schema:
        if column.name in in_path:
            continue
        if "timestamp[ns" in str(column.type):
            what = f"column `{column.name}` is {column.type}; expected microseconds, which is what Spark reads"
            yield Problem("sink.format", what, "Cast it to timestamp[us]")
        elif try_writing(spec, pa.schema([column])):
            yield Problem(
                "sink.format",
                f"{spec.format} cannot hold column `{column.name}` of type {column.type}",
                "Leave the column out, convert it, or use another format (parquet holds them all)",
            )


def find_changed_column_problems(sink: FilesSinkOptions, before: Mapping[str, str], schema: pa.Schema) -> Iterator[Problem]:
    """Yield a problem for each column that readers could not combine with the existing windows.

    :param before: the columns of these windows; empty if they are not known.
    """
    if not before:
        return
    now = list_column_types(schema)
    for name, kind in now.items():
        where = f"sink.path column `{name}`"
        if name in before and before[name] != kind:
            what = f"found {kind}; expected {before[name]}, as in the windows that are there: readers cannot combine the two"
            yield Problem(where, what, "Correct the schema, give the column another name, or name another directory")
        elif name not in before and (similar := [known for known in before if known.casefold() == name.casefold()]):
            what = f"the windows that are there have `{similar[0]}`, and Spark treats the two as one"
            yield Problem(where, what, f"Call it `{similar[0]}` in the schema, or give it another name")
        elif name not in before and not sink.auto_evolve:
            what = f"it is new ({kind}); the windows that are there have {_format_columns(before)}"
            yield Problem(where, what, "Set `auto_evolve=True` on the sink, or leave it out of the schema")
    if sink.format == "csv" and list(now)[: len(before)] != list(before):
        what = (
            f"found {_format_columns(now)}; expected {_format_columns(before)}, and new ones behind them: readers "
            "of CSV go by position"
        )
        yield Problem("sink.format", what, "Keep the columns and their order, or name another directory")


def _format_columns(columns: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
