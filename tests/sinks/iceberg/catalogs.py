"""Catalogs whose answers get lost: real SQL catalogs, for the connection's ``py-catalog-impl``."""

from __future__ import annotations

from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException


class LostAnswers(SqlCatalog):
    """Commits, and answers that it does not know, as often as :attr:`lost` says."""

    lost = 0
    seen = 0

    def commit_table(self, *args: Any, **options: Any) -> Any:
        type(self).seen += 1
        answer = super().commit_table(*args, **options)
        if type(self).lost > 0:
            type(self).lost -= 1
            raise CommitStateUnknownException("502 Bad Gateway")
        return answer


class LostRequests(SqlCatalog):
    """Does not get the first commits."""

    lost = 0

    def commit_table(self, *args: Any, **options: Any) -> Any:
        if type(self).lost > 0:
            type(self).lost -= 1
            raise ConnectionError("connection reset by peer")
        return super().commit_table(*args, **options)
