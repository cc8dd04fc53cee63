"""An Airflow with users, and requests to it with or without a login."""

from __future__ import annotations

import io
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.message import Message
from pathlib import Path
from typing import Any

import psutil

from airflow_kafka_spark.testing import EmbeddedAirflow, EmbeddedKafka
from tests.ui.past import Past

USERS = {"admin": "admin", "editor": "user", "viewer": "viewer"}
"""The users that may log in, with their roles in Airflow; the password is the name followed by ``-secret``."""

PATH = "/some/where"
"""Below which path of its host Airflow is, as behind a proxy."""

CONNECTION_SECRET = "s3cr3t-of-the-connection"

HOURS = int(os.environ.get("INTERVALS", "2"))
"""The number of data intervals of the hourly DAGs."""

NOW = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
BEGIN, LAST = NOW - timedelta(hours=HOURS), NOW - timedelta(hours=1)


@dataclass
class Answer:
    """The server's answer; ``json`` is the parsed body."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Login:
    """The session of a user; without a token, requests have no login."""

    url: str
    token: str | None = None

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        given = {"Accept": "application/json", **({"Authorization": f"Bearer {self.token}"} if self.token else {}), **headers}
        request = urllib.request.Request(f"{self.url}/{path.lstrip('/')}", method=method, data=body, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, answer.read(), {k.lower(): v for k, v in answer.headers.items()})
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read(), {k.lower(): v for k, v in error.headers.items()})

    def get(self, path: str, **query: Any) -> Answer:
        """Request a route of this package, as ``pipelines``, or any other path that begins with a slash."""
        where = path if path.startswith("/") else f"/kafka-spark/api/{path}"
        return self.request("GET", where + (f"?{urllib.parse.urlencode(query)}" if query else ""))

    def post(self, path: str, value: Any) -> Answer:
        where = path if path.startswith("/") else f"/kafka-spark/api/{path}"
        return self.request("POST", where, json.dumps(value).encode(), **{"Content-Type": "application/json"})


class SiteAirflow(EmbeddedAirflow):
    """Airflow below a path of its host. Its methods act as the user ``admin`` after that user has logged in."""

    admin: Login | None = None

    @property
    def url(self) -> str:
        return super().url + PATH

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        if self.admin is None:
            return super()._ask(method, path, body)
        given = None if body is None else json.dumps(body).encode()
        answer = self.admin.request(method, f"/api/v2{path}", given, **{"Content-Type": "application/json"})
        if answer.status >= 400:
            raise urllib.error.HTTPError(path, answer.status, "", Message(), io.BytesIO(answer.body))
        return answer.json if answer.body else None


@dataclass
class Site:
    """Airflow, with the Kafka and the ledgers that its pages show.

    :param past: writes windows into the ledger as operators do.
    :param files: a directory for the instructions of tests to tasks, and for tables.
    """

    airflow: SiteAirflow
    kafka: EmbeddedKafka
    past: Past
    files: Path
    _logins: dict[str, Login] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.airflow.url

    @property
    def nobody(self) -> Login:
        return Login(self.url)

    def login(self, name: str) -> Login:
        """Return the session of one of :data:`USERS`."""
        if name not in self._logins:
            answer = self.nobody.post("/auth/token", {"username": name, "password": f"{name}-secret"})
            assert answer.status == 201, answer.body
            self._logins[name] = Login(self.url, answer.json["access_token"])
        return self._logins[name]

    def cookies(self, name: str, url: str | None = None) -> list[dict[str, str]]:
        """Return the session of a user for a browser.

        :param url: where it is valid; default: Airflow's.
        """
        return [{"name": "_token", "value": str(self.login(name).token), "url": url or self.url}]

    def trigger(self, dag_id: str, **body: Any) -> str:
        """Start a run as the editor; return its run id."""
        answer = self.login("editor").post(f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": None, **body})
        assert answer.status == 200, answer.body
        return str(answer.json["dag_run_id"])

    def wait(self, dag_id: str, run_id: str, wanted: str = "success") -> None:
        """Wait until a run has ended, in this state."""
        state = self.airflow.wait(dag_id, run_id, 900)
        assert state == wanted, self.airflow.account(dag_id, run_id)

    def value(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """Return the value that a task has returned."""
        found = self.airflow.xcom(dag_id, run_id, task_id)
        return json.loads(found) if isinstance(found, str) else found


def find_tasks(scheduler: psutil.Process) -> dict[str, psutil.Process]:
    """Return the processes of tasks below this scheduler, by the ids of the task instances, which are the titles of the
    processes.
    """
    found = {}
    for process in scheduler.children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith("airflow worker -- ") and "LocalExecutor" not in title:
                found[title.removeprefix("airflow worker -- ").strip()] = process
    return found
