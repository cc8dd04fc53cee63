"""Credentials of object stores, from Airflow's connections."""

from __future__ import annotations

from airflow_kafka_spark.sinks.delta.place import S3Access, TablePlace, TableStore


def open_store(place: TablePlace, conn_id: str | None) -> TableStore:
    """Return the files of a table, with the credentials of an Airflow connection.

    :param place: where the table is.
    :param conn_id: a connection of type ``aws``; None for the credentials of the environment. Not used for a local table.
    :raises Exception: the connection does not exist, or gives no credentials.
    """
    return TableStore(place) if place.is_local else TableStore(place, s3_access(conn_id))


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
