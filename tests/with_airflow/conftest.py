"""One real Airflow for all tests of this directory: with users, a triggerer, PostgreSQL, and tasks that share one Spark."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from tests.support.browser import Open, Visit, browser
from tests.support.connect import AIRFLOW_PATH, spark_connect
from tests.ui.past import LEDGER, Past
from tests.with_airflow.site import BEGIN, CONNECTION_SECRET, LAST, USERS, Site, SiteAirflow

LEDGERS = (LEDGER, "kafka_default/no-such-ledger", "kafka_default/nor-this-one")


@pytest.fixture(scope="package")
def lake() -> Iterator[Path]:
    """A directory for tables, with a name that may be shown in a picture."""
    directory = Path(tempfile.mkdtemp(prefix="lake-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="package")
def site(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, lake: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Airflow with the DAGs of ``dags``, over a ledger in which pipelines have moved windows.

    A task is killed at ``close.begin`` if the file ``fault`` is missing; it writes that file first.
    """
    directory = tmp_path_factory.mktemp("site")
    (directory / "fault").touch()
    (directory / "gate").write_text("0/4")
    (directory / "passwords").write_text(json.dumps({name: f"{name}-secret" for name in USERS}))
    # A copy, to which a test adds files.
    shutil.copytree(Path(__file__).with_name("dags"), directory / "dags", ignore=shutil.ignore_patterns("__pycache__"))
    past = Past(kafka)
    past.write()
    kafka.create_topic("watched-orders")
    connection = json.loads(kafka.connection_json())
    # Kafka does not ask for it here; it must not be seen anywhere.
    connection["extra"] = {**connection["extra"], "sasl.password": CONNECTION_SECRET}
    # One JVM for all tasks: each would start its own.
    with past, spark_connect(directory) as port:
        spark = {"conn_type": "spark_connect", "host": "127.0.0.1", "port": port}
        with SiteAirflow(
            directory / "dags",
            connections={
                "kafka_default": json.dumps(connection),
                "spark_default": json.dumps(spark),
                "warehouse": postgres.connection_uri(),
            },
            env={
                "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
                "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{name}:{role}" for name, role in USERS.items()),
                "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(directory / "passwords"),
                "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "1",
                "AIRFLOW__KAFKA_SPARK__LEDGERS": ", ".join(LEDGERS),
                "PYTHONPATH": AIRFLOW_PATH,
                faults.FAULT: "close.begin",
                faults.ONCE: str(directory / "fault"),
                "SITE_FILES": str(directory),
                "SITE_LAKE": str(lake),
                "SITE_BEGIN": BEGIN.isoformat(),
                "SITE_LAST": LAST.isoformat(),
            },
            home=directory / "home",
            components=("triggerer",),
            # These DAG files do not change until the last tests.
            dag_processor=False,
            metadata=postgres,
            parallelism=4,
        ) as airflow:
            site = Site(airflow, kafka, past, directory)
            airflow.admin = site.login("admin")
            yield site


@pytest.fixture(scope="package")
def opened() -> Iterator[Open]:
    """One browser for all tests."""
    with browser() as make:
        yield make


@pytest.fixture(scope="package")
def known_people(site: Site, opened: Open) -> Callable[[str], Visit]:
    known: dict[str, Visit] = {}

    def visit(name: str) -> Visit:
        if name not in known:
            known[name] = opened(site.url, cookies=site.cookies(name))
        return known[name]

    return visit


@pytest.fixture
def people(known_people: Callable[[str], Visit]) -> Iterator[Callable[[str], Visit]]:
    """``people("viewer")`` returns the visit of a user who has logged in, and who leaves the page at the end of the test."""
    here: list[Visit] = []

    def visit(name: str) -> Visit:
        here.append(known_people(name))
        here[-1].troubles.clear()
        return here[-1]

    yield visit
    for each in here:
        each.leave()
