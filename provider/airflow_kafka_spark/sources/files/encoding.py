"""The encoding of files: rows with bytes that are no text in it are marked as bad.

Spark's reader of CSV replaces such bytes by U+FFFD without an error. Those of text, Parquet and ORC keep them in a string that is
not UTF-8. That of JSON takes the line for malformed. Most CSV is therefore read as ISO-8859-1, which keeps every byte, and
its texts are made from these bytes again. Where that is not possible, a text that holds U+FFFD counts as bad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from airflow_kafka_spark.formats.base import ERROR, UNREADABLE, is_utf8, make_spark_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_BYTES = "ISO-8859-1"
_REPLACEMENT = "\ufffd"
_METADATA = "_metadata"


@dataclass(frozen=True)
class FileEncoding:
    """The encoding of files, and how their texts are checked.

    :param format: the format of the files.
    :param schema: the columns as DDL; None if the files have their own.
    :param options: the options of Spark's reader, with names in lower case.
    """

    format: str
    schema: str | None
    options: Mapping[str, str]

    @property
    def name(self) -> str:
        """The encoding's name; UTF-8 by default."""
        return self.options.get("encoding") or self.options.get("charset") or "UTF-8"

    @property
    def reader_options(self) -> dict[str, str]:
        """The options with which Spark reads the files."""
        if not self._is_read_as_bytes:
            return dict(self.options)
        return {**{name: value for name, value in self.options.items() if name != "charset"}, "encoding": _BYTES}

    @property
    def _is_read_as_bytes(self) -> bool:
        """True for CSV in UTF-8 if nothing that the parser compares or counts depends on the encoding."""
        given = self.options
        compared = [*given.values(), *([self.schema or ""] if given.get("header", "").lower() == "true" else [])]
        return (
            self.format == "csv"
            and is_utf8(self.name)
            and given.get("multiline", "").lower() != "true"  # a byte order mark would choose the encoding
            and not given.keys() & {"locale", "maxcharspercolumn"}
            and all(map(str.isascii, compared))
        )

    @property
    def _is_replaced(self) -> bool:
        """True if the reader replaces bytes that are no text by U+FFFD."""
        return self.format == "csv" and not self._is_read_as_bytes

    def check_texts(self, frame: DataFrame) -> DataFrame:
        """Return the rows with their texts, and with the column :data:`~airflow_kafka_spark.formats.base.ERROR` if a text of
        theirs may be bad.

        :param frame: as Spark's reader made it, with :attr:`reader_options`.
        """
        from pyspark.sql import functions as F

        columns = {field.name: self._restore(make_spark_column(field.name), field.dataType) for field in frame.schema.fields}
        found = []
        for field in frame.schema.fields:
            wrong = self._find_bad(columns[field.name], field.dataType)
            if wrong is not None:
                found.append(F.when(wrong, F.lit(f"column `{field.name}`")))
        rows = [column.alias(name) for name, column in columns.items()]
        if not found:
            return frame.select(*rows)
        file = F.lit("")
        if _METADATA not in frame.columns:
            file = F.concat(F.lit(" of file `"), F.col(f"{_METADATA}.file_name"), F.lit("`"))
        found_bytes = f"the reader found bytes that are not {self.name}, or U+FFFD" if self._is_replaced else f"not {self.name}"
        advice = "" if self.format in ("parquet", "orc") else ". `encoding` in the source's `options` names another encoding"
        # Null unless a column is named.
        reason = F.concat(F.lit(UNREADABLE), F.coalesce(*found), file, F.lit(f": {found_bytes}{advice}"))
        return frame.select(*rows, reason.alias(ERROR))

    def _restore(self, column: Column, kind: DataType) -> Column:
        """Return a column of the reader with the texts and bytes of the file."""
        from pyspark.sql import functions as F

        name = kind.typeName()
        if self._is_read_as_bytes and name in ("string", "binary"):
            return F.encode(column.cast("string"), _BYTES).cast(name)
        if self.format == "text" and not is_utf8(self.name):
            return F.decode(column.cast("binary"), _BYTES)
        return column

    def _find_bad(self, column: Column, kind: DataType) -> Column | None:
        """Return the condition for values with a bad text; None if there can be none."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import ArrayType, MapType, StructType

        if isinstance(kind, StructType):
            parts = [self._find_bad(column.getField(f.name), f.dataType) for f in kind.fields]
        elif isinstance(kind, ArrayType):
            parts = [self._find_bad_items(column, kind.elementType)]
        elif isinstance(kind, MapType):
            parts = [
                self._find_bad_items(F.map_keys(column), kind.keyType),
                self._find_bad_items(F.map_values(column), kind.valueType),
            ]
        else:
            parts = [self._find_bad_text(column, kind.typeName())]
        found = [part for part in parts if part is not None]
        return reduce(or_, found) if found else None

    def _find_bad_items(self, column: Column, kind: DataType) -> Column | None:
        """Return the condition for arrays of items of a type of which one has a bad text; None if there can be none."""
        from pyspark.sql import functions as F

        if self._find_bad(F.lit(None), kind) is None:
            return None

        def is_bad(item: Column) -> Column:
            found = self._find_bad(item, kind)
            assert found is not None
            return found

        return F.coalesce(F.exists(column, is_bad), F.lit(False))

    def _find_bad_text(self, column: Column, kind: str) -> Column | None:
        from pyspark.sql import functions as F

        if self._is_replaced and kind in ("string", "binary"):
            return F.coalesce(column.cast("string").contains(_REPLACEMENT), F.lit(False))
        if kind != "string" or self.format == "json":
            return None
        if hasattr(F, "is_valid_utf8"):
            return F.coalesce(~F.is_valid_utf8(column), F.lit(False))
        # Spark 3.5 replaces what it cannot decode.
        return F.coalesce(F.decode(column.cast("binary"), "UTF-8") != column, F.lit(False))
