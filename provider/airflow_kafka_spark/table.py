"""A table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; a cell may hold several lines; numbers stand on the right."""
    cells = [[str(c).split("\n") for c in row] for row in [header, *rows]]
    widths = [max(len(line) for row in cells for line in row[i]) for i in range(len(header))]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for number, row in enumerate(cells):
        for depth in range(max(len(cell) for cell in row)):
            parts = [cell[depth] if depth < len(cell) else "" for cell in row]
            lines.append(
                "  ".join(p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True)).rstrip()
            )
        if number == 0:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join("  " + line for line in lines)


def _is_number(cell: object) -> bool:
    return str(cell).replace(",", "").replace("/s", "").strip().isdecimal()
