"""How a window's files are cut into splits: the way Spark's file sources do it, so that Spark can be made to agree. Pure.

Spark orders the paths' pieces by length, longest first, and fills partitions with them one after the other
(``FilePartition.getFilePartitions``). With :func:`spark_settings` the outcome depends on order and sizes of the files only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

SPLITTABLE = ("parquet", "orc")
_CODECS = (".gz", ".deflate", ".snappy", ".lz4", ".zst")
"""Suffixes of compressed text that Hadoop can read from its beginning only. (``.bz2`` can be cut.)"""
_PATTERN = re.compile(r"[{}\[\]*?\\]")
_SMALLEST = 64
"""What opening a file costs, as a share of a split: at most so many files are read by one split."""


@dataclass(frozen=True)
class File:
    """A file as it was listed.

    :param name: path below the source's directory.
    :param size: bytes.
    :param mtime: modification time, microseconds since 1970.
    :param etag: what the store calls this version of it, where it does.
    """

    name: str
    size: int
    mtime: int
    etag: str = ""

    @property
    def key(self) -> tuple[int, str]:
        """Files are read in this order: oldest first, then by name."""
        return self.mtime, self.name


@dataclass(frozen=True)
class Piece:
    """The bytes ``[start, start + length)`` of a file."""

    file: File
    start: int
    length: int

    @property
    def is_whole(self) -> bool:
        return self.length == self.file.size


Pack = tuple[Piece, ...]


def is_splittable(name: str, format: str, options: Mapping[str, str]) -> bool:
    """Whether Spark may read the file from its middle.

    :param options: the reader's, with names in lower case.
    """
    if format in SPLITTABLE:
        return True
    whole = {"json": "multiline", "csv": "multiline", "text": "wholetext"}[format]
    return options.get(whole, "").lower() != "true" and not name.endswith(_CODECS)


def cut(files: Iterable[File], split_bytes: int, unsplittable: Collection[str] = ()) -> tuple[Pack, ...]:
    """Spark's partitions for these files, in Spark's order.

    :param files: of at least a byte each, in any order.
    :param split_bytes: the longest piece.
    :param unsplittable: names of files that stay in one piece.
    """
    pieces: list[Piece] = []
    for file in in_spark_order(files):
        step = file.size if file.name in unsplittable else split_bytes
        pieces += [Piece(file, start, min(step, file.size - start)) for start in range(0, file.size, step)]
    pieces.sort(key=lambda p: -p.length)  # stable, as Spark's: pieces of one length stay in the order of their files
    packs: list[Pack] = []
    pack: list[Piece] = []
    filled = 0
    for piece in pieces:
        if filled + piece.length > split_bytes and pack:
            packs.append(tuple(pack))
            pack, filled = [], 0
        filled += piece.length + open_cost(split_bytes)
        pack.append(piece)
    return (*packs, tuple(pack)) if pack else tuple(packs)


def in_spark_order(files: Iterable[File]) -> list[File]:
    """The order in which Spark takes files that are loaded in this order: paths that look like a pattern come first."""
    return sorted(files, key=lambda f: (_PATTERN.search(f.name) is None, f.key))


def escaped(path: str) -> str:
    """A path of which Spark takes no character for a part of a pattern. (With ``__globPaths__`` off, which exists for this,
    Spark 4.0 reads all files as often as there are such paths.)"""
    return _PATTERN.sub(r"\\\g<0>", path)


def why_unreadable(path: str) -> str | None:
    """Why Spark cannot open a file.

    :param path: without its scheme.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    if "//" in path.lstrip("/"):  # which objects may have
        return "has an empty component in its path"
    # Hadoop looks such paths up component by component, and takes what comes before the colon for a scheme.
    return "has both a `:` and one of `{}[]*?\\` in its path" if ":" in path and _PATTERN.search(path) else None


def open_cost(split_bytes: int) -> int:
    return max(1, split_bytes // _SMALLEST)


def spark_settings(split_bytes: int) -> dict[str, str]:
    """The settings that make Spark cut as :func:`cut` does."""
    return {
        "spark.sql.files.maxPartitionBytes": str(split_bytes),
        "spark.sql.files.openCostInBytes": str(open_cost(split_bytes)),
        # Else the cut depends on the number of cores.
        "spark.sql.files.minPartitionNum": "1",
        "spark.sql.files.maxPartitionNum": str(2**31 - 1),
    }


# --- in a plan ------------------------------------------------------------------------------------------------------------


def encode(pack: Pack, split_bytes: int) -> dict[str, Any]:
    """A split: ``{"files": [[name, start, length, size, mtime(, etag)], ...], "split_bytes": n}``."""
    files = []
    for piece in pack:
        name, size, mtime, etag = astuple(piece.file)
        files.append([name, piece.start, piece.length, size, mtime, *([etag] if etag else [])])
    return {"files": files, "split_bytes": split_bytes}


def decode(split: Mapping[str, Any]) -> Pack:
    return tuple(
        Piece(File(name, size, mtime, *etag), start, length) for name, start, length, size, mtime, *etag in split["files"]
    )


def size_in_plan(splits: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that splits take as JSON."""
    return len(json.dumps(list(splits)))
