"""Catalogs that lose requests and answers: SQL catalogs, for the connection's ``py-catalog-impl``, and a catalog behind HTTP."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table

if TYPE_CHECKING:
    from typing_extensions import Self


class LostAnswers(SqlCatalog):
    """A catalog that commits, but loses the answer, :attr:`lost` times."""

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
    """A catalog that loses the first commits."""

    lost = 0

    def commit_table(self, *args: Any, **options: Any) -> Any:
        if type(self).lost > 0:
            type(self).lost -= 1
            raise ConnectionError("connection reset by peer")
        return super().commit_table(*args, **options)


class LockedFile(SqlCatalog):
    """A catalog in SQLite that another program reads during the first commits, so that they find the file locked."""

    lost = 0

    def __init__(self, name: str, **options: str) -> None:
        super().__init__(name, **{**options, "uri": f"{options['uri']}?timeout=0.1"})

    def commit_table(self, *args: Any, **options: Any) -> Any:
        if type(self).lost == 0:
            return super().commit_table(*args, **options)
        type(self).lost -= 1
        with closing(sqlite3.connect(str(self.engine.url.database), isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT * FROM iceberg_tables").fetchall()
            return super().commit_table(*args, **options)


class RestServer(ThreadingHTTPServer):
    """A catalog that speaks the protocol of REST catalogs, as far as pyiceberg's client and these tests use it, and keeps its
    tables in a SQL catalog. It may lose requests, or their answers.

    :param options: of the SQL catalog.
    """

    daemon_threads = True

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.requests = 0
        self.lost: int | None = None
        """Number of the request that is answered by 503."""
        self.handled = False
        """True: the request is carried out nevertheless."""
        super().__init__(("127.0.0.1", 0), _RestHandler)

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def lose(self, number: int | None, handled: bool = False) -> None:
        """Answer a request by 503, counted from now on.

        :param handled: True: the request is carried out nevertheless.
        """
        self.requests, self.lost, self.handled = 0, number, handled


class _RestHandler(BaseHTTPRequestHandler):
    server: RestServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, status: int, body: object = None) -> None:
        text = json.dumps(body).encode() if body is not None else b""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        number, self.server.requests = self.server.requests, self.server.requests + 1
        lost = number == self.server.lost
        refusal = {"error": {"message": "try again", "type": "ServiceUnavailableException", "code": 503}}
        if lost and not self.server.handled:
            return self._answer(503, refusal)
        try:
            with SqlCatalog("lake", **self.server.options) as catalog:
                status, found = self._result(catalog, body)
        except (NoSuchNamespaceError, NoSuchTableError) as error:
            status, found = 404, {"error": {"message": str(error), "type": type(error).__name__, "code": 404}}
        except (CommitFailedException, TableAlreadyExistsError, NamespaceAlreadyExistsError) as error:
            status, found = 409, {"error": {"message": str(error), "type": type(error).__name__, "code": 409}}
        self._answer(*((503, refusal) if lost else (status, found)))

    do_GET = do_POST = do_HEAD = _handle

    def _result(self, catalog: SqlCatalog, body: bytes) -> tuple[int, Any]:
        parts = self.path.partition("?")[0].strip("/").split("/")[1:]
        if parts == ["config"]:
            return 200, {"defaults": {}, "overrides": {}}
        if parts == ["namespaces"]:
            asked = json.loads(body)
            catalog.create_namespace(tuple(asked["namespace"]), asked.get("properties", {}))
            return 200, {"namespace": asked["namespace"], "properties": {}}
        namespace = (parts[1],)
        if len(parts) == 2:
            return 200, {"namespace": list(namespace), "properties": catalog.load_namespace_properties(namespace)}
        if len(parts) == 3:
            wanted = CreateTableRequest.model_validate({"location": None, **json.loads(body)})
            columns = wanted.table_schema
            spec = wanted.partition_spec or UNPARTITIONED_PARTITION_SPEC
            made = catalog.create_table((*namespace, wanted.name), columns, partition_spec=spec, properties=wanted.properties)
            return 200, _loaded(made)
        table = catalog.load_table((*namespace, parts[3]))
        if self.command == "POST":
            change = CommitTableRequest.model_validate_json(body)
            catalog.commit_table(table, change.requirements, change.updates)
            table = catalog.load_table((*namespace, parts[3]))
        return 200, _loaded(table)


def _loaded(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}
