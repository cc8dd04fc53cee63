"""Transforms of headers, and of the fields of a key or value: choose, rename, wrap, insert and mask them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.types import INTEGER_BITS
from airflow_kafka_spark.transforms.base import (
    FIXED,
    ColumnTransform,
    KeyOrValueTransform,
    NullDefaultTransform,
    RecordSchema,
    rebuild_struct,
)
from airflow_kafka_spark.transforms.conversions import to_text
from airflow_kafka_spark.transforms.options import (
    find_name_problems,
    find_names_problems,
    parse_names,
    parse_pairs,
    parse_path,
    require_unique,
)

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType


@dataclass(frozen=True)
class ExtractField(NullDefaultTransform, KeyOrValueTransform):
    """Replaces the key or value by one of its fields. A tombstone stays one.

    :param field: the field's name; a path with ``field_syntax_version="V2"``.
    :param field_syntax_version: ``V1`` reads ``field`` as one name, also if it contains dots; ``V2`` as names separated by dots,
        where a name that contains dots is in backticks. Default ``V1``.
    """

    field: str
    field_syntax_version: Literal["V1", "V2"] = "V1"

    def validate(self, where: str) -> list[Problem]:
        problems = [*super().validate(where), *find_name_problems(f"{where}.field", self.field)]
        if self.field_syntax_version not in ("V1", "V2"):
            what = f'found {self.field_syntax_version!r}; expected "V1" or "V2"'
            problems.append(Problem(f"{where}.field_syntax_version", what, "Correct it"))
        elif not problems:
            try:
                self._split_path()
            except ValueError as error:
                problems.append(Problem(f"{where}.field", str(error), "Close it, or write a backslash before it"))
        return problems

    def _split_path(self) -> list[str]:
        return [self.field] if self.field_syntax_version == "V1" else parse_path(self.field)

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        first, *rest = self._split_path()
        found: DataType = record.require_fields(self.of, "field", [first])[first]
        column = F.col(self.of).getField(first)
        for name in rest:
            if not isinstance(found, StructType) or name not in found.names:
                what = f"the {self.of} has no field `{self.field}`: there is no `{name}` in {found.simpleString()}"
                raise ValidationError([Problem("field", what, "Correct the path")])
            found, column = found[name].dataType, column.getField(name)
        return {self.of: column}


@dataclass(frozen=True)
class Flatten(KeyOrValueTransform):
    """Replaces nested structs by their fields, named by their paths. Arrays are unchanged, and a tombstone stays a tombstone.

    :param delimiter: the text between the names of a path; default ``.``.
    """

    delimiter: str = "."

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if not isinstance(self.delimiter, str):
            problems.append(Problem(f"{where}.delimiter", f"found {self.delimiter!r}; expected a text", "Correct it"))
        return problems

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        whole = F.col(self.of)
        flat = list(self._flatten(whole, record.list_fields(self.of, "of"), ""))
        require_unique("delimiter", (name for name, _ in flat), "Choose another delimiter, or rename a field before")
        return {self.of: rebuild_struct(whole, dict(flat))}

    def _flatten(self, whole: Column, fields: Mapping[str, DataType], prefix: str) -> Iterator[tuple[str, Column]]:
        from pyspark.sql.types import MapType, StructType

        for name, found in fields.items():
            path = f"{prefix}{name}"
            if isinstance(found, MapType):
                what = f"the field `{path}` is a map, whose keys are not known beforehand; expected structs"
                raise ValidationError([Problem("of", what, "Declare it as a struct, or leave it out with ReplaceField")])
            if isinstance(found, StructType):
                inner = {f.name: f.dataType for f in found}
                yield from self._flatten(whole.getField(name), inner, f"{path}{self.delimiter}" if path else "")
            else:
                yield path, whole.getField(name)


@dataclass(frozen=True)
class HoistField(KeyOrValueTransform):
    """Wraps the key or value in a struct with one field. The field of a tombstone is null, so the record becomes a record with a
    value.

    :param field: the field's name.
    """

    field: str

    def validate(self, where: str) -> list[Problem]:
        return [*super().validate(where), *find_name_problems(f"{where}.field", self.field)]

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        return {self.of: F.struct(F.col(self.of).alias(self.field))}


@dataclass(frozen=True)
class InsertField(NullDefaultTransform, KeyOrValueTransform):
    """Adds fields with the record's metadata, and with a constant. A tombstone stays one.

    A name that ends in ``!`` is required: a record without this fact gets an error. A name that ends in ``?`` is optional, which
    is the default.

    :param topic_field: the field for the topic; default None.
    :param partition_field: the field for the partition; default None.
    :param offset_field: the field for the offset; default None.
    :param timestamp_field: the field for the record's timestamp; default None.
    :param static_field: the field for ``static_value``; default None.
    :param static_value: a text; default None.
    """

    topic_field: str | None = None
    partition_field: str | None = None
    offset_field: str | None = None
    timestamp_field: str | None = None
    static_field: str | None = None
    static_value: str | None = None

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        given = self._list_given()
        if not given:
            problems.append(Problem(where, "found no field to insert; expected at least one", "Name for instance `topic_field`"))
        for option, spec in given.items():
            problems += find_name_problems(f"{where}.{option}_field", _parse_field_name(spec) if isinstance(spec, str) else spec)
        if (self.static_field is None) != (self.static_value is None):
            what = "`static_field` and `static_value` belong together; found one of them"
            problems.append(Problem(f"{where}.static_value", what, "Give both, or neither"))
        elif self.static_value is not None and not isinstance(self.static_value, str):
            what = f"found {self.static_value!r}; expected a text"
            problems.append(Problem(f"{where}.static_value", what, "Write it as a text; a later Cast converts it to a number"))
        return problems

    def _list_given(self) -> dict[str, str]:
        options = ("topic", "partition", "offset", "timestamp", "static")
        given = {option: getattr(self, f"{option}_field") for option in options}
        return {option: spec for option, spec in given.items() if spec is not None}

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        whole = F.col(self.of)
        new, errors = {}, []
        names = {option: _parse_field_name(spec) for option, spec in self._list_given().items()}
        for option, spec in self._list_given().items():
            name = names[option]
            new[name] = F.lit(self.static_value) if option == "static" else F.col(option)
            if spec.endswith("!"):
                missing = whole.isNotNull() & new[name].isNull()
                errors.append(F.when(missing, F.lit(f"found a record without a {option}, expected one for `{name}`")))
        fields = record.list_fields(self.of, "of")
        action = "Choose another name, or drop the field before with ReplaceField(exclude=...)"
        require_unique("of", [*fields, *names.values()], action)
        made = rebuild_struct(whole, {n: whole.getField(n) for n in fields} | new)
        return {self.of: made} | ({"error": F.coalesce(*errors)} if errors else {})


@dataclass(frozen=True)
class ReplaceField(NullDefaultTransform, KeyOrValueTransform):
    """Removes and renames fields. A tombstone stays one.

    :param include: only these fields stay; empty keeps all. Default empty.
    :param exclude: these fields are removed, even if they are included; default none.
    :param renames: old -> new name, ``"a:b,c:d"``, a list of such pairs, or a mapping; default none.
    """

    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    renames: str | Sequence[str] | Mapping[str, str] = ()

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        try:
            renames = parse_pairs(self.renames or ())
        except ValueError as error:
            problems.append(Problem(f"{where}.renames", str(error), "Write `old:new`, or give a mapping"))
            renames = {}
        if not (self.include or self.exclude or self.renames):
            what = "found neither `include`, `exclude` nor `renames`; expected one"
            problems.append(Problem(where, what, "Name fields"))
        for option in ("include", "exclude"):
            if given := getattr(self, option):
                problems += find_names_problems(f"{where}.{option}", given)
        wrong = [p for pair in renames.items() for name in pair for p in find_name_problems(f"{where}.renames", name)]
        problems += wrong
        for new, count in Counter(() if wrong else renames.values()).items():
            if count > 1:
                what = f"{count} fields are renamed to `{new}`; expected different names"
                problems.append(Problem(f"{where}.renames", what, "Correct it"))
        return problems

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        fields = record.list_fields(self.of, "of")
        include, exclude, renames = (
            parse_names(self.include or ()),
            parse_names(self.exclude or ()),
            parse_pairs(self.renames or ()),
        )
        problems: list[Problem] = []
        for option, names in (("include", include), ("exclude", exclude), ("renames", tuple(renames))):
            try:
                record.require_fields(self.of, option, names)
            except ValidationError as error:
                problems += error.problems
        if problems:
            raise ValidationError(problems)
        kept = [name for name in fields if name not in exclude and (not include or name in include)]
        require_unique("renames", (renames.get(n, n) for n in kept), "Exclude the other field, or choose another name")
        whole = F.col(self.of)
        return {self.of: rebuild_struct(whole, {renames.get(n, n): whole.getField(n) for n in kept})}


@dataclass(frozen=True)
class ValueToKey(NullDefaultTransform):
    """Replaces the key by a struct of fields of the value.

    A tombstone has no fields, which is an error of the record, as in Connect. Give ``predicate=RecordIsTombstone(), negate=True``
    if the topic has tombstones.

    :param fields: the fields, in the key's order.
    """

    fields: str | Sequence[str]

    def validate(self, where: str) -> list[Problem]:
        return [*super().validate(where), *find_names_problems(f"{where}.fields", self.fields)]

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        names = parse_names(self.fields)
        record.require_fields("value", "fields", names)
        value = F.col("value")
        key = F.when(value.isNotNull(), F.struct(*(value.getField(n).alias(n) for n in names)))
        return {"key": key, "error": F.when(value.isNull(), F.lit("found a null value (a tombstone), expected a struct"))}


def _parse_field_name(spec: str) -> str:
    """Return the name of an inserted field, without the mark of required and optional fields."""
    return spec[:-1] if spec.endswith(("!", "?")) else spec


@dataclass(frozen=True)
class MaskField(NullDefaultTransform, KeyOrValueTransform):
    """Replaces fields by a neutral value: 0, false, an empty text or list, 1970-01-01. Nulls stay null.

    A tombstone has no fields, which is an error of the record, as in Connect.

    :param fields: the fields.
    :param replacement: the value to use instead of the neutral one, for texts and numbers only. Default None.
    """

    fields: str | Sequence[str]
    replacement: str | None = None

    def validate(self, where: str) -> list[Problem]:
        problems = [*super().validate(where), *find_names_problems(f"{where}.fields", self.fields)]
        if self.replacement is not None and not (isinstance(self.replacement, str) and self.replacement):
            what = f"found {self.replacement!r}; expected a text that is not empty"
            problems.append(Problem(f"{where}.replacement", what, "Leave it out for an empty text, 0 and so on"))
        return problems

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        names = parse_names(self.fields)
        fields = record.require_fields(self.of, "fields", names)
        masks = {name: self._make_mask(name, fields[name]) for name in names}
        problems = [mask for mask in masks.values() if isinstance(mask, Problem)]
        if problems:
            raise ValidationError(problems)
        whole = F.col(self.of)
        made = {name: whole.getField(name) for name in fields}
        made |= {n: F.when(made[n].isNotNull(), m) for n, m in masks.items() if not isinstance(m, Problem)}
        return {self.of: rebuild_struct(whole, made), "error": self.make_missing_value_error()}

    def _make_mask(self, name: str, found: DataType) -> Column | Problem:
        kind = found.simpleString()
        mask = find_neutral_value(found) if self.replacement is None else _make_replacement_value(self.replacement, found)
        if mask is not None:
            return mask
        if self.replacement is None:
            what = f"the field `{name}` is {kind}, for which there is no mask"
            return Problem("fields", what, "Leave it out with ReplaceField(exclude=...)")
        what = f"the field `{name}` is {kind}, which cannot hold {self.replacement!r}; expected a text or a number that can"
        return Problem("replacement", what, "Mask it in a separate MaskField")


def find_neutral_value(found: DataType) -> Column | None:
    """Return the neutral value of a type; None if the type has no neutral value."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(found, t.MapType):
        none = F.array().cast(t.ArrayType(found.keyType)), F.array().cast(t.ArrayType(found.valueType))
        return F.map_from_arrays(*none)
    if isinstance(found, t.ArrayType):
        return F.array().cast(found)
    if isinstance(found, t.NumericType):
        return F.lit(0).cast(found)
    if isinstance(found, (t.DateType, t.TimestampType, t.TimestampNTZType)):
        return F.lit("1970-01-01").cast(found)
    return F.lit("") if isinstance(found, t.StringType) else F.lit(False) if isinstance(found, t.BooleanType) else None


def _make_replacement_value(text: str, found: DataType) -> Column | None:
    """Return a text as a value of a type; None if the type cannot hold it."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(found, t.StringType):
        return F.lit(text)
    if not text.isascii() or "_" in text:  # Python accepts these in numbers, Spark does not
        return None
    try:
        if isinstance(found, t.IntegralType):
            limit = 2 ** (INTEGER_BITS[found.simpleString()] - 1)
            whole = Decimal(text)
            return F.lit(str(int(whole))).cast(found) if -limit - 1 < whole < limit else None
        if isinstance(found, (t.FloatType, t.DoubleType)):
            return F.lit(repr(float(text))).cast(found)
        if isinstance(found, t.DecimalType):
            number = Decimal(text)
            fits = number == round(number, found.scale) and abs(number) < 10 ** (found.precision - found.scale)
            return F.lit(text).cast(found) if fits else None
    except (ValueError, InvalidOperation):
        return None
    return None


@dataclass(frozen=True)
class DropHeaders(ColumnTransform):
    """Removes all headers of these names.

    :param headers: their names.
    """

    headers: str | Sequence[str]

    def validate(self, where: str) -> list[Problem]:
        return [*super().validate(where), *find_names_problems(f"{where}.headers", self.headers)]

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        names = list(parse_names(self.headers))
        return {"headers": F.filter("headers", lambda header: ~header.getField("key").isin(names))}


@dataclass(frozen=True)
class InsertHeader(ColumnTransform):
    """Appends a header, even if there is one of the same name.

    :param header: its name.
    :param value_literal: its value, a text that is written in UTF-8. ``null`` is a header without a value; of a text in double
        quotes, the inner text is written.
    """

    header: str
    value_literal: str

    def validate(self, where: str) -> list[Problem]:
        problems = [*super().validate(where), *find_name_problems(f"{where}.header", self.header)]
        if not isinstance(self.value_literal, str):
            what = f"found {self.value_literal!r}; expected a text"
            problems.append(Problem(f"{where}.value_literal", what, "Write it as a text"))
        return problems

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        text: str | None = self.value_literal
        if text == "null":
            text = None
        elif text is not None and len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1].replace(r"\"", '"')
        return {"headers": _append_headers([(self.header, F.lit(text).cast("string").cast("binary"))])}


@dataclass(frozen=True)
class HeaderFrom(NullDefaultTransform, KeyOrValueTransform):
    """Appends fields of the key or value as headers.

    A header's value is the field's value in text, as Connect's ``SimpleHeaderConverter`` writes it: numbers and texts unchanged,
    binaries in base64, timestamps in ISO 8601, structures in JSON; null stays null. A tombstone has no fields, which is an error
    of the record, as in Connect.

    :param fields: the fields; one may become several headers.
    :param headers: the headers' names, in the same order.
    :param operation: ``move`` takes the fields out of the key or value, ``copy`` leaves them.
    """

    fields: str | Sequence[str]
    headers: str | Sequence[str]
    operation: Literal["copy", "move"]

    def validate(self, where: str) -> list[Problem]:
        wrong = find_names_problems(f"{where}.fields", self.fields, twice=True)
        wrong += find_names_problems(f"{where}.headers", self.headers, twice=True, what="headers")
        problems = [*super().validate(where), *wrong]
        if not wrong and len(parse_names(self.headers)) != len(parse_names(self.fields)):
            what = f"found {len(parse_names(self.headers))} for {len(parse_names(self.fields))} fields; expected one for each"
            problems.append(Problem(f"{where}.headers", what, "Name a header for each field"))
        if self.operation not in ("copy", "move"):
            what = f'found {self.operation!r}; expected "copy" or "move"'
            problems.append(Problem(f"{where}.operation", what, "Correct it"))
        return problems

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        names = parse_names(self.fields)
        fields: dict[str, DataType] = record.require_fields(self.of, "fields", names)
        whole = F.col(self.of)
        new = [
            (header, to_text(whole.getField(name), fields[name]).cast("binary"))
            for name, header in zip(names, parse_names(self.headers), strict=True)
        ]
        # A record without key or value keeps its headers.
        made = {
            "headers": F.when(whole.isNotNull(), _append_headers(new)).otherwise(F.col("headers")),
            "error": self.make_missing_value_error(),
        }
        if self.operation == "move":
            made[self.of] = rebuild_struct(whole, {n: whole.getField(n) for n in fields if n not in names})
        return made


def _append_headers(new: Sequence[tuple[str, Column]]) -> Column:
    """Return the record's headers, followed by further ones."""
    from pyspark.sql import functions as F

    kind = FIXED["headers"]
    more = F.array(*(F.struct(F.lit(name).alias("key"), value.alias("value")) for name, value in new))
    return F.concat(F.coalesce(F.col("headers"), F.array().cast(kind)), more.cast(kind))
