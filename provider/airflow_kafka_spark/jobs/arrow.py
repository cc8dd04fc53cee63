"""Translate a chain of transforms, as Spark's analyzer leaves it, into a program that Spark's tasks run over Arrow batches.

:class:`Builder` collects the nodes of the program (``tasks/arrow.py`` runs it), and keeps equal expressions once. Only the types,
literals, casts and expressions of this module are translated. If a chain has any other, Spark computes the whole chain.

Expressions that fail for some values are translated in Spark's ANSI mode, its default since 4.0, and as ``try_...``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_kafka_spark.jobs.tasks.arrow import (
    CALL,
    CASE,
    COLUMN,
    FIELD,
    FUNCTIONS,
    KEPT,
    LITERAL,
    STRUCT,
    Node,
    Program,
    is_common,
    parse_pattern,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType as SparkType
    from pyspark.sql.types import StructType

_BOOLEAN = pa.bool_()
_UNKNOWN = "unknown"


class Unknown(Exception):
    """Raised for an expression that this module does not translate; the message names it. Spark then computes the chain."""


class Builder:
    """Collects the nodes of a program. All methods take and return the numbers of nodes."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._depths: list[int] = []
        self._known: dict[Any, int] = {}
        self._filters: list[int] = []

    def get_type_of(self, at: int) -> pa.DataType:
        """Return the type of a node's values."""
        return self._nodes[at].type

    def find_constant(self, at: int) -> Any:
        """Return the value of a literal; None for any other node."""
        node = self._nodes[at]
        return node.data if node.kind == LITERAL else None

    def is_column(self, at: int, name: str) -> bool:
        """Return True if a node is a column of the batches, or the part of one that filters have kept."""
        node = self._nodes[at]
        return self.is_column(node.args[0], name) if node.kind == KEPT else node.kind == COLUMN and node.data == name

    def find_depth(self, at: int) -> int:
        """Return the depth to which the expressions of a node are nested."""
        return self._depths[at]

    # --- expressions ---

    def make_column(self, name: str, kind: pa.DataType) -> int:
        """Return a column of the batches."""
        return self._add(Node(COLUMN, kind, (), name))

    def make_literal(self, value: object, kind: pa.DataType) -> int:
        """Return a value that is equal in all rows."""
        return self._add(Node(LITERAL, kind, (), value))

    def make_unknown(self, what: str) -> int:
        """Return the node of an expression without a function in Arrow. :meth:`make_program` fails if it is needed."""
        return self._add(Node(_UNKNOWN, pa.null(), (), what))

    def make_struct(self, names: Sequence[str], values: Sequence[int]) -> int:
        """Return a struct that is not null."""
        kind = pa.struct([pa.field(name, self.get_type_of(value)) for name, value in zip(names, values, strict=True)])
        return self._add(Node(STRUCT, kind, (*values, self.make_literal(False, _BOOLEAN))))

    def make_field(self, at: int, number: int) -> int:
        """Return a field of a struct; null if the struct is null."""
        node = self._nodes[at]
        if node.kind == _UNKNOWN:
            return at
        kind = node.type.field(number).type
        if node.kind == STRUCT:
            value, null = node.args[number], node.args[-1]
            return self.make_case([(null, self.make_literal(None, kind))], value)
        if node.kind == LITERAL and node.data is None:
            return self.make_literal(None, kind)
        if node.kind == CASE:
            *pairs, last = node.args
            branches = [(c, self.make_field(v, number)) for c, v in zip(pairs[::2], pairs[1::2], strict=True)]
            return self.make_case(branches, self.make_field(last, number))
        if node.kind == KEPT:
            return self.make_kept(self.make_field(node.args[0], number), node.data)
        return self._add(Node(FIELD, kind, (at,), number))

    def is_null(self, at: int) -> int:
        """Return the condition that a node is null."""
        node = self._nodes[at]
        if node.kind == LITERAL:
            return self.make_literal(node.data is None, _BOOLEAN)
        if node.kind == STRUCT:
            return node.args[-1]
        if node.kind == CASE:
            *pairs, last = node.args
            branches = [(c, self.is_null(v)) for c, v in zip(pairs[::2], pairs[1::2], strict=True)]
            return self.make_case(branches, self.is_null(last))
        if node.kind == KEPT:
            return self.make_kept(self.is_null(node.args[0]), node.data)
        return self.call("is_null", _BOOLEAN, at)

    def make_case(self, branches: Sequence[tuple[int, int]], otherwise: int) -> int:
        """Return the value of the first condition that is true, else the last value."""
        kept: list[tuple[int, int]] = []
        for condition, value in branches:
            said = self._nodes[condition]
            if said.kind == LITERAL and said.data:
                otherwise = value
                break
            if said.kind != LITERAL:
                kept.append((condition, value))
        while kept and kept[-1][1] == otherwise:
            kept.pop()
        if not kept:
            return otherwise
        return self._add(Node(CASE, self.get_type_of(otherwise), (*(at for pair in kept for at in pair), otherwise)))

    def make_coalesce(self, values: Sequence[int]) -> int:
        """Return the first value that is not null."""
        *before, last = values
        for value in reversed(before):
            last = self.make_case([(self.is_null(value), last)], value)
        return last

    def call(self, function: str, kind: pa.DataType, *args: int) -> int:
        """Return the call of a function of :data:`~airflow_kafka_spark.jobs.tasks.arrow.FUNCTIONS`."""
        assert function in FUNCTIONS, function
        return self._add(Node(CALL, kind, args, function))

    # --- filters ---

    def filter(self, condition: int) -> int:
        """Keep only the rows for which a condition is true, from here on. Return the filter's number, for :meth:`make_kept`."""
        self._filters.append(condition)
        return len(self._filters) - 1

    def make_kept(self, at: int, number: int) -> int:
        """Return the rows of an earlier node that a filter has kept."""
        node = self._nodes[at]
        return at if node.kind == LITERAL else self._add(Node(KEPT, node.type, (at,), number))

    # --- the end ---

    def make_whole(self, at: int, kind: pa.DataType) -> int:
        """Return a node that leaves the program, with its structs built.

        :param kind: its type, including the fields of structs that are never null.
        """
        node = self._nodes[at]
        if not pa.types.is_struct(node.type) or node.kind in (COLUMN, FIELD, LITERAL):
            return at
        if node.kind == KEPT and self._nodes[node.args[0]].kind in (COLUMN, FIELD):
            return at
        fields = [self.make_whole(self.make_field(at, number), kind.field(number).type) for number in range(kind.num_fields)]
        return self._add(Node(STRUCT, kind, (*fields, self.is_null(at))))

    def make_program(self, outputs: Sequence[tuple[str, int]]) -> Program:
        """Return the program that computes only these columns.

        :raises Unknown: a needed expression is not translated.
        """
        program = Program(tuple(self._nodes), tuple(outputs), tuple(self._filters)).drop_outputs(())
        for node in program.nodes:
            if node.kind == _UNKNOWN:
                raise Unknown(node.data)
        return program

    def _add(self, node: Node) -> int:
        # In Python 1, 1.0 and True are equal.
        key = (node.kind, str(node.type), node.args, type(node.data), repr(node.data))
        if key not in self._known:
            self._known[key] = len(self._nodes)
            self._nodes.append(node)
            self._depths.append(1 + max((self._depths[arg] for arg in node.args), default=0))
        return self._known[key]


TEXT, LONG, INSTANT = pa.string(), pa.int64(), pa.timestamp("us", "UTC")


def is_plain(kind: pa.DataType) -> bool:
    """Return True if values of a type compare in Arrow as in Spark."""
    t = pa.types
    return bool(
        t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind)
        or kind in (TEXT, pa.binary(), pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us"))
    )  # fmt: skip


def find_cast(had: pa.DataType, wanted: pa.DataType, mode: Callable[[], str]) -> str | None:
    """Return the function that casts as Spark does; None if no function is proven to.

    :param mode: returns Spark's mode: ``TRY`` (null for a value that does not fit), ``ANSI`` (it fails) or ``LEGACY``.
    """
    if _can_hold_all(had, wanted):
        return "widened"
    if wanted == TEXT:
        return _TEXTS.get(_find_family(had))
    if pa.types.is_decimal(had) and wanted == pa.float64():
        return "as_double" if had.precision <= 15 else None
    if (never_fails := _SAFE.get((had, wanted))) is not None:
        return never_fails
    tries = _TRIES.get((_find_family(had), _find_family(wanted)))
    if tries is None or wanted == pa.float32() or (pa.types.is_decimal(wanted) and getattr(had, "precision", 0) > 37):
        return None
    return {"TRY": tries, "ANSI": f"{tries}_or_fail"}.get(mode())


def _find_family(kind: pa.DataType) -> str:
    t = pa.types
    if t.is_integer(kind):
        return "integer"
    if t.is_decimal(kind):
        return "decimal"
    return "float" if t.is_floating(kind) else str(kind)


_TEXTS = {
    **dict.fromkeys(("integer", "bool"), "as_text"),
    "decimal": "decimal_text",
    "date32[day]": "date_text",
    str(INSTANT): "moment_text",
    str(pa.timestamp("us")): "local_text",
}
_SAFE = {
    (TEXT, pa.binary()): "as_bytes",
    (pa.date32(), INSTANT): "midnight_of",
    (INSTANT, pa.date32()): "day_of",
}
_TRIES = {
    ("integer", "integer"): "narrowed",
    ("float", "integer"): "cut_off",
    ("string", "integer"): "whole_number",
    ("string", "float"): "float_of_text",
    ("decimal", "decimal"): "fitting_decimal",
    ("decimal", "integer"): "whole_part",
    ("string", "decimal"): "decimal_of_text",
}
"""Function that gives null for a value that does not fit, by the kinds of types that are cast."""


def _can_hold_all(had: pa.DataType, wanted: pa.DataType) -> bool:
    """Return True if a type holds all numbers of another one, or rounds them."""
    t = pa.types
    if t.is_decimal(wanted):
        before = _DIGITS[had.bit_width] if t.is_integer(had) else had.precision - had.scale if t.is_decimal(had) else None
        behind = had.scale if t.is_decimal(had) else 0
        return before is not None and wanted.precision - wanted.scale >= before and wanted.scale >= behind
    if t.is_integer(had):
        return t.is_floating(wanted) or (t.is_integer(wanted) and wanted.bit_width > had.bit_width)
    return had == pa.float32() and wanted == pa.float64()


_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
_SIZES = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def convert_whole_literal(value: object, kind: pa.DataType) -> int | Decimal | float | None:
    """Return a whole number, or the number of a text, in a numeric type that holds it; None for anything else."""
    t = pa.types
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value):
        value = int(value)
    if type(value) is not int:
        return None
    if t.is_integer(kind):
        return value if -(2 ** (kind.bit_width - 1)) <= value < 2 ** (kind.bit_width - 1) else None
    if t.is_decimal(kind):
        return Decimal(value) if len(str(abs(value))) <= kind.precision - kind.scale else None
    return float(value) if t.is_floating(kind) and abs(value) <= 2 ** (53 if kind == pa.float64() else 24) else None


def convert_type(spark_type: str | Mapping[str, Any]) -> pa.DataType:
    """Return a type of Spark as an Arrow type.

    :raises Unknown: records of Kafka have no columns of this type.
    """
    from pyspark.sql.types import StructField

    if spark_type == "void":
        return pa.null()
    field = {"name": "it", "type": spark_type, "nullable": True, "metadata": {}}
    try:
        return _make_arrow_type(StructField.fromJson(field).dataType)
    except Exception:
        raise Unknown(f"the type {spark_type}") from None


def make_arrow_schema(schema: StructType) -> pa.Schema:
    """Return columns of Spark as columns of Arrow. Timestamps are in UTC, whatever the session's time zone."""
    return pa.schema([pa.field(field.name, _make_arrow_type(field.dataType), field.nullable) for field in schema])


def _make_arrow_type(kind: SparkType) -> pa.DataType:
    from pyspark.sql.pandas.types import to_arrow_type

    try:
        # From PySpark 4.2 on, timestamps need a time zone.
        return to_arrow_type(kind, timezone="UTC")  # type: ignore[call-arg]
    except TypeError:
        return to_arrow_type(kind)


def parse_value(text: str | None, kind: pa.DataType) -> Any:
    """Return the value of a literal.

    :raises Unknown: the plan's text does not show values of this type exactly.
    """
    t = pa.types
    if text is None:
        return None
    if t.is_boolean(kind):
        return text == "true"
    if t.is_integer(kind):
        return int(text)
    if kind == TEXT:
        return text
    if t.is_decimal(kind):
        return Decimal(text)
    if t.is_floating(kind):
        return float(text)
    if t.is_date(kind):
        return date.fromisoformat(text)
    if kind == INSTANT:  # in the time zone of the session, which is UTC
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    raise Unknown(f"a literal of type {kind}")


EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."

_DOT = re.compile(r"((?<!\\)(?:\\\\)*)\.")  # not escaped
_LAST_MILLISECOND = 253402300800000
# Expressions that Spark replaces by their only child, and names.
_PASSED_ON = ("Alias", "Nvl", "Nvl2", "NullIf", "Between", "TryAdd", "TrySubtract", "TryMultiply", "TryDivide")
_LOGIC = {"And": "both", "Or": "either", "Not": "negated"}
_COMPARISONS = {
    "EqualTo": "equal",
    "EqualNullSafe": "equal_or_both_null",
    "LessThan": "less",
    "LessThanOrEqual": "less_or_equal",
    "GreaterThan": "greater",
    "GreaterThanOrEqual": "greater_or_equal",
    "In": "one_of",
}
_OF_TEXT = {"Contains": "contains", "StartsWith": "starts_with", "EndsWith": "ends_with"}
_INT = pa.int32()
_MOMENT = (pa.date32(), INSTANT, pa.timestamp("us"))
_OF_ONE: Mapping[str, tuple[str, pa.DataType, tuple[pa.DataType, ...]]] = {
    "IsNaN": ("is_nan", _BOOLEAN, (pa.float32(), pa.float64())),
    "UnixDate": ("number_of", _INT, (pa.date32(),)),
    "UnixMillis": ("milliseconds_of", LONG, (INSTANT,)),
    "UnixMicros": ("number_of", LONG, (INSTANT,)),
    "UnixSeconds": ("seconds_of", LONG, (INSTANT,)),
    "MicrosToTimestamp": ("moment_of", INSTANT, tuple(_SIZES)),
    "Upper": ("upper", TEXT, (TEXT,)),
    "Lower": ("lower", TEXT, (TEXT,)),
    "StringTrim": ("trimmed", TEXT, (TEXT,)),
    "StringTrimLeft": ("left_trimmed", TEXT, (TEXT,)),
    "StringTrimRight": ("right_trimmed", TEXT, (TEXT,)),
    "OctetLength": ("count_of_bytes", _INT, (TEXT, pa.binary())),
    "Md5": ("md5", TEXT, (pa.binary(),)),
    "Year": ("year", _INT, _MOMENT),
    "Quarter": ("quarter", _INT, _MOMENT),
    "Month": ("month", _INT, _MOMENT),
    "WeekOfYear": ("week", _INT, _MOMENT),
    "DayOfMonth": ("day_of_month", _INT, _MOMENT),
    "DayOfYear": ("day_of_year", _INT, _MOMENT),
    "DayOfWeek": ("day_of_week", _INT, _MOMENT),
    "WeekDay": ("week_day", _INT, _MOMENT),
    "Hour": ("hour", _INT, _MOMENT[1:]),
    "Minute": ("minute", _INT, _MOMENT[1:]),
    "Second": ("second", _INT, _MOMENT[1:]),
}
"""Functions of one argument: name, type of the result, and the types of the argument."""

_BY_NUMBER = {"IntegralDivide": "divided", "Remainder": "remainder"}
_ARITHMETIC = {"Add": "plus", "Subtract": "minus", "Multiply": "times"}
_DAYS = {"DateAdd": "later_day", "DateSub": "earlier_day", "DateDiff": "days_between"}
_EXTREMES = {"Greatest": "largest", "Least": "smallest"}
_UNITS = {
    **dict.fromkeys(("year", "yyyy", "yy"), "year"), "quarter": "quarter", **dict.fromkeys(("month", "mon", "mm"), "month"),
    "week": "week", **dict.fromkeys(("day", "dd"), "day"), "hour": "hour", "minute": "minute", "second": "second",
    "millisecond": "millisecond", "microsecond": "microsecond",
}  # fmt: skip
_DIGESTS = {0: "sha256", 224: "sha224", 256: "sha256", 384: "sha384", 512: "sha512"}


@dataclass(frozen=True)
class LevelColumn:
    """A column of a level. Its node is made on first use.

    :param name: its name.
    :param make: makes its node.
    """

    name: str
    make: Callable[[], int]

    @cached_property
    def node(self) -> int:
        """The number of its node."""
        return self.make()


LevelColumns = Mapping[int, LevelColumn]
"""The columns of a level by the numbers that the analyzer has given them."""


def parse_number(column: Mapping[str, Any]) -> int:
    """Return the number that the analyzer has given to a column."""
    return int(column["exprId"]["id"])


def get_short_class_name(tree: Mapping[str, Any]) -> str:
    """Return the name of an expression's or a level's class, without its package."""
    return str(tree["class"]).rpartition(".")[2]


class Expression:
    """An expression, as a list of its parts: each followed by its children.

    :param known: the columns that it may use.
    :param shown: Spark's own object, for facts that its text leaves out.
    """

    def __init__(
        self, builder: Builder, known: LevelColumns, trees: Sequence[Mapping[str, Any]], shown: Callable[[], Any]
    ) -> None:
        self._builder = builder
        self._known = known
        self._trees = trees
        self._shown = shown
        self._in_range: frozenset[int] = frozenset()
        self._common: list[int] = []

    def translate(self) -> int:
        """Return the node of the expression.

        :raises Unknown: it, or a part of it, is not translated.
        """
        return self._translate_node(0)

    def _list_children(self, at: int) -> list[int]:
        found, child = [], at + 1
        for _ in range(self._trees[at]["num-children"]):
            found.append(child)
            child = self._end(child)
        return found

    def _end(self, at: int) -> int:
        """Return the position at which the next node begins."""
        open_children = 1
        while open_children:
            open_children += self._trees[at]["num-children"] - 1
            at += 1
        return at

    def _translate_node(self, at: int) -> int:
        tree = self._trees[at]
        name = str(tree["class"]).removeprefix(EXPRESSIONS)
        special = getattr(self, f"_{name}", None)
        if special is not None:
            return int(special(at, tree))
        return self._call_function(name, at)

    def _call_function(self, name: str, at: int) -> int:
        """Return an expression whose result is one function of its children."""
        if name in _PASSED_ON:
            return self._translate_node(at + 1)
        if name in _LOGIC:
            return self._builder.call(_LOGIC[name], _BOOLEAN, *map(self._translate_node, self._list_children(at)))
        if name in _COMPARISONS:
            return self._compare(at, _COMPARISONS[name])
        if name in _OF_TEXT:
            return self._translate_text_test(at, _OF_TEXT[name])
        if name in _OF_ONE:
            function, kind, fitting = _OF_ONE[name]
            value = self._translate_node(at + 1)
            if self._builder.get_type_of(value) not in fitting:
                raise Unknown(f"{name} of {self._builder.get_type_of(value)}")
            return self._builder.call(function, kind, value)
        if name in _ARITHMETIC:
            return self._compute_arithmetic(at, _ARITHMETIC[name])
        if name in _DAYS:
            return self._translate_days(at, _DAYS[name])
        if name in _EXTREMES:
            return self._choose_extreme(at, _EXTREMES[name])
        raise Unknown(name)

    def _find_node(self, at: int) -> int:
        # Often only some fields of a struct are needed.
        try:
            return self._translate_node(at)
        except Unknown as reason:
            return self._builder.make_unknown(str(reason))

    # `_translate_node` finds these methods by the names of Spark's expressions.

    def _AttributeReference(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._known[parse_number(tree)].node

    def _Literal(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        kind = convert_type(tree["dataType"])
        return self._builder.make_literal(parse_value(tree["value"], kind), kind)

    def _TypedNullLiteral(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        # NULL of the type of its child, in `nullif` from Spark 4.2 on.
        return self._builder.make_literal(None, self._builder.get_type_of(self._translate_node(at + 1)))

    def _GetStructField(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._builder.make_field(self._translate_node(at + 1), tree["ordinal"])

    def _CreateNamedStruct(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        children = self._list_children(at)
        if any(get_short_class_name(self._trees[child]) != "Literal" for child in children[::2]):
            raise Unknown("CreateNamedStruct with names that are computed")
        names = [str(self._trees[child]["value"]) for child in children[::2]]
        return self._builder.make_struct(names, [self._find_node(child) for child in children[1::2]])

    def _IsNull(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._builder.is_null(self._translate_node(at + 1))

    def _IsNotNull(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._builder.call("negated", _BOOLEAN, self._IsNull(at, tree))

    def _CaseWhen(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        children = self._list_children(at)
        pairs = zip(children[::2], children[1::2], strict=False)
        branches = [(self._translate_node(condition), self._keep_if(condition, value)) for condition, value in pairs]
        if len(children) % 2:
            return self._builder.make_case(branches, self._translate_node(children[-1]))
        return self._builder.make_case(branches, self._builder.make_literal(None, self._builder.get_type_of(branches[0][1])))

    def _keep_if(self, condition: int, value: int) -> int:
        """Return a value if a condition is true, else null."""
        before = self._in_range
        self._in_range = before | self._find_milliseconds_in_range(condition)
        try:
            return self._translate_node(value)
        finally:
            self._in_range = before

    def _If(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        condition, value, otherwise = map(self._translate_node, self._list_children(at))
        return self._builder.make_case([(condition, value)], otherwise)

    def _Coalesce(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._builder.make_coalesce([self._translate_node(child) for child in self._list_children(at)])

    def _Concat(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        made = [self._translate_node(child) for child in self._list_children(at)]
        if any(self._builder.get_type_of(value) != TEXT for value in made):
            raise Unknown("Concat of something else than texts")
        return self._builder.call("concat", TEXT, *made)

    def _With(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        body, *definitions = self._list_children(at)
        if len(definitions) != 1:
            raise Unknown("With of several expressions")
        # References do not show which definition they mean. Spark nests them so that it is the innermost one.
        self._common.append(self._translate_node(definitions[0] + 1))
        try:
            return self._translate_node(body)
        finally:
            self._common.pop()

    def _CommonExpressionRef(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._common[-1]

    def _ConcatWs(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        separator, *texts = [self._translate_node(child) for child in self._list_children(at)]
        if (
            any(self._builder.get_type_of(text) != TEXT for text in texts)
            or not isinstance(self._read_constant(separator), str)
            or not texts
        ):
            raise Unknown("ConcatWs but of texts, with a constant between")
        return self._builder.call("joined", TEXT, separator, *texts)

    def _Substring(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._take_part(at, *map(self._translate_node, self._list_children(at)))

    def _Left(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        text, count = map(self._translate_node, self._list_children(at))
        return self._take_part(at, text, self._builder.make_literal(1, _INT), count)

    def _take_part(self, at: int, text: int, start: int, count: int) -> int:
        first, length = self._read_constant(start), self._read_constant(count)
        if self._builder.get_type_of(text) != TEXT or not isinstance(first, int) or not isinstance(length, int) or length < 0:
            raise Unknown(f"{get_short_class_name(self._trees[at])} but of a constant part of a text")
        return self._builder.call("part", TEXT, text, start, count)

    def _Length(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        value = self._translate_node(at + 1)
        kind = self._builder.get_type_of(value)
        if kind not in (TEXT, pa.binary()):
            raise Unknown(f"Length of {kind}")
        return self._builder.call("count_of_characters" if kind == TEXT else "count_of_bytes", _INT, value)

    def _StringReplace(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        text, old, new = map(self._translate_node, self._list_children(at))
        if not self._read_constant(old) or not isinstance(self._read_constant(new), str):
            raise Unknown("StringReplace but of a constant by a constant")
        return self._builder.call("replaced", TEXT, text, old, new)

    def _RegExpReplace(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        text, pattern, new, start = map(self._translate_node, self._list_children(at))
        said, by = self._read_constant(pattern), self._read_constant(new)
        plain = isinstance(said, str) and is_common(said) and not re.search(said, "") and "|" not in said
        # In a replacement, these have a meaning in Java, in RE2 or in both.
        if not plain or not isinstance(by, str) or re.search(r"[$\\]", by) or self._read_constant(start) != 1:
            raise Unknown(f"RegExpReplace {said!r}")
        return self._builder.call("replaced_matches", TEXT, text, pattern, new)

    def _Sha2(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        value, bits = map(self._translate_node, self._list_children(at))
        if self._read_constant(bits) not in _DIGESTS:
            raise Unknown("Sha2 of a length that does not exist")
        return self._builder.call(_DIGESTS[self._read_constant(bits)], TEXT, value)

    def _GetMapValue(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        value, key = map(self._translate_node, self._list_children(at))
        kind = self._builder.get_type_of(value)
        if not pa.types.is_map(kind) or kind.key_type != TEXT or not isinstance(self._read_constant(key), str):
            raise Unknown("GetMapValue but of a constant text")
        return self._builder.call("entry", kind.item_type, value, key)

    def _Size(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        value = self._translate_node(at + 1)
        if not pa.types.is_list(self._builder.get_type_of(value)) or bool(self._shown().apply(at).legacySizeOfNull()):
            raise Unknown("Size but of an array")
        return self._builder.call("count_of_items", _INT, value)

    def _ParseToDate(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        value = self._translate_node(at + 1)
        kind = self._builder.get_type_of(value)
        if kind == pa.date32():
            return value
        if kind != INSTANT or self._trees[at]["num-children"] != 1:
            raise Unknown(f"ParseToDate of {kind}")
        return self._builder.call("day_of", pa.date32(), value)

    def _DateFormatClass(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        moment, pattern = map(self._translate_node, self._list_children(at))
        said = self._read_constant(pattern)
        # An empty pattern, or one for the legacy parser, has another meaning.
        if self._builder.get_type_of(moment) != INSTANT or not said or parse_pattern(said) is None:
            raise Unknown(f"DateFormatClass {said!r}")
        return self._builder.call("formatted", TEXT, moment, pattern)

    def _TruncTimestamp(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        unit, moment = map(self._translate_node, self._list_children(at))
        return self._truncate_time(moment, unit, (INSTANT,), tuple(_UNITS))

    def _TruncDate(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        day, unit = map(self._translate_node, self._list_children(at))
        units = ("year", "yyyy", "yy", "quarter", "month", "mon", "mm", "week")
        return self._truncate_time(day, unit, (pa.date32(),), units)

    def _truncate_time(self, value: int, unit: int, kinds: tuple[pa.DataType, ...], units: tuple[str, ...]) -> int:
        kind, name = self._builder.get_type_of(value), str(self._read_constant(unit)).lower()
        if kind not in kinds or name not in units:
            raise Unknown(f"the beginning of {name!r} of {kind}")
        return self._builder.call("beginning_of", kind, value, self._builder.make_literal(_UNITS[name], TEXT))

    def _translate_days(self, at: int, function: str) -> int:
        values = [self._translate_node(child) for child in self._list_children(at)]
        first, second = map(self._builder.get_type_of, values)
        if first != pa.date32() or second not in ((pa.date32(),) if function == "days_between" else _SIZES[:3]):
            raise Unknown(f"{get_short_class_name(self._trees[at])} of {first} and {second}")
        return self._builder.call(function, _INT if function == "days_between" else pa.date32(), *values)

    def _choose_extreme(self, at: int, function: str) -> int:
        values = [self._translate_node(child) for child in self._list_children(at)]
        kinds = {self._builder.get_type_of(value) for value in values}
        (kind,) = kinds if len(kinds) == 1 else (pa.null(),)
        if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind) or kind in _MOMENT):
            raise Unknown(f"{get_short_class_name(self._trees[at])} of {', '.join(sorted(map(str, kinds)))}")
        return self._builder.call(function, kind, *values)

    def _Like(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        # The plan's text does not show the escape character.
        escape = str(self._shown().apply(at).escapeChar())
        return self._translate_text_test(at, "is_like", lambda pattern: escape not in pattern and "\\" not in pattern)

    def _RLike(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        # A topic's name has no line ends, which Java and RE2 match differently.
        topic = self._builder.is_column(self._translate_node(at + 1), "topic")
        return self._translate_text_test(
            at, "matches", lambda pattern: is_common(_DOT.sub(r"\1a", pattern) if topic else pattern)
        )

    def _translate_text_test(self, at: int, function: str, fits: Callable[[str], bool] = lambda _: True) -> int:
        text, part = map(self._translate_node, self._list_children(at))
        said = self._read_constant(part)
        if {self._builder.get_type_of(text), self._builder.get_type_of(part)} != {TEXT} or said is None or not fits(said):
            raise Unknown(f"{get_short_class_name(self._trees[at])} {said!r}")
        return self._builder.call(function, _BOOLEAN, text, part)

    def _Abs(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._translate_sign(at, "magnitude")

    def _UnaryMinus(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._translate_sign(at, "opposite")

    def _translate_sign(self, at: int, function: str) -> int:
        value = self._translate_node(at + 1)
        kind = self._builder.get_type_of(value)
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return self._builder.call(function, kind, value)
        # The smallest integer has no opposite.
        if not pa.types.is_integer(kind) or not bool(self._shown().apply(at).failOnError()):
            raise Unknown(f"{get_short_class_name(self._trees[at])} of {kind}")
        return self._builder.call(f"{function}_or_fail", kind, value)

    def _compute_arithmetic(self, at: int, function: str) -> int:
        left, right = map(self._translate_node, self._list_children(at))
        kinds, mode = [self._builder.get_type_of(side) for side in (left, right)], self._find_mode(at)
        t = pa.types
        if all(map(t.is_decimal, kinds)):
            return self._translate_decimals(at, function, left, right)
        if kinds[0] != kinds[1] or not (t.is_integer(kinds[0]) or t.is_floating(kinds[0])):
            raise Unknown(f"{get_short_class_name(self._trees[at])} of {kinds[0]} and {kinds[1]}")
        if t.is_floating(kinds[0]):
            return self._builder.call(function, kinds[0], left, right)
        if mode == "ANSI":
            return self._builder.call(f"{function}_or_fail", kinds[0], left, right)
        if mode == "TRY" and function == "times":
            return self._divide_by_number(at, "multiplied")
        raise Unknown(get_short_class_name(self._trees[at]))

    def _translate_decimals(self, at: int, function: str, left: int, right: int) -> int:
        first, second = self._builder.get_type_of(left), self._builder.get_type_of(right)
        scale = first.scale + second.scale if function == "times" else max(first.scale, second.scale)
        whole = max(first.precision - first.scale, second.precision - second.scale)
        precision = first.precision + second.precision + 1 if function == "times" else whole + scale + 1
        # With more digits Spark rounds, and results may not fit.
        if precision > 38 or self._read_spark_type(at) != pa.decimal128(precision, scale):
            raise Unknown(f"{get_short_class_name(self._trees[at])} of {first} and {second}")
        return self._builder.call(function, pa.decimal128(precision, scale), left, right)

    def _Divide(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._divide(at, "ratio", pa.types.is_floating)

    def _IntegralDivide(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._divide(at, "whole_ratio", lambda kind: kind == LONG)

    def _Remainder(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        return self._divide(at, "whole_remainder", pa.types.is_integer)

    def _divide(self, at: int, function: str, fits: Callable[[pa.DataType], bool]) -> int:
        if function != "ratio" and (by_constant := self._try_division_by_number(at)) is not None:
            return by_constant
        value, by = map(self._translate_node, self._list_children(at))
        kind = self._builder.get_type_of(value)
        if not fits(kind) or self._builder.get_type_of(by) != kind or self._find_mode(at) != "ANSI":
            raise Unknown(f"{get_short_class_name(self._trees[at])} of {kind}")
        return self._builder.call(function, kind, value, by)

    def _try_division_by_number(self, at: int) -> int | None:
        try:
            return self._divide_by_number(at, _BY_NUMBER[get_short_class_name(self._trees[at])])
        except Unknown:
            return None

    def _divide_by_number(self, at: int, function: str) -> int:
        value, by = map(self._translate_node, self._list_children(at))
        kind, number = self._builder.get_type_of(value), self._read_constant(by)
        if not pa.types.is_integer(kind) or self._builder.get_type_of(by) != kind or not isinstance(number, int) or number < 1:
            raise Unknown(f"{get_short_class_name(self._trees[at])} but of whole numbers by a positive one")
        return self._builder.call(function, kind, value, by)

    def _MillisToTimestamp(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        value = self._translate_node(at + 1)
        if value not in self._in_range:
            raise Unknown("MillisToTimestamp of numbers that may be out of range")  # Spark fails there.
        return self._builder.call("moment_of_milliseconds", INSTANT, value)

    def _find_milliseconds_in_range(self, condition: int) -> frozenset[int]:
        """Return the node of ``x`` if the condition is ``abs(cast(x as double)) < limit``: then ``x`` milliseconds are a valid
        timestamp. Return an empty set for any other condition."""
        if [get_short_class_name(tree) for tree in self._trees[condition : condition + 3]] != ["LessThan", "Abs", "Cast"]:
            return frozenset()
        limit = self._read_constant(self._translate_node(self._list_children(condition)[1]))
        fits = isinstance(limit, (int, float)) and limit <= _LAST_MILLISECOND
        return frozenset([self._translate_node(condition + 3)] if fits else [])

    def _compare(self, at: int, function: str) -> int:
        made = [self._translate_node(child) for child in self._list_children(at)]
        kinds = {self._builder.get_type_of(value) for value in made}
        if len(kinds) > 1 or not all(map(is_plain, kinds)):
            raise Unknown(f"a comparison of {', '.join(sorted(map(str, kinds)))}")
        return self._builder.call(function, _BOOLEAN, *made)

    def _EqualTo(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        left, right = self._list_children(at)
        if get_short_class_name(self._trees[left]) == "Lower" and self._trees[right].get("value") == "true":
            return self._builder.call("is_true_text", _BOOLEAN, self._translate_node(left + 1))
        return self._compare(at, "equal")

    def _GreaterThanOrEqual(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        # This condition is true for every row. It keeps Spark from moving a filter (transforms/base.py).
        if self._trees[at + 1]["class"] == f"{EXPRESSIONS}MonotonicallyIncreasingID":
            last = self._list_children(at)[1]
            if self._read_constant(self._translate_node(last)) == 0:
                return self._builder.make_literal(True, _BOOLEAN)
        return self._compare(at, "greater_or_equal")

    def _Cast(self, at: int, tree: Mapping[str, Any]) -> int:  # noqa: N802
        value, wanted = self._translate_node(at + 1), convert_type(tree["dataType"])
        had = self._builder.get_type_of(value)
        if had == wanted:
            return value
        if self._builder.is_null(value) == self._builder.make_literal(True, _BOOLEAN):
            return self._builder.make_literal(None, wanted)
        if (number := convert_whole_literal(self._read_constant(value), wanted)) is not None:
            return self._builder.make_literal(number, wanted)
        function = find_cast(had, wanted, lambda: self._find_mode(at))
        if function is None:
            raise Unknown(f"Cast of {had} to {wanted}")
        return self._builder.call(function, wanted, value)

    # --- what they need ---

    def _find_mode(self, at: int) -> str:
        """Return ``ANSI``, ``TRY`` or ``LEGACY``. Only Spark's object knows it."""
        return str(self._shown().apply(at).evalMode().toString())

    def _read_spark_type(self, at: int) -> pa.DataType:
        return convert_type(json.loads(self._shown().apply(at).dataType().json()))

    def _read_constant(self, node: int) -> Any:
        return self._builder.find_constant(node)


_PLANS = "org.apache.spark.sql.catalyst.plans.logical."

_DEEPEST = 250
"""Maximum depth to which expressions are nested."""
_LARGEST = 64_000_000
"""Maximum number of characters of a plan as JSON."""


def make_program(frame: DataFrame, schema: pa.Schema) -> Program:
    """Return a program whose results are equal to those of Spark's plan.

    :param frame: made by columns and filters only, from a frame that was created from rows.
    :param schema: the schema of the batches, which are the columns of that first frame.
    :raises Unknown: an expression is not translated, or the session is one of Spark Connect, which shows no plan.
    """
    try:
        program = _make_program(frame, schema)
        program.run_over_nulls(schema)
    except Unknown:
        raise
    except Exception as error:
        # A plan of an unexpected form, or a type for which Arrow has no function: Spark computes the chain.
        raise Unknown(f"plan like this one ({type(error).__name__}: {str(error).partition(chr(10))[0]})") from error
    return program


def _make_program(frame: DataFrame, schema: pa.Schema) -> Program:
    plan = _get_plan(frame)
    # A plan's text repeats the type of a struct at each use, so its size grows with the square of the number of fields.
    text = str(plan.toJSON())
    if len(text) > _LARGEST:
        raise Unknown(f"a plan of {len(text)} characters")
    levels = json.loads(text)
    *upper, leaf = levels
    if any(level["num-children"] != 1 for level in upper) or leaf["num-children"]:
        raise Unknown("a plan that is no chain")
    builder = Builder()
    known = _make_leaf(builder, leaf, schema)
    for at in range(len(levels) - 2, -1, -1):
        known = _add_level(builder, levels[at], known, partial(plan.apply, at))
    types = make_arrow_schema(frame.schema)
    outputs = [(column.name, builder.make_whole(column.node, types.field(column.name).type)) for column in known.values()]
    if any(builder.find_depth(at) > _DEEPEST for _, at in outputs):
        raise Unknown(f"expressions nested more than {_DEEPEST} deep")
    return builder.make_program(outputs)


def _get_plan(frame: DataFrame) -> Any:
    execution = getattr(getattr(frame, "_jdf", None), "queryExecution", None)
    if execution is None:
        raise Unknown("a session of Spark Connect")
    return execution().analyzed()


# --- levels: projections and filters -----------------------------------------------------------------------------------------


def _make_leaf(builder: Builder, level: Mapping[str, Any], schema: pa.Schema) -> LevelColumns:
    if "output" not in level:
        raise Unknown(get_short_class_name(level))

    def make_node(name: str) -> int:
        return builder.make_column(name, schema.field(name).type)

    columns = [output[0] for output in level["output"]]
    return {parse_number(column): LevelColumn(column["name"], partial(make_node, column["name"])) for column in columns}


def _add_level(builder: Builder, level: Mapping[str, Any], known: LevelColumns, plan: Callable[[], Any]) -> LevelColumns:
    kind = level["class"]
    if kind == f"{_PLANS}Project":
        made: dict[int, LevelColumn] = {}

        def read_expression(index: int) -> Any:
            return plan().expressions().apply(index)

        for index, trees in enumerate(level["projectList"]):
            top, found = trees[0], Expression(builder, known, trees, partial(read_expression, index))
            if top["class"] not in (f"{EXPRESSIONS}Alias", f"{EXPRESSIONS}AttributeReference"):
                raise Unknown(get_short_class_name(top))
            made[parse_number(top)] = LevelColumn(top["name"], found.translate)
        return made
    if kind == f"{_PLANS}Filter":
        condition = Expression(builder, known, level["condition"], lambda: plan().expressions().apply(0))
        number = builder.filter(condition.translate())

        def make_kept(column: LevelColumn) -> int:
            return builder.make_kept(column.node, number)

        return {key: LevelColumn(column.name, partial(make_kept, column)) for key, column in known.items()}
    raise Unknown(get_short_class_name(level))
