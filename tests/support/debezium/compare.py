"""Compare records with those of Debezium's engine, value by value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

OF_RUN = {
    *("version", "ts_ms", "ts_us", "ts_ns", "sequence", "txId", "lsn", "xmin", "gtid", "file", "pos", "thread", "server_id"),
    *("id", "transaction_id"),
}
"""Fields outside of rows whose values are those of a run: only their kinds are compared."""


def of_engine(database: str, options: str) -> list[dict[str, Any]]:
    """Return the records of the engine, with their schemas.

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
    return records


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
                yield f"{where}.{key}: {'missing' if key not in one else 'superfluous'}: {json.dumps(other.get(key, one.get(key)))}"
            else:
                yield from _differing(one[key], other[key], f"{where}.{key}", "" if inside else key)
    elif isinstance(one, list) and isinstance(other, list) and where.endswith(".fields"):
        names = [[field.get("field") for field in side] for side in (one, other)]
        if names[0] != names[1]:
            yield f"{where}: {names[0]}, expected {names[1]}"
        by_name = {field.get("field"): field for field in one}
        for field in other:
            if (mine := by_name.get(field.get("field"))) is not None:
                yield from _differing(mine, field, f"{where}.{field.get('field')}")
    elif name in OF_RUN:
        if type(one) is not type(other):
            yield f"{where}: {one!r}, expected a value such as {other!r}"
    elif one != other or type(one) is not type(other):
        yield f"{where}: {one!r}, expected {other!r}"
