"""What keeps a files source from being read: found before Spark starts, all of it at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem, SchemaInvalid
from airflow_kafka_spark.formats.ddl import Array, Column, DataType, Map, Struct, Text, parse_ddl
from airflow_kafka_spark.sources.files import reader_options
from airflow_kafka_spark.sources.files.reader_options import FORMATS, WITH_SCHEMA
from airflow_kafka_spark.sources.files.store import LocalStore, Selection, store_of

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.files.options import FilesSettings

SMALLEST_SPLIT = 1 << 10
ON_CHANGE = ("fail", "read", "ignore")


def problems(source: FilesSettings) -> list[Problem]:
    columns: tuple[Column, ...] = ()
    found = [*_place(source), *_numbers(source), *_choices(source)]
    if source.format in FORMATS:
        try:
            columns = parse_ddl(source.schema) if source.schema is not None else ()
        except SchemaInvalid as error:
            found.append(Problem("source.schema", str(error)))
        else:
            found += _schema(source, columns)
        found += reader_options.problems(source.format, source.options, columns)
    return found


# --- place --------------------------------------------------------------------------------------------------------------


def _place(source: FilesSettings) -> Iterator[Problem]:
    try:
        store = store_of(source.path, source.conn_id)
    except ValueError as error:
        yield Problem("source.path", str(error), "Name a directory, as an absolute path or as a URI")
        return
    if isinstance(store, LocalStore):
        if source.conn_id:
            yield Problem("source.conn_id", "a mounted directory needs no connection", "Leave it out")
        yield from _local(store)
        return
    try:
        next(iter(store.files(Selection())), None)
    except Exception as error:  # whatever the store's client raises: a missing package, connection, bucket or right
        detail = f"{type(error).__name__}: {error}"
        yield Problem("source.path", f"{source.uri} cannot be listed: {detail}", "Check path, `conn_id` and its rights")


def _local(store: LocalStore) -> Iterator[Problem]:
    directory = store.directory
    try:
        os.stat(directory)
        if not os.path.isdir(directory):
            yield Problem("source.path", f"{directory} is not a directory", "Name the directory, and the file by `glob`")
        elif not os.access(directory, os.R_OK | os.X_OK):
            yield Problem("source.path", f"{directory} cannot be listed by user {os.geteuid()}", "Give this user the right to")
    except FileNotFoundError:
        yield Problem("source.path", f"{directory} does not exist", "Make it, mount it, or correct the path")
    except OSError as error:
        yield Problem("source.path", f"{directory} cannot be looked at: {error}", "Give the worker's user the right to")


# --- options ------------------------------------------------------------------------------------------------------------


def _numbers(source: FilesSettings) -> Iterator[Problem]:
    whole = (
        ("split_bytes", source.split_bytes, SMALLEST_SPLIT),
        ("max_files", source.max_files, 1),
        ("max_bytes", source.max_bytes, 1),
    )
    for name, value, least in whole:
        if name != "split_bytes" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
            yield Problem(f"source.{name}", f"it is {value!r}; expected a whole number from {least:,}")
    for name, seconds in (("min_age", source.min_age), ("allowed_lateness", source.allowed_lateness)):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
            yield Problem(f"source.{name}", f"it is {seconds!r}; expected seconds, from 0")


def _choices(source: FilesSettings) -> Iterator[Problem]:
    if source.format not in FORMATS:
        yield Problem("source.format", f"`{source.format}` is not known; expected one of {', '.join(FORMATS)}")
    if source.on_change not in ON_CHANGE:
        yield Problem("source.on_change", f"`{source.on_change}` is not known; expected one of {', '.join(ON_CHANGE)}")
    glob: Any = source.glob
    if not isinstance(glob, str) or not glob or "/" in glob:
        advice = "To look into directories below set `recursive=True`"
        yield Problem("source.glob", f"{glob!r} is not a pattern of file names (`*`, `?`, `[...]`)", advice)


def _schema(source: FilesSettings, columns: tuple[Column, ...]) -> Iterator[Problem]:
    if source.schema is None:
        if source.format in WITH_SCHEMA:
            yield Problem(
                "source.schema",
                f"{source.format} files have no types of their own, and guessed ones would change from window to window",
                "Give the columns as Spark DDL, for instance `id bigint, name string, placed_at timestamp`",
            )
        return
    if source.format == "text":
        yield Problem("source.schema", "lines of text have one column, `value string`", "Leave `schema` out")
    for column in columns:
        if any(isinstance(kind, Text) and kind.max_length for kind in _kinds(column.type)):
            yield Problem("source.schema", f"`{column.name}` is {column.type}, which Spark's readers do not take", "Use string")
        if source.format == "csv" and isinstance(column.type, (Array, Map, Struct)):
            yield Problem("source.schema", f"`{column.name}` is {column.type}, which csv cannot hold", "Read it as string")


def _kinds(kind: DataType) -> Iterator[DataType]:
    yield kind
    if isinstance(kind, Array):
        yield from _kinds(kind.element)
    elif isinstance(kind, Map):
        yield from _kinds(kind.key)
        yield from _kinds(kind.value)
    elif isinstance(kind, Struct):
        for field in kind.fields:
            yield from _kinds(field.type)
