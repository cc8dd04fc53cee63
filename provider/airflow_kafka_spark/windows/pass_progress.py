"""The progress of a pass over whole tables that takes many windows: a snapshot, or a bulk read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PassProgress:
    """The progress of a pass behind the window whose position holds this.

    :param began: the time at which the pass was begun, seconds since 1970.
    :param all_rows: how many rows the tables have, as their database estimated when the pass began; None if it did not.
    :param all_chunks: how many chunks these rows make; None if that is unknown.
    :param chunks: the chunks that are planned until now.
    :param rows: the rows in them, at most.
    """

    began: float
    all_rows: int | None = None
    all_chunks: int | None = None
    chunks: int = 0
    rows: int = 0

    @classmethod
    def begin(cls, now: float, estimates: Mapping[Any, int], chunk_rows: int) -> PassProgress:
        """Return the progress of a pass that begins.

        :param estimates: the rows of each table.
        :param chunk_rows: the rows of a chunk.
        """
        chunks = sum(max(1, math.ceil(rows / chunk_rows)) for rows in estimates.values())
        return cls(now, sum(estimates.values()), chunks) if all(rows > 0 for rows in estimates.values()) else cls(now)

    def add(self, chunks: int, rows: int, *, is_complete: bool = False) -> PassProgress:
        """Return the progress behind a window.

        :param chunks: the chunks of the window.
        :param rows: the rows in them.
        :param is_complete: True if nothing is left. Else one chunk is left at least, whatever was estimated.
        """
        done = replace(self, chunks=self.chunks + chunks, rows=self.rows + rows)
        if is_complete:
            return replace(done, all_chunks=done.chunks, all_rows=done.rows)
        if done.all_chunks is None or done.all_rows is None:
            return done
        return replace(done, all_chunks=max(done.all_chunks, done.chunks + 1), all_rows=max(done.all_rows, done.rows + 1))

    def to_json(self) -> dict[str, Any]:
        """Return the value for a position."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> PassProgress | None:
        """Return what :meth:`to_json` has written; None if there is none."""
        return cls(**value) if value else None

    def at(self, now: float) -> dict[str, Any]:
        """Return what a report says: chunks and rows that are done and, about, of how many, and seconds until now and to go.

        :param now: seconds since 1970.
        """
        found: dict[str, Any] = {"chunks": self.chunks, "rows": self.rows, "seconds": round(max(0.0, now - self.began), 1)}
        if self.all_chunks is not None:
            left = found["seconds"] * (self.all_chunks - self.chunks) / self.chunks if self.chunks else None
            more = {} if left is None else {"seconds_left": round(left, 1)}
            found |= {"all_chunks": self.all_chunks, "all_rows": self.all_rows, **more}
        return found


def parse_position_progress(position: Mapping[str, Any]) -> PassProgress | None:
    """Return the progress that the position of a source holds; None without a pass."""
    return PassProgress.from_json(position.get("progress") or (position.get("snapshot") or {}).get("progress"))


def format_progress(found: Mapping[str, Any]) -> str:
    """Return what :meth:`PassProgress.at` returned as a text for a log."""
    if "all_chunks" not in found:
        return f"{found['chunks']:,} chunks, at most {found['rows']:,} rows, in {_format_duration(found['seconds'])}"
    of = f"{found['chunks']:,} of about {found['all_chunks']:,} chunks ({found['rows']:,} of about {found['all_rows']:,} rows)"
    left = f", about {_format_duration(found['seconds_left'])} to go" if found.get("seconds_left") else ""
    return f"{of} in {_format_duration(found['seconds'])}{left}"


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
