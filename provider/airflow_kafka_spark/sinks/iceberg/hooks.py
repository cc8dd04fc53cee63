"""The hook of connections of the type ``iceberg``, where Airflow's Iceberg provider is not installed.

If no provider declares a type, ``airflow connections add --conn-type iceberg`` stores a connection of the type ``generic``, and
the form of Airflow's UI does not offer the type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import BaseHook

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks.connections import TEST_SECONDS, name_other_server_at, run_within
from airflow_kafka_spark.sinks.iceberg.catalog import CatalogAccess, IcebergTable, find_catalog_access

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog


class IcebergHook(BaseHook):
    """A catalog of Iceberg, with the connection test of Airflow's UI.

    :param conn_id: the Airflow connection; default ``iceberg_default``.
    """

    conn_name_attr = "conn_id"
    conn_type = "iceberg"
    default_conn_name = "iceberg_default"
    hook_name = "Iceberg"

    def __init__(self, conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.conn_id = conn_id

    def get_conn(self) -> Catalog:
        """Return the catalog.

        :raises ConnectionInvalid: the connection does not exist, or its options do not fit each other.
        """
        return find_catalog_access(self.conn_id).open()

    def test_connection(self) -> tuple[bool, str]:
        """List the namespaces, and return True and the catalog's address, or False and the reason, for Airflow's UI.

        It takes some ten seconds at most.
        """
        try:
            access = find_catalog_access(self.conn_id)
        except KafkaSparkError as error:
            return False, error.found
        # Clients of catalogs wait without end for a server that does not answer.
        where = f"The catalog at {access.address}"
        done, found = run_within(TEST_SECONDS, where, lambda: self._list_namespaces(access))
        if done:
            return True, f"Connected to the catalog at {access.address}."
        return False, name_other_server_at(found, access.address)

    def _list_namespaces(self, access: CatalogAccess) -> tuple[bool, str]:
        try:
            with IcebergTable(access, "", f"iceberg://{self.conn_id}") as lake:
                try:
                    lake.catalog.list_namespaces()
                except KafkaSparkError:
                    raise
                except Exception as error:  # each catalog has errors of its own
                    raise lake.make_unavailable_error("listing its namespaces", error) from error
        except KafkaSparkError as error:
            return False, error.found
        return True, ""
