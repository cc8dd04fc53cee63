"""The rows of a chunk of a table, read by COPY as columns of texts."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import csv

from airflow_kafka_spark.hooks.databases import quote
from airflow_kafka_spark.sources.cdc.tasks.columns import PIECE_BYTES, PIECE_ROWS
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import PostgresTableShape

if TYPE_CHECKING:
    import psycopg

_DELIMITER = "\x1f"
"""Separates the values of a row. Values that have this character are in quotes, so that it should be a rare one."""


def read_chunk_rows(
    connection: psycopg.Connection[Any], chunk: Mapping[str, Any], shape: PostgresTableShape
) -> Generator[list[pa.Array], None, None]:
    """Yield the rows of a chunk, some at a time: per column, the texts of its values as PostgreSQL writes them (binary).

    :param chunk: a split.
    """
    ends = ((">", chunk["after"]), ("<=", chunk["upto"]))
    conditions = [shape.compared(operator, key) for operator, key in ends if key is not None]
    if shape.row_filter:
        conditions.append(f"({shape.row_filter})")
    columns = ", ".join(quote(column.name) for column in shape.relation.columns)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    options = f"(FORMAT csv, DELIMITER '{_DELIMITER}')"
    with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY (SELECT {columns} FROM {shape.source}{where}) TO STDOUT WITH {options}".encode()) as copy,
    ):
        for lines in _read_lines(copy, _make_header(len(shape.relation.columns))):
            yield parse_lines(lines)


def _make_header(width: int) -> bytes:
    """Return the line of names before the lines of a table."""
    return (_DELIMITER.join(map(str, range(width))) + "\n").encode()


def _read_lines(copy: psycopg.Copy, header: bytes) -> Iterator[bytearray]:
    """Yield the lines of a COPY, some at a time, each time behind a header."""
    from psycopg.errors import error_from_result
    from psycopg.pq import ExecStatus

    libpq, is_complete = copy.connection.pgconn, False
    read = libpq.get_copy_data
    while not is_complete and (line := copy.read()):
        # The lines are copied at once: many objects that live for a while would keep Python's garbage collector busy.
        lines, left = bytearray(header), PIECE_BYTES - len(line)
        lines += line
        for _ in range(PIECE_ROWS - 1):
            # Copy.read() waits for the network before each line; libpq has many lines by then.
            count, line = read(1)
            if count <= 0:
                is_complete = count < 0
                if is_complete or not (line := copy.read()):
                    break
                count = len(line)
            lines += line
            left -= count
            if left <= 0:
                break
        yield lines
    if is_complete:
        for result in list(iter(libpq.get_result, None)):
            if result.status != ExecStatus.COMMAND_OK:
                raise error_from_result(result)


def parse_lines(lines: bytearray) -> list[pa.Array]:
    """Return the values of lines of COPY's format `csv`, per column (binary).

    :param lines: complete lines, at least one, behind a line of names: Arrow takes some bytes at the beginning for a mark of the
        encoding.
    """
    names = lines[: lines.index(b"\n")].decode().split(_DELIMITER)
    table = csv.read_csv(
        pa.BufferReader(lines),
        read_options=csv.ReadOptions(use_threads=False, block_size=len(lines)),
        parse_options=csv.ParseOptions(delimiter=_DELIMITER, newlines_in_values=True, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    return [column.combine_chunks() for column in table.columns]
