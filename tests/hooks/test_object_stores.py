"""Paths and URIs, and credentials of object stores from Airflow's connections."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from airflow_kafka_spark.errors import ConnectionInvalid, SinkUnavailable
from airflow_kafka_spark.hooks.object_stores import (
    AzureAccess,
    GcsAccess,
    S3Access,
    describe_store_error,
    find_azure_access,
    find_gcs_access,
    make_local_path,
    parse_scheme,
)

HOST = "shop.dfs.core.windows.net"
KEY = {"client_email": "loader@shop", "private_key": "not shown"}


def test_no_secret_is_shown():
    access = S3Access("http://localhost:1", "eu-west-1", "AKIA", "the secret", "the token")
    assert "the secret" not in repr(access) and "the token" not in repr(access)


@pytest.mark.parametrize(
    ("text", "scheme", "path"),
    [
        ("/data/orders/", "file", "/data/orders"),
        ("/data/../orders", "file", "/orders"),
        ("file:///data/a%20b", "file", "/data/a b"),
        ("FILE://localhost/data", "file", "/data"),
        ("orders", "file", "is not an absolute path"),
        ("file://server/data", "file", "names the host server"),
        ("S3A://bucket/orders", "s3a", "names the host bucket"),
    ],
)
def test_paths_and_uris_are_distinguished(text, scheme, path):
    assert parse_scheme(text) == scheme
    if path.startswith("/"):
        assert make_local_path(text) == path
    else:
        with pytest.raises(ValueError, match=path):
            make_local_path(text)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda **fields: monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps(fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"login": "shop", "password": "k"}, AzureAccess("shop", key="k")),
        ({"login": "shop", "extra": {"shared_access_key": "k"}}, AzureAccess("shop", key="k")),
        ({"login": "shop", "extra": {"extra__wasb__sas_token": "sv=1"}}, AzureAccess("shop", sas_token="sv=1")),
        (
            {"extra": {"connection_string": "AccountName=shop;AccountKey=a==;BlobEndpoint=https://edge/shop"}},
            AzureAccess("shop", "https://edge/shop", key="a=="),
        ),
        (
            {"login": "app", "password": "s", "extra": {"tenant_id": "t"}},
            AzureAccess("shop", tenant_id="t", client_id="app", client_secret="s"),
        ),
    ],
)
def test_a_wasb_connection_gives_the_credentials_of_the_account_that_the_path_names(connect, fields, expected):
    connect(conn_type="wasb", **fields)
    found = find_azure_access(HOST, "store")
    assert found == expected
    assert not {"k", "sv=1", "a==", "s"} & set(repr(found).replace("'", " ").split())


def test_a_wasb_connection_of_another_account_is_refused(connect):
    connect(conn_type="wasb", login="other", password="k")
    with pytest.raises(ValueError, match="leads to the storage account `other`; expected `shop`"):
        find_azure_access(HOST, "store")


@pytest.mark.parametrize(
    ("access", "kind"), [(partial(find_azure_access, HOST), "wasb"), (find_gcs_access, "google_cloud_platform")]
)
def test_a_connection_of_another_type_gives_no_credentials(connect, access, kind):
    connect(conn_type="postgres", login="shop", password="k")
    with pytest.raises(ConnectionInvalid, match=f"it is of type `postgres`. Use a connection of type `{kind}`"):
        access("store")


def test_a_google_connection_gives_the_key_of_its_service_account(connect, tmp_path: Path):
    connect(conn_type="google_cloud_platform", extra={"keyfile_dict": KEY})
    assert find_gcs_access("store") == GcsAccess(json.dumps(KEY)) and "not shown" not in repr(find_gcs_access("store"))
    path = tmp_path / "key.json"
    path.write_text(json.dumps(KEY))
    connect(conn_type="google_cloud_platform", extra={"extra__google_cloud_platform__key_path": str(path)})
    assert find_gcs_access("store") == GcsAccess(json.dumps(KEY))
    connect(conn_type="google_cloud_platform", extra={"impersonation_chain": "other@shop"})
    with pytest.raises(ValueError, match="has `impersonation_chain`; expected `keyfile_dict` or `key_path`"):
        find_gcs_access("store")


# --- errors of clients ----------------------------------------------------------------------------------------------------

DENIED = """Generic MicrosoftAzure error: Error performing GET https://a.example.org/lake?comp=list&sig=s3cr3t%3D in 9ms - \
Server returned non-2xx status code: 403 Forbidden: <?xml version="1.0"?>
<Error><Code>AuthenticationFailed</Code><Message>Not authorized.</Message></Error>

Debug source:
Generic { source: Status { uri: Some(https://a.example.org/lake?comp=list&sig=s3cr3t%3D) } }"""
UNRESOLVED = """Generic S3 error: Error performing PUT http://nowhere:9000/lake in 4s, after 8 retries - HTTP error

Debug source:
Http(ConnectError("dns error", Custom { error: "failed to lookup address information: Name or service not known" }))"""
REFUSED = """Kernel error -> Generic S3 error
   \x1b[31m↳\x1b[0m Error performing GET http://127.0.0.1:1/b/t/_delta_log/_last_checkpoint in 102ms, after 1 retries, max_retries
    \x1b[31m↳\x1b[0m tcp connect error
     \x1b[31m↳\x1b[0m Connection refused (os error 111)"""
FORBIDDEN = """Kernel error -> Generic S3 error
   \x1b[31m↳\x1b[0m Error performing GET http://127.0.0.1:1/b/t in 12ms - Server returned non-2xx status code
    \x1b[31m↳\x1b[0m 403 Forbidden
     \x1b[31m↳\x1b[0m <?xml version="1.0" encoding="utf-8"?>
     <Error><Code>AccessDenied</Code><Message>Access Denied</Message><RequestId>x</RequestId></Error>"""
METADATA = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 6ms - HTTP error"
NO_TOKEN = "Kernel error -> Operation not supported: failed to load IMDS session token: service error: request forbidden"
FULL = "Generic LocalFileSystem error\n ↳ Unable to copy data to file\n  ↳ No space left on device (os error 28)"


@pytest.mark.parametrize(
    ("text", "said", "retryable"),
    [
        (
            DENIED,
            "answered 403 Forbidden (AuthenticationFailed, Not authorized) to GET https://a.example.org/lake",
            False,
        ),
        (UNRESOLVED, "no answer to PUT http://nowhere:9000/lake: failed to lookup address information: Name or service", True),
        (REFUSED, "no answer to GET http://127.0.0.1:1/b/t/_delta_log/_last_checkpoint: Connection refused", True),
        (FORBIDDEN, "the store answered 403 Forbidden (AccessDenied, Access Denied) to GET http://127.0.0.1:1/b/t", False),
        (METADATA, "there are no credentials", False),
        (NO_TOKEN, "there are no credentials", False),
        (
            "Kernel error: Json error: no JSON\n   0: <unknown>\n   8: start_thread\n    at ./nptl/pthread.c:4",
            "no JSON. The task",
            True,
        ),
        (FULL, "No space left on device (os error 28). Make room on the file system; then run the task again", False),
    ],
)
def test_an_error_of_a_store_is_one_line_without_tokens_that_says_if_a_retry_helps(text: str, said: str, retryable: bool):
    error = SinkUnavailable("s3://lake", "listing", describe_store_error(OSError(text)))
    assert said in str(error) and error.retryable is retryable
    assert "s3cr3t" not in str(error) and "\n" not in str(error)
