"""A real schema registry for tests: Apicurio Registry, in memory, with its API that is compatible with Confluent's.

It is fetched from Maven Central once (109 MB) and cached beside the jars of the embedded Kafka. It starts in some seconds.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from airflow_kafka_spark.errors import ServerFailed
from airflow_kafka_spark.hooks.spark import jars
from airflow_kafka_spark.testing import _processes as processes

# The newest that runs on Java 17.
RELEASE = "3.0.9"
RUNNER = f"apicurio-registry-app-{RELEASE}-runner.jar"
_ATTEMPTS = 3


def application() -> Path:
    """Return the directory of the server; the first call fetches and unpacks it."""
    root = jars.find_cache_directory()
    target = root / "test-packages" / f"apicurio-registry-{RELEASE}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with jars._lock_directory(root, (RUNNER,)) as lock:
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as temporary:
                with tarfile.open(_fetched(Path(temporary), lock)) as archive:
                    # Python before 3.11.4 and 3.10.12 has no filters.
                    archive.extraction_filter = getattr(tarfile, "data_filter", None)
                    archive.extractall(Path(temporary) / "made")
                (Path(temporary) / "made").rename(target)
    return target


def _fetched(into: Path, lock: int) -> Path:
    artifact = '<artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" m:classifier="all"/>'
    (into / "ivy.xml").write_text(
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven"><info organisation="tests" module="registry"/>'
        '<configurations><conf name="default"/></configurations><dependencies>'
        f'<dependency org="io.apicurio" name="apicurio-registry-app" rev="{RELEASE}" transitive="false" conf="default->default">'
        f"{artifact}</dependency></dependencies></ivy-module>"
    )
    command = [str(jars.find_java()), "-cp", f"{jars.find_pyspark_jars()}/*", "org.apache.ivy.Main"]
    settings = os.environ.get(jars.IVY_SETTINGS_ENV)
    if not settings:
        # The application stands alone; the description of it names a parent that not every mirror has.
        resolver = '<ibiblio name="central" m2compatible="true" usepoms="false"/>'
        own = f'<ivysettings><settings defaultResolver="central"/><resolvers>{resolver}</resolvers></ivysettings>'
        settings = str(into / "settings.xml")
        Path(settings).write_text(own)
    command += ["-settings", settings, "-cache", str(into / "ivy"), "-ivy", str(into / "ivy.xml"), "-confs", "default", "-warn"]
    command += ["-retrieve", f"{into}/[artifact]-[revision].[ext]"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, pass_fds=(lock,))
    archive = into / f"apicurio-registry-app-{RELEASE}.tar.gz"
    assert archive.is_file(), ran.stdout[-2000:]
    return archive


def serializer(url: str, schema: Mapping[str, Any], part: str = "value", **conf: Any) -> Callable[[str, Any], bytes]:
    """Return Confluent's serializer, which takes a topic and a value.

    :param part: ``key`` or ``value``.
    """
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroSerializer
    from confluent_kafka.serialization import SerializationContext

    write = AvroSerializer(SchemaRegistryClient({"url": url}), json.dumps(schema), conf=conf)
    return lambda topic, value: write(value, SerializationContext(topic, part))


class EmbeddedRegistry:
    """A registry that ends with this process. All registered schemas end with it."""

    def __enter__(self) -> EmbeddedRegistry:
        home = application()
        for attempt in range(1, _ATTEMPTS + 1):
            self._directory = processes.make_own_directory("registry")
            self._supervisor = processes.SupervisorClient("schema registry")
            self._supervisor.own(self._directory)
            self.port = processes.find_free_ports(1)[0]
            self._log = self._directory / "registry.log"
            command = [jars.find_java(), "-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
            command += ["-Dquarkus.http.host=127.0.0.1", f"-Dquarkus.http.port={self.port}", "-Dquarkus.log.level=WARN"]
            command += [
                "-Dapicurio.rest.deletion.artifact.enabled=true",
                "-Dapicurio.rest.deletion.artifact-version.enabled=true",
            ]
            server = self._supervisor.spawn([*command, "-jar", home / RUNNER], log=self._log)
            if self._waits_for(server):
                return self
            log_tail = processes.read_tail(self._log)
            self._supervisor.close()
            if attempt == _ATTEMPTS:
                raise ServerFailed("schema registry", log_tail)
        raise AssertionError("unreachable")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def connection(self, **settings: object) -> str:
        """Return the Airflow connection as the value of its environment variable."""
        return json.dumps({"conn_type": "schema_registry", "extra": {"url": self.url, **settings}})

    def _waits_for(self, server: processes.ServerProcess) -> bool:
        return processes.wait_until(lambda: not server.running or self._answers(), 180, every=0.1) and server.running

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._supervisor.close()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def guarded(url: str, user: str, password: str) -> Iterator[str]:
    """Put a proxy with basic authentication in front of the registry, and yield its address."""
    wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    class Guard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the server's name
            if self.headers.get("Authorization") != wanted:
                return self._answer(401, b'{"error_code": 40101, "message": "Unauthorized"}')
            length = int(self.headers.get("Content-Length") or 0)
            asked = urllib.request.Request(url + self.path, self.rfile.read(length) or None, method=self.command)
            asked.add_header("Content-Type", self.headers.get("Content-Type") or "application/json")
            try:
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    self._answer(answer.status, answer.read())
            except urllib.error.HTTPError as e:
                self._answer(e.code, e.read())

        do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Guard)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
