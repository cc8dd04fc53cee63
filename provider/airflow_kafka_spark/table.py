"""Tables as text, for the command line and the demo."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table, indented by two blanks. A cell may contain several lines.

    Columns of numbers are aligned to the right. Cells are printed as given: numbers keep their separators and digits.

    :param header: names of the columns.
    :param rows: cells, one per column.
    """
    align = ["right" if rows and all(_is_number(row[i]) for row in rows) else "left" for i in range(len(header))]
    cells = [[str(cell) for cell in row] for row in rows]
    table = tabulate(cells, header, tablefmt="simple", disable_numparse=True, colalign=align if rows else None)
    return "\n".join(f"  {line}".rstrip() for line in table.splitlines())


def _is_number(cell: object) -> bool:
    return str(cell).replace(",", "").replace("/s", "").strip().isdecimal()
