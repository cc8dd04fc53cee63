"""A real Airflow with users who log in, a real Kafka, and pipelines that have moved windows: what all tests of the UI share."""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from airflow_kafka_spark.testing import EmbeddedAirflow, EmbeddedKafka
from airflow_kafka_spark.testing._processes import wait_until
from tests.support.connect import AIRFLOW_PATH, spark_connect
from tests.ui.past import AWKWARD, Past

USERS = {"admin": "admin", "editor": "user", "viewer": "viewer"}
"""Who may log in, and as what in Airflow's words; the password is the name and ``-secret``."""

CONNECTION_SECRET = "s3cr3t-of-the-connection"

DAGS = """
import os
import time

from airflow.sdk import DAG, task
from airflow_kafka_spark.formats import Json, String
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink

value = Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp")

with DAG("shop", schedule=None):
    for name, place in (("orders", {place!r}), ("never_ran", "/tmp/lake/never_ran")):
        sink = FilesSink(path=place)
        KafkaToSinkOperator(task_id=name, topics=["ui-orders"], group_id=f"ui-{{name}}", value=value, sink=sink)
with DAG("billing", schedule=None):
    KafkaToKafkaOperator(task_id="copy", topics=["ui-orders"], group_id="ui-copy", topic="ui-copied", pipeline="billing/copy")
with DAG("odd", schedule=None):
    for number, name in enumerate({awkward!r}):
        KafkaToSinkOperator(
            task_id=f"odd_{{number}}", topics=["ui-odd"], group_id=f"ui-odd-{{number}}", value=value, pipeline=name,
            sink=FilesSink(path="/tmp/lake/odd"),
        )
with DAG("states", schedule=None):

    @task
    def hold(**context):
        # What an operator says while its job runs.
        now = time.time()
        said = {{"window": 2, "name": "2", "splits": 4, "splits_done": 1, "records_total": 30, "records_done": 8,
                "started_at": now - 10, "updated_at": now, "step": "move"}}
        context["task_state_store"].set("kafka_spark.progress", said)
        while not os.path.exists({release!r}):
            time.sleep(0.1)
        raise ValueError("it was released")

    hold()
"""


@dataclass
class Answer:
    """What the server said; ``json`` is the parsed body."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Login:
    """Somebody's session; without a token it is nobody's."""

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
        """A route of ours, as ``pipelines``; or any other path that begins with a slash."""
        where = path if path.startswith("/") else f"/kafka-spark/api/{path}"
        return self.request("GET", where + (f"?{urllib.parse.urlencode(query)}" if query else ""))

    def post(self, path: str, value: Any) -> Answer:
        where = path if path.startswith("/") else f"/kafka-spark/api/{path}"
        return self.request("POST", where, json.dumps(value).encode(), **{"Content-Type": "application/json"})


@dataclass
class Site:
    """The whole of it.

    :param past: writes windows into the ledger as operators do.
    :param release: once this file is there, the task ``hold`` of the DAG ``states`` fails; until then it runs.
    """

    airflow: EmbeddedAirflow
    kafka: EmbeddedKafka
    past: Past
    release: Path
    _logins: dict[str, Login] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.airflow.url

    @property
    def nobody(self) -> Login:
        return Login(self.url)

    def login(self, name: str) -> Login:
        """The session of one of :data:`USERS`."""
        if name not in self._logins:
            answer = self.nobody.post("/auth/token", {"username": name, "password": f"{name}-secret"})
            assert answer.status == 201, answer.body
            self._logins[name] = Login(self.url, answer.json["access_token"])
        return self._logins[name]

    def trigger(self, dag_id: str) -> str:
        """Start a run as the editor; its run id."""
        answer = self.login("editor").post(f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": None})
        assert answer.status == 200, answer.body
        return str(answer.json["dag_run_id"])

    def wait(self, dag_id: str, run_id: str, wanted: str = "success") -> None:
        """Until a run has ended, in this state."""
        state = ""

        def ended() -> bool:
            nonlocal state
            answer = self.login("admin").get(f"/api/v2/dags/{dag_id}/dagRuns/{run_id}")
            # A busy Airflow on SQLite may answer a question by 500: it is asked again.
            state = answer.json["state"] if answer.status == 200 else state
            return state in ("success", "failed")

        wait_until(ended, 600, every=0.3)
        assert state == wanted, self.airflow.account(dag_id, run_id)


@pytest.fixture(scope="package")
def lake():
    """A directory for tables with a name that may stand in a picture."""
    directory = Path(tempfile.mkdtemp(prefix="lake-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="package")
def site(kafka: EmbeddedKafka, lake: Path, tmp_path_factory: pytest.TempPathFactory):
    """Airflow over pipelines that have moved windows, one that never ran, and some of awkward names."""
    directory = tmp_path_factory.mktemp("site")
    (directory / "dags").mkdir()
    (directory / "dags" / "flows.py").write_text(
        DAGS.format(place=str(lake / "orders"), awkward=AWKWARD, release=str(directory / "release"))
    )
    (directory / "passwords").write_text(json.dumps({name: f"{name}-secret" for name in USERS}))
    past = Past(kafka)
    past.write()
    connection = json.loads(kafka.connection_json())
    # Kafka does not ask for it here; it must not be seen anywhere.
    connection["extra"] = {**connection["extra"], "sasl.password": CONNECTION_SECRET}
    env = {
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{name}:{role}" for name, role in USERS.items()),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(directory / "passwords"),
        "AIRFLOW__KAFKA_SPARK__LEDGERS": "kafka_default/airflow-windows, kafka_default/no-such-ledger",
        "PYTHONPATH": AIRFLOW_PATH,
    }
    # One JVM for all tasks: each would start its own.
    with spark_connect(directory) as port:
        spark = {"conn_type": "spark_connect", "host": "127.0.0.1", "port": port}
        connections = {"kafka_default": json.dumps(connection), "spark_default": json.dumps(spark)}
        with EmbeddedAirflow(directory / "dags", connections=connections, env=env) as airflow:
            yield Site(airflow, kafka, past, directory / "release")
