from __future__ import annotations

import pytest

from airflow_kafka_spark.hooks.storage import S3Access, local_path, scheme_of


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
def test_paths_and_uris_are_told_apart(text, scheme, path):
    assert scheme_of(text) == scheme
    if path.startswith("/"):
        assert local_path(text) == path
    else:
        with pytest.raises(ValueError, match=path):
            local_path(text)
