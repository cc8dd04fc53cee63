from __future__ import annotations

from tests.support.lag import connection, hook, topic

__all__ = ["connection", "hook", "topic"]
