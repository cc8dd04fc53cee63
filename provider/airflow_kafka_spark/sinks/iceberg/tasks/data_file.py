"""A data file of Iceberg's metadata as JSON, on its way from a task to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow.parquet
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record

_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


def file_statistics(footer: pyarrow.parquet.FileMetaData, schema: Schema, properties: Mapping[str, str]) -> dict[str, Any]:
    """Return counts and bounds of a file's columns, as JSON has them.

    :param footer: the file's footer.
    :param schema: the file's columns with the table's ids.
    :param properties: the table's properties, which say which columns have bounds (``write.metadata.metrics``).
    """
    found: dict[str, Any] = {}
    for wanted in (dict(properties), {"write.metadata.metrics.default": "counts"}):
        try:
            plan = compute_statistics_plan(schema, wanted)
            statistics = data_file_statistics_from_parquet_metadata(footer, plan, parquet_path_to_id_mapping(schema))
            found = statistics.to_serialized_dict()
            break
        except (OverflowError, ValueError, TypeError):  # an instant outside of Python's years: no bounds
            continue
    statistics_of = {name: {str(key): value for key, value in found.get(name, {}).items()} for name in _COUNTS}
    bounds = {name: {str(key): value.hex() for key, value in found.get(name, {}).items()} for name in _BOUNDS}
    return {**statistics_of, **bounds, "split_offsets": found.get("split_offsets", [])}


def partition_to_json(values: Sequence[Any]) -> list[Any]:
    """Return partition values as JSON has them."""
    return [{"decimal": str(v)} if isinstance(v, Decimal) else {"bytes": v.hex()} if isinstance(v, bytes) else v for v in values]


def _partition_from_json(values: Sequence[Any]) -> list[Any]:
    return [
        v if not isinstance(v, dict) else Decimal(v["decimal"]) if "decimal" in v else bytes.fromhex(v["bytes"]) for v in values
    ]


def data_file(value: Mapping[str, Any], path: str, spec_id: int) -> DataFile:
    """Return the data file that a token names.

    :param path: its path as Iceberg's metadata has it.
    :param spec_id: the partition spec that the task wrote for.
    """
    statistics = value["statistics"]
    facts: dict[str, Any] = dict(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(*_partition_from_json(value["partition"])),
        record_count=value["rows"],
        file_size_in_bytes=value["bytes"],
        sort_order_id=value["sort_order"],
        equality_ids=None,
        key_metadata=None,
        split_offsets=statistics["split_offsets"],
        **{name: {int(key): number for key, number in statistics[name].items()} for name in _COUNTS},
        **{name: {int(key): bytes.fromhex(text) for key, text in statistics[name].items()} for name in _BOUNDS},
    )
    made = DataFile.from_args(**facts)
    made.spec_id = spec_id
    return made
