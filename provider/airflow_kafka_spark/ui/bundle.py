"""The pages' one script: the files of ``static`` in the order of their names, each as it is. Nothing is built."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

STATIC = Path(__file__).parent / "static"


@dataclass(frozen=True)
class Bundle:
    """The script.

    :param body: its bytes.
    :param etag: what identifies them, quoted as HTTP has it.
    """

    body: bytes
    etag: str


_known: dict[tuple[tuple[str, int, int], ...], Bundle] = {}


def bundle(directory: Path = STATIC) -> Bundle:
    """The script as the files are now: read again only when one of them has changed.

    The files share one function scope, so that none of their names reaches the host's page.
    """
    files = sorted(directory.glob("*.js"), key=lambda file: file.name)
    stats = [(file, file.stat()) for file in files]
    state = tuple((str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats)
    if state not in _known:
        parts = [b"(() => {\n'use strict';\n", *(_part(file) for file in files), b"})();\n"]
        body = b"".join(parts)
        _known.clear()
        _known[state] = Bundle(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return _known[state]


def _part(file: Path) -> bytes:
    return f"// {file.name}\n".encode() + file.read_bytes().rstrip() + b"\n\n"
