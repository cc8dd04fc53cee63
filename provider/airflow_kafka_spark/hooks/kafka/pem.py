"""PEM texts in the form the Java client accepts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from airflow_kafka_spark.errors import ConnectionInvalid

Invalid = Callable[[str, str], ConnectionInvalid]


def read_pem(path: str, name: str, invalid: Invalid) -> str:
    """The text of a PEM file; nothing for no path.

    :param path: the file, or "".
    :param name: the property that named it.
    :param invalid: makes the error to raise from what was found and what to do.
    :raises ConnectionInvalid: when the file cannot be read or holds no PEM text.
    """
    if not path:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise invalid(
            f"`{name}` names `{path}`, which cannot be read: {error.strerror}", "Name a readable PEM file on this machine"
        ) from None
    if "-----BEGIN " not in text:
        raise invalid(
            f"`{name}` names `{path}`, which is not a PEM file", "Convert it, for instance with `openssl x509 -outform pem`"
        )
    return text


def pkcs8_key(pem: str, password: str, invalid: Invalid) -> str:
    """A private key as unencrypted PKCS#8, the one form that the Java client reads on every Java version.

    OpenSSL, and so librdkafka, also takes the traditional forms (``BEGIN RSA PRIVATE KEY``) and encrypted keys. The result is as
    secret as the key and its password together, which is what would be passed on otherwise.

    :param pem: the key's text.
    :param password: its password, or "".
    :param invalid: makes the error to raise from what was found and what to do.
    :raises ConnectionInvalid: when the key cannot be read with this password.
    """
    if "-----BEGIN PRIVATE KEY-----" in pem:
        return pem
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    encrypted = "ENCRYPTED" in pem
    try:
        key = serialization.load_pem_private_key(pem.encode(), password.encode() if encrypted and password else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        detail = (
            "its client key cannot be decrypted with `ssl.key.password`"
            if encrypted
            else "its client key is not a readable PEM private key"
        )
        raise invalid(detail, "Check `ssl.key.location` or `ssl.key.pem`, and `ssl.key.password`") from None
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
