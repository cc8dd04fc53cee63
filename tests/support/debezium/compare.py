"""Compare records with those of Debezium's engine, value by value."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

OF_RUN = {
    *("version", "ts_ms", "ts_us", "ts_ns", "sequence", "txId", "lsn", "xmin", "gtid", "file", "pos", "thread", "server_id"),
    *("id", "transaction_id", "__source_ts_ms"),
}
"""Fields outside of rows whose values are those of a run: only their kinds are compared."""


def of_engine(database: str, options: str) -> list[dict[str, Any]]:
    """Return the records of the engine, with their schemas, without ``BEGIN`` records of transactions that have no ``END``.

    The engine publishes such a record for each change of a table.

    :param database: ``postgres`` or ``mariadb``.
    :param options: the name of a set of options.
    """
    found = json.loads((Path(__file__).parent / f"{database}.json").read_text(encoding="utf-8"))[options]
    records = []
    for record in found["records"]:
        for part in ("key", "value"):
            if record[part] is not None:
                record[part]["schema"] = found["schemas"][record[part]["schema"]]
        records.append(record)
    of_transactions = [record for record in records if "status" in ((record["value"] or {}).get("payload") or {})]
    empty = [
        one
        for one, other in itertools.pairwise(of_transactions)
        if one["value"]["payload"]["status"] == other["value"]["payload"]["status"]
    ]
    return [record for record in records if not any(record is one for one in empty)]


def unexplained(found: list[str], known: Mapping[str, str], types: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the differences that are not known, and the patterns of known ones that are not found.

    :param found: all differences.
    :param known: regular expressions, and the reasons; ``c7`` is written as its type, ``<text>``.
    :param types: the types of the columns ``c0``, ``c1`` and so on.
    """
    named = [re.sub(r"\.c(\d+)\b", lambda found: f".<{types[int(found[1])][0]}>", line) for line in found]
    used = {pattern for pattern in known for line in named if re.search(pattern, line)}
    return [line for line in named if not any(re.search(pattern, line) for pattern in known)] + sorted(set(known) - used)


def differences(ours: list[dict[str, Any]], engine: list[dict[str, Any]]) -> list[str]:
    """Return the differences, each with its place. The records of a topic are compared in their order."""
    found: list[str] = []
    topics = sorted({r["topic"] for r in (*ours, *engine)})
    for topic in topics:
        left, right = ([r for r in records if r["topic"] == topic] for records in (ours, engine))
        if len(left) != len(right):
            ops = [[(r["value"] or {"payload": {"op": None}})["payload"].get("op") for r in side] for side in (left, right)]
            found.append(f"{topic}: {len(left)} records, expected {len(right)}: {ops[0]}, expected {ops[1]}")
        for number, (one, other) in enumerate(zip(left, right, strict=False)):
            for part in ("key", "value"):
                found += _differing(one[part], other[part], f"{topic} {number} {part}")
    return found


def _differing(one: Any, other: Any, where: str, name: str = "") -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        inside = ".schema" in where or ".after" in where or ".before" in where
        for key in [*other, *(k for k in one if k not in other)]:
            if key not in one or key not in other:
                what = "missing" if key not in one else "superfluous"
                yield f"{where}.{key}: {what}: {json.dumps(other.get(key, one.get(key)))}"
            else:
                yield from _differing(one[key], other[key], f"{where}.{key}", "" if inside else key)
    elif isinstance(one, list) and isinstance(other, list) and where.endswith(".fields"):
        ours, theirs = ({field["field"]: field for field in side} for side in (one, other))
        yield from _differing_fields(ours, theirs, where)
    elif name in OF_RUN:
        if type(one) is not type(other):
            yield f"{where}: {one!r}, expected a value such as {other!r}"
    elif one != other or type(one) is not type(other):
        yield f"{where}: {one!r}, expected {other!r}"


def _differing_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> Iterator[str]:
    for name in [*theirs, *(n for n in ours if n not in theirs)]:
        if name in ours and name in theirs:
            yield from _differing(ours[name], theirs[name], f"{where}.{name}")
        else:
            yield f"{where}.{name}: {'superfluous' if name in ours else 'missing'}"
    common = [[name for name in side if name in ours and name in theirs] for side in (ours, theirs)]
    if common[0] != common[1]:
        yield f"{where}: in the order {common[0]}, expected {common[1]}"
