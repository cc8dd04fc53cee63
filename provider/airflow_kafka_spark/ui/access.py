"""Permissions: users see the pipelines whose DAGs they may read in Airflow, and change those whose DAGs they may edit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.ui.responses import RequestRefused

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser


@dataclass(frozen=True)
class Access:
    """Permissions of one user, as Airflow's auth manager reports them now.

    A pipeline belongs to the DAGs of its tasks. If this Airflow knows none of them (another Airflow runs the pipeline, or its DAG
    was deleted), users who may see the pages of plugins see the pipeline, and users who may edit all DAGs change it.

    :param readable: DAGs that the user may read.
    :param editable: DAGs that the user may edit.
    :param known: all DAGs of this Airflow.
    :param sees_pages: True if the user may see the pages of plugins.
    :param edits_all: True if the user may edit all DAGs.
    """

    readable: frozenset[str]
    editable: frozenset[str]
    known: frozenset[str]
    sees_pages: bool
    edits_all: bool

    def may_see(self, dag_ids: Collection[str]) -> bool:
        """Return True if the user may see a pipeline of these DAGs.

        :param dag_ids: the DAGs of the pipeline; empty if it has none.
        """
        known = self.known.intersection(dag_ids)
        return bool(known & self.readable) if known else self.sees_pages

    def may_edit(self, dag_ids: Collection[str]) -> bool:
        """Return True if the user may see a pipeline of these DAGs and edit all of them."""
        known = self.known.intersection(dag_ids)
        if not self.may_see(dag_ids):
            return False
        return known <= self.editable if known else self.edits_all


def find_access(user: BaseUser, paused: Mapping[str, bool]) -> Access:
    """Return the permissions of a user.

    :param user: the user of the request.
    :param paused: all DAGs of this Airflow; the values are ignored.
    :raises RequestRefused: 403 if the user may read no DAG and may not see the pages of plugins.
    """
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import AccessView

    manager = get_auth_manager()
    sees_pages = manager.is_authorized_view(access_view=AccessView.PLUGINS, user=user)
    readable = frozenset(manager.get_authorized_dag_ids(user=user, method="GET"))
    if not sees_pages and not readable:
        raise RequestRefused(403, "You may not see any pipeline", action="Ask for the permission to read their DAGs")
    return Access(
        readable,
        frozenset(manager.get_authorized_dag_ids(user=user, method="PUT")),
        frozenset(paused),
        sees_pages,
        manager.is_authorized_dag(method="PUT", user=user),
    )
