"""Random schemas, and random records that nearly fit them: enough good records that batches stay whole, and enough of every
fault.
"""

from __future__ import annotations

from random import Random

NAMES = ("a", "A b", "id", "s.t", 'q"q', "é", "back\\slash", "\U0001f600", "n`n", "NULL")
SPACES = ("", "", "", "", " ", "\t", "\r", " \r ", "\n")
NUMBERS = (
    *(
        "0",
        "-0",
        "1",
        "-1",
        "7",
        "127",
        "128",
        "-128",
        "-129",
        "255",
        "32767",
        "32768",
        "2147483647",
        "2147483648",
        "-2147483649",
        "1e3",
        "1E+2",
        "1.0",
    ),
    *(
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775808",
        "-9223372036854775809",
        "123456789012345678901234567890",
        "1.5",
        "0.1",
    ),
    *(
        "12.34",
        "12.340",
        "12.345",
        "99.99",
        "100",
        "999.99",
        "-999.99",
        "1000",
        "1e-2",
        "1e-3",
        "0.001",
        "0.000",
        "1e400",
        "-1e400",
        "1e-400",
        "4e38",
        "3.5e38",
    ),
    *(
        "12345678901234567890123456789012345678",
        "123456789012345678901234567890123456789",
        "0.00000000000000000000000000000000000001",
        "1" + "0" * 60,
        "5e-324",
    ),
    *(
        "1790000000",
        "1790000000000",
        "253402300799",
        "253402300800",
        "-62135596800",
        "-62135596801",
        "1e10",
        "0e100",
        "16777217",
        "3.4028235677973366e38",
    ),
)
ODD_NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "-NaN",
    "Inf",
    "-Inf",
    "+1",
    "01",
    "1.",
    ".5",
    "-",
    "1e",
    "0x1",
    "nan",
    "1_0",
    "--1",
    "- 1",
)
TEXTS = (
    *(
        "",
        "x",
        "NaN",
        "Infinity",
        "-Infinity",
        "Inf, ",
        "true",
        "null",
        "{}",
        "}\\n{",
        "é",
        "\\u00e9",
        "\\ud83d\\ude00",
        "\\ud800",
        "\\udc00",
        "\\u0000",
        "😀😀😀",
        "\\/",
    ),
    *(
        "1",
        "1.5",
        "12.34",
        "12.345",
        "+.50",
        "5.",
        ".",
        "1e2",
        "1e-400",
        " 1",
        "1 ",
        "1,5",
        "0001.5",
        "999.99",
        "1000",
        "99999999999999999999999999999999999999",
        "-0",
    ),
    *("aGk=", "aGk", "aGk==", "QQ==", "QR==", "====", "a Gk=", "-_-_", "aGVs\\u0062A==", "AAAA", "A===", "QUJD\\n"),
    *(
        "2026-11-05",
        "0001-01-01",
        "0000-12-31",
        "9999-12-31",
        "2026-02-29",
        "2024-02-29",
        "2026-1-5",
        "2026-11-05 ",
        "20261105",
        "2026-13-01",
        "+2026-11-05",
    ),
    *(
        "2026-11-05T07:08:09Z",
        "2026-11-05 07:08:09",
        "2026-11-05T07:08:09.123456Z",
        "2026-11-05T07:08:09.1234567",
        "2026-11-05T07:08:09.1234560Z",
        "2026-11-05T07:08:09.5",
    ),
    *(
        "2026-11-05T07:08:09+02:00",
        "2026-11-05T07:08:09-0200",
        "2026-11-05T07:08:09+02",
        "2026-11-05T07:08:09+2:00",
        "2026-11-05T07:08:09+24:00",
        "2026-11-05T07:08",
    ),
    *(
        "2026-11-05T07",
        "2026-11-05T07Z",
        "2026-11-05Z",
        "2026-11-05T24:00:00Z",
        "2026-11-05T07:08:60Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59.999999-00:01",
    ),
    *(
        "2026-11-05T07:08:09.Z",
        "2026-11-05T07:08:09z",
        "2026-11-05t07:08:09Z",
        "2026-11-05T07:08:09 Z",
        "1969-12-31T23:59:59.999999Z",
        "\\u0032026-11-05T07:08:09Z",
    ),
    *(
        "0001-01-01T00:00:00Z",
        "0000-12-31T23:59:59Z",
        "9999-12-31T23:59:59.999999Z",
        "2026-11-05T07:08:09.000001",
        "2026-11-05T7:08:09Z",
        "2026-11-05T07:8:09Z",
    ),
)
ODD_TEXTS = ('"\\x"', '"\\u12"', '"\x01"', '"\n"', '"\x7f"', '"', "'x'", '"a\\"', '"\\u0000"', '"\t"')
WORDS = ("true", "false", "null", "tru", "True", "nul", "undefined")
SCALARS = (
    *(
        "tinyint",
        "smallint",
        "int",
        "bigint",
        "bigint",
        "float",
        "double",
        "boolean",
        "binary",
        "date",
        "timestamp",
        "timestamp",
        "timestamp_ntz",
    ),
    *(
        "string",
        "string",
        "varchar(3)",
        "decimal(5,2)",
        "decimal(12,2)",
        "decimal(38,0)",
        "decimal(38,38)",
        "decimal(38,10)",
        "decimal(3,3)",
    ),
)
JUNK = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"null",
    b"1",
    b"{}",
    b"}\n{",
    b'},"x":{',
    b"NaN",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"/*",
    b"//",
    b"'",
    b"-",
    b"e",
    b"u",
    b"\xc3",
    b"\x0c",
)


class Maker:
    """Makes random schemas and records.

    :param random: the source of random numbers.
    :param maps: True if schemas may have maps.
    """

    def __init__(self, random: Random, maps: bool = False) -> None:
        self.random = random
        self.maps = maps

    def often(self, share: float) -> bool:
        return self.random.random() < share

    # --- schemas: name -> type, a type being text or a nested schema -------------------------------------------------

    def schema(self) -> list[tuple[str, object, bool]]:
        names = self.random.sample(NAMES, self.random.randint(1, 4))
        return [(name, self.type(2), self.often(0.15)) for name in names]

    def type(self, depth: int) -> object:
        kind = self.random.random()
        if depth and kind < 0.15:
            return [
                (name, self.type(depth - 1), self.often(0.2)) for name in self.random.sample(NAMES, self.random.randint(1, 3))
            ]
        if depth and kind < 0.3:
            return ("array", self.type(depth - 1))
        if depth and self.maps and kind < 0.4:
            return ("map", self.type(depth - 1))
        return self.random.choice(SCALARS)

    # --- records ---------------------------------------------------------------------------------------------------------

    def record(self, schema: list, tidy: float) -> bytes:
        """Return one record; ``tidy`` is the share of correct values."""
        text = self.space() + self.object(schema, tidy) + self.space()
        value = text.encode("utf-8", "surrogatepass")
        return value if self.often(tidy) else self.mutated(value)

    def mutated(self, value: bytes) -> bytes:
        at = self.random.randint(0, len(value))
        kind = self.random.randrange(6)
        if kind == 0:
            return value[:at]
        if kind == 1:
            return value[:at] + value[at + 1 :]
        if kind == 2:
            return value + value
        if kind == 3:
            return self.random.choice((b"", b" ", b"null", b"[]", b"1", b'"x"', b"{}", b"\n", b"{}{}", b"[{}]"))
        if kind == 4:
            return value[at:]
        return value[:at] + self.random.choice(JUNK) + value[at:]

    def space(self) -> str:
        return self.random.choice(SPACES) if self.often(0.1) else ""

    def object(self, schema: list, tidy: float) -> str:
        members = [(name, self.value(kind, tidy, required)) for name, kind, required in schema if required or self.often(0.9)]
        if not self.often(tidy):
            members.append((self.random.choice(members)[0] if members and self.often(0.5) else "a", self.anything(2)))
        if self.often(0.2):
            members.append(("unknown", self.anything(3)))
            self.random.shuffle(members)
        return (
            "{"
            + self.space()
            + ",".join(f"{self.space()}{self.name(n)}{self.space()}:{self.space()}{v}{self.space()}" for n, v in members)
            + "}"
        )

    def name(self, name: str) -> str:
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        if self.often(0.05):
            escaped = "".join(f"\\u{unit:04x}" for unit in _units(name))
        return f'"{escaped}"'

    def value(self, kind: object, tidy: float, required: bool = False) -> str:
        if not self.often(tidy):
            return self.anything(1)
        if not required and self.often(0.1):
            return "null"
        if isinstance(kind, list):
            return self.object(kind, tidy)
        if isinstance(kind, tuple) and kind[0] == "array":
            return "[" + ",".join(self.value(kind[1], tidy) for _ in range(self.random.randint(0, 3))) + "]"
        if isinstance(kind, tuple):
            keys = self.random.sample(NAMES, self.random.randint(0, 3))
            return "{" + ",".join(f"{self.name(k)}:{self.value(kind[1], tidy)}" for k in keys) + "}"
        return self.scalar(str(kind), tidy)

    def scalar(self, kind: str, tidy: float) -> str:
        choose = self.random.choice
        if not self.often(tidy) or self.often(0.03):
            return f'"{choose(TEXTS)}"' if self.often(0.6) else choose(NUMBERS)
        if kind.startswith("decimal"):
            number = choose(("0", "0.0", "0.1", "-0.12", "0.120", "1e-1", "0e5"))
            return number if self.often(0.5) else f'"{choose((number, "+.5", "00.50", "5e-1"))}"'
        if kind == "timestamp":
            return (
                choose(("1790000000", "-1"))
                if self.often(0.2)
                else f'"{choose([t for t in TEXTS if t.startswith("2026-11-05")])}"'
            )
        good = {
            "boolean": ("true", "false"),
            "float": ("1", "-0.0", "0.1", "1e10", "16777217", "NaN", "1e-400"),
            "double": ("1", "-0", "0.1", "1e300", "9007199254740993", "Infinity", "-Infinity", "5e-324"),
            "binary": ('"aGk="', '""', '"AAAA"'),
            "date": ('"2026-11-05"', '"0001-01-01"', '"9999-12-31"'),
            "timestamp_ntz": ('"2026-11-05"', '"2026-11-05 07:08"', '"2026-11-05T07:08:09.123456"'),
            "string": ('""', '"x"', '"é"', '"\\u00e9\\n"', '"\\u0000"', '"Info, Inf"'),
            "varchar(3)": ('"abc"', '"\\ud83d\\ude00xx"', '""'),
        }
        return choose(good.get(kind, ("0", "-0", "1", "-7", "127")))

    def anything(self, depth: int) -> str:
        kind = self.random.random()
        if depth and kind < 0.15:
            return "[" + ",".join(self.anything(depth - 1) for _ in range(self.random.randint(0, 3))) + "]"
        if depth and kind < 0.3:
            return (
                "{"
                + ",".join(
                    f"{self.name(self.random.choice(NAMES))}:{self.anything(depth - 1)}" for _ in range(self.random.randint(0, 3))
                )
                + "}"
            )
        pools = (NUMBERS, WORDS[:3], [f'"{t}"' for t in TEXTS], NUMBERS, [f'"{t}"' for t in TEXTS], ODD_NUMBERS, ODD_TEXTS, WORDS)
        return self.random.choice(self.random.choice(pools[: 8 if self.often(0.2) else 5]))


def _units(text: str) -> list[int]:
    data = text.encode("utf-16-be")
    return [data[i] << 8 | data[i + 1] for i in range(0, len(data), 2)]


def ddl(schema: list, nested: bool = False) -> str:
    """Return the DDL of a random schema."""
    parts = []
    for name, kind, required in schema:
        quoted = "`" + name.replace("`", "``") + "`"
        parts.append(f"{quoted}{':' if nested else ' '}{_type(kind)}{' NOT NULL' if required else ''}")
    return ", ".join(parts)


def _type(kind: object) -> str:
    if isinstance(kind, list):
        return f"struct<{ddl(kind, nested=True)}>"
    if isinstance(kind, tuple):
        return f"array<{_type(kind[1])}>" if kind[0] == "array" else f"map<string,{_type(kind[1])}>"
    return str(kind)
