"""Paths and URIs of files, and the address and credentials of S3 from Airflow's connections of type ``aws``."""

from __future__ import annotations

import os
import re
import urllib.parse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import obstore.store
    import pyarrow.fs


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def scheme_of(text: str) -> str:
    """Return the scheme of a path or URI, in small letters; ``file`` for a path."""
    found = _SCHEME.match(text)
    return found[1].lower() if found else "file"


def local_path(text: str) -> str:
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
        return {"aws_conditional_put": "etag", **{name: value for name, value in named.items() if value}}

    def object_store(self, bucket: str) -> obstore.store.S3Store:
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
        return obstore.store.S3Store(bucket, config=config, client_options={"allow_http": self.endpoint.startswith("http:")})

    def filesystem(self) -> pyarrow.fs.FileSystem:
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


def s3_access(conn_id: str | None) -> S3Access:
    """Return how S3 is reached, as the Amazon provider understands the connection (assumed roles included).

    :param conn_id: a connection of type ``aws``; None for the credentials of the environment.
    :raises Exception: the connection does not exist, or gives no credentials.
    """
    if conn_id is None:
        return S3Access()
    from airflow.providers.common.compat.sdk import BaseHook

    # For an undefined connection the Amazon provider would take the environment's credentials.
    BaseHook.get_connection(conn_id)
    from airflow.providers.amazon.aws.hooks.base_aws import AwsGenericHook  # type: ignore[import-not-found]

    hook: AwsGenericHook = AwsGenericHook(aws_conn_id=conn_id, client_type="s3")
    found = hook.get_credentials()
    config = hook.conn_config
    return S3Access(
        endpoint=config.get_service_endpoint_url("s3") or "",
        region=hook.region_name or "",
        access_key=found.access_key,
        secret_key=found.secret_key,
        session_token=found.token or "",
    )
