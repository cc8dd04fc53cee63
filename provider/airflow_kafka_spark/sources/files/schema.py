"""Columns, types and row counts from the footers of Parquet and ORC files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.files.store import ListedFile

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.sources.files.store import FileStore

_MOST_SHOWN = 8


@dataclass(frozen=True)
class FileFooter:
    """The footer of a file.

    :param columns: names and types, in order; the types as Arrow names them, alike for types that Spark reads alike.
    :param rows: the number of rows.
    """

    columns: tuple[tuple[str, str], ...]
    rows: int


def read_footers(store: FileStore, format: str, files: Sequence[ListedFile]) -> list[FileFooter]:
    """Return the footers of the files.

    :param format: ``parquet`` or ``orc``.
    :raises SourceRejected: a file is not of this format, or is damaged.
    :raises SourceUnavailable: a file is gone, or cannot be opened.
    """
    return store.map_files(lambda file: _read_footer(store, format, file), files)


def _read_footer(store: FileStore, format: str, file: ListedFile) -> FileFooter:
    import pyarrow as pa

    try:
        with store.open(file.name) as opened:
            return _parquet(opened) if format == "parquet" else _orc(opened)
    except (FileNotFoundError, PermissionError) as error:
        raise SourceUnavailable(store.uri, f"reading the footer of {file.name}", str(error)) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceRejected(
            store.uri,
            f"`{file.name}` ({file.size} bytes) is not a readable {format} file: {error}",
            "Replace or remove it. If it is still being written, let its writer rename it into the directory when it is "
            "complete, or set `min_age`",
        ) from error


def _parquet(opened: object) -> FileFooter:
    import pyarrow.parquet as pq

    with pq.ParquetFile(opened) as file:
        return FileFooter(_columns(file.schema_arrow), file.metadata.num_rows)


def _orc(opened: object) -> FileFooter:
    from pyarrow import orc

    file = orc.ORCFile(opened)
    return FileFooter(_columns(file.schema), file.nrows)


def _columns(schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    return tuple((field.name, _type_name(field.type)) for field in schema)


def _type_name(kind: pa.DataType) -> str:
    """Return the name of a type, alike for types that Spark reads alike."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _type_name(kind.value_type)
    if types.is_map(kind):
        return f"map<{_type_name(kind.key_type)},{_type_name(kind.item_type)}>"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return f"list<{_type_name(kind.value_type)}>"
    if types.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{_type_name(field.type)}' for field in kind)}>"
    if types.is_timestamp(kind):
        return f"timestamp[{'UTC' if kind.tz else 'no zone'}]"
    if types.is_large_string(kind) or types.is_string(kind):
        return "string"
    if types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "binary"
    return str(kind)


def require_same_columns(source: str, files: Sequence[ListedFile], found: Sequence[FileFooter]) -> None:
    """Check that all files have the same columns, in any order.

    :param source: the source's URI, for the message.
    :raises SourceRejected: they do not; the message shows the differences.
    """
    by_columns: dict[frozenset[tuple[str, str]], list[ListedFile]] = {}
    for file, footer in zip(files, found, strict=True):
        by_columns.setdefault(frozenset(footer.columns), []).append(file)
    if len(by_columns) == 1:
        return
    (columns, usual), (others, odd) = sorted(by_columns.items(), key=lambda item: -len(item[1]))[:2]
    raise SourceRejected(
        source,
        f"the files of this window have {len(by_columns)} different schemas. `{odd[0].name}` ({len(odd)} of {len(files)} files) "
        f"differs from `{usual[0].name}` ({len(usual)} files): {_difference(dict(columns), dict(others))}",
        "Give `schema`, which all files are then read with (missing columns become NULL), or read the files of each kind by a "
        "pipeline of its own, told apart by `glob`",
    )


def _difference(usual: dict[str, str], odd: dict[str, str]) -> str:
    lacks = [f"it lacks `{name}` {kind}" for name, kind in sorted(usual.items()) if name not in odd]
    adds = [f"it adds `{name}` {kind}" for name, kind in sorted(odd.items()) if name not in usual]
    other = [f"its `{n}` is {odd[n]}, not {usual[n]}" for n in sorted(usual) if n in odd and odd[n] != usual[n]]
    differences = [*other, *lacks, *adds]
    more = len(differences) - _MOST_SHOWN
    return "; ".join(differences[:_MOST_SHOWN]) + (f"; and {more} more differences" if more > 0 else "")
