"""Column types in Spark's DDL, read without a JVM: ``id bigint NOT NULL, tags array<string>, s struct<a: int>``.

:func:`parse_ddl` returns frozen values; :func:`to_arrow_schema` returns the Arrow schema of such values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeAlias

from airflow_kafka_spark.errors import SchemaInvalid
from airflow_kafka_spark.errors.base import find_similar_name

if TYPE_CHECKING:
    import pyarrow as pa


INTEGER_BITS: Mapping[str, int] = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
"""Number of bits of Spark's integers, by the names of their types."""

MAX_PRECISION = 38
"""Maximum number of digits of Spark's decimals."""


@dataclass(frozen=True)
class Primitive:
    """A type without parameters, by Spark's name: ``tinyint``, ``smallint``, ``int``, ``bigint``, ``float``, ``double``,
    ``boolean``, ``binary``, ``date``, ``timestamp`` (an instant) or ``timestamp_ntz`` (a wall clock)."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Text:
    """``string``, or ``varchar(n)`` / ``char(n)``: at most ``max_length`` characters (code points), never padded or cut."""

    max_length: int | None = None

    def __str__(self) -> str:
        return "string" if self.max_length is None else f"varchar({self.max_length})"


@dataclass(frozen=True)
class Decimal:
    """``decimal(precision, scale)``: 1 to 38 digits, ``scale`` of them after the point."""

    precision: int = 10
    scale: int = 0

    def __str__(self) -> str:
        return f"decimal({self.precision},{self.scale})"


@dataclass(frozen=True)
class Array:
    """``array<element>``."""

    element: DataType
    contains_null: bool = True

    def __str__(self) -> str:
        return f"array<{self.element}>"


@dataclass(frozen=True)
class Map:
    """``map<key, value>``; keys are never null."""

    key: DataType
    value: DataType
    value_contains_null: bool = True

    def __str__(self) -> str:
        return f"map<{self.key},{self.value}>"


@dataclass(frozen=True)
class Struct:
    """``struct<name: type, ...>``."""

    fields: tuple[Column, ...]

    def __str__(self) -> str:
        return f"struct<{','.join(f'{_quote(f.name)}:{f.type}{_format_nullability(f)}' for f in self.fields)}>"


DataType: TypeAlias = Primitive | Text | Decimal | Array | Map | Struct


@dataclass(frozen=True)
class Column:
    """A column, or a field of a struct."""

    name: str
    type: DataType
    nullable: bool = True
    comment: str = ""

    def __str__(self) -> str:
        return f"{_quote(self.name)} {self.type}{_format_nullability(self)}"


class SparkSchema(Protocol):
    """The part of pyspark's ``StructType`` that is used here."""

    def jsonValue(self) -> dict[str, Any]:  # noqa: N802 - pyspark's name
        """Return the schema as plain dicts, lists and strings."""


def quote_with_backticks(name: str) -> str:
    """Return a name in backticks, as Spark's SQL accepts it with any characters."""
    return "`" + name.replace("`", "``") + "`"


def _quote(name: str) -> str:
    return name if name.isascii() and _PLAIN_NAME.fullmatch(name) else quote_with_backticks(name)


def _format_nullability(column: Column) -> str:
    return "" if column.nullable else " NOT NULL"


_PRIMITIVES: Mapping[str, str] = {
    **dict.fromkeys(("tinyint", "byte"), "tinyint"),
    **dict.fromkeys(("smallint", "short"), "smallint"),
    **dict.fromkeys(("int", "integer"), "int"),
    **dict.fromkeys(("bigint", "long"), "bigint"),
    **dict.fromkeys(("float", "real"), "float"),
    **dict.fromkeys(("timestamp", "timestamp_ltz"), "timestamp"),
    **{name: name for name in ("double", "boolean", "binary", "date", "timestamp_ntz")},
}
_DECIMALS = ("decimal", "dec", "numeric")
_KNOWN = (
    *_PRIMITIVES,
    "string",
    "varchar(n)",
    "char(n)",
    *(f"{d}(p,s)" for d in _DECIMALS),
    "array<...>",
    "map<...>",
    "struct<...>",
)
_MAX_NESTING = 50
_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("int64", "serial8", "bigserial", "uint32"), "bigint"),
    **dict.fromkeys(("int32", "int4", "serial", "mediumint", "uint16"), "int"),
    **dict.fromkeys(("int16", "int2", "uint8"), "smallint"),
    **dict.fromkeys(("float64", "float8"), "double"),
    **dict.fromkeys(("float32", "float4"), "float"),
    **dict.fromkeys(("text", "str", "uuid", "json", "jsonb", "varchar2", "enum"), "string"),
    **dict.fromkeys(("bytes", "bytea", "blob", "varbinary"), "binary"),
    **dict.fromkeys(("datetime", "timestamptz", "instant"), "timestamp"),
    **dict.fromkeys(("number", "money"), "decimal(p,s)"),
    "bool": "boolean",
    "int8": "tinyint` for 8 bits, or `bigint",
}
"""Types of other systems by name, with the type to write."""

_PLAIN_NAME = re.compile(r"\w*[^\W\d]\w*")
_TOKENS = re.compile(
    r"""\s+|(?P<word>\w+)|(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")|(?P<mark>[<>(),:])""",
    re.S,
)


class _Token(NamedTuple):
    """A token of a DDL text. ``kind`` is ``word``, ``quoted``, ``text``, ``mark`` or ``end``."""

    kind: str
    text: str
    position: int


@lru_cache(maxsize=256)
def parse_ddl(text: str) -> tuple[Column, ...]:
    """Read a schema in Spark's DDL.

    :param text: columns separated by commas, ``name type [NOT NULL] [COMMENT '...']``; or all of them as one ``struct<...>``,
        which is how Spark prints a schema. Type names in any case; a colon may stand between name and type; names that are not
        plain words in backticks.
    :return: the columns, in order.
    :raises SchemaInvalid: naming the position, what was found there and what was expected; also for names that occur twice, or
        twice but for their case, since neither Spark nor most databases distinguish these.
    """
    parser = _DdlParser(text)
    if parser.peek_word() == "struct" and parser.tokens[1].text == "<":
        column_type = parser.parse_data_type()
        assert isinstance(column_type, Struct)
        columns = column_type.fields
    else:
        columns = parser.parse_columns(closing="")
    if parser.token.kind != "end":
        parser.fail("`,` or the end of the schema")
    parser.refuse_unknown_types()
    return columns


class _DdlParser:
    """Recursive-descent parser over the tokens of a DDL text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._split_tokens(text)
        self.next = 0
        self.nesting = 0
        self.unknown_types: list[_Token] = []

    def _split_tokens(self, text: str) -> list[_Token]:
        tokens: list[_Token] = []
        position = 0
        while position < len(text):
            match = _TOKENS.match(text, position)
            if match is None:
                expected = "a name, a type or one of `,` `:` `<` `>` `(` `)`; other names go in backticks"
                if not tokens and text[position] == "{":
                    expected = "columns, as in `id bigint, name string`. A text of JSON Schema goes to `Json.of_json_schema`"
                raise SchemaInvalid(text, position, f"`{text[position]}`", expected)
            if match.lastgroup:
                tokens.append(_Token(match.lastgroup, match.group(), position))
            position = match.end()
        return [*tokens, _Token("end", "", len(text))]

    @property
    def token(self) -> _Token:
        """The current token."""
        return self.tokens[self.next]

    def peek_word(self) -> str:
        """Return the current token in lower case if it is a word, else an empty string."""
        return self.token.text.lower() if self.token.kind == "word" else ""

    def fail(self, expected: str, token: _Token | None = None) -> NoReturn:
        """Raise the error for the current token, or for another one."""
        self.refuse_unknown_types()
        token = token or self.token
        if not self.text.strip():
            expected += ", as in `id bigint, name string`"
        raise SchemaInvalid(self.text, token.position, f"`{token.text}`" if token.text else "the end", expected)

    def take(self, mark: str, expected: str = "") -> None:
        """Pass a mark, which has to be the current token."""
        if self.token.text != mark or self.token.kind != "mark":
            self.fail(expected or f"`{mark}`")
        self.next += 1

    def accept(self, mark: str) -> bool:
        """Pass a mark if it is the current token, and return True if it was."""
        found = self.token.kind == "mark" and self.token.text == mark
        self.next += found
        return found

    def parse_columns(self, closing: str) -> tuple[Column, ...]:
        columns: list[Column] = []
        seen: dict[str, str] = {}
        while True:
            at = self.token
            column = self.parse_column()
            other = seen.setdefault(column.name.casefold(), column.name)
            if len(seen) == len(columns):
                self.fail(
                    f"another name: `{other}` is there already"
                    + ("" if other == column.name else ", and Spark treats names that differ only by case as one"),
                    at,
                )
            columns.append(column)
            if not self.accept(","):
                break
        if closing:
            self.take(closing, f"`,` or `{closing}`")
        return tuple(columns)

    def parse_column(self) -> Column:
        name = self.parse_name()
        self.accept(":")
        data_type = self.parse_data_type()
        nullable, comment = True, ""
        while self.peek_word() in ("not", "comment"):
            self.next += 1
            if self.tokens[self.next - 1].text.lower() == "comment":
                comment = self.parse_comment()
            elif self.peek_word() == "null":
                self.next += 1
                nullable = False
            else:
                self.fail("`NULL` after `NOT`")
        return Column(name, data_type, nullable, comment)

    def parse_name(self) -> str:
        kind, text, _ = self.token
        if kind == "quoted" and len(text) > 2:
            name = text[1:-1].replace("``", "`")
        elif kind == "word" and _PLAIN_NAME.fullmatch(text):
            name = text
        else:
            self.fail("the name of a column" if kind != "word" else "the name of a column; one of digits only goes in backticks")
        self.next += 1
        return name

    def parse_comment(self) -> str:
        if self.token.kind != "text":
            self.fail("the comment in quotes")
        text = self.token.text
        self.next += 1
        return re.sub(r"\\(.)", r"\1", text[1:-1].replace(text[0] * 2, text[0]), flags=re.S)

    def parse_data_type(self) -> DataType:
        at, word = self.token, self.peek_word()
        if word in _PRIMITIVES:
            self.next += 1
            return Primitive(_PRIMITIVES[word])
        if word in ("array", "map", "struct"):
            return self.parse_nested(word)
        if word in _DECIMALS:
            self.next += 1
            return self.parse_decimal(at)
        if word in ("string", "varchar", "char", "character"):
            self.next += 1
            return Text() if word == "string" else Text(self.parse_length())
        if not word:
            self.fail("a type")
        # The other columns are parsed, too, so that all unknown types are named together.
        self.unknown_types.append(at)
        self.next += 1
        if self.accept("("):
            while not self.accept(")") and self.token.kind != "end":
                self.next += 1
        return Text()

    def refuse_unknown_types(self) -> None:
        """Raise :class:`SchemaInvalid` for the first unknown type, with the names of the others."""
        if not self.unknown_types:
            return
        first, *others = self.unknown_types
        listed = ", ".join(dict.fromkeys(f"`{token.text}`{_suggest_type(token)}" for token in others))
        expected = f"a type{_suggest_type(first)}: one of {', '.join(_KNOWN)}"
        expected += f". Further unknown types: {listed}" if others else ""
        raise SchemaInvalid(self.text, first.position, f"`{first.text}`", expected)

    def parse_nested(self, word: str) -> DataType:
        self.nesting += 1
        if self.nesting > _MAX_NESTING:
            self.fail(f"types nested at most {_MAX_NESTING} deep")
        self.next += 1
        self.take("<", f"`<` after `{word}`")
        result: DataType
        if word == "array":
            result = Array(self.parse_data_type())
            self.take(">")
        elif word == "map":
            key = self.parse_data_type()
            self.take(",")
            result = Map(key, self.parse_data_type())
            self.take(">")
        else:
            result = Struct(self.parse_columns(closing=">"))
        self.nesting -= 1
        return result

    def parse_number(self, expected: str) -> int:
        token = self.token
        if token.kind != "word" or not re.fullmatch("[0-9]{1,9}", token.text):
            self.fail(expected)
        self.next += 1
        return int(token.text)

    def parse_length(self) -> int:
        self.take("(", "`(` and the greatest length in characters")
        length = self.parse_number("the greatest length in characters")
        if length < 1:
            self.fail("a length of at least 1", self.tokens[self.next - 1])
        self.take(")")
        return length

    def parse_decimal(self, at: _Token) -> Decimal:
        precision, scale = 10, 0
        if self.accept("("):
            precision = self.parse_number("the number of digits, 1 to 38")
            if self.accept(","):
                scale = self.parse_number("the number of digits after the point")
            self.take(")", "`,` or `)`")
        if not (1 <= precision <= MAX_PRECISION and scale <= precision):
            expected = "decimal(p,s) with 1 <= p <= 38 and s <= p"
            raise SchemaInvalid(self.text, at.position, f"`{at.text}({precision},{scale})`", expected)
        return Decimal(precision, scale)


def _suggest_type(token: _Token) -> str:
    """Return the type that was probably meant, in parentheses; "" if none is similar."""
    word = token.text.lower()
    meant = _OTHER_NAMES.get(word) or find_similar_name(word, (k.partition("(")[0].partition("<")[0] for k in _KNOWN))
    return f" (perhaps `{meant}`?)" if meant else ""


def parse_columns(schema: str | SparkSchema) -> tuple[Column, ...]:
    """Return the columns of a schema given as DDL text or as a pyspark ``StructType``, without importing pyspark.

    :raises SchemaInvalid: the text is not DDL, the object is no ``StructType``, or it holds an unknown type.
    """
    if isinstance(schema, str):
        return parse_ddl(schema)
    value = schema.jsonValue() if hasattr(schema, "jsonValue") else None
    if not isinstance(value, Mapping) or value.get("type") != "struct":
        raise SchemaInvalid(repr(schema), 0, f"a {type(schema).__name__}", "DDL text or a pyspark StructType")
    parsed = _parse_json_value(value)
    if not isinstance(parsed, Struct) or not parsed.fields:
        raise SchemaInvalid(repr(schema), 0, "a StructType without fields", "at least one column")
    return parsed.fields


def _parse_json_value(value: Any) -> DataType:
    """Return a type from its description by pyspark's ``jsonValue``."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "array":
        return Array(_parse_json_value(value["elementType"]), value.get("containsNull", True))
    if kind == "map":
        return Map(
            _parse_json_value(value["keyType"]), _parse_json_value(value["valueType"]), value.get("valueContainsNull", True)
        )
    if kind == "struct":
        fields = []
        for f in value["fields"]:
            comment = (f.get("metadata") or {}).get("comment", "")
            fields.append(Column(f["name"], _parse_json_value(f["type"]), f.get("nullable", True), comment))
        _refuse_duplicates(fields)
        return Struct(tuple(fields))
    if isinstance(value, str):
        parser = _DdlParser(value)
        data_type = parser.parse_data_type()
        if parser.token.kind == "end" and not parser.unknown_types:
            return data_type
    raise SchemaInvalid(str(value), 0, f"the type {value}", f"one of {', '.join(_KNOWN)}")


def _refuse_duplicates(fields: Sequence[Column]) -> None:
    seen: dict[str, str] = {}
    for f in fields:
        if not f.name:
            raise SchemaInvalid("StructType", 0, "a column without a name", "a name")
        if f.name.casefold() in seen:
            raise SchemaInvalid(
                f.name, 0, f"`{f.name}` beside `{seen[f.name.casefold()]}`", "names that differ by more than case"
            )
        seen[f.name.casefold()] = f.name


def to_arrow_type(data_type: DataType) -> pa.DataType:
    """Return the Arrow type: ``timestamp`` becomes ``timestamp[us, UTC]``, ``timestamp_ntz`` becomes ``timestamp[us]``, NOT NULL
    fields of a struct are not nullable.
    """
    import pyarrow as pa

    if isinstance(data_type, Primitive):
        return _list_arrow_primitives()[data_type.name]
    if isinstance(data_type, Text):
        return pa.string()
    if isinstance(data_type, Decimal):
        return pa.decimal128(data_type.precision, data_type.scale)
    if isinstance(data_type, Array):
        return pa.list_(pa.field("item", to_arrow_type(data_type.element), nullable=data_type.contains_null))
    if isinstance(data_type, Map):
        return pa.map_(
            to_arrow_type(data_type.key),
            pa.field("value", to_arrow_type(data_type.value), nullable=data_type.value_contains_null),
        )
    return pa.struct([_to_arrow_field(f) for f in data_type.fields])


@lru_cache(maxsize=1)
def _list_arrow_primitives() -> Mapping[str, pa.DataType]:
    import pyarrow as pa

    return {
        "tinyint": pa.int8(),
        "smallint": pa.int16(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestamp_ntz": pa.timestamp("us"),
    }


def _to_arrow_field(column: Column) -> pa.Field:
    import pyarrow as pa

    return pa.field(column.name, to_arrow_type(column.type), nullable=column.nullable)


def to_arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """Return the Arrow schema of columns, see :func:`to_arrow_type`; NOT NULL columns are not nullable. Comments are left out."""
    import pyarrow as pa

    return pa.schema([_to_arrow_field(c) for c in columns])
