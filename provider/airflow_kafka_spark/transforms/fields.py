"""Transforms that choose, rename and wrap the fields of a key or a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.base import OfPart
from airflow_kafka_spark.transforms.defaults import KeepsNulls
from airflow_kafka_spark.transforms.predicates import name_problems

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType


@dataclass(frozen=True)
class ExtractField(KeepsNulls, OfPart):
    """The key or value becomes one of its fields. A tombstone stays one.

    :param field: the field's name; a path with ``field_syntax_version="V2"``.
    :param field_syntax_version: ``V1`` takes ``field`` as one name, whatever it holds; ``V2`` as names with dots between, where
        a name with dots stands in backticks.
    """

    field: str
    field_syntax_version: Literal["V1", "V2"] = "V1"

    def validate(self, where: str) -> list[Problem]:
        problems = [*super().validate(where), *name_problems(f"{where}.field", self.field)]
        if self.field_syntax_version not in ("V1", "V2"):
            what = f'found {self.field_syntax_version!r}; expected "V1" or "V2"'
            problems.append(Problem(f"{where}.field_syntax_version", what, "Correct it"))
        elif not problems:
            try:
                self._path()
            except ValueError as error:
                problems.append(Problem(f"{where}.field", str(error), "Close it, or write a backslash before it"))
        return problems

    def _path(self) -> list[str]:
        return [self.field] if self.field_syntax_version == "V1" else path_of(self.field)

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        first, *rest = self._path()
        found: DataType = record.known(self.of, "field", [first])[first]
        column = F.col(self.of).getField(first)
        for name in rest:
            if not isinstance(found, StructType) or name not in found.names:
                what = f"the {self.of} has no field `{self.field}`: there is no `{name}` in {found.simpleString()}"
                raise ValidationError([Problem("field", what, "Correct the path")])
            found, column = found[name].dataType, column.getField(name)
        return {self.of: column}


@dataclass(frozen=True)
class Flatten(OfPart):
    """Fields of structs within the key or value become its own, named by their path. Arrays stay; a tombstone stays one.

    :param delimiter: what stands between the names.
    """

    delimiter: str = "."

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if not isinstance(self.delimiter, str):
            problems.append(Problem(f"{where}.delimiter", f"found {self.delimiter!r}; expected a text", "Correct it"))
        return problems

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        whole = F.col(self.of)
        flat = list(self._flat(whole, record.fields(self.of, "of"), ""))
        refuse_doubles("delimiter", (name for name, _ in flat), "Choose another delimiter, or rename a field before")
        return {self.of: r.rebuilt(whole, dict(flat))}

    def _flat(self, whole: Column, fields: Mapping[str, DataType], prefix: str) -> Iterator[tuple[str, Column]]:
        from pyspark.sql.types import MapType, StructType

        for name, found in fields.items():
            path = f"{prefix}{name}"
            if isinstance(found, MapType):
                what = f"the field `{path}` is a map, whose keys are not known beforehand; expected structs"
                raise ValidationError([Problem("of", what, "Declare it as a struct, or leave it out with ReplaceField")])
            if isinstance(found, StructType):
                inner = {f.name: f.dataType for f in found}
                yield from self._flat(whole.getField(name), inner, f"{path}{self.delimiter}" if path else "")
            else:
                yield path, whole.getField(name)


@dataclass(frozen=True)
class HoistField(OfPart):
    """The key or value becomes the only field of a struct. That of a tombstone is null: it is no tombstone any more.

    :param field: the field's name.
    """

    field: str

    def validate(self, where: str) -> list[Problem]:
        return [*super().validate(where), *name_problems(f"{where}.field", self.field)]

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        return {self.of: F.struct(F.col(self.of).alias(self.field))}


@dataclass(frozen=True)
class InsertField(KeepsNulls, OfPart):
    """Fields of what is known of the record, and one of a constant, are added. A tombstone stays one.

    A name that ends in ``!`` is required: a record that lacks it has an error. One that ends in ``?`` is not, as by default.

    :param topic_field: the field for the topic.
    :param partition_field: the field for the partition.
    :param offset_field: the field for the offset.
    :param timestamp_field: the field for the record's timestamp.
    :param static_field: the field for ``static_value``.
    :param static_value: a text.
    """

    topic_field: str | None = None
    partition_field: str | None = None
    offset_field: str | None = None
    timestamp_field: str | None = None
    static_field: str | None = None
    static_value: str | None = None

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        given = self._given()
        if not given:
            problems.append(Problem(where, "found no field to insert; expected at least one", "Name for instance `topic_field`"))
        for option, spec in given.items():
            problems += name_problems(f"{where}.{option}_field", _inserted(spec) if isinstance(spec, str) else spec)
        if (self.static_field is None) != (self.static_value is None):
            what = "`static_field` and `static_value` belong together; found one of them"
            problems.append(Problem(f"{where}.static_value", what, "Give both, or neither"))
        elif self.static_value is not None and not isinstance(self.static_value, str):
            what = f"found {self.static_value!r}; expected a text"
            problems.append(Problem(f"{where}.static_value", what, "Write it as a text; a Cast behind makes a number of it"))
        return problems

    def _given(self) -> dict[str, str]:
        options = ("topic", "partition", "offset", "timestamp", "static")
        given = {option: getattr(self, f"{option}_field") for option in options}
        return {option: spec for option, spec in given.items() if spec is not None}

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        whole = F.col(self.of)
        new, errors = {}, []
        names = {option: _inserted(spec) for option, spec in self._given().items()}
        for option, spec in self._given().items():
            name = names[option]
            new[name] = F.lit(self.static_value) if option == "static" else F.col(option)
            if spec.endswith("!"):
                missing = whole.isNotNull() & new[name].isNull()
                errors.append(F.when(missing, F.lit(f"found a record without a {option}, expected one for `{name}`")))
        fields = record.fields(self.of, "of")
        action = "Choose another name, or drop the field before with ReplaceField(exclude=...)"
        refuse_doubles("of", [*fields, *names.values()], action)
        made = r.rebuilt(whole, {n: whole.getField(n) for n in fields} | new)
        return {self.of: made} | ({"error": F.coalesce(*errors)} if errors else {})


@dataclass(frozen=True)
class ReplaceField(KeepsNulls, OfPart):
    """Fields are left out or renamed. A tombstone stays one.

    :param include: only these fields stay; empty keeps all.
    :param exclude: these do not, even where they are included.
    :param renames: old -> new name, ``"a:b,c:d"``, a list of such pairs, or a mapping.
    """

    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    renames: str | Sequence[str] | Mapping[str, str] = ()

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        try:
            renames = r.pairs(self.renames or ())
        except ValueError as error:
            problems.append(Problem(f"{where}.renames", str(error), "Write `old:new`, or give a mapping"))
            renames = {}
        if not (self.include or self.exclude or self.renames):
            what = "found neither `include`, `exclude` nor `renames`; expected one"
            problems.append(Problem(where, what, "Name fields"))
        for option in ("include", "exclude"):
            if given := getattr(self, option):
                problems += names_problems(f"{where}.{option}", given)
        wrong = [p for pair in renames.items() for name in pair for p in name_problems(f"{where}.renames", name)]
        problems += wrong
        for new, count in Counter(() if wrong else renames.values()).items():
            if count > 1:
                what = f"{count} fields are renamed to `{new}`; expected names of their own"
                problems.append(Problem(f"{where}.renames", what, "Correct it"))
        return problems

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        fields = record.fields(self.of, "of")
        include, exclude, renames = r.listed(self.include or ()), r.listed(self.exclude or ()), r.pairs(self.renames or ())
        problems: list[Problem] = []
        for option, names in (("include", include), ("exclude", exclude), ("renames", tuple(renames))):
            try:
                record.known(self.of, option, names)
            except ValidationError as error:
                problems += error.problems
        if problems:
            raise ValidationError(problems)
        kept = [name for name in fields if name not in exclude and (not include or name in include)]
        refuse_doubles("renames", (renames.get(n, n) for n in kept), "Exclude the other field, or choose another name")
        whole = F.col(self.of)
        return {self.of: r.rebuilt(whole, {renames.get(n, n): whole.getField(n) for n in kept})}


@dataclass(frozen=True)
class ValueToKey(KeepsNulls):
    """The key becomes a struct of fields of the value. A tombstone has none of them: that is its error, as in Connect; give
    ``predicate=RecordIsTombstone(), negate=True`` where tombstones come.

    :param fields: the fields, in the key's order.
    """

    fields: str | Sequence[str]

    def validate(self, where: str) -> list[Problem]:
        return [*super().validate(where), *names_problems(f"{where}.fields", self.fields)]

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        names = r.listed(self.fields)
        record.known("value", "fields", names)
        value = F.col("value")
        key = F.when(value.isNotNull(), F.struct(*(value.getField(n).alias(n) for n in names)))
        return {"key": key, "error": F.when(value.isNull(), F.lit("found a null value (a tombstone), expected a struct"))}


def _inserted(spec: str) -> str:
    """The name of a field that is inserted, without the mark that says whether it is required."""
    return spec[:-1] if spec.endswith(("!", "?")) else spec


def names_problems(where: str, names: object, *, twice: bool = False, what: str = "fields") -> list[Problem]:
    """What is wrong with a list of names that must not be empty.

    :param twice: whether it may hold a name twice.
    :param what: what is named, for the message.
    """
    if not isinstance(names, (str, Sequence)) or not (found := r.listed(names)):
        return [Problem(where, f"found {names!r}; expected at least one name", f"Name {what}")]
    problems = [p for name in found for p in name_problems(where, name)]
    if problems or twice:
        return problems
    doubles = sorted(name for name, count in Counter(found).items() if count > 1)
    return [Problem(where, f"found `{name}` twice; expected each name once", "Leave one out") for name in doubles]


def refuse_doubles(option: str, names: Iterable[str], action: str) -> None:
    """:raises ValidationError: a name is there twice."""
    doubles = [name for name, count in Counter(names).items() if count > 1]
    if doubles:
        raise ValidationError(
            [Problem(option, f"there would be `{name}` twice; expected each name once", action) for name in doubles]
        )


def path_of(text: str) -> list[str]:
    """The names of a path in Connect's syntax V2: dots between; a name in backticks may hold dots, and ``\\``` before a dot is a
    backtick of the name's own.

    :raises ValueError: a backtick is not closed.
    """
    names, at = [], 0
    while at < len(text):
        if text[at] != "`":
            end = text.find(".", at)
            end = len(text) if end < 0 else end
            names.append(text[at:end])
        else:
            name, end = _quoted(text, at + 1)
            names.append(name)
        at = end + 1
    return [*names, ""] if text.endswith(".") else names


def _quoted(text: str, start: int) -> tuple[str, int]:
    """The name that a backtick before ``start`` opens, and where the dot behind it is, or the text's end."""
    name, at = "", start
    while (end := text.find("`", at)) >= 0:
        last = end == len(text) - 1
        escaped = text[end - 1] == "\\" and end > start
        if last and not escaped:
            return name + text[start:end], len(text)
        if not last and text[end + 1] == "." and not escaped:
            return name + text[start:end], end + 1
        if not last and text[end + 1] == ".":
            name, start = name + text[start : end - 1] + "`", end + 1
        at = end + 1
    raise ValueError(f"found a backtick without its end in `{text}`; expected pairs")
