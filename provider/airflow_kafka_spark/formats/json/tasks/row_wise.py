"""What a JSON record means: the reference that the fast path of :mod:`.json.tasks.decode` has to agree with.

Plain Python, no Arrow. :class:`Reference` turns the bytes of one record into one Python value per column, in the form that
``pyarrow.array(values, type)`` takes, or raises :class:`.BadValue` with the reason. The table of meanings is in :class:`.Json`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from airflow_kafka_spark.formats.json.logical_types import VARIABLE, Carried, carried_reader, variable
from airflow_kafka_spark.formats.text import (
    MAX_NESTING,
    MAX_SECOND,
    MIN_SECOND,
    PRIMITIVES,
    BadValue,
    Reader,
    after_space,
    check_unicode,
    decimal_reader,
    found_at,
    match_integer,
    micros,
    next_item,
    read_key,
    read_string,
    short,
    skip_space,
    skip_value,
    text_reader,
    too_deep,
    unexpected,
)
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Struct, Text


class Reference:
    """Reads records of one schema.

    :param columns: the schema.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.epochs: list[bool] = []
        """Of each ``timestamp`` and each value that is carried, in order, whether the last was a number: so will be the next."""
        self._names = [c.name for c in columns]
        self._read = self._object(columns)

    def read(self, value: bytes) -> list[Any]:
        """One value per column of one record.

        :raises BadValue: the record is not one JSON object, or a value in it does not fit its column.
        """
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError as e:
            raise BadValue(f"not UTF-8: byte 0x{value[e.start]:02x} at position {e.start}") from None
        start = skip_space(text).end()  # type: ignore[union-attr]
        if too_deep(value):
            raise BadValue(f"objects and arrays nested more than {MAX_NESTING} deep")
        if not text.startswith("{", start):
            raise BadValue(f"expected a JSON object, found {found_at(text, start)}")
        try:
            row, end = self._read(text, start)
        except IndexError:
            raise BadValue(f"not JSON: it ends too early, after {len(text)} characters") from None
        end = skip_space(text, end).end()  # type: ignore[union-attr]
        if end != len(text):
            raise BadValue(f"expected one JSON object, found {found_at(text, end)} after it, at character {end + 1}")
        return [row[name] for name in self._names]

    # --- values of any type ------------------------------------------------------------------------------------------

    def _value(self, data_type: DataType, nullable: bool) -> Reader:
        """Reads a value that may be null."""
        read = self._typed(data_type)

        def value(text: str, i: int) -> tuple[Any, int]:
            if not text.startswith("null", i):
                return read(text, i)
            if nullable:
                return None, i + 4
            raise BadValue(f"found null, expected {data_type} NOT NULL")

        return value

    def _typed(self, data_type: DataType) -> Reader:
        if isinstance(data_type, Struct):
            return self._object(data_type.fields)
        if isinstance(data_type, Array):
            return self._array(data_type)
        if isinstance(data_type, Map):
            return self._map(data_type)
        if isinstance(data_type, Text):
            return text_reader(data_type)
        if isinstance(data_type, Decimal):
            return decimal_reader(data_type)
        if isinstance(data_type, Carried):
            return self._carried(data_type)
        if data_type.name == "timestamp":
            return self._instant()
        return PRIMITIVES[data_type.name]

    def _carried(self, kind: Carried) -> Reader:
        read = carried_reader(kind, self._expected())
        if kind.unit not in ("unscaled", "variable"):
            return read
        read_parts = self._object(VARIABLE)

        def decimal(text: str, i: int) -> tuple[Any, int]:
            if text[i] != "{":
                return read(text, i)
            parts, end = read_parts(text, i)
            return variable(parts["value"], parts["scale"], kind), end

        return decimal

    def _object(self, columns: Sequence[Column]) -> Reader:
        readers = {c.name: self._value(c.type, c.nullable) for c in columns}
        required = {c.name: c.type for c in columns if not c.nullable}
        blank = dict.fromkeys(readers)

        def read(text: str, i: int) -> tuple[Any, int]:
            if text[i] != "{":
                raise unexpected(text, i, "a JSON object")
            row: dict[str, Any] = {}
            i = after_space(text, i + 1)
            while text[i] != "}":
                name, i = read_key(text, i)
                reader = readers.get(name)
                if reader is None:
                    i = skip_value(text, i)
                elif name in row:
                    raise BadValue("found twice in one object, expected once").within(f".{name}")
                else:
                    try:
                        row[name], i = reader(text, i)
                    except BadValue as e:
                        raise e.within(f".{name}") from None
                i = next_item(text, i, "}")
            for name in required:
                if name not in row:
                    raise BadValue(f"missing, expected {required[name]} NOT NULL").within(f".{name}")
            return blank | row, i + 1

        return read

    def _array(self, data_type: Array) -> Reader:
        read_element = self._value(data_type.element, data_type.contains_null)

        def read(text: str, i: int) -> tuple[Any, int]:
            if text[i] != "[":
                raise unexpected(text, i, str(data_type))
            items: list[Any] = []
            i = after_space(text, i + 1)
            while text[i] != "]":
                try:
                    item, i = read_element(text, i)
                except BadValue as e:
                    raise e.within(f"[{len(items)}]") from None
                items.append(item)
                i = next_item(text, i, "]")
            return items, i + 1

        return read

    def _map(self, data_type: Map) -> Reader:
        read_value = self._value(data_type.value, data_type.value_contains_null)

        def read(text: str, i: int) -> tuple[Any, int]:
            if text[i] != "{":
                raise unexpected(text, i, str(data_type))
            entries: dict[str, Any] = {}
            i = after_space(text, i + 1)
            while text[i] != "}":
                name, i = read_key(text, i)
                try:
                    if name in entries:
                        raise BadValue("found twice in one object, expected once")
                    check_unicode(name)
                    entries[name], i = read_value(text, i)
                except BadValue as e:
                    raise e.within(f"[{short(ascii(name))}]") from None
                i = next_item(text, i, "}")
            return list(entries.items()), i + 1

        return read

    def _expected(self) -> Callable[[bool], None]:
        """What notes whether a value came as a number."""
        index = len(self.epochs)
        self.epochs.append(False)

        def seen(number: bool) -> None:
            self.epochs[index] = number

        return seen

    def _instant(self) -> Reader:
        seen = self._expected()

        def read(text: str, i: int) -> tuple[Any, int]:
            if text[i] == '"':
                seen(False)
                found, end = read_string(text, i)
                return micros(found, "timestamp", zoned=True), end
            match = match_integer(text, i)
            if match is None:
                raise unexpected(text, i, "timestamp")
            seen(True)
            if len(match.group()) > 20 or not MIN_SECOND <= int(match.group()) <= MAX_SECOND:
                expected = "timestamp: an integer is seconds since 1970, in the years 0001 to 9999"
                raise BadValue(f"found {short(match.group())}, expected {expected}")
            return int(match.group()) * 1_000_000, match.end()

        return read
