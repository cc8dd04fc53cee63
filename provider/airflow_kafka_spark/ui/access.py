"""Who may see a pipeline, and who may change it: whoever may read, or edit, its DAG in Airflow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.ui.answers import Refused


@dataclass(frozen=True)
class Access:
    """What one user may do, as Airflow's auth manager says at this moment.

    A pipeline belongs to the DAGs of its tasks. One whose DAG this Airflow does not know (another Airflow moves it, or its DAG is
    gone) is seen by everybody who may see the plugins' pages, and changed only by those who may edit all DAGs.

    :param readable: DAGs that the user may read.
    :param editable: DAGs that the user may edit.
    :param known: all DAGs there are.
    :param sees_pages: whether the user may see the pages of plugins.
    :param edits_all: whether the user may edit all DAGs.
    """

    readable: frozenset[str]
    editable: frozenset[str]
    known: frozenset[str]
    sees_pages: bool
    edits_all: bool

    def may_see(self, dag_ids: Collection[str]) -> bool:
        """:param dag_ids: the DAGs of a pipeline; empty when it has none."""
        known = self.known.intersection(dag_ids)
        return bool(known & self.readable) if known else self.sees_pages

    def may_edit(self, dag_ids: Collection[str]) -> bool:
        """All of its DAGs have to be the user's to edit."""
        known = self.known.intersection(dag_ids)
        if not self.may_see(dag_ids):
            return False
        return known <= self.editable if known else self.edits_all


def access_of(user: Any, paused: Mapping[str, bool]) -> Access:
    """What this user may do now.

    :param user: as Airflow's own dependency has found it.
    :param paused: all DAGs there are.
    :raises Refused: 403, the user may not even see the pages of plugins.
    """
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import AccessView

    manager = get_auth_manager()
    sees_pages = manager.is_authorized_view(access_view=AccessView.PLUGINS, user=user)
    readable = frozenset(manager.get_authorized_dag_ids(user=user, method="GET"))
    if not sees_pages and not readable:
        raise Refused(403, "You may not see any pipeline", action="Ask for the right to read their DAGs")
    return Access(
        readable,
        frozenset(manager.get_authorized_dag_ids(user=user, method="PUT")),
        frozenset(paused),
        sees_pages,
        manager.is_authorized_dag(method="PUT", user=user),
    )
