"""Paths and URIs of files, and addresses and credentials of object stores from Airflow's connections of the types ``aws``,
``google_cloud_platform`` and ``wasb``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import urllib.parse
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from airflow_kafka_spark.errors import ConnectionInvalid, Problem
from airflow_kafka_spark.hooks.connections import GENERIC, look_up

if TYPE_CHECKING:
    import obstore.store
    import pyarrow.fs


AMAZON = "amazonaws.com"
"""The server of S3 if the connection names no other."""

AZURE = "abfss"
OBJECT_STORES = ("s3", "gs", AZURE)
"""The schemes of object stores that have conditional writes."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_TRIED = ".airflow-kafka-spark-"
"""The beginning of the name of a directory that is created and removed at once."""


def parse_scheme(text: str) -> str:
    """Return the scheme of a path or URI, in small letters; ``file`` for a path."""
    found = _SCHEME.match(text)
    return found[1].lower() if found else "file"


def make_local_path(text: str) -> str:
    """Return the absolute, normalized path that a path or a URI of the scheme ``file`` names.

    :raises ValueError: it is on another host, or not absolute.
    """
    path = text
    if _SCHEME.match(text):
        parts = urllib.parse.urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"`{text}` names the host {parts.netloc}")
        # urlsplit ends the path at ? and #: names of files that hold them must be encoded.
        path = urllib.parse.unquote(parts.path)
    if not os.path.isabs(path):
        raise ValueError(f"`{text}` is not an absolute path")
    return os.path.normpath(path)


_RETRIES: obstore.store.RetryConfig = {"max_retries": 8, "retry_timeout": timedelta(seconds=60)}
"""Requests that a store refuses for the moment are tried again for so long; then the task is."""


def _make_client_config(endpoint: str) -> obstore.store.ClientConfig:
    return {"allow_http": endpoint.startswith("http:")}


_MACHINES_METADATA = "/169.254.169.254/"
"""The service of a virtual machine that clients of stores ask for credentials, if they have no others."""
_FRAME = re.compile(r"\d+: (?:<unknown>|\w+)$|at \./")
"""A line of a stack trace of deltalake."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_REQUEST = re.compile(r"[Pp]erforming ([A-Z]+ [^\s?]+)")
_ANSWER = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z]*)*)")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_NUMBER = re.compile(r"(?:\(os error |\bOs \{ code: )(\d+)")


def describe_store_error(error: Exception) -> OSError:
    """Return the error of an object store's client, or of deltalake, in one line.

    Their own messages contain the store's answer as XML, with all causes, and with the query of the request, which may hold a
    token. The result is a :class:`PermissionError` if the store refused the user, and has the number of a local system's error.
    """
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno):
        return error
    text = _COLOUR.sub("", str(error))
    lines = (line.strip(" \t↳") for line in text.partition("\nDebug source:")[0].splitlines())
    said = ": ".join(line for line in lines if line and not _FRAME.match(line))
    request = (_REQUEST.findall(text) or [""])[-1]
    if _MACHINES_METADATA in request or "failed to load IMDS session token" in said:
        return PermissionError("there are no credentials: no connection is given, and neither environment nor machine has any")
    if answer := _ANSWER.search(said):
        parts = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
        reason = ", ".join(part[1].rstrip(".") for part in parts if part)
        answered = f"the store answered {answer[1]}{f' ({reason})' if reason else ''}{f' to {request}' if request else ''}"
        return PermissionError(answered) if answer[1][:3] in ("401", "403") else OSError(answered)
    if request:
        return OSError(f"no answer to {request}: {(_CAUSE.findall(text) or [said.rpartition(': ')[2]])[-1]}")
    number = _NUMBER.search(text)
    return OSError(int(number[1]), said) if number else OSError(said)


class StoreAccess(Protocol):
    """The address and credentials of an object store."""

    @property
    def server(self) -> str:
        """The server or the account that has the buckets."""

    def make_object_store(self, bucket: str) -> obstore.store.ObjectStore:
        """Return a bucket or container, by a client that writes on conditions."""


@dataclass(frozen=True)
class S3Access:
    """The address and credentials of S3. Never shows a credential in its repr.

    :param endpoint: URL of the server; "" for Amazon's.
    :param region: name of the region; "" for the environment's.
    :param access_key: the access key; "" for the credentials of the environment.
    :param secret_key: its secret.
    :param session_token: of temporary credentials, else "".
    """

    endpoint: str = ""
    region: str = ""
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)

    @property
    def server(self) -> str:
        """The server: Amazon's, or the one that the connection names."""
        return self.endpoint.partition("://")[2] or AMAZON

    @property
    def storage_options(self) -> dict[str, str]:
        """The options of deltalake. Commits are conditional PUTs, which fail if another writer has taken the version."""
        named = {
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "aws_session_token": self.session_token,
            "aws_region": self.region,
            "aws_endpoint_url": self.endpoint,
            "aws_allow_http": "true" if self.endpoint.startswith("http:") else "",
        }
        retries = {
            "max_retries": str(_RETRIES["max_retries"]),
            "retry_timeout": f"{_RETRIES['retry_timeout'].total_seconds():.0f}s",
        }
        return {"aws_conditional_put": "etag", **retries, **{name: value for name, value in named.items() if value}}

    def make_object_store(self, bucket: str) -> obstore.store.S3Store:
        """Return a bucket, by a client that writes on conditions."""
        import obstore.store

        config: obstore.store.S3Config = {}
        if self.access_key:
            config.update({"access_key_id": self.access_key, "secret_access_key": self.secret_key})
        if self.session_token:
            config["session_token"] = self.session_token
        if self.region:
            config["region"] = self.region
        if self.endpoint:
            config["endpoint"] = self.endpoint
        return obstore.store.S3Store(
            bucket, config=config, client_options=_make_client_config(self.endpoint), retry_config=_RETRIES
        )

    def make_client(self) -> Any:
        """Return a client of boto3, for uploads in parts that others complete."""
        import boto3
        from botocore.config import Config

        named = {
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "aws_session_token": self.session_token,
            "region_name": self.region,
            "endpoint_url": self.endpoint,
        }
        # Checksums that not every server of S3 knows are sent only where they are required.
        checksums: Any = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        # The mode "standard" does not repeat a request that was answered by 429, as stores other than Amazon's do.
        config = Config(
            retries={"total_max_attempts": 5, "mode": "legacy"},
            s3={"addressing_style": "path"} if self.endpoint else {},
            **checksums,
        )
        return boto3.client("s3", config=config, **{name: value for name, value in named.items() if value})

    def make_filesystem(self) -> pyarrow.fs.FileSystem:
        """Return the file system of Arrow."""
        import pyarrow.fs

        scheme, _, host = self.endpoint.rpartition("://")
        named: dict[str, Any] = {
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "session_token": self.session_token,
            "region": self.region,
            "endpoint_override": host.rstrip("/"),
            "scheme": scheme,
        }
        return pyarrow.fs.S3FileSystem(**{name: value for name, value in named.items() if value})


def find_s3_access(conn_id: str | None) -> S3Access:
    """Return the address and credentials of S3, as the Amazon provider reads the connection (assumed roles included).

    :param conn_id: a connection of type ``aws``; None for the credentials of the environment.
    :raises ConnectionInvalid: the connection does not exist, or is of another type.
    :raises Exception: the connection gives no credentials.
    """
    if conn_id is None:
        return S3Access()
    # For an undefined connection the Amazon provider would take the environment's credentials.
    look_up(conn_id, "aws", GENERIC)
    from airflow.providers.amazon.aws.hooks.base_aws import AwsGenericHook

    hook: AwsGenericHook = AwsGenericHook(aws_conn_id=conn_id, client_type="s3")
    config = hook.conn_config
    endpoint = config.get_service_endpoint_url("s3") or ""
    if endpoint and not re.match(r"https?://[^/]", endpoint):
        # The clients of S3 end the process' threads where this is no URL.
        found, action = (
            f"its `endpoint_url` is `{endpoint}`; expected a URL",
            f"Write it as http://{endpoint} or https://{endpoint}",
        )
        raise ConnectionInvalid(conn_id, found, action)
    found = hook.get_credentials()
    return S3Access(
        endpoint=endpoint,
        region=hook.region_name or "",
        access_key=found.access_key,
        secret_key=found.secret_key,
        session_token=found.token or "",
    )


@dataclass(frozen=True)
class GcsAccess:
    """The address and credentials of Google Cloud Storage. Never shows a credential in its repr.

    :param key: the JSON of a service account's key; "" for the credentials of the environment.
    :param endpoint: URL of another server, which asks for no credentials if there is no key; "" for Google's.
    """

    key: str = field(default="", repr=False)
    endpoint: str = ""

    @property
    def server(self) -> str:
        """The server: Google's, or the one that the connection names."""
        return self.endpoint.partition("://")[2] or "storage.googleapis.com"

    def make_object_store(self, bucket: str) -> obstore.store.ObjectStore:
        """Return a bucket, by a client that writes on conditions."""
        import obstore.store

        config: obstore.store.GCSConfig = {}
        if self.endpoint:
            config["base_url"] = self.endpoint
        if self.key:
            config["service_account_key"] = self.key
        elif self.endpoint:
            # `skip_signature` alone still asks for a token before a write.
            config["service_account_key"] = json.dumps({"disable_oauth": True, "gcs_base_url": self.endpoint, **_NOBODY})
        return obstore.store.GCSStore(
            bucket, config=config, client_options=_make_client_config(self.endpoint), retry_config=_RETRIES
        )


@dataclass(frozen=True)
class AzureAccess:
    """The address and credentials of a storage account of Azure. Never shows a credential in its repr.

    :param account: the account's name.
    :param endpoint: URL of another server; "" for Azure's.
    :param key: the account's key, or "".
    :param sas_token: a token in place of the key, or "".
    :param tenant_id: the tenant of an application, or "".
    :param client_id: the application's id.
    :param client_secret: its secret.
    """

    account: str
    endpoint: str = ""
    key: str = field(default="", repr=False)
    sas_token: str = field(default="", repr=False)
    tenant_id: str = ""
    client_id: str = ""
    client_secret: str = field(default="", repr=False)

    @property
    def server(self) -> str:
        """The account, and the server if the connection names one."""
        return self.endpoint.partition("://")[2] or self.account

    def make_object_store(self, bucket: str) -> obstore.store.ObjectStore:
        """Return a container, by a client that writes on conditions."""
        import obstore.store

        named = {
            "account_name": self.account,
            "endpoint": self.endpoint,
            "account_key": self.key,
            "sas_key": self.sas_token,
            "tenant_id": self.tenant_id,
            "client_id": self.client_id,
            "client_secret": self.client_secret,
        }
        config: Any = {name: value for name, value in named.items() if value}
        return obstore.store.AzureStore(
            bucket, config=config, client_options=_make_client_config(self.endpoint), retry_config=_RETRIES
        )


_NOBODY = {"client_email": "", "private_key": "", "private_key_id": ""}


def find_provider_problem(
    option: str, scheme: str, conn_id: str | None, package: str = "apache-airflow-providers-amazon"
) -> Problem | None:
    """Return a problem if S3 is used with a connection, and Airflow's Amazon provider, which reads it, is not installed.

    :param option: the argument that has the problem, as users know it.
    :param scheme: the scheme of the path.
    :param package: the package to install.
    """
    if scheme != "s3" or not conn_id or importlib.util.find_spec("airflow.providers.amazon") is not None:
        return None
    return Problem(option, "S3 with a connection needs Airflow's Amazon provider", f"Install {package} on the Airflow worker")


def find_unwritable_directory_problem(option: str, directory: Path) -> Problem | None:
    """Return a problem if this user cannot write into a directory that exists.

    The rights alone do not decide: root may write everywhere, but not in ``/proc``, nor on a share whose server allows it less.
    So a hidden directory is created and removed.

    :param option: the argument that has the problem, as users know it.
    """
    if os.access(directory, os.W_OK | os.X_OK):
        tried = directory / f"{_TRIED}{uuid.uuid4().hex}"
        try:
            tried.mkdir()
        except OSError as error:
            found = f"no directory can be created in {directory}: {error.strerror or error}"
            return Problem(option, found, "Name a directory in which this user may create others")
        with suppress(OSError):
            tried.rmdir()
        return None
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return Problem(option, f"{directory} is in a file system that is mounted read-only", "Mount it for writing")
    return Problem(option, f"{directory} cannot be written by user {os.geteuid()}", "Give this user the right to")


def find_uncreatable_problem(option: str, directory: Path) -> Problem | None:
    """Return a problem if this user cannot create a directory, or write into it if it exists.

    :param option: the argument that has the problem, as users know it.
    """
    existing = next((path for path in (directory, *directory.parents) if os.path.lexists(path)), directory)
    if not existing.is_dir():
        return Problem(option, f"{existing} is not a directory", "Name a directory, or remove the file")
    return find_unwritable_directory_problem(option, existing)


def find_store_access(scheme: str, account: str, conn_id: str | None) -> StoreAccess:
    """Return the address and credentials of an object store.

    :param scheme: one of :data:`OBJECT_STORES`.
    :param account: the host of a storage account of Azure, else "".
    :param conn_id: a connection of type ``aws``, ``google_cloud_platform`` or ``wasb``; None for the credentials of the
        environment.
    :raises ConnectionInvalid: the connection does not exist, or is of another type.
    :raises Exception: the connection gives no credentials.
    """
    if scheme == "gs":
        return find_gcs_access(conn_id)
    return find_azure_access(account, conn_id) if scheme == AZURE else find_s3_access(conn_id)


def find_gcs_access(conn_id: str | None) -> GcsAccess:
    """Return the address and credentials of Google Cloud Storage. Parameters and errors are those of
    :func:`find_store_access`.
    """
    if conn_id is None:
        return GcsAccess()
    extra = look_up(conn_id, "google_cloud_platform", GENERIC).extra_dejson
    found = {name: extra.get(name) or extra.get(f"extra__google_cloud_platform__{name}") for name in (*_GCS_KEYS, *_GCS_OTHERS)}
    if others := sorted(name for name in _GCS_OTHERS if found[name]):
        raise ValueError(
            f"connection `{conn_id}` has `{others[0]}`; expected `keyfile_dict` or `key_path`, a service account's key"
        )
    key = found["keyfile_dict"] or ""
    if found["key_path"] and not key:
        with open(found["key_path"], encoding="utf-8") as file:
            key = file.read()
    return GcsAccess(key if isinstance(key, str) else json.dumps(key), extra.get("endpoint_url") or "")


_GCS_KEYS = ("keyfile_dict", "key_path")
_GCS_OTHERS = ("key_secret_name", "credential_config_file", "impersonation_chain")


def find_azure_access(account: str, conn_id: str | None) -> AzureAccess:
    """Return the address and credentials of a storage account of Azure. Parameters and errors are those of
    :func:`find_store_access`.

    The fields of the connection are those of Airflow's Azure provider: login and password are the account and its key, or with
    ``tenant_id`` an application and its secret.
    """
    name = account.partition(".")[0]
    if conn_id is None:
        return AzureAccess(name)
    connection = look_up(conn_id, "wasb", GENERIC)
    extra = connection.extra_dejson
    found = {field: extra.get(field) or extra.get(f"extra__wasb__{field}") or "" for field in _WASB_FIELDS}
    parts = dict(part.split("=", 1) for part in found["connection_string"].split(";") if "=" in part)
    host, tenant = connection.host or "", found["tenant_id"]
    endpoint = parts.get("BlobEndpoint") or (host if "://" in host else f"https://{host}" if "." in host else "")
    login, password = connection.login or "", connection.password or ""
    known = name if tenant else parts.get("AccountName") or login or name
    if known != name:
        raise ValueError(
            f"connection `{conn_id}` leads to the storage account `{known}`; expected `{name}`, which the path names"
        )
    return AzureAccess(
        account=name,
        endpoint=endpoint.rstrip("/"),
        key="" if tenant else parts.get("AccountKey") or found["shared_access_key"] or password,
        sas_token=parts.get("SharedAccessSignature") or found["sas_token"],
        tenant_id=tenant,
        client_id=login if tenant else "",
        client_secret=password if tenant else "",
    )


_WASB_FIELDS = ("connection_string", "shared_access_key", "sas_token", "tenant_id")
