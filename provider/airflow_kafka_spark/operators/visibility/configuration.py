"""The configuration of an operator as JSON, for the pages: its arguments without secrets, its connections and its guarantee.

Airflow stores it with the serialized DAG. It must not change between two parses of one DAG file, because Airflow would create a
new version of the DAG each time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import timedelta
from typing import Any

from airflow.providers.common.compat.sdk import BaseOperator

SECRET = re.compile(r"secret|password|passphrase|token|jaas|credential|access[._]?key|keystore[._]key|dsn", re.IGNORECASE)
"""Names of settings whose values are not shown."""
HIDDEN = "***"
MAX_TEXT = 20_000
"""Largest text that is stored, in characters; a longer one is replaced by its length."""
CONNECTION = re.compile(r"(^|_)conn_id$|^registry$")
"""Names of arguments that name an Airflow connection."""

_USERINFO = re.compile(r"(\w+://)[^/\s@]+@")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe_configuration(operator: BaseOperator) -> dict[str, Any]:
    """Return the configuration of an operator.

    :return: ``operator``: name of its class; ``guarantee``: that of its sink; ``connections``: the Airflow connections by
        argument; ``arguments``: the arguments that differ from their defaults.
    """
    given = get_arguments(operator)
    defaults = _list_parameters(type(operator))
    arguments = {
        name: convert_argument(given[name], name)
        for name in defaults
        if name in given and not _is_equal(given[name], defaults[name])
    }
    everything = {name: convert_argument(given.get(name, default), name) for name, default in defaults.items()}
    guarantee = getattr(getattr(operator, "sink", None), "guarantee", None)
    return {
        "operator": type(operator).__name__,
        "guarantee": guarantee.value if guarantee is not None else None,
        "connections": dict(sorted(_find_connections(everything))),
        "arguments": arguments,
    }


def get_arguments(operator: BaseOperator) -> Mapping[str, Any]:
    """Return the arguments that an operator was made with. Templates in them are not rendered."""
    found: Mapping[str, Any] = getattr(operator, "_BaseOperator__init_kwargs", {})
    return found


def convert_argument(value: object, name: str = "") -> Any:
    """Return a value as JSON, without secrets.

    An object of options, as a sink or a format, becomes ``{"class": name, "arguments": {...}}`` with the arguments that differ
    from their defaults.

    :param name: name of the argument or the setting.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return HIDDEN if value and SECRET.search(name) else _format_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        options = ((f, getattr(value, f.name)) for f in fields(value) if f.init)
        arguments = {f.name: convert_argument(option, f.name) for f, option in options if not _is_default(f, option)}
        return {"class": type(value).__name__, "arguments": arguments}
    if isinstance(value, Mapping):
        return {str(key): convert_argument(item, str(key)) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((convert_argument(item, name) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [convert_argument(item, name) for item in value]
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return _format_text(_ADDRESS.sub("", str(value)))


def _format_text(value: str) -> str:
    return _USERINFO.sub(rf"\1{HIDDEN}@", value) if len(value) <= MAX_TEXT else f"({len(value):,} characters)"


def _list_parameters(operator: type) -> dict[str, Any]:
    """Return the named parameters of an operator's constructors with their defaults, without those of Airflow's operators."""
    found: dict[str, Any] = {}
    for cls in operator.__mro__:
        if cls is BaseOperator or not issubclass(cls, BaseOperator):
            break
        if "__init__" not in vars(cls):
            continue
        for name, parameter in inspect.signature(vars(cls)["__init__"]).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                default = parameter.default
                found.setdefault(name, None if default is inspect.Parameter.empty else default)
        if cls.__module__.startswith(__name__.partition(".")[0] + "."):
            # A concrete operator has all options; the classes above it take them in groups.
            break
    return found


def _is_default(option: Field[Any], value: object) -> bool:
    if option.default is not MISSING:
        return _is_equal(value, option.default)
    return option.default_factory is not MISSING and _is_equal(value, option.default_factory())


def _is_equal(value: object, other: object) -> bool:
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        # The truth of a comparison may be undefined, as that of Spark's columns.
        return False


def _find_connections(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the connections that the JSON of an argument names, by argument."""
    if isinstance(value, Mapping):
        inner = value["arguments"] if value.keys() == {"class", "arguments"} else value
        for name, item in inner.items():
            where = f"{path}.{name}" if path else str(name)
            if isinstance(item, str) and item and CONNECTION.search(str(name)):
                yield where, item
            else:
                yield from _find_connections(item, where)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _find_connections(item, f"{path}[{number}]")
