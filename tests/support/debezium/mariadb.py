"""Tables of all types of MariaDB, or of MySQL, and changes of all kinds."""

from __future__ import annotations

# type, literals
TYPES: list[tuple[str, list[str]]] = [
    ("tinyint", ["-128", "127"]),
    ("tinyint unsigned", ["255", "0"]),
    ("tinyint(1)", ["1", "0"]),
    ("bool", ["true", "false"]),
    ("smallint", ["-32768"]),
    ("smallint unsigned", ["65535"]),
    ("mediumint", ["-8388608", "8388607"]),
    ("mediumint unsigned", ["16777215"]),
    ("year", ["2155", "1901", "0"]),
    ("int", ["-2147483648"]),
    ("int unsigned", ["4294967295"]),
    ("int zerofill", ["7"]),
    ("bigint", ["-9223372036854775808"]),
    ("bigint unsigned", ["9223372036854775807", "0"]),
    ("float", ["0.1", "-16777216", "1e-38", "3.40282e38"]),
    ("float(7,3)", ["1.5"]),
    ("double", ["0.1", "-1e300", "0"]),
    ("double(8,2)", ["1.25"]),
    ("decimal(10,2)", ["-123.45", "1.28", "0"]),
    ("decimal(65,30)", ["-" + "9" * 35 + "." + "9" * 30, "1"]),
    ("decimal(5,0)", ["-99999", "-1"]),
    ("decimal(3,3)", ["-0.001", "0.999"]),
    ("decimal(20,10) unsigned", ["1234567890.0123456789"]),
    ("date", ["'1000-01-01'", "'9999-12-31'", "'1970-01-02'", "'1582-10-10'"]),
    ("time", ["'838:59:59'", "'-00:00:01'", "'-838:59:59'"]),
    ("time(1)", ["'-00:00:00.1'", "'01:00:00.9'"]),
    ("time(3)", ["'-12:34:56.789'", "'-00:00:00.001'"]),
    ("time(6)", ["'-00:00:00.000001'", "'12:34:56.789012'"]),
    ("datetime", ["'1969-12-31 23:59:59'", "'1000-01-01 00:00:00'"]),
    ("datetime(2)", ["'1970-01-01 00:00:01.23'"]),
    ("datetime(4)", ["'1970-01-01 00:00:01.2345'"]),
    ("datetime(6)", ["'1969-12-31 23:59:59.5'", "'9999-12-31 23:59:59.999999'"]),
    ("timestamp null", ["'2026-01-02 03:04:05'", "'2038-01-19 03:14:07'", "'2026-01-02 03:04:00'"]),
    ("timestamp(3) null", ["'2026-01-02 03:04:05.6'", "'2026-01-02 03:04:05'"]),
    ("timestamp(6) null", ["'1970-01-01 00:00:00.000001'", "'2026-01-02 03:04:05.6'", "'2026-01-02 03:04:05'"]),
    ("char(5)", ["'ab'", "''"]),
    ("varchar(10)", ["'a\"\\\\\\nü😀'"]),
    ("varchar(300)", ["repeat('ü', 300)"]),
    ("varchar(10) character set latin1", ["'äß€'"]),
    ("char(9) character set utf16", ["'ä😀'"]),
    ("text character set latin2", ["'łąka'"]),
    ("tinytext", ["'t'"]),
    ("text", ["'x'"]),
    ("mediumtext", ["'m'"]),
    ("longtext", ["'l'"]),
    ("json", ['\'{"a":  [1, null, "ü"]}\'']),
    ("binary(4)", ["x'01020304'", "x'0100'"]),
    ("varbinary(10)", ["x'00ff00'", "x''"]),
    ("tinyblob", ["x'00'"]),
    ("blob", ["x'00'", "x''"]),
    ("mediumblob", ["x'00'"]),
    ("longblob", ["x'00'"]),
    ("enum('klein','groß','a,b')", ["'groß'", "'a,b'", "''"]),
    ("set('x','y','ü')", ["'ü,x'", "''"]),
    ("bit(1)", ["b'1'", "b'0'"]),
    ("bit(10)", ["b'1000000001'", "b'0'"]),
    ("bit(64)", ["b'1'"]),
    ("point", ["ST_GeomFromText('POINT(1 2)', 4326)", "ST_GeomFromText('POINT(1 2)')"]),
    ("geometry", ["ST_GeomFromText('LINESTRING(0 0,1 1)')"]),
    ("polygon", ["ST_GeomFromText('POLYGON((0 0,1 0,1 1,0 0))')"]),
    ("text not null default 'd'", ["'n'"]),
    ("int not null default 7", ["8"]),
    ("decimal(6,2) default 1.5", ["2.5"]),
    ("datetime default '2026-01-01'", ["'2026-01-02'"]),
    ("int generated always as (7) stored", ["default"]),
]  # fmt: skip

_OF_MYSQL: dict[tuple[str, str], tuple[str, list[str]]] = {
    ("timestamp(6) null", "'1970-01-01 00:00:00.000001'"): (
        "timestamp(6) null",
        ["'1970-01-01 00:00:01.000001'", "'2026-01-02 03:04:05.6'", "'2026-01-02 03:04:05'"],
    ),
    ("json", '\'{"a":  [1, null, "ü"]}\''): (
        "json",
        [
            '\'{"a":  [1, null, "ü"], "bb": {"": -70000}}\'',
            "'[1.5, 1e300, true, 18446744073709551615]'",
            "CAST(DATE'2026-01-02' AS JSON)",
            "CAST(CAST(-1.5 AS DECIMAL(3,1)) AS JSON)",
        ],
    ),
    ("point", "ST_GeomFromText('POINT(1 2)', 4326)"): (
        "point",
        ["ST_GeomFromText('POINT(1 2)', 4326, 'axis-order=long-lat')", "ST_GeomFromText('POINT(1 2)')"],
    ),
    ("text not null default 'd'", "'n'"): ("varchar(9) not null default 'd'", ["'n'"]),
}
"""The types and literals that replace those of MariaDB in tests on MySQL, by type and first literal."""

TYPES_OF_MYSQL = [
    *(_OF_MYSQL.get((kind, literals[0]), (kind, literals)) for kind, literals in TYPES),
    ("vector(3)", ["TO_VECTOR('[1, -2.5, 0.1]')"]),
    ("int invisible", ["5"]),
]


def _make_types(types: list[tuple[str, list[str]]]) -> str:
    return f"CREATE TABLE types (id int PRIMARY KEY, {', '.join(f'c{n} {kind}' for n, (kind, _) in enumerate(types))})"


TABLES = (
    _make_types(TYPES),
    "CREATE TABLE changes (id int, part varchar(10), note text, big text, PRIMARY KEY (part, id))",
    "CREATE TABLE keyed (a int PRIMARY KEY, b varchar(36) NOT NULL)",
    "CREATE TABLE `odd näme` (`my key` int PRIMARY KEY, `col-1` text)",
    "CREATE TABLE finish (id int PRIMARY KEY)",
)

TABLES_OF_MYSQL = (_make_types(TYPES_OF_MYSQL), *TABLES[1:])

KEYS = {"keyed": ["b"]}
"""The tables with a message key of their own."""


def _rows(types: list[tuple[str, list[str]]]) -> list[list[str]]:
    found = []
    for number in range(max(len(literals) for _, literals in types)):
        names = [f"c{n}" for n, (_, literals) in enumerate(types) if number < len(literals)]
        given = [literals[number] for _, literals in types if number < len(literals)]
        found.append([f"INSERT INTO types (id, {', '.join(names)}) VALUES ({number}, {', '.join(given)})"])
    return found


CHANGES: list[list[str]] = [
    *_rows(TYPES),
    ["INSERT INTO types (id) VALUES (1000)"],
    ["INSERT INTO changes VALUES (1, 'a', 'n', repeat('0123456789', 500))", "INSERT INTO changes VALUES (2, 'b', NULL, NULL)"],
    ["UPDATE changes SET note = 'm' WHERE id = 1"],
    ["UPDATE changes SET part = 'c' WHERE id = 1"],
    ["UPDATE changes SET id = id + 10", "DELETE FROM changes WHERE id = 12"],
    ["INSERT INTO keyed VALUES (1, 'x'), (2, 'y')"],
    ["UPDATE keyed SET a = 3 WHERE a = 1"],
    ["UPDATE keyed SET b = 'z' WHERE a = 3"],
    ["DELETE FROM keyed WHERE a = 3"],
    ["INSERT INTO `odd näme` VALUES (1, 'x')", "DELETE FROM `odd näme`"],
    ["ALTER TABLE changes ADD COLUMN extra int DEFAULT 5"],
    ["INSERT INTO changes VALUES (4, 'e', 'b', 'x', 6)"],
    ["ALTER TABLE changes DROP COLUMN note"],
    ["UPDATE changes SET extra = 7 WHERE id = 4"],
    ["TRUNCATE changes"],
    ["INSERT INTO finish VALUES (1)"],
]
"""Transactions, each with its statements."""

CHANGES_OF_MYSQL = [*_rows(TYPES_OF_MYSQL), *CHANGES[len(_rows(TYPES)) :]]
