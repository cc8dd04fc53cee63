"""Arguments of users: find values that do not have the declared type, names that do not exist, and templates that render to
nothing; make copies with sound values in place of wrong ones.

A wrong type must neither raise where the value is used nor hide other mistakes. Specifications (sinks, sources, groups of
options) are frozen dataclasses, so their annotations name the expected types. A class may have two class variables:
``ARGUMENTS``, the names by which users know attributes, and ``CHECKED``, arguments whose own checks take values of any type.
"""

from __future__ import annotations

import re
import sys
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import lru_cache
from inspect import Signature, signature
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeGuard, TypeVar, Union, cast, get_args, get_origin

from airflow_kafka_spark.errors.base import find_similar_name
from airflow_kafka_spark.errors.setup import Problem

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from airflow.sdk.definitions.mappedoperator import OperatorPartial
    from jinja2 import Environment
    from typing_extensions import Self

T = TypeVar("T")

_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "True or False", bytes: "bytes", NoneType: "None"}
_SHOWN = 60
_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.S)
_NONE = re.compile(r"^\s*None\s*$|^\S*[/._:-]None([/._:-]\S*)?$|^None[/._:-]\S*$")
"""A text that is ``None``, or a name or path with such a part."""
_SCHEMAS = ("schema", "reader_schema")
"""Fields whose text may be a document that contains braces."""
_PACKAGE = __name__.partition(".")[0] + "."


def as_names(value: object) -> Any:
    """Return a text as a tuple of itself, and a list as a tuple; anything else unchanged, for the validation to name."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)) else value


def find_choice_problems(where: str, value: object, known: Sequence[str | None]) -> list[Problem]:
    """Return a problem if a value is not one of the known ones; otherwise an empty list.

    :param where: the argument, as the user writes it.
    """
    return [] if value in known else [Problem(where, f"`{value}` is not one of {', '.join(map(str, known))}")]


def find_type_problems(spec: object, prefix: str = "") -> list[Problem]:
    """Return a problem for each field of a dataclass whose value does not have the declared type; none for other objects.

    :param prefix: the argument that the dataclass is, with a dot (``sink.``). Default: its fields are arguments themselves.
    """
    return [problem for _, problem in _find_wrong_fields(spec, prefix)]


def replace_wrong_types(spec: T, prefix: str = "") -> tuple[T, list[Problem]]:
    """Return a dataclass with sound values where the given ones do not have the declared type, and the problems of these.

    A sound value is the text of the value where a text is expected, and else the default. A value without either is unchanged:
    its check has to expect it. Problems that other checks report for an argument with a sound value are to be ignored.

    :param prefix: as for :func:`find_type_problems`.
    """
    wrong = _find_wrong_fields(spec, prefix)
    if not wrong:
        return spec, []
    kind: Any = type(spec)
    known, changes = _find_declared_types(kind), {}
    for found, _ in wrong:
        if str in _list_members(known[found.name]):
            changes[found.name] = str(getattr(spec, found.name))
        elif found.default is not MISSING:
            changes[found.name] = found.default
        elif found.default_factory is not MISSING:
            changes[found.name] = found.default_factory()
    return cast("T", replace(cast("DataclassInstance", spec), **changes)), [problem for _, problem in wrong]


def replace_wrong_arguments(owner: T) -> tuple[T, list[Problem]]:
    """Return an object with sound values where arguments of its constructor do not have the declared type, and the problems of
    these.

    Arguments that are attributes of the same name are compared, and those that ``ARGUMENTS`` names. Without problems it is the
    object itself, otherwise a shallow copy.
    """
    # A user's subclass may have any annotations of its own arguments.
    own: Any = next(base for base in type(owner).__mro__ if base.__module__.startswith(_PACKAGE))
    scope = vars(sys.modules[own.__module__])
    attributes = {argument: name for name, argument in getattr(owner, "ARGUMENTS", {}).items()}
    checked: frozenset[str] = getattr(owner, "CHECKED", frozenset())
    found, sound = [], {}
    for argument, parameter in signature(own.__init__).parameters.items():
        name = attributes.get(argument, argument)
        if name not in vars(owner) or argument in checked:
            continue
        default = MISSING if parameter.default is parameter.empty else parameter.default
        if problem := find_argument_problem(argument, vars(owner)[name], _evaluate(parameter.annotation, scope), default):
            found.append(problem)
            sound[name] = str(vars(owner)[name]) if default is MISSING else default
    if not found:
        return owner, []
    made = copy(owner)
    for name, value in sound.items():
        setattr(made, name, value)
    return made, found


def describe_similar_arguments(kind: type, given: Iterable[str]) -> str:
    """Return the arguments of a constructor whose names are similar to unknown ones, as the end of an error; "" without any.

    :param kind: the class. Arguments that it passes on to classes that it extends count, too.
    :param given: the names that were given.
    """
    known = _list_argument_names(kind)
    similar = {name: find_similar_name(name, known) for name in given if name not in known}
    hints = [f"`{found}` for `{name}`" for name, found in similar.items() if found]
    return f". Did you mean {', '.join(hints)}?" if hints else ""


@lru_cache(maxsize=64)
def _list_argument_names(kind: type) -> frozenset[str]:
    """Return the names of the arguments of a class, with those that it passes on to classes that it extends."""
    names = {name for constructor in _list_constructors(kind) for name in signature(constructor).parameters}
    return frozenset(names - {"self", "args", "kwargs"})


def _list_constructors(kind: type) -> list[Callable[..., None]]:
    """Return the constructors of a class and of the classes that it extends, its own one first."""
    return [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]


class OptionsType(ABCMeta):
    """The type of classes that users construct with options: the error of an unknown option names a similar one.

    Python does that by itself from 3.13 on.
    """

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except TypeError as error:
            is_unknown = f"{cls.__name__}.__init__() got an unexpected keyword argument" in str(error)
            if not is_unknown or "Did you mean" in str(error):
                raise
            raise TypeError(f"{error}{describe_similar_arguments(cls, kwargs)}") from None

    @property
    def __signature__(cls) -> Signature:
        """The arguments of the constructor, which the method above would hide."""
        own = signature(_list_constructors(cls)[0])
        return own.replace(parameters=list(own.parameters.values())[1:])


class ChecksArguments:
    """First base class of operators and sensors: the error of an unknown argument names a similar one, templates are checked once
    they are rendered, and arguments may have templates of their own.

    A class that extends it needs a constructor of its own, because Airflow would wrap the one of its other base class twice.
    """

    rendered_parts: ClassVar[Sequence[str]] = ()
    """Arguments with ``template_fields`` of their own: sinks, sources and formats, which are frozen dataclasses."""
    left_out_by_none: ClassVar[Collection[str]] = ()
    """Arguments that are left out if their template renders to ``None``."""
    rendered_none: Sequence[Problem] = ()
    """The problems of templates that rendered to ``None``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        _refuse_misspelt(cls, kwargs)
        return super().__new__(cls)

    @classmethod
    def partial(cls, **kwargs: Any) -> OperatorPartial:
        _refuse_misspelt(cls, kwargs)
        operator: Any = super()
        made: OperatorPartial = operator.partial(**kwargs)
        return made

    def _do_render_template_fields(
        self, parent: Any, template_fields: Iterable[str], context: Any, jinja_env: Environment, seen_oids: set[int]
    ) -> None:
        """Render templates. For a mapped task, Airflow calls this method only, and not ``render_template_fields``."""
        names = list(template_fields)
        given = {name: getattr(self, name) for name in names if name not in self.left_out_by_none} if parent is self else {}
        operator: Any = super()
        operator._do_render_template_fields(parent, names, context, jinja_env, seen_oids)
        if parent is self:
            found = [problem for name in given for problem in find_rendered_none(name, given[name], getattr(self, name))]
            self.rendered_none = [*found, *self.render_parts(context, jinja_env)]

    def render_parts(self, context: Any, jinja_env: Environment) -> list[Problem]:
        """Render the templates of ``rendered_parts``, and return the problems of those that render to ``None``."""
        found: list[Problem] = []
        for name in self.rendered_parts:
            part = getattr(self, name)
            if (made := self.render_part(part, context, jinja_env)) is part:
                continue
            setattr(self, name, made)
            found += find_parts_rendered_none(f"{name}.", part, made)
        return found

    def render_part(self, part: T, context: Any, jinja_env: Environment) -> T:
        """Return a sink, a source or a format with its templates rendered; anything else unchanged."""
        templated = getattr(part, "template_fields", ())
        if not (is_dataclass(part) and not isinstance(part, type) and templated):
            return part
        operator: Any = self
        known = {f.name for f in fields(part)}
        return replace(
            part, **{f: operator.render_template(getattr(part, f), context, jinja_env) for f in templated if f in known}
        )


def _refuse_misspelt(kind: type, given: Mapping[str, object]) -> None:
    """Refuse unknown arguments of an operator or sensor if the name of one is similar to a known one. Airflow looks for required
    arguments only afterwards: it would name the missing argument and not the misspelt one.

    Nothing is refused for a user's own subclass, whose constructor may take further arguments out of its ``**kwargs``.
    """
    is_own = _list_constructors(kind)[0].__module__.startswith(f"{__package__}.")
    names = [name for name in given if not name.startswith("_")]  # Airflow gives itself some that begin so
    if is_own and (hint := describe_similar_arguments(kind, names)):
        known = _list_argument_names(kind)
        unknown = ", ".join(f"`{name}`" for name in names if name not in known)
        raise TypeError(f"{kind.__name__} (task_id: {given.get('task_id')}) does not take {unknown}{hint}")


class LiteralText(str):
    """A text that the user has wrapped in Airflow's ``literal()``: braces in it are no template."""

    __slots__ = ()


def unwrap_literals(value: T) -> T:
    """Return a value with the texts that Airflow's ``literal()`` wraps, as :class:`LiteralText`, also within lists, mappings and
    dataclasses.

    Fields that Airflow renders keep the wrapper, which Airflow removes.
    """
    found: Any = value
    if type(found).__name__ == "LiteralValue" and type(found).__module__.partition(".")[0] == "airflow":
        found = LiteralText(found.value) if isinstance(found.value, str) else found.value
    made: Any = found
    if isinstance(found, Mapping):
        made = {name: unwrap_literals(item) for name, item in found.items()}
        made = found if all(made[name] is item for name, item in found.items()) else made
    elif _is_list(found):
        made = [unwrap_literals(item) for item in found]
        made = found if all(new is old for new, old in zip(made, found, strict=True)) else made
    elif is_dataclass(found) and not isinstance(found, type):
        rendered = getattr(found, "template_fields", ())
        given = {each.name: getattr(found, each.name) for each in fields(found) if each.init and each.name not in rendered}
        changed = {name: new for name, item in given.items() if (new := unwrap_literals(item)) is not item}
        made = replace(made, **changed) if changed else made
    unwrapped: T = made
    return unwrapped


def find_template_problems(spec: object, prefix: str = "", rendered: Collection[str] | None = None) -> list[Problem]:
    """Return a problem for each text in a dataclass, and in dataclasses within it, that has a template in a field that is not
    rendered. The text would be used as it is written.

    :param prefix: as for :func:`find_type_problems`.
    :param rendered: the arguments whose templates are rendered; None (default) for the class's ``template_fields``.
    """
    if not is_dataclass(spec) or isinstance(spec, type):
        return []
    names: Mapping[str, str] = getattr(spec, "ARGUMENTS", {})
    known = getattr(spec, "template_fields", ()) if rendered is None else rendered
    found: list[Problem] = []
    for each in fields(spec):
        name = names.get(each.name, each.name)
        if name in known or not each.init:
            continue
        value, where = getattr(spec, each.name), prefix + name
        if text := next((text for text in _list_texts(value) if _has_template(each.name, text)), ""):
            others = f"; {type(spec).__name__} renders templates in {', '.join(known)}" if known and rendered is None else ""
            what = f"{_shorten(_TEMPLATE.findall(text)[0], quoted=False)} is a template, and this argument renders none"
            action = f"Write the value itself{others}. If it is no template: `airflow.sdk.literal(...)`"
            found.append(Problem(where, what, action))
        for place, part in _list_parts(value, where):
            found += find_template_problems(part, f"{place}.")
    return found


def find_rendered_none(where: str, template: object, rendered: object) -> Iterator[Problem]:
    """Yield a problem for each template that renders to the text ``None``, to a name or path with a part ``None``, or to a path
    with an empty part.

    Airflow renders a missing value so, and a topic, a group or a directory of that name would be accepted.

    :param where: the argument, as the user writes it.
    :param template: its value as it was given, a text or a list or mapping of texts.
    :param rendered: its value with its templates rendered.
    """
    if isinstance(template, str) and isinstance(rendered, str):
        if not _TEMPLATE.search(template):
            return
        missing = "None" if _NONE.search(rendered) and not _NONE.search(template) else ""
        missing = missing or ("empty" if _has_emptied_part(template, rendered) else "")
        if missing:
            found = f"{_shorten(template, quoted=False)} renders to `{rendered.strip()}`: a value in it is {missing}"
            yield Problem(where, found, "Give it a value, or a default in the template: `{{ params.name or 'orders' }}`")
    elif isinstance(template, Mapping) and isinstance(rendered, Mapping):
        for name, item in template.items():
            yield from find_rendered_none(where, item, rendered.get(name))
    elif _is_list(template) and _is_list(rendered) and len(template) == len(rendered):
        for given, made in zip(template, rendered, strict=True):
            yield from find_rendered_none(where, given, made)


def find_parts_rendered_none(prefix: str, given: object, made: object) -> list[Problem]:
    """Return the problems of templates of a sink, a source or a format that render to ``None``.

    :param prefix: as for :func:`find_type_problems`.
    :param given: the part with its templates.
    :param made: the part with its templates rendered.
    """
    names = [name for name in getattr(given, "template_fields", ()) if hasattr(given, name)]
    return [p for name in names for p in find_rendered_none(prefix + name, getattr(given, name), getattr(made, name))]


def _has_emptied_part(template: str, rendered: str) -> bool:
    """Return True if a part of a path that is only a template renders to nothing, so that the path names another directory."""
    given = _TEMPLATE.sub("\0", template).split("/")
    parts = rendered.split("/")
    return len(given) == len(parts) > 1 and any(g == "\0" and not p for g, p in zip(given, parts, strict=True))


def _has_template(name: str, text: str) -> bool:
    found = None if isinstance(text, LiteralText) else _TEMPLATE.search(text)
    return found is not None and (name not in _SCHEMAS or not text[: found.start()].strip())


def _list_texts(value: object) -> Iterator[str]:
    """Yield a text, or the texts in a list or a mapping."""
    values = value.values() if isinstance(value, Mapping) else value if _is_list(value) else (value,)
    yield from (item for item in values if isinstance(item, str))


def _list_parts(value: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield a value, or the members of a list, each with its place as messages name it."""
    if not _is_list(value):
        yield where, value
        return
    yield from ((f"{where}[{n}] {type(item).__name__}", item) for n, item in enumerate(value))


def find_argument_problem(where: str, value: object, declared: object, default: object = MISSING) -> Problem | None:
    """Return the problem of one argument; None if its value has the declared type.

    :param declared: its type.
    :param default: its value if it is left out, for the message. Default: it has to be given.
    """
    if has_type(value, declared):
        return None
    action = "Correct it" if default is MISSING else f"Correct it, or leave it out (default {default!r})"
    if isinstance(value, str) and _TEMPLATE.search(value):
        action = "Write the value itself: this argument renders no templates"
    elif users := getattr(type(value), "used_by", ""):
        action = f"A {type(value).__name__} is for {users}"
    if isinstance(value, type) and any(
        isinstance(member, type) and issubclass(value, member) for member in _list_members(declared)
    ):
        action = f"Write `{value.__name__}(...)`"
    return Problem(where, f"{_describe_found(value, declared)}; expected {_describe_type(declared)}", action)


def has_type(value: object, declared: object) -> bool:
    """Return True if a value has the declared type, as far as it is known at run time. Values of a ``Literal`` may be any of
    its type: their own checks list the choices."""
    return any(_has(value, member) for member in _list_members(declared))


def _has(value: object, member: object) -> bool:
    origin, inner = get_origin(member), get_args(member)
    if member is Any:
        return True
    if member is bool or member is NoneType:
        return isinstance(value, member)
    if member in (int, float):
        return isinstance(value, (int, member)) and not isinstance(value, bool)
    if origin is Sequence:
        return _is_list(value) and all(has_type(item, inner[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(has_type(k, inner[0]) and has_type(v, inner[1]) for k, v in value.items())
    if origin is Callable:
        return callable(value)
    if origin is Literal:
        return isinstance(value, tuple(map(type, inner)))
    return isinstance(value, member) if isinstance(member, type) and origin is None else True


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _find_wrong_fields(spec: object, prefix: str) -> list[tuple[Field[Any], Problem]]:
    if not is_dataclass(spec) or isinstance(spec, type):
        return []
    known, found = _find_declared_types(type(spec)), []
    names: Mapping[str, str] = getattr(spec, "ARGUMENTS", {})
    checked: frozenset[str] = getattr(spec, "CHECKED", frozenset())
    for each in fields(spec):
        if each.name in checked:
            continue
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        where = prefix + names.get(each.name, each.name)
        if problem := find_argument_problem(where, getattr(spec, each.name), known[each.name], default):
            found.append((each, problem))
    return found


@lru_cache(maxsize=256)
def _find_declared_types(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; ``Any`` for those whose names are imported for type checkers only, and for those
    of users' classes."""
    types: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        scope = vars(sys.modules[base.__module__])
        is_ours = base.__module__.startswith(_PACKAGE)
        declared = base.__dict__.get("__annotations__", {})
        types |= {name: _evaluate(kind, scope) if is_ours else Any for name, kind in declared.items()}
    return types


def _evaluate(annotation: object, scope: Mapping[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(scope))
    except Exception:
        return Any


def _list_members(declared: object) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself if it is no union."""
    return get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)


def _describe_type(declared: object) -> str:
    return " or ".join(_describe_member(member) for member in _list_members(declared))


def _describe_member(member: object) -> str:
    origin, inner = get_origin(member), get_args(member)
    if origin is Sequence:
        return "a list of " + ("texts" if inner[0] is str else _describe_type(inner[0]))
    if origin is Mapping:
        parts = [
            f"{_describe_type(kind)} as {what}" for what, kind in zip(("key", "value"), inner, strict=True) if kind is not Any
        ]
        return "a mapping (dict)" + (f" with {' and '.join(parts)}" if parts else "")
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is Callable or not isinstance(member, type):
        return "a function" if origin is Callable else str(member)
    return _NAMES.get(member, f"a {member.__name__}")


def _shorten(value: object, *, quoted: bool = True) -> str:
    text = repr(value) if quoted else str(value)
    return f"`{text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'}`"


def _describe_found(value: object, declared: object) -> str:
    """Return a description of the value that was found in place of the declared type. Values of mappings are not shown: they may
    be passwords.
    """
    mappings = [get_args(member) for member in _list_members(declared) if get_origin(member) is Mapping]
    if not mappings:
        return f"it is {_shorten(value)} ({type(value).__name__})"
    if not isinstance(value, Mapping):
        return f"it is of type {type(value).__name__}"
    (keys, values), *_ = mappings
    name = next(key for key, item in value.items() if not (has_type(key, keys) and has_type(item, values)))
    if not has_type(name, keys):
        return f"its key {_shorten(name)} is of type {type(name).__name__}"
    return f"its value for {_shorten(name)} is of type {type(value[name]).__name__}"
