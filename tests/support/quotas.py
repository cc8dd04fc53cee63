"""Quotas of a client id, which an `EmbeddedKafka` enforces by delaying its answers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_kafka_spark.testing import EmbeddedKafka


@contextmanager
def quotas(kafka: EmbeddedKafka, client_id: str, **limits: float) -> Iterator[None]:
    """Set quotas of a client id in this context, as ``consumer_byte_rate=20_000``. The broker has no security."""
    _alter(kafka, client_id, "--add-config", ",".join(f"{name}={value}" for name, value in limits.items()))
    try:
        yield
    finally:
        _alter(kafka, client_id, "--delete-config", ",".join(limits))


def _alter(kafka: EmbeddedKafka, client_id: str, *change: str) -> None:
    # The Python client has no request for quotas.
    java = kafka._make_command(kafka.broker())
    where = ["--bootstrap-server", kafka.bootstrap_servers, "--entity-type", "clients", "--entity-name", client_id]
    command = [*java, "kafka.admin.ConfigCommand", *where, "--alter", *change]
    subprocess.run(command, check=True, capture_output=True)
