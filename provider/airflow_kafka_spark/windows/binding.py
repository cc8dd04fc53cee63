"""The task that moves a pipeline, the destination of its windows, and their origin. The ledger keeps them with each plan.

The destination of an open window may hold its rows already, and nothing else knows that. If the window were finished elsewhere,
its records would be there twice. So an attempt compares its own binding with that of the window, and refuses the window if they
differ, until a person decides (``rebind``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

SERVER, SERVER_ID = "server", "server_id"
"""Names of two facts of an :class:`Endpoint`: the address of a server, and the identity that it reports. Two endpoints name one
server if either fact is equal: the address may be renamed, and an upgrade may change the identity."""


@dataclass(frozen=True)
class Writer:
    """The task that moves a pipeline's windows.

    :param deployment: the Airflow deployment that the task runs in; empty if unknown.
    :param run_id: the DAG run that planned the window. All runs of a task are one writer; see :func:`compare_writers` for mapped
        tasks.
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
    """A destination or an origin of a pipeline, without credentials. The offsets of Kafka's log are not part of it.

    :param place: the location: server, database and table; a directory; a topic. All windows of a pipeline share it.
    :param details: further locations that must not change within one window, such as ``windows_table`` and ``dead_letters``. They
        may change between two windows. An empty value is not compared.
    """

    place: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, str]:
        """Return all facts that have a value, for messages."""
        return {what: value for what, value in {**self.place, **self.details}.items() if value}

    def add_prefix(self, name: str) -> Endpoint:
        """Return this endpoint with a prefix before the name of each fact, so that it can be merged with other endpoints.

        :param name: the prefix.
        """
        place, details = ({f"{name} {k}": v for k, v in facts.items()} for facts in (self.place, self.details))
        return Endpoint(place, details)

    def __or__(self, other: Endpoint) -> Endpoint:
        return Endpoint({**self.place, **other.place}, {**self.details, **other.details})


@dataclass(frozen=True)
class Binding:
    """The writer, the destination and the origin of a window, as they were when it was planned.

    :param writer: the task that planned the window.
    :param destination: where the rows go.
    :param origin: where the rows come from, beside the offsets of the window.
    :param decided: number of the newest decision (:func:`~airflow_kafka_spark.control.lifecycle.rebind`) that the ledger held
        when the window was planned; 0 without one. A later decision allows another binding.
    :param owns: True once the ledger has a record that the pipeline uses the group or the replication slot of ``origin``; False
        (default) if that has to be checked.
    """

    writer: Writer
    destination: Endpoint = Endpoint()
    origin: Endpoint = Endpoint()
    decided: int = 0
    owns: bool = False


def add_details(known: Binding, found: Binding) -> Binding:
    """Return the binding that an open window has from its next attempt on.

    Details that the window already has are kept. Missing ones are taken from the attempt: if a window failed without a dead
    letter topic, and its next attempt has one, then that topic is part of the binding from there on.

    :param known: the binding of the window.
    :param found: the binding of the attempt, which has the same writer, destination and origin.
    """
    kept = {what: value for what, value in known.destination.details.items() if value}
    return replace(known, destination=replace(known.destination, details={**found.destination.details, **kept}))


class Difference(NamedTuple):
    """A fact that was recorded with a window and has another value now."""

    what: str
    known: str
    found: str


def compare_writers(known: Writer, found: Writer) -> tuple[Difference, ...]:
    """Return the differences between the recorded writer and the present one; none if they are equal.

    Deployments are compared only if both are known. Map indexes are compared only within one DAG run, because the list that a
    task is mapped over may change from run to run.
    """
    differences = []
    if known.deployment and found.deployment and known.deployment != found.deployment:
        differences.append(Difference("deployment", known.deployment, found.deployment))
    for what, one, other in (("DAG", known.dag_id, found.dag_id), ("task", known.task_id, found.task_id)):
        if one != other:
            differences.append(Difference(what, one, other))
    if not differences and known.run_id == found.run_id and known.map_index != found.map_index:
        differences.append(Difference("map index", str(known.map_index), str(found.map_index)))
    return tuple(differences)


def compare_locations(known: Endpoint, found: Endpoint) -> tuple[Difference, ...]:
    """Return the differences between two locations, for the next window of a pipeline. Facts that only one of them has are not
    compared.
    """
    return _find_differences(known.place, {k: v for k, v in found.place.items() if k in known.place}, all_of=False)


def compare_endpoints(known: Endpoint, found: Endpoint) -> tuple[Difference, ...]:
    """Return the differences between the endpoint of an open window and that of its next attempt.

    Empty values are not compared.
    """
    return _find_differences({**known.place, **known.details}, {**found.place, **found.details}, all_of=True)


def is_same_place(one: Endpoint, other: Endpoint) -> bool:
    """Return True if two endpoints have the same location, whatever connections or symbolic links name it."""
    places = [_resolve_links(endpoint) for endpoint in (one, other)]
    names = [place.keys() - {SERVER_ID} for place in places]
    return bool(names[0]) and names[0] == names[1] and not _find_differences(*places, all_of=True)


def _resolve_links(endpoint: Endpoint) -> dict[str, str]:
    """Return the place of an endpoint, with the directory that a path leads to through symbolic links."""
    directory = endpoint.details.get("directory")
    uri = Path(directory).as_uri() if directory else ""
    return {what: uri if uri and value.startswith("file:") else value for what, value in endpoint.place.items()}


def _find_differences(known: Mapping[str, str], found: Mapping[str, str], *, all_of: bool) -> tuple[Difference, ...]:
    differences = []
    for what, was in sorted(known.items()):
        before, is_server, kind = what.rpartition(" ")[0], what.rpartition(" ")[1], what.rpartition(" ")[2]
        if kind == SERVER_ID or (kind == SERVER and _is_same_server(known, found, before + is_server)):
            continue
        now = found.get(what, "none")
        if (what in found or all_of) and was and now and now != was:
            differences.append(Difference(what, was, now))
    return tuple(differences)


def _is_same_server(known: Mapping[str, str], found: Mapping[str, str], prefix: str) -> bool:
    identity = known.get(prefix + SERVER_ID)
    return bool(identity) and identity == found.get(prefix + SERVER_ID)


def binding_to_json(binding: Binding) -> dict[str, Any]:
    return {
        "writer": dict(vars(binding.writer)),
        "destination": _endpoint_to_json(binding.destination),
        "origin": _endpoint_to_json(binding.origin),
        **({"decided": binding.decided} if binding.decided else {}),
        **({"owns": True} if binding.owns else {}),
    }


def binding_from_json(value: Mapping[str, Any]) -> Binding:
    """Return the binding that a record holds. Facts that this release does not know are ignored."""
    writer = {name: value["writer"][name] for name in vars(Writer("", "")) if name in value["writer"]}
    destination, origin = (_endpoint_from_json(value.get(name, {})) for name in ("destination", "origin"))
    return Binding(Writer(**writer), destination, origin, value.get("decided", 0), value.get("owns", False))


def _endpoint_to_json(endpoint: Endpoint) -> dict[str, Any]:
    return {name: dict(facts) for name, facts in vars(endpoint).items() if facts}


def _endpoint_from_json(value: Mapping[str, Any]) -> Endpoint:
    return Endpoint(dict(value.get("place", {})), dict(value.get("details", {})))
