"""Tables of a separate schema, a publication of them, and a slot that ends with the test."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from airflow_kafka_spark.sources import PostgresCdcSource
from airflow_kafka_spark.sources.base import FrozenWindow, RowSource
from tests.sinks.postgres.kit import Place


class Log:
    """The log of a place's tables.

    :ivar name: of slot and publication.
    """

    def __init__(self, place: Place, *tables: str, root: bool = False) -> None:
        self.place = place
        self.name = "cdc_" + "".join(c if c.isalnum() else "_" for c in place.schema.lower())
        self.tables = [f'{place.quoted}."{table}"' for table in tables]
        which = f"FOR TABLE {', '.join(self.tables)}" if tables else ""
        place.execute(f"CREATE PUBLICATION {self.name} {which} WITH (publish_via_partition_root = {root})")

    def source(self, **options: Any) -> PostgresCdcSource:
        given = {"publication": self.name, "slot": self.name, "topic_prefix": "shop", "tables": self.tables, **options}
        return PostgresCdcSource(self.place.conn_id, **given)

    def close(self) -> None:
        drop_slot(self.place, self.name)
        self.place.execute(f"DROP PUBLICATION IF EXISTS {self.name}")


@contextmanager
def log_of(place: Place, *tables: str, root: bool = False) -> Iterator[Log]:
    made = Log(place, *tables, root=root)
    try:
        yield made
    finally:
        made.close()


def drop_slot(place: Place, name: str) -> None:
    """Drop a slot, also if another session uses it."""
    of_slot = f"FROM pg_replication_slots WHERE slot_name = '{name}'"
    place.execute(f"SELECT pg_terminate_backend(active_pid, 10000) {of_slot} AND active_pid > 0")
    place.execute(f"SELECT pg_drop_replication_slot(slot_name) {of_slot}")


def create_citext(place: Place) -> str:
    """Create a schema with a type whose order does not distinguish upper and lower case, as the extension `citext` does it. The
    servers of tests have no extensions.

    :return: the schema.
    """
    schema = f"of_extensions_{place.connection.info.backend_pid}"
    of_type = f"{schema}.citext"
    place.execute(f"CREATE SCHEMA {schema}; CREATE TYPE {of_type}")
    for name, argument, result in (("textin", "cstring", of_type), ("textout", of_type, "cstring")):
        place.execute(
            f"CREATE FUNCTION {schema}.{name}({argument}) RETURNS {result} AS '{name}' LANGUAGE internal IMMUTABLE STRICT"
        )
    functions = f"INPUT = {schema}.textin, OUTPUT = {schema}.textout"
    place.execute(f"CREATE TYPE {of_type} ({functions}, LIKE = text, CATEGORY = 'S', COLLATABLE = true)")
    place.execute(f"CREATE CAST ({of_type} AS text) WITHOUT FUNCTION AS IMPLICIT")
    place.execute(f"CREATE CAST (text AS {of_type}) WITHOUT FUNCTION AS ASSIGNMENT")
    lowered = "lower(a::text) {} lower(b::text)"
    operators = {1: ("<", "lt"), 2: ("<=", "le"), 3: ("=", "eq"), 4: (">=", "ge"), 5: (">", "gt")}
    made = "CREATE FUNCTION {0}.{1}(a {2}, b {2}) RETURNS {3} LANGUAGE sql IMMUTABLE STRICT AS $$ SELECT {4} $$"
    for symbol, name in operators.values():
        place.execute(made.format(schema, name, of_type, "boolean", lowered.format(symbol)))
        place.execute(
            f"CREATE OPERATOR {schema}.{symbol} (LEFTARG = {of_type}, RIGHTARG = {of_type}, FUNCTION = {schema}.{name})"
        )
    compared = "CASE WHEN lower(a::text) < lower(b::text) THEN -1 WHEN lower(a::text) = lower(b::text) THEN 0 ELSE 1 END"
    place.execute(made.format(schema, "compare", of_type, "integer", compared))
    members = ", ".join(f"OPERATOR {number} {schema}.{symbol}" for number, (symbol, _) in operators.items())
    function = f"FUNCTION 1 {schema}.compare({of_type}, {of_type})"
    place.execute(f"CREATE OPERATOR CLASS {schema}.ops DEFAULT FOR TYPE {of_type} USING btree AS {members}, {function}")
    return schema


def find_problems(source: RowSource) -> dict[str, str]:
    """Return the text of all problems by the option that they are about."""
    texts: dict[str, str] = {}
    for problem in source.validate():
        texts[problem.where] = f"{texts.get(problem.where, '')}{problem.what}. {problem.action}; "
    return texts


class Windows:
    """Windows of a source, read without Spark and without Kafka, as their pipeline reads them."""

    def __init__(self, source: RowSource) -> None:
        self.source = source
        self.position: Mapping[str, Any] | None = None
        self.tokens: dict[int, Mapping[str, Any]] = {}

    def freeze(self) -> FrozenWindow:
        return self.source.freeze(self.position)

    def read(self, window: FrozenWindow) -> list[dict[str, Any]]:
        """Return the records of a window: topic, key, value and timestamp, with JSON decoded."""
        return [record for index in range(len(window.splits)) for record in self.read_split(window, index)]

    def read_split(self, window: FrozenWindow, index: int) -> list[dict[str, Any]]:
        """Return the records of a split, as a task of its own reads it, and keep its token."""
        reader = self.source.make_reader([json.loads(json.dumps(window.splits[index]))], None)
        assert not isinstance(reader, str)
        found = [row for batch in reader.read(0) for row in batch.to_pylist()]
        self.tokens[index] = json.loads(json.dumps(reader.get_token(0)))
        return [{**r, "key": decoded(r["key"]), "value": decoded(r["value"])} for r in found]

    def close(self, window: FrozenWindow, *, advance: bool = True) -> bool:
        """Close a window, as the operator does, and return True if the source holds more.

        :param advance: False: the attempt dies before it moves the slot.
        """
        tokens = [self.tokens.get(index, {}) for index in range(len(window.splits))]
        splits = json.loads(json.dumps(window.splits))
        position = json.loads(json.dumps(window.position))
        self.position = json.loads(
            json.dumps(self.source.compute_position_after(splits, position, tokens) if splits else position)
        )
        assert self.position is not None
        end = self.source.find_final_position(self.position) if splits and window.remaining else None
        if end is not None:
            self.position = json.loads(json.dumps(end))
        assert self.position is not None
        if advance:
            self.source.finish_window(self.position)
        return window.remaining and end is None

    def next(self) -> list[dict[str, Any]]:
        """Freeze, read and close a window."""
        window = self.freeze()
        found = self.read(window)
        self.close(window)
        return found

    def drain(self) -> list[dict[str, Any]]:
        """Read windows until no change is left."""
        found: list[dict[str, Any]] = []
        for _ in range(50):
            window = self.freeze()
            found += self.read(window)
            if not self.close(window):
                return found
        raise AssertionError("windows remain")


class Copy:
    """A consumer that keeps a copy of tables, and refuses an event that does not fit the row that it has.

    :param moving: tables whose rows may be read in two chunks under the same key.
    """

    def __init__(self, moving: Collection[str] = ()) -> None:
        self.moving = moving
        self.tables: dict[str, dict[Any, Any]] = {}
        self.count: dict[str, int] = {}

    def apply(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            if record["value"] is None:
                continue
            op, after = record["value"]["op"], record["value"]["after"]
            self.count[op] = self.count.get(op, 0) + 1
            name = record["value"]["source"]["table"]
            table = self.tables.setdefault(name, {})
            if op == "t":
                table.clear()
                continue
            key = tuple(record["key"].values())
            if name not in self.moving or op != "r":
                assert (key in table) == (op in "ud"), f"{op} of {key}: an event is missing, or there twice"
            before = record["value"]["before"]
            if before is not None and name not in self.moving:
                # PostgreSQL's log has the key only, unless the replica identity is FULL.
                kept = {column: value for column, value in table[key].items() if before.get(column) is not None}
                assert kept == {column: before[column] for column in kept}, f"{op} of {key}: an event is missing"
            if op == "d":
                del table[key]
            else:
                table[key] = after


def number_events(rows: Iterable[dict[str, Any]], prefix: str) -> Iterator[dict[str, Any]]:
    """Yield events with their numbers, and the records of their transactions, one by one."""
    id, counts = "", Counter[bytes]()
    topic = f"{prefix}.transaction"
    for row in rows:
        if row["topic"] == "" and row["key"] is not None:
            id, counts = row["key"].decode(), Counter()
        elif row["topic"] == "" and counts:
            shown = [{"data_collection": json.loads(table), "event_count": count} for table, count in counts.items()]
            end = {"status": "END", "id": id, "event_count": counts.total(), "data_collections": shown, "ts_ms": row["timestamp"]}
            yield {**row, "topic": topic, "key": to_json({"id": id}), "value": to_json(end)}
        elif row["topic"] and row["value"] is None:
            yield row
        elif row["topic"]:
            if not counts:
                begin = {"status": "BEGIN", "id": id, "event_count": None, "data_collections": None, "ts_ms": row["timestamp"]}
                yield {**row, "topic": topic, "key": to_json({"id": id}), "value": to_json(begin)}
            before, table, after = row["value"].split(b"\1")
            counts[table] += 1
            numbers = {"id": id, "total_order": counts.total(), "data_collection_order": counts[table]}
            yield {**row, "value": before + to_json(numbers) + after}


def extract_rows(events: Iterable[dict[str, Any]], mode: str) -> list[dict[str, Any]]:
    """Return the records of rows that Debezium's ExtractNewRecordState makes of events with tombstones.

    Their fields `op`, `source.ts_ms` and `table` are added, the last one as `of`.
    """
    found = []
    for event in events:
        value = decoded(event["value"])
        if value is None:
            found += [event] if mode not in ("drop", "rewrite") else []
            continue
        is_delete = value["op"] == "d"
        if is_delete and mode not in ("rewrite", "rewrite-with-tombstone"):
            continue
        row = {**value["before" if is_delete else "after"], "__op": value["op"]}
        row |= {"__source_ts_ms": value["source"]["ts_ms"], "__of": value["source"]["table"]}
        if mode.startswith("rewrite"):
            row["__deleted"] = "true" if is_delete else "false"
        found.append({**event, "value": row})
    return found


ROW_FIELDS = ("op", "table:of", "source.ts_ms")
"""`add_fields` of the rows of :func:`extract_rows`."""


def to_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def take_transactions(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a window of whole transactions, without the records of these, which have to count them all."""
    events = [record for record in records if not record["topic"].endswith(".transaction")]
    given = [record["value"] for record in records if record["topic"].endswith(".transaction")]
    assert [value["status"] for value in given] == ["BEGIN", "END"] * (len(given) // 2)
    counted = sum(record["value"] is not None for record in events)
    assert sum(value["event_count"] or 0 for value in given) == (counted if given else 0)
    return events


def decoded(value: bytes | None) -> Any:
    return None if value is None else json.loads(value)


def changes(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return per record the operation, the old and the new row; ``("tombstone", key)``."""
    return [
        ("tombstone", r["key"]) if r["value"] is None else (r["value"]["op"], r["value"]["before"], r["value"]["after"])
        for r in records
    ]
