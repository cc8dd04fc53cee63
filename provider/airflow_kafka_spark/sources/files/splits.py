"""The splits of a window of files, which are Spark's own, so that Spark reads the splits that were frozen.

Spark orders the slices of files by length, longest first, and fills partitions with them one after the other
(``FilePartition.getFilePartitions``). With :func:`make_spark_settings` the outcome depends on order and sizes of the files only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from airflow_kafka_spark.sources.files.store import ListedFile

SPLITTABLE = ("parquet", "orc")
_UNSPLITTABLE_CODECS = (".gz", ".deflate", ".snappy", ".lz4", ".zst")
"""Suffixes, in any case, of compressed text that Hadoop can read from its beginning only. (``.bz2`` files can be split.)"""
_GLOB_CHARACTERS = re.compile(r"[{}\[\]*?\\]")
_MAX_FILES_OF_SPLIT = 64
"""Maximum number of files in a split: the cost of opening a file counts as one split divided by this number."""


@dataclass(frozen=True)
class FileSlice:
    """The bytes ``[start, start + length)`` of a file."""

    file: ListedFile
    start: int
    length: int

    @property
    def is_whole(self) -> bool:
        """True if it is the whole file."""
        return self.length == self.file.size


FileSplit = tuple[FileSlice, ...]
"""The slices that one Spark partition reads, in its order."""


def is_splittable(name: str, format: str, options: Mapping[str, str]) -> bool:
    """Return True if Spark can begin to read the file in its middle.

    :param options: the reader's, with names in lower case.
    """
    if format in SPLITTABLE:
        return True
    whole = {"json": "multiline", "csv": "multiline", "text": "wholetext"}[format]
    return options.get(whole, "").lower() != "true" and not name.lower().endswith(_UNSPLITTABLE_CODECS)


def split_files(files: Iterable[ListedFile], split_bytes: int, unsplittable: Collection[str] = ()) -> tuple[FileSplit, ...]:
    """Return Spark's partitions for these files, in Spark's order.

    :param files: of at least a byte each, in any order.
    :param split_bytes: the length of the longest slice.
    :param unsplittable: names of files that are not cut.
    """
    slices: list[FileSlice] = []
    for file in sort_like_spark(files):
        step = file.size if file.name in unsplittable else split_bytes
        slices += [FileSlice(file, start, min(step, file.size - start)) for start in range(0, file.size, step)]
    slices.sort(key=lambda s: -s.length)  # stable, as Spark's: slices of one length stay in the order of their files
    splits: list[FileSplit] = []
    split: list[FileSlice] = []
    filled = 0
    for part in slices:
        if filled + part.length > split_bytes and split:
            splits.append(tuple(split))
            split, filled = [], 0
        filled += part.length + compute_open_cost(split_bytes)
        split.append(part)
    return (*splits, tuple(split)) if split else tuple(splits)


def sort_like_spark(files: Iterable[ListedFile]) -> list[ListedFile]:
    """Return the files in the order in which Spark lists them: paths that look like a pattern come first, then the oldest."""
    return sorted(files, key=lambda f: (_GLOB_CHARACTERS.search(f.name) is None, f.key))


def escape_path(path: str) -> str:
    """Return a path in which Spark takes no character for a part of a pattern.

    (The option ``__globPaths__`` exists for this. With it off, Spark 4.0 reads all files as often as there are such paths.)
    """
    return _GLOB_CHARACTERS.sub(r"\\\g<0>", path)


def find_unreadable_reason(path: str) -> str | None:
    """Return the reason why Spark cannot open a file; None if it can.

    :param path: without its scheme.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    if "//" in path.lstrip("/"):  # names of objects may have such components
        return "has an empty component in its path"
    # Hadoop looks such paths up component by component, and takes the text before the colon for a scheme.
    return "has both a `:` and one of `{}[]*?\\` in its path" if ":" in path and _GLOB_CHARACTERS.search(path) else None


def compute_open_cost(split_bytes: int) -> int:
    """Return the number of bytes that the opening of a file counts as."""
    return max(1, split_bytes // _MAX_FILES_OF_SPLIT)


def make_spark_settings(split_bytes: int) -> dict[str, str]:
    """Return the settings with which Spark splits as :func:`split_files` does."""
    return {
        "spark.sql.files.maxPartitionBytes": str(split_bytes),
        "spark.sql.files.openCostInBytes": str(compute_open_cost(split_bytes)),
        # Otherwise the splits would depend on the number of cores.
        "spark.sql.files.minPartitionNum": "1",
        "spark.sql.files.maxPartitionNum": str(2**31 - 1),
    }


# --- as JSON -------------------------------------------------------------------------------------------------------------


def encode_split(split: FileSplit, split_bytes: int) -> dict[str, Any]:
    """Return a split as JSON: ``{"files": [[name, start, length, size, mtime(, etag)], ...], "split_bytes": n}``."""
    files = []
    for part in split:
        name, size, mtime, etag = astuple(part.file)
        files.append([name, part.start, part.length, size, mtime, *([etag] if etag else [])])
    return {"files": files, "split_bytes": split_bytes}


def decode_split(split: Mapping[str, Any]) -> FileSplit:
    """Return the split from the value of :func:`encode_split`."""
    return tuple(
        FileSlice(ListedFile(name, size, mtime, *etag), start, length)
        for name, start, length, size, mtime, *etag in split["files"]
    )


def compute_encoded_size(splits: Sequence[Mapping[str, Any]]) -> int:
    """Return the size of the splits as JSON, in bytes."""
    return len(json.dumps(list(splits)))
