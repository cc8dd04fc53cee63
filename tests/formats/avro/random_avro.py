"""Random Avro schemas, values, readers of other versions, and damaged bytes."""

from __future__ import annotations

import datetime
import decimal
import io
import random
from typing import Any

import fastavro

LEAVES = ("boolean", "int", "long", "float", "double", "bytes", "string")
LOGICAL = {
    "date": "int",
    "time-millis": "int",
    "time-micros": "long",
    "timestamp-millis": "long",
    "timestamp-micros": "long",
    "local-timestamp-millis": "long",
    "local-timestamp-micros": "long",
    "uuid": "string",
}
UTC = datetime.timezone.utc
TEXTS = ("", "a", "é😀", "x" * 70, "\x00\n", "null")


class RandomAvro:
    """Random schemas and values.

    :param seed: equal seeds give equal schemas and values.
    """

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"N{self.names}"

    def record(self, depth: int = 0) -> dict[str, Any]:
        fields = [{"name": f"c{n}", "type": self.type(depth)} for n in range(self.r.randint(1, 5))]
        return {"type": "record", "name": self.name(), "fields": fields}

    def type(self, depth: int) -> Any:
        kind = self.r.random()
        if kind < 0.3:
            inner = self.type(depth + 1)
            if isinstance(inner, list):
                return inner
            return ["null", inner] if self.r.random() < 0.7 else [inner, "null"]
        if depth < 3 and kind < 0.6:
            shape = self.r.choice(["array", "map", "record"])
            if shape == "record":
                return self.record(depth + 1)
            return {"type": shape, "items" if shape == "array" else "values": self.type(depth + 1)}
        if kind < 0.62:
            return ["null", "string", "long"]
        return self.leaf()

    def leaf(self) -> Any:
        kind = self.r.random()
        if kind < 0.5:
            return self.r.choice(LEAVES)
        if kind < 0.6:
            return {"type": "enum", "name": self.name(), "symbols": ["A", "B", "C"]}
        if kind < 0.65:
            return {"type": "fixed", "name": self.name(), "size": self.r.choice([1, 3, 16])}
        if kind < 0.8:
            precision = self.r.choice([1, 5, 12, 38])
            logical = {"logicalType": "decimal", "precision": precision, "scale": self.r.randint(0, min(precision, 6))}
            if self.r.random() < 0.3:
                return {"type": "fixed", "name": self.name(), "size": 16, **logical}
            return {"type": "bytes", **logical}
        name = self.r.choice(list(LOGICAL))
        return {"type": LOGICAL[name], "logicalType": name}

    # --- values ------------------------------------------------------------------------------------------------------

    def value(self, schema: Any) -> Any:
        """A value as the raw types have it: logical types are left out, see :func:`bare`."""
        if isinstance(schema, list):
            return self.value(self.r.choice(schema))
        if isinstance(schema, str):
            return self.scalar(schema)
        kind = schema["type"]
        if kind == "record":
            return {f["name"]: self.value(f["type"]) for f in schema["fields"]}
        if kind == "array":
            return [self.value(schema["items"]) for _ in range(self.r.choice([0, 1, 3]))]
        if kind == "map":
            return {self.r.choice(TEXTS): self.value(schema["values"]) for _ in range(self.r.choice([0, 1, 3]))}
        if kind == "enum":
            return self.r.choice(schema["symbols"])
        if "logicalType" in schema:
            return self.logical(schema)
        return self.r.randbytes(schema["size"]) if kind == "fixed" else self.scalar(kind)

    def scalar(self, kind: str) -> Any:
        r = self.r
        if kind in ("int", "long"):
            bits = r.choice([1, 7, 14, 31] if kind == "int" else [1, 7, 31, 40, 63])
            return r.randint(-(1 << bits), (1 << bits) - 1)
        if kind in ("float", "double"):
            return r.choice([0.0, -0.0, 1.5, -2.25, float("inf"), float("-inf"), float("nan")])
        texts = r.choice(TEXTS)
        return {"boolean": r.random() < 0.5, "string": texts, "bytes": texts.encode() + b"\xff", "null": None}[kind]

    def logical(self, schema: dict[str, Any]) -> Any:
        name = schema["logicalType"]
        if name == "decimal":
            most = 10 ** schema["precision"] - 1
            unscaled = self.r.choice([0, 1, -1, most, -most, self.r.randint(-most, most), 128, -129])
            unscaled = max(-most, min(most, unscaled))
            size = schema.get("size") or (8 + (unscaled + (unscaled < 0)).bit_length()) // 8
            return unscaled.to_bytes(size, "big", signed=True)
        if name == "uuid":
            return "123e4567-e89b-12d3-a456-426614174000"
        if name == "date":
            return self.r.choice([0, -1, -719_162, 2_932_896, 20_000])
        if name.startswith("time-"):
            return self.r.randint(0, 86_399_999 if name == "time-millis" else 86_399_999_999)
        unit = 1000 if name.endswith("millis") else 1_000_000
        return self.r.choice([0, -1, 1_790_000_000 * unit + 1, -62_135_596_800 * unit, 253_402_300_800 * unit - 1])

    # --- other versions, damage --------------------------------------------------------------------------------------

    def reader(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a later version of the record's schema."""
        fields: list[dict[str, Any]] = []
        for f in schema["fields"]:
            chance, kind = self.r.random(), f["type"]
            if chance < 0.2:
                continue
            if chance < 0.4 and kind in ("int", "long", "float"):
                wider = {"int": ["long", "float", "double"], "long": ["float", "double"], "float": ["double"]}
                fields.append({**f, "type": self.r.choice(wider[kind])})
            elif chance < 0.5 and kind in ("bytes", "string"):
                fields.append({**f, "type": "string" if kind == "bytes" else "bytes"})
            elif chance < 0.6:
                fields.append({**f, "name": f"{f['name']}_new", "aliases": [f["name"]]})
            elif chance < 0.8 and not isinstance(kind, list):
                fields.append({**f, "type": ["null", kind]})
            elif chance < 0.85 and isinstance(kind, list) and len(kind) == 2:
                fields.append({**f, "type": next(k for k in kind if k != "null")})
            elif isinstance(kind, dict) and kind["type"] == "record":
                fields.append({**f, "type": self.reader(kind)})
            else:
                fields.append(f)
        fields.insert(
            self.r.randint(0, len(fields)),
            self.r.choice(
                [
                    {"name": "added", "type": ["null", "string"], "default": None},
                    {"name": "added", "type": {"type": "array", "items": "int"}, "default": [1, 2]},
                    {"name": "added", "type": "double", "default": 1.5},
                ]
            ),
        )
        return {**schema, "fields": fields}

    def damaged(self, value: bytes) -> bytes:
        """Return a value with some bytes changed, removed or added."""
        how = self.r.random()
        if how < 0.3 or not value:
            return value[: self.r.randint(0, len(value))]
        if how < 0.45:
            return value + self.r.randbytes(self.r.randint(1, 3))
        at = self.r.randrange(len(value))
        odd = self.r.choice([b"\xff", b"\x80", b"\x01", b"\x04", b"\xff" * 10, self.r.randbytes(1)])
        return value[:at] + odd + value[at + (how < 0.8) :]


def bare(schema: Any) -> Any:
    """Return the schema without logical types."""
    if isinstance(schema, list):
        return [bare(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    if "logicalType" in schema and schema["type"] != "fixed":
        return schema["type"]
    kept = {k: v for k, v in schema.items() if k not in ("logicalType", "precision", "scale")}
    if "fields" in kept:
        kept["fields"] = [{**f, "type": bare(f["type"])} for f in kept["fields"]]
    return {k: bare(v) if k in ("items", "values") else v for k, v in kept.items()}


def encoded(schema: Any, value: Any) -> bytes:
    """Return a value of a bare schema, encoded by fastavro."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def shown(schema: Any, raw: Any) -> Any:
    """Return the expected value of a column for a raw value, by an independent implementation of the table of types."""
    if isinstance(schema, list):
        if raw is None:
            return None
        if len(schema) == 3:
            return {"member0": raw if isinstance(raw, str) else None, "member1": raw if isinstance(raw, int) else None}
        return shown(next(s for s in schema if s != "null"), raw)
    if not isinstance(schema, dict):
        return raw
    if schema["type"] == "record":
        return {f["name"]: shown(f["type"], raw[f["name"]]) for f in schema["fields"]}
    if schema["type"] == "array":
        return [shown(schema["items"], v) for v in raw]
    if schema["type"] == "map":
        return [(k, shown(schema["values"], v)) for k, v in raw.items()]
    return _shown_logical(schema, schema.get("logicalType", ""), raw)


def _shown_logical(schema: dict[str, Any], name: str, raw: Any) -> Any:
    if name == "decimal":
        unscaled = int.from_bytes(raw, "big", signed=True)
        return decimal.Decimal(unscaled).scaleb(-schema["scale"], decimal.Context(prec=60))
    if name == "date":
        return datetime.date(1970, 1, 1) + datetime.timedelta(days=raw)
    if "timestamp" in name:
        zone = None if name.startswith("local") else UTC
        micros = raw * (1000 if name.endswith("millis") else 1)
        return datetime.datetime(1970, 1, 1, tzinfo=zone) + datetime.timedelta(microseconds=micros)
    return raw
