"""Schemas of Protobuf: compiled by protoc, searched for messages, compared with older versions, and derived from columns
or from schemas of Connect.

:class:`MessageLayout` holds the columns of a message: its descriptor read once, as values that are sent to tasks.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from google.protobuf.descriptor_pb2 import DescriptorProto

from airflow_kafka_spark.errors import PackageMissing, SchemaUnusable
from airflow_kafka_spark.formats.avro.schema import make_namespace
from airflow_kafka_spark.formats.registry import SchemaDocument
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool


MAIN = "schema.proto"
_ALL_FILES = (
    "Give a descriptor set with all files, as `protoc --include_imports --descriptor_set_out=` writes it, or use a registry"
)
_TIMEOUT = 120
_LOGGED = re.compile(r"(?m)^(WARNING: All log messages|[WI]\d{4} ).*\n")
_COMPILE = """
import json, os, sys
from grpc_tools import protoc
for directory, roots, main in json.load(sys.stdin):
    with open(directory + "/messages", "w") as messages:
        os.dup2(messages.fileno(), 2)
        os.chdir(directory)
        protoc.main(["protoc", *("-I" + r for r in roots), "--include_imports", "--descriptor_set_out=compiled", main])
"""


def compile_schemas(documents: Sequence[SchemaDocument]) -> list[bytes | SchemaUnusable]:
    """Return the descriptor sets of schemas with all their imports; the last file of each set is the schema itself.

    :raises PackageMissing: protoc is missing.
    """
    found: list[bytes | SchemaUnusable | None] = [_decode_descriptor(document) for document in documents]
    left = [at for at, one in enumerate(found) if one is None]
    for at, one in zip(left, _run_protoc(tuple(documents[at] for at in left)), strict=True):
        found[at] = one
    return [one for one in found if one is not None]


def _decode_descriptor(document: SchemaDocument) -> bytes | None:
    """Return the descriptor set of a descriptor in base64, which Confluent's clients for Python register; None for other
    texts.
    """
    text = document.text.strip()
    if not text or any(mark in text for mark in '{};" '):
        return None
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    files = descriptor_pb2.FileDescriptorSet()
    try:
        own = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
        given = dict(document.references)
        _add_imports(files, own, given)
    # RecursionError: files that import each other.
    except (binascii.Error, ValueError, KeyError, DecodeError, RecursionError):
        return None
    files.file.append(own)
    return files.SerializeToString()


def _add_imports(files: FileDescriptorSet, of: FileDescriptorProto, given: dict[str, str]) -> None:
    """Add the imports of a file to a set, each before the files that import it."""
    from google.protobuf import descriptor_pb2

    for name in of.dependency:
        if any(f.name == name for f in files.file):
            continue
        if name in given:
            imported = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(given[name], validate=True))
            imported.name = name
            _add_imports(files, imported, given)
            files.file.append(imported)
        else:
            (known,) = _run_protoc((SchemaDocument(f'syntax = "proto3"; import "{name}"; message None {{}}'),))
            if isinstance(known, SchemaUnusable):
                raise KeyError(name)
            for one in descriptor_pb2.FileDescriptorSet.FromString(known).file[:-1]:
                if all(f.name != one.name for f in files.file):
                    files.file.append(one)


@lru_cache(maxsize=64)
def _run_protoc(documents: tuple[SchemaDocument, ...]) -> tuple[bytes | SchemaUnusable, ...]:
    if not documents:
        return ()
    include = _list_include_directories()
    with tempfile.TemporaryDirectory(prefix="airflow-kafka-spark-protoc-") as temporary:
        jobs, wrong = [], dict[int, SchemaUnusable]()
        for at, document in enumerate(documents):
            directory = Path(temporary) / str(at)
            if strange := [name for name, _ in document.references if not _is_plain(name)]:
                wrong[at] = SchemaUnusable(
                    document.name, f"it imports `{strange[0]}`, which is no plain path", "Rename that file"
                )
                continue
            for name, text in [*WELL_KNOWN_FILES.items(), *document.references, (MAIN, document.text)]:
                path = directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            jobs.append((str(directory), [".", *include], MAIN))
        command = [sys.executable, "-c", _COMPILE]
        ran = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        results: list[bytes | SchemaUnusable] = []
        for at, document in enumerate(documents):
            done, messages = Path(temporary) / str(at) / "compiled", Path(temporary) / str(at) / "messages"
            if at in wrong:
                results.append(wrong[at])
            elif done.is_file():
                results.append(done.read_bytes())
            else:
                detail = messages.read_text("utf-8", "replace") if messages.is_file() else ran.stderr
                action = _ALL_FILES if "File not found" in detail else ""
                said = f"protoc reports: {' '.join(_LOGGED.sub('', detail).split())[:1000]}"
                results.append(SchemaUnusable(document.name, said, action))
    return tuple(results)


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and name != MAIN and "\0" not in name


@lru_cache(maxsize=1)
def _list_include_directories() -> tuple[str, ...]:
    """Return the directories of the files that every schema may import."""
    spec = find_spec("grpc_tools")
    if spec is None or not spec.submodule_search_locations:
        raise PackageMissing("Protobuf", "grpcio-tools", "protobuf")
    roots = [str(Path(spec.submodule_search_locations[0]) / "_proto")]
    try:
        types = find_spec("google.type")
    except ModuleNotFoundError:
        types = None
    if types is not None and types.submodule_search_locations:
        roots.append(str(Path(next(iter(types.submodule_search_locations))).parents[1]))
    return tuple(roots)


# --- messages ------------------------------------------------------------------------------------------------------------


def find_message(files: bytes, name: str, what: str) -> Descriptor:
    """Return a message of the last file of a set.

    :param name: its name, with or without the package; empty for the first one.
    :param what: the schema's description in messages.
    :raises SchemaUnusable: the schema does not contain it.
    """
    found = dict(list_messages(files))
    for path, message in found.items():
        if (not name and path == (0,)) or name in (message.full_name, _shorten(message)):
            return message
    listed = ", ".join(m.full_name for m in found.values()) or "none"
    detail = f"it has no message `{name}`; its messages are {listed}" if name else "it has no message"
    raise SchemaUnusable(what, detail, "Name one of its messages as `message`")


def _shorten(message: Descriptor) -> str:
    return str(message.full_name).removeprefix(f"{message.file.package}.")


def list_messages(files: bytes) -> Iterator[tuple[tuple[int, ...], Descriptor]]:
    """Yield all messages of the last file of a set with their indexes in Confluent's wire format."""
    pool, last = make_pool(files)
    file = pool.FindFileByName(last)
    proto = _parse_last_file(files)
    for at, message in enumerate(proto.message_type):
        yield from _list_nested_messages(file.message_types_by_name[message.name], message, (at,))


def _list_nested_messages(
    message: Descriptor, proto: DescriptorProto, path: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Descriptor]]:
    yield path, message
    for at, inner in enumerate(proto.nested_type):
        if not inner.options.map_entry:
            yield from _list_nested_messages(message.nested_types_by_name[inner.name], inner, (*path, at))


def _parse_last_file(files: bytes) -> FileDescriptorProto:
    from google.protobuf import descriptor_pb2

    return descriptor_pb2.FileDescriptorSet.FromString(files).file[-1]


@lru_cache(maxsize=256)
def make_pool(files: bytes) -> tuple[DescriptorPool, str]:
    """Return the descriptors of a set, and the name of its last file.

    :raises SchemaUnusable: the files do not fit together.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.message import DecodeError

    try:
        given = descriptor_pb2.FileDescriptorSet.FromString(files)
        pool = descriptor_pool.DescriptorPool()
        for file in given.file:
            pool.Add(file)
        for file in given.file:
            pool.FindFileByName(file.name)
        return pool, given.file[-1].name
    except (DecodeError, TypeError, KeyError, IndexError) as e:
        raise SchemaUnusable("the descriptor set", f"it is not valid ({e})", "Make it with protoc --include_imports") from None


# --- old messages read as new ones ---------------------------------------------------------------------------------------

_WIDER: dict[str, tuple[str, ...]] = {
    "INT32": ("INT64",),
    "UINT32": ("UINT64", "INT64"),
    "SINT32": ("SINT64",),
    "STRING": ("BYTES",),
    "BYTES": ("STRING",),
    "BOOL": ("INT32", "INT64", "UINT32", "UINT64"),
    "ENUM": ("INT32", "INT64"),
}


def find_incompatibility(writer: Descriptor, reader: Descriptor) -> str:
    """Return the field of a writer's message that would be misread as the reader's; empty if none would."""
    return _find_incompatibility(writer, reader, set())


def _find_incompatibility(writer: Descriptor, reader: Descriptor, seen: set[tuple[str, str]]) -> str:
    if (writer.full_name, reader.full_name) in seen:
        return ""
    seen.add((writer.full_name, reader.full_name))
    theirs = writer.fields_by_number
    for number, field in reader.fields_by_number.items():
        old = theirs.get(number)
        if old is not None and (wrong := _find_field_incompatibility(old, field, seen)):
            return wrong
    for choice in reader.oneofs:
        old_ones = [theirs[f.number] for f in choice.fields if f.number in theirs]
        if len(old_ones) > 1 and len({f.containing_oneof.name if f.containing_oneof else f.name for f in old_ones}) > 1:
            return f"the oneof `{choice.name}` was fields of which several may be set"
    return ""


def _find_field_incompatibility(old: FieldDescriptor, new: FieldDescriptor, seen: set[tuple[str, str]]) -> str:
    was, now = get_type_name(old), get_type_name(new)
    if is_repeated(old) and not is_repeated(new):
        return f"field {new.number} (`{new.name}`) was repeated"
    if was != now and now not in _WIDER.get(was, ()):
        return f"field {new.number} (`{new.name}`) was of type {was.lower()}, which is not read as {now.lower()}"
    if is_map(old) != is_map(new):
        return f"field {new.number} (`{new.name}`) was {'a' if is_map(old) else 'no'} map"
    if was == now == "ENUM":
        return _find_renumbered_symbol(old, new)
    if was == now == "MESSAGE" and _has_other_meaning(of := old.message_type.full_name, to := new.message_type.full_name):
        return f"field {new.number} (`{new.name}`) was a {of}, which is not read as a {to}"
    return _find_incompatibility(old.message_type, new.message_type, seen) if now in ("MESSAGE", "GROUP") else ""


def _has_other_meaning(of: str, to: str) -> bool:
    """Return True if both are different well-known messages: a point in time and a length of time have the same fields."""
    return of != to and {of, to} <= _WITH_MEANING and not {of, to} <= _WRAPPERS


def _find_renumbered_symbol(old: FieldDescriptor, new: FieldDescriptor) -> str:
    """Return the symbol of an enum that has the number of another one now. A renamed symbol keeps its number."""
    was, now = ({value.name: value.number for value in field.enum_type.values} for field in (old, new))
    for name, number in now.items():
        if was.get(name, number) != number and (number in was.values() or was[name] in now.values()):
            return f"field {new.number} (`{new.name}`) had the symbol `{name}` as {was[name]}, which is {number} now"
    return ""


_TYPES = (
    "DOUBLE FLOAT INT64 UINT64 INT32 FIXED64 FIXED32 BOOL STRING GROUP MESSAGE BYTES UINT32 ENUM SFIXED32 SFIXED64 SINT32 SINT64"
)
_TYPE_NAMES = dict(enumerate(_TYPES.split(), 1))


def get_type_name(field: FieldDescriptor) -> str:
    """Return the type of a field: ``INT32``, ``MESSAGE``, ..."""
    return _TYPE_NAMES[field.type]


def is_repeated(field: FieldDescriptor) -> bool:
    """Return True if a field is a list or a map."""
    # Protobuf 7 has no labels, earlier releases have no `is_repeated`.
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == 3


def is_required(field: FieldDescriptor) -> bool:
    """Return True if a message must have this field."""
    return bool(field.is_required) if hasattr(field, "is_required") else field.label == 2


def is_map(field: FieldDescriptor) -> bool:
    """Return True if a field is a map."""
    return get_type_name(field) == "MESSAGE" and bool(field.message_type.GetOptions().map_entry)


# --- files that every schema may import -----------------------------------------------------------------------------------


_META = """syntax = "proto3";
package confluent;
import "google/protobuf/descriptor.proto";
message Meta {
  string doc = 1;
  map<string, string> params = 2;
  repeated string tags = 3;
}
extend google.protobuf.FileOptions { Meta file_meta = 1088; }
extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
"""
_DECIMAL = """syntax = "proto3";
package confluent.type;
message Decimal {
  bytes value = 1;
  uint32 precision = 2;
  int32 scale = 3;
}
"""
_DATE = """syntax = "proto3";
package google.type;
message Date {
  int32 year = 1;
  int32 month = 2;
  int32 day = 3;
}
"""
WELL_KNOWN_FILES: Mapping[str, str] = {
    "confluent/meta.proto": _META,
    "confluent/type/decimal.proto": _DECIMAL,
    "google/type/date.proto": _DATE,
}
"""Files that every ``.proto`` may import without a reference, besides those of protoc."""


# --- schemas derived from columns -----------------------------------------------------------------------------------------


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHAT = "the option `schema`"
_PROTO_TYPES = {
    **dict.fromkeys(("tinyint", "smallint", "int"), "int32"),
    "bigint": "int64",
    "float": "float",
    "double": "double",
    "boolean": "bool",
    "binary": "bytes",
    "timestamp": "google.protobuf.Timestamp",
    "date": "google.type.Date",
}
_IMPORTS = {
    "google.protobuf.Timestamp": ("google/protobuf/timestamp.proto",),
    "google.type.Date": ("google/type/date.proto",),
    "confluent.type.Decimal": ("confluent/meta.proto", "confluent/type/decimal.proto"),
}


def derive_proto(columns: Sequence[Column], message: str) -> str:
    """Return a proto3 file with one message whose fields are these columns, numbered from 1 in their order.

    Nullable columns are ``optional``; lists and maps are not, since Protobuf has no null for them.

    :param message: the message's full name.
    :raises SchemaUnusable: a column has no counterpart.
    """
    package, _, name = message.rpartition(".")
    maker = _MessageWriter()
    body = maker.write_message(name, columns, "")
    imports = [f'import "{file}";' for file in maker.scalars.imports]
    lines = ['syntax = "proto3";', *([f"package {package};"] if package else []), *imports]
    return "\n".join([*lines, "", *body, ""])


class ScalarFields:
    """Names the types of fields that are no message of the file, and collects the files that they need."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    @property
    def imports(self) -> list[str]:
        """The files to import."""
        return sorted({file for used in self._used for file in _IMPORTS[used]})

    def find_kind(self, data_type: DataType, path: str) -> tuple[str, str]:
        """Return the type and the options of a field.

        :raises SchemaUnusable: the column has no counterpart.
        """
        if isinstance(data_type, Text):
            return "string", ""
        if isinstance(data_type, Decimal):
            self._used.add("confluent.type.Decimal")
            params = {"precision": data_type.precision, "scale": data_type.scale}
            said = ", ".join(f'{{ key: "{key}", value: "{value}" }}' for key, value in params.items())
            return "confluent.type.Decimal", f" [(confluent.field_meta) = {{ params: [{said}] }}]"
        if not isinstance(data_type, Primitive) or data_type.name not in _PROTO_TYPES:
            raise _make_no_counterpart_error(
                path, data_type, "Declare it timestamp" if str(data_type) == "timestamp_ntz" else "Declare another type"
            )
        kind = _PROTO_TYPES[data_type.name]
        if kind in _IMPORTS:
            self._used.add(kind)
        return kind, ""


class _MessageWriter:
    """Writes messages of columns."""

    def __init__(self) -> None:
        self.scalars = ScalarFields()

    def write_message(self, name: str, columns: Sequence[Column], path: str) -> list[str]:
        inner: list[str] = []
        fields = []
        for number, column in enumerate(columns, 1):
            here = f"{path}.{column.name}" if path else column.name
            if not NAME.fullmatch(column.name):
                raise SchemaUnusable(_WHAT, f"column `{here}` has a name that Protobuf does not take", "Rename it")
            label, kind, options = self._write_field(column, here, inner)
            fields.append(f"  {label}{kind} {column.name} = {number}{options};")
        return [f"message {name} {{", *(f"  {line}" for line in inner), *fields, "}"]

    def _write_field(self, column: Column, path: str, inner: list[str]) -> tuple[str, str, str]:
        data_type = column.type
        if isinstance(data_type, Array):
            if isinstance(data_type.element, Array | Map):
                raise _make_no_counterpart_error(path, data_type, "Put the inner one into a struct")
            return "repeated ", *self._write_type(data_type.element, column.name, path, inner)
        if isinstance(data_type, Map):
            if str(data_type.key) not in ("string", "int", "bigint", "boolean", "smallint", "tinyint"):
                raise _make_no_counterpart_error(path, data_type, "Keys are strings, integers or booleans")
            if isinstance(data_type.value, Array | Map | Decimal):
                raise _make_no_counterpart_error(path, data_type, "Put the value into a struct")
            key, _ = self._write_type(data_type.key, column.name, path, inner)
            value, options = self._write_type(data_type.value, column.name, path, inner)
            return "", f"map<{key}, {value}>", options
        kind, options = self._write_type(data_type, column.name, path, inner)
        return "optional " if column.nullable else "", kind, options

    def _write_type(self, data_type: DataType, name: str, path: str, inner: list[str]) -> tuple[str, str]:
        if isinstance(data_type, Struct):
            message = "".join(part[:1].upper() + part[1:] for part in name.split("_")) or "Inner"
            # protoc puts a nested message into the scope of its field's siblings.
            inner += self.write_message(f"{message}Value", data_type.fields, path)
            return f"{message}Value", ""
        return self.scalars.find_kind(data_type, path)


def _make_no_counterpart_error(path: str, data_type: DataType, action: str) -> SchemaUnusable:
    return SchemaUnusable(_WHAT, f"column `{path}` is of type {data_type}, which Protobuf does not have", action)


Conversion = Literal["plain", "unsigned", "enum", "message", "timestamp", "duration", "date", "decimal", "wrapper", "json"]
"""Conversion of a field's value to a column's: unchanged; from a uint64; from an enum's number; from a message's fields; from a
Timestamp; from a Duration; from a Date; from Confluent's Decimal; from a wrapper's field; from a Struct or Value, as JSON.
"""

_MAX_NESTING = 50
_PLAIN: Mapping[str, DataType] = {
    **dict.fromkeys(("INT32", "SINT32", "SFIXED32"), Primitive("int")),
    **dict.fromkeys(("INT64", "SINT64", "SFIXED64", "UINT32", "FIXED32"), Primitive("bigint")),
    "FLOAT": Primitive("float"),
    "DOUBLE": Primitive("double"),
    "BOOL": Primitive("boolean"),
    "STRING": Text(),
    "BYTES": Primitive("binary"),
}
_BOUNDS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("INT32", "SINT32", "SFIXED32"), (-(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys(("UINT32", "FIXED32"), (0, (1 << 32) - 1)),
}
_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}
_JSON = {f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue")}
_WELL_KNOWN: Mapping[str, tuple[Conversion, DataType]] = {
    "google.protobuf.Timestamp": ("timestamp", Primitive("timestamp")),
    "google.protobuf.Duration": ("duration", Primitive("bigint")),
    "google.type.Date": ("date", Primitive("date")),
}
_WITH_MEANING = {*_WELL_KNOWN, *_WRAPPERS, *_JSON, "confluent.type.Decimal"}
"""Messages that are more than their fields: one of them is not read as another one."""


@dataclass(frozen=True)
class FieldLayout:
    """A field of a message, or the key, the value or an element of one.

    :param name: the field's name.
    :param how: the conversion of one value to the column's.
    :param type: the type of one value.
    :param nullable: True if the field may be absent; False: it has a default, or is required.
    :param many: ``list``, ``map``, or empty for a single value.
    :param fields: the fields of a message.
    :param inner: the value of a wrapper; the keys and values of a map.
    :param symbols: numbers and symbols of an enum, in the schema's order; with `allow_alias` a number has several.
    :param numbers: the field numbers of a message.
    :param bounds: smallest and greatest value of an integer.
    :param full_name: the full name of a message.
    :param choice: the name of the ``oneof`` that contains the field.
    """

    name: str
    how: Conversion
    type: DataType
    nullable: bool = False
    many: Literal["", "list", "map"] = ""
    fields: tuple[FieldLayout, ...] = ()
    inner: tuple[FieldLayout, ...] = ()
    symbols: tuple[tuple[int, str], ...] = ()
    numbers: frozenset[int] = frozenset()
    bounds: tuple[int, int] | None = None
    full_name: str = ""
    choice: str = ""

    @property
    def column(self) -> Column:
        """The column of this field."""
        if self.many == "list":
            return Column(self.name, Array(self.type, contains_null=False), nullable=False)
        if self.many == "map":
            key, value = self.inner
            return Column(self.name, Map(key.type, value.type, value_contains_null=False), nullable=False)
        return Column(self.name, self.type, self.nullable)


@dataclass(frozen=True)
class MessageLayout:
    """Reads the columns of descriptors.

    :param what: the schema's description in messages.
    :param recursive_fields_max_depth: the number of times that a message may occur within itself, as Spark counts: 1 leaves such
        fields out, 2 reads them once; None refuses them.
    """

    what: str
    recursive_fields_max_depth: int | None = None

    def describe_message(self, message: Descriptor) -> FieldLayout:
        """Return the layout of a message.

        :raises SchemaUnusable: it has no columns.
        """
        node = self._read_message(message, (), message.name)
        if node is None:
            raise self._make_schema_error(f"message `{message.full_name}` has no fields", "Read such values with Raw")
        return node

    def _make_schema_error(self, detail: str, action: str = "") -> SchemaUnusable:
        return SchemaUnusable(self.what, detail, action)

    def _read_message(self, message: Descriptor, within: tuple[str, ...], name: str) -> FieldLayout | None:
        """Return the layout of a message, or None if none of its fields is a column."""
        if len(within) >= _MAX_NESTING:
            raise self._make_schema_error(f"messages are nested more than {_MAX_NESTING} deep")
        here = (*within, message.full_name)
        found, seen = [], dict[str, str]()
        for field in message.fields:
            node = self._read_field(field, here)
            if node is None:
                continue
            other = seen.setdefault(node.name.casefold(), node.name)
            if other != node.name:
                raise self._make_schema_error(
                    f"message `{message.full_name}` has `{other}` and `{node.name}`, which are one to Spark"
                )
            found.append(node)
        if not found:
            return None
        struct = Struct(tuple(node.column for node in found))
        numbers = frozenset(field.number for field in message.fields)
        return FieldLayout(name, "message", struct, fields=tuple(found), numbers=numbers, full_name=message.full_name)

    def _read_field(self, field: FieldDescriptor, within: tuple[str, ...]) -> FieldLayout | None:
        if is_map(field):
            entry = field.message_type
            key, value = (self._read_value(entry.fields_by_name[part], within) for part in ("key", "value"))
            if key is None or value is None:
                return None
            return FieldLayout(field.name, "plain", value.type, many="map", inner=(key, value))
        node = self._read_value(field, within)
        if node is None or is_repeated(field):
            return node and replace(node, many="list", nullable=False)
        has_default = field.has_default_value and get_type_name(field) not in ("MESSAGE", "GROUP")
        oneof = field.containing_oneof
        choice = oneof.name if oneof is not None and len(oneof.fields) > 1 else ""
        nullable = bool(field.has_presence) and not is_required(field) and not has_default
        return replace(node, nullable=nullable, choice=choice)

    def _read_value(self, field: FieldDescriptor, within: tuple[str, ...]) -> FieldLayout | None:
        kind = get_type_name(field)
        if kind in _PLAIN:
            return FieldLayout(field.name, "plain", _PLAIN[kind], bounds=_BOUNDS.get(kind))
        if kind in ("UINT64", "FIXED64"):
            return FieldLayout(field.name, "unsigned", Decimal(20, 0))
        if kind == "ENUM":
            symbols = tuple((value.number, value.name) for value in field.enum_type.values)
            return FieldLayout(field.name, "enum", Text(), symbols=symbols)
        message = field.message_type
        name = message.full_name
        if name in _WELL_KNOWN:
            how, data_type = _WELL_KNOWN[name]
            return FieldLayout(field.name, how, data_type, full_name=name)
        if name in _WRAPPERS:
            inner = self._read_value(message.fields_by_name["value"], within)
            assert inner is not None
            return FieldLayout(field.name, "wrapper", inner.type, inner=(inner,), full_name=name)
        if name in _JSON:
            return FieldLayout(field.name, "json", Text(), full_name=name)
        if name == "confluent.type.Decimal" and (decimal := _find_decimal(field)) is not None:
            return FieldLayout(field.name, "decimal", decimal, full_name=name)
        if (times := within.count(name)) and self.recursive_fields_max_depth is None:
            raise self._make_schema_error(
                f"message `{name}` holds itself, by `{field.full_name}`",
                "Set `recursive_fields_max_depth` to the depth to read: 1 leaves the field out, 2 reads it once",
            )
        if times and times >= (self.recursive_fields_max_depth or 0):
            return None
        return self._read_message(message, within, field.name)


def _find_decimal(field: FieldDescriptor) -> Decimal | None:
    """Return precision and scale of a Decimal, if the field's ``confluent.field_meta`` has these parameters, as Connect writes
    them.
    """
    from google.protobuf.message_factory import GetMessageClass

    pool = field.file.pool
    try:
        extension = pool.FindExtensionByName("confluent.field_meta")
    except KeyError:
        return None
    options = GetMessageClass(extension.containing_type).FromString(field.GetOptions().SerializeToString())
    params = dict(options.Extensions[extension].params)
    try:
        precision, scale = int(params["precision"]), int(params["scale"])
    except (KeyError, ValueError):
        return None
    return Decimal(precision, scale) if 1 <= precision <= 38 and 0 <= scale <= precision else None


FieldNumbers = Mapping[str, int]
"""The numbers of a message's fields, by name. A reserved name has the number 0; a reserved number is its own name."""


def make_message_name(schema: Mapping[str, Any]) -> str:
    """Return the full name of the message of a struct: its own, with ``_`` for what such names cannot have."""
    return make_namespace(str(schema["name"]))


def list_field_numbers(message: Descriptor) -> dict[str, FieldNumbers]:
    """Return the numbers of the fields of a message and of those in it, by the messages' names; with those that are reserved."""
    described = DescriptorProto()
    message.CopyToProto(described)
    numbers: dict[str, int] = dict.fromkeys(described.reserved_name, 0)
    numbers |= {str(at): at for span in described.reserved_range for at in range(span.start, span.end)}
    found: dict[str, FieldNumbers] = {message.name: numbers | {field.name: field.number for field in message.fields}}
    for inner in message.nested_types:
        found |= list_field_numbers(inner)
    return found


def convert_connect_to_proto(schema: Mapping[str, Any], columns: Iterable[Column], known: Mapping[str, FieldNumbers]) -> str:
    """Return a proto3 file with the message of a struct's schema, and messages for the structs in it, named as these are.

    A field keeps the number that it has in an earlier version, and a number of an earlier version is not given to another
    field: by its number a reader finds a field.

    :param columns: the columns of the struct.
    :param known: the numbers of an earlier version; see :func:`list_field_numbers`.
    :raises SchemaUnusable: a column has no counterpart.
    """
    package, _, name = make_message_name(schema).rpartition(".")
    writer = _ConnectMessages(f".{package}.{name}" if package else f".{name}", known)
    body = writer.write_message(name, schema, list(columns))
    lines = ['syntax = "proto3";', *([f"package {package};"] if package else [])]
    lines += [f'import "{file}";' for file in writer.scalars.imports]
    return "\n".join([*lines, "", f"message {name} {{", *writer.inner, *body, "}", ""])


class _ConnectMessages:
    """Writes the fields of messages, and the messages in them, once each.

    :param outer: the full name of the outer message.
    :param known: the numbers of fields of an earlier version.
    """

    def __init__(self, outer: str, known: Mapping[str, FieldNumbers]) -> None:
        self.scalars = ScalarFields()
        self.inner: list[str] = []
        self._outer, self._known = outer, known
        self._made: set[str] = set()

    def write_message(self, name: str, schema: Mapping[str, Any], columns: list[Column]) -> list[str]:
        """Return the lines of the fields of a message."""
        known = self._known.get(name, {})
        following = max(known.values(), default=0)
        lines, of_fields = [], {str(field["field"]): field for field in schema["fields"]}
        for column in columns:
            if not NAME.fullmatch(column.name):
                found = f"column `{column.name}` has a name that Protobuf does not take"
                raise SchemaUnusable(f"message {name}", found, "Rename it, or leave the table out")
            number = known.get(column.name)
            if not number:
                number = following = following + 1
            lines.append(f"  {self._write_field(column, of_fields[column.name])} = {number}{self._write_options(column)};")
        gone = {field: number for field, number in known.items() if field not in of_fields}
        names = sorted(f'"{field}"' for field in gone if not field.isdigit())
        reserved = [", ".join(map(str, sorted(filter(None, gone.values())))), ", ".join(names)]
        return [*(f"  reserved {those};" for those in reserved if those), *lines]

    def _write_field(self, column: Column, schema: Mapping[str, Any]) -> str:
        if isinstance(column.type, Array):
            if isinstance(column.type.element, Array | Map):
                found = f"column `{column.name}` is an array of arrays, which Protobuf does not have"
                raise SchemaUnusable(f"message {self._outer}", found, "Leave the table out")
            return f"repeated {self._write_kind(Column(column.name, column.type.element), schema['items'])} {column.name}"
        return f"{'optional ' if column.nullable else ''}{self._write_kind(column, schema)} {column.name}"

    def _write_kind(self, column: Column, schema: Mapping[str, Any]) -> str:
        if not isinstance(column.type, Struct):
            return self.scalars.find_kind(column.type, column.name)[0]
        name = make_message_name(schema).rpartition(".")[2]
        if name not in self._made:
            self._made.add(name)
            lines = self.write_message(name, schema, list(column.type.fields))
            self.inner += [f"  message {name} {{", *(f"  {line}" for line in lines), "  }"]
        return f"{self._outer}.{name}"

    def _write_options(self, column: Column) -> str:
        kind = column.type.element if isinstance(column.type, Array) else column.type
        return "" if isinstance(kind, Struct) else self.scalars.find_kind(kind, column.name)[1]
