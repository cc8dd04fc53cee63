"""Whose pipeline it is, where its windows go and where they come from: written down with each plan, and compared ever after.

An open window may have been taken already where it was planned to go, and only that place knows it. Finished anywhere else, its
records would be there twice. So an attempt whose own binding is another one refuses the window, until somebody decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SERVER, SERVER_ID = "server", "server_id"
"""Facts of an :class:`Endpoint`: how a server is addressed, and what it says it is. One of them is enough to know it again: an
address may be renamed, and a server may be upgraded."""


@dataclass(frozen=True)
class Writer:
    """The task that moves a pipeline's windows.

    :param deployment: the Airflow deployment it runs in; empty where that is not known.
    :param run_id: the DAG run that planned the window. Not part of who the writer is, but for mapped tasks: see
        :func:`other_writer`.
    :param map_index: index of a mapped task, -1 without mapping.
    """

    dag_id: str
    task_id: str
    map_index: int = -1
    run_id: str = ""
    deployment: str = ""

    def __str__(self) -> str:
        mapped = f", index {self.map_index}" if self.map_index >= 0 else ""
        return f"task `{self.dag_id}.{self.task_id}`{mapped}{f' of deployment `{self.deployment}`' if self.deployment else ''}"


@dataclass(frozen=True)
class Endpoint:
    """One end of a pipeline that is not Kafka's log, without credentials.

    :param place: what it is: a server, a database, a table; a directory; a topic. A pipeline keeps it from window to window.
    :param details: what else decides, within one window, where its rows and the records of it are: ``windows_table``,
        ``atomic``. Between two windows these may change.
    """

    place: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)

    def under(self, name: str) -> Endpoint:
        """The same facts, as those of one of several endpoints."""
        place, details = ({f"{name} {k}": v for k, v in facts.items()} for facts in (self.place, self.details))
        return Endpoint(place, details)

    def __or__(self, other: Endpoint) -> Endpoint:
        return Endpoint({**self.place, **other.place}, {**self.details, **other.details})


@dataclass(frozen=True)
class Binding:
    """What a window was planned for.

    :param writer: who planned it.
    :param destination: where its rows go.
    :param origin: where they come from, beside the offsets that the window holds.
    :param decided: the number of the newest decision (:func:`~airflow_kafka_spark.hooks.pipeline_rebind.rebind`) that the ledger
        held when it was made, 0 without one: a later one allows another binding.
    """

    writer: Writer
    destination: Endpoint = Endpoint()
    origin: Endpoint = Endpoint()
    decided: int = 0


class Difference(NamedTuple):
    """One fact that is another one now."""

    what: str
    known: str
    found: str


def other_writer(known: Writer, found: Writer) -> tuple[Difference, ...]:
    """In what ``found`` is another writer than the one that is known.

    A deployment that is not known on either side is not compared. Map indexes are, within one DAG run: between two runs the list
    that a task is mapped over may have changed.
    """
    told = []
    if known.deployment and found.deployment and known.deployment != found.deployment:
        told.append(Difference("deployment", known.deployment, found.deployment))
    for what, one, other in (("DAG", known.dag_id, found.dag_id), ("task", known.task_id, found.task_id)):
        if one != other:
            told.append(Difference(what, one, other))
    if not told and known.run_id == found.run_id and known.map_index != found.map_index:
        told.append(Difference("map index", str(known.map_index), str(found.map_index)))
    return tuple(told)


def other_place(known: Endpoint, found: Endpoint) -> tuple[Difference, ...]:
    """In what ``found`` is another place, as far as both say something of it: what the next window of a pipeline is asked."""
    return _differences(known.place, {k: v for k, v in found.place.items() if k in known.place}, all_of=False)


def other_endpoint(known: Endpoint, found: Endpoint) -> tuple[Difference, ...]:
    """In what ``found`` is not where a window was planned to go: what an open window is asked. What is not known is no
    difference."""
    return _differences({**known.place, **known.details}, {**found.place, **found.details}, all_of=True)


def _differences(known: Mapping[str, str], found: Mapping[str, str], *, all_of: bool) -> tuple[Difference, ...]:
    told = []
    for what, was in sorted(known.items()):
        before, is_server, kind = what.rpartition(" ")[0], what.rpartition(" ")[1], what.rpartition(" ")[2]
        if kind == SERVER_ID or (kind == SERVER and _same_server(known, found, before + is_server)):
            continue
        now = found.get(what, "none")
        if (what in found or all_of) and now != was:
            told.append(Difference(what, was, now))
    return tuple(told)


def _same_server(known: Mapping[str, str], found: Mapping[str, str], prefix: str) -> bool:
    identity = known.get(prefix + SERVER_ID)
    return bool(identity) and identity == found.get(prefix + SERVER_ID)


def binding_to_json(binding: Binding) -> dict[str, Any]:
    return {
        "writer": dict(vars(binding.writer)),
        "destination": _endpoint_to_json(binding.destination),
        "origin": _endpoint_to_json(binding.origin),
        **({"decided": binding.decided} if binding.decided else {}),
    }


def binding_from_json(value: Mapping[str, Any]) -> Binding:
    """A fact that this release does not know is passed over."""
    writer = {name: value["writer"][name] for name in vars(Writer("", "")) if name in value["writer"]}
    destination, origin = (_endpoint_from_json(value.get(name, {})) for name in ("destination", "origin"))
    return Binding(Writer(**writer), destination, origin, value.get("decided", 0))


def _endpoint_to_json(endpoint: Endpoint) -> dict[str, Any]:
    return {name: dict(facts) for name, facts in vars(endpoint).items() if facts}


def _endpoint_from_json(value: Mapping[str, Any]) -> Endpoint:
    return Endpoint(dict(value.get("place", {})), dict(value.get("details", {})))
