"""Iceberg catalogs: their options in Airflow's connections, and one table of a catalog."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import ConnectionInvalid, SinkUnavailable
from airflow_kafka_spark.hooks.connections import GENERIC, format_setting, look_up
from airflow_kafka_spark.hooks.databases import describe_driver_message
from airflow_kafka_spark.sinks.storage.store import TableLocation, TableStore

if TYPE_CHECKING:
    import pyarrow.fs
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from typing_extensions import Self

CATALOGS = ("rest", "sql", "glue", "hive")
"""The values of ``type`` in the connection's extra."""

_REFUSED = {
    "hadoop": "A Hadoop catalog commits by renaming files, which loses windows where two writers meet",
    "dynamodb": "pyiceberg cannot commit to the tables of a DynamoDB catalog",
    "bigquery": "pyiceberg cannot commit to the tables of a BigQuery catalog",
}
"""Types of catalogs in which no window can be committed, with the reason."""

_SECRET = re.compile(r"secret|password|token|credential|session|access[-_]key|account[-_]key|sas", re.IGNORECASE)


@dataclass(frozen=True)
class CatalogAccess:
    """The options of a catalog. Never shows one in its repr.

    :param conn_id: the Airflow connection.
    :param name: the catalog's name, under which a SQL catalog stores its tables.
    :param properties: the options of ``pyiceberg.catalog.load_catalog``.
    """

    conn_id: str
    name: str
    properties: Mapping[str, str] = field(repr=False)

    def open(self) -> Catalog:
        """Return the catalog.

        :raises Exception: the catalog cannot be opened.
        """
        from pyiceberg.catalog import load_catalog

        # pyiceberg passes this option unchanged to botocore, which accepts only a number.
        retries = self.properties.get("glue.max-retries", "")
        numbers: dict[str, Any] = {"glue.max-retries": int(retries)} if retries.isdecimal() else {}
        return load_catalog(self.name, **{**self.properties, **numbers})

    @property
    def address(self) -> str:
        """The catalog's address without credentials; its type if it has no address."""
        uri = self.properties.get("uri", "").partition("?")[0]
        return re.sub(r"//[^/]*@", "//", uri) or self.properties.get("type", "rest")

    @property
    def catalog(self) -> str:
        """The name that distinguishes the catalog from others at its address: the name of a SQL catalog, under which its database
        stores tables; the warehouse of a REST catalog; the account and the region of Glue."""
        kind, of = self.properties.get("type", ""), self.properties.get
        if kind == "rest":
            return of("warehouse") or "default"
        if kind == "glue":
            region = of("glue.region") or of("client.region") or ""
            return "/".join(filter(None, (of("glue.endpoint"), of("glue.id"), region))) or "default"
        return "default" if kind == "hive" else self.name

    def hide_secrets(self, text: str) -> str:
        """Return a message without the values of secret options."""
        secrets = [value for name, value in self.properties.items() if _SECRET.search(name) and len(value) > 1]
        if "uri" in self.properties and (password := urllib.parse.urlsplit(self.properties["uri"]).password):
            secrets += [password, urllib.parse.unquote(password)]
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def find_catalog_access(conn_id: str) -> CatalogAccess:
    """Return the options of the catalog that a connection names.

    The connection has the fields of Airflow's Iceberg provider: the host is the catalog's URI, login and password are the id and
    secret of the client (REST) or the user of the database (SQL), and the extra holds all other options of pyiceberg's
    ``load_catalog``. ``name`` in the extra is the catalog's name, by default the connection's id.

    :raises ConnectionInvalid: the connection does not exist, is of another type, or its options do not fit each other.
    """
    try:
        found = look_up(conn_id, "iceberg", GENERIC)
        extra = dict(found.extra_dejson)
    except ConnectionInvalid:
        raise
    except Exception as error:  # Airflow's own errors, and those of a secrets backend
        raise ConnectionInvalid(conn_id, f"{type(error).__name__}: {error}", "Define it, of type `iceberg`") from error
    name = str(extra.pop("name", conn_id))
    options = {key: format_setting(value) for key, value in extra.items() if value is not None}
    if found.host:
        options["uri"] = found.host.rstrip("/") if found.host.startswith("http") else found.host
    kind = options.setdefault("type", "rest") if "py-catalog-impl" not in options else ""
    if kind and kind not in CATALOGS:
        what = f"`type` in its extra is `{kind}`; expected one of {', '.join(CATALOGS)}"
        raise ConnectionInvalid(conn_id, ". ".join([what, *filter(None, [_REFUSED.get(kind)])]))
    if kind == "rest" and found.login and found.password:
        options["credential"] = f"{found.login}:{found.password}"
    elif kind in ("sql", "") and found.login and "@" not in (uri := options.get("uri", "")) and "://" in uri:
        scheme, _, rest = uri.partition("://")
        user = urllib.parse.quote(found.login, safe="")
        password = f":{urllib.parse.quote(found.password, safe='')}" if found.password else ""
        options["uri"] = f"{scheme}://{user}{password}@{rest}"
    if kind in ("rest", "sql") and "uri" not in options:
        raise ConnectionInvalid(conn_id, f"it has no host, which is the URI of a {kind} catalog")
    if kind == "rest" and not options["uri"].startswith(("http://", "https://")):
        what = f"its host is `{options['uri']}`; expected the URL of a REST catalog"
        raise ConnectionInvalid(conn_id, what, "Begin it with `https://`, or set `type` in the extra for another catalog")
    return CatalogAccess(conn_id, name, options)


def find_end_of_path(location: str) -> str:
    """Return the character at which pyiceberg ends the path of a location, so that all its files would have one name; "" if it
    has none."""
    return next((character for character in location if character in "?#"), "")


@dataclass(frozen=True)
class IcebergStore(TableStore):
    """The files below a location, reached as pyiceberg's FileIO of the table does. Never shows an option in its repr.

    :param uri: the location as Iceberg names it, without a slash at its end.
    :param properties: the options of the table's FileIO, credentials that the catalog has lent included.
    """

    uri: str = ""
    properties: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)

    @classmethod
    def of(cls, location: str, properties: Mapping[str, str]) -> IcebergStore:
        """Return the store of a location.

        :raises ValueError: pyarrow knows no file system for it, or pyiceberg would end its path early.
        """
        if found := find_end_of_path(location):
            raise ValueError(f"`{location}` has `{found}` in it, at which pyiceberg ends a path")
        from pyiceberg.io.pyarrow import PyArrowFileIO

        scheme, _, path = PyArrowFileIO.parse_location(location, dict(properties))
        return cls(TableLocation(scheme, path.rstrip("/")), None, location.rstrip("/"), dict(properties))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "filesystem"}

    def has_bucket(self) -> bool:
        """Return True if the bucket of the location exists.

        :raises OSError: the store did not answer, or the user may not list the bucket.
        """
        import pyarrow.fs

        return bool(self.filesystem.get_file_info(self.location.bucket).type != pyarrow.fs.FileType.NotFound)

    @cached_property
    def filesystem(self) -> pyarrow.fs.FileSystem:
        """The file system of Arrow that holds the files."""
        if self.location.is_local:
            # Tasks use it, too: importing pyiceberg takes each of their processes half a second of CPU.
            return super().filesystem
        from pyiceberg.io.pyarrow import PyArrowFileIO

        io = PyArrowFileIO(dict(self.properties))
        scheme, netloc, _ = io.parse_location(self.uri, io.properties)
        return io.fs_by_scheme(scheme, netloc)

    def make_uri(self, path: str) -> str:
        """Return a path below the location in the form of Iceberg's metadata."""
        return f"{self.uri}/{path}"


def _get_request_message(text: str) -> str:
    """Return the message of an error without the retries that the client of a REST catalog names."""
    text = text.partition("\n(Background on this error at:")[0]  # SQLAlchemy's
    cause = _REQUEST.search(text)
    return f"{cause['host']}:{cause['port']}: {cause['why']}" if cause else text


_REQUEST = re.compile(r"HTTPS?Connection\(host='(?P<host>[^']+)', port=(?P<port>\d+)\): (?P<why>.+?)[\"']\)\)")


class IcebergTable:
    """One table of a catalog. A context manager: leaving it closes the catalog.

    :param access: the catalog's options.
    :param name: namespace and name of the table, joined by dots.
    :param uri: the sink's URI, for messages.
    """

    def __init__(self, access: CatalogAccess, name: str, uri: str) -> None:
        self.access, self.name, self.uri = access, name, uri

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog.

        :raises SinkUnavailable: it cannot be opened.
        """
        try:
            return self.access.open()
        except Exception as error:  # each catalog has errors of its own
            raise self.make_unavailable_error("opening the catalog", error) from error

    def close(self) -> None:
        """Close the catalog's connections. It may be called repeatedly; the next use opens the catalog again."""
        if (found := self.__dict__.pop("catalog", None)) is not None:
            found.close()

    def make_unavailable_error(self, doing: str, error: Exception | str) -> SinkUnavailable:
        """Return the error to raise for an error of catalog or store, without secrets."""
        detail = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return SinkUnavailable(self.uri, doing, describe_driver_message(self.access.hide_secrets(_get_request_message(detail))))

    def load(self, doing: str) -> Table | None:
        """Return the newest version of the table, or None if there is no such table.

        :param doing: for messages.
        :raises SinkUnavailable: catalog or store did not answer.
        """
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return self.catalog.load_table(self.name)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        except SinkUnavailable:
            raise
        except Exception as error:  # each catalog has errors of its own
            raise self.make_unavailable_error(doing, error) from error

    def load_newest(self, doing: str) -> Table:
        """Return the newest version of the table.

        :param doing: for messages.
        :raises SinkUnavailable: catalog or store did not answer, or the table is gone.
        """
        table = self.load(doing)
        if table is None:
            raise self.make_unavailable_error(doing, "the table is gone")
        return table

    def has_location(self) -> bool:
        """Return True if the table's namespace exists, and has a location for its tables.

        :raises SinkUnavailable: the catalog did not answer.
        """
        from pyiceberg.exceptions import NoSuchNamespaceError

        try:
            return "location" in self.catalog.load_namespace_properties(tuple(self.name.split(".")[:-1]))
        except NoSuchNamespaceError:
            return False
        except Exception as error:  # each catalog has errors of its own
            raise self.make_unavailable_error("reading the namespace", error) from error

    def try_commit(
        self, table: Table, requirements: Sequence[TableRequirement], updates: Sequence[TableUpdate]
    ) -> Exception | None:
        """Try one commit, without the retries of pyiceberg.

        :return: None if it is committed. After an error the outcome is unknown: load the table again.
        """
        from pyiceberg.exceptions import CommitFailedException
        from pyiceberg.table.update import AssertTableUUID

        same = AssertTableUUID(uuid=table.metadata.table_uuid)
        try:
            answer = self.catalog.commit_table(table, (same, *requirements), tuple(updates))
            self.flush(table, answer.metadata_location)
        except CommitFailedException as error:
            return error
        except Exception as error:  # each catalog has errors of its own
            # A connection of SQLite whose COMMIT has failed (`database is locked`) stays in its transaction: it would read the
            # commit that no other connection sees, and that ends with it.
            self.close()
            return error
        return None

    def flush(self, table: Table, location: str) -> None:
        """Make a metadata file durable. In an object store it is durable as soon as it is written.

        :raises OSError: it cannot be flushed.
        """
        from airflow_kafka_spark.sinks.storage.store import flush

        parent, _, name = location.rpartition("/")
        store = IcebergStore.of(parent, table.io.properties)
        if store.location.is_local:
            flush(store.make_full_path(name))
            flush(store.location.path)

    def get_store(self, table: Table) -> IcebergStore:
        """Return the table's location."""
        return IcebergStore.of(table.location(), table.io.properties)

    def get_data_store(self, table: Table) -> IcebergStore:
        """Return the location of data files."""
        return IcebergStore.of(table.properties.get("write.data.path", f"{table.location()}/data"), table.io.properties)

    def get_metadata_store(self, table: Table) -> IcebergStore:
        """Return the location of manifests."""
        metadata = table.properties.get("write.metadata.path", f"{table.location()}/metadata")
        return IcebergStore.of(metadata, table.io.properties)
