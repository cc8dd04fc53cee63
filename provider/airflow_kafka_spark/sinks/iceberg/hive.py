"""pyiceberg's Hive catalog, with commits that compare what they replace. Needs the package ``thrift``."""

from __future__ import annotations

from hive_metastore.ThriftHiveMetastore import Client
from hive_metastore.ttypes import EnvironmentContext, Table
from pyiceberg.catalog.hive import PROP_METADATA_LOCATION, PROP_PREVIOUS_METADATA_LOCATION, HiveCatalog, _HiveClient


class ComparingHiveCatalog(HiveCatalog):
    """A Hive catalog whose commits name the metadata file that they replace.

    pyiceberg locks a table, reads it, and replaces its metadata. The metastore takes a lock away that it has heard nothing of for
    five minutes (``hive.txn.timeout``), so a process that was paused in between would undo what others have committed meanwhile.
    """

    @staticmethod
    def _create_hive_client(properties: dict[str, str]) -> _HiveClient:
        made = HiveCatalog._create_hive_client(properties)
        user = ":".join(made._ugi) if made._ugi else None
        return _ComparingHiveClient(made._uri, user, made._kerberos_auth, made._kerberos_service_name)


class _ComparingHiveClient(_HiveClient):
    def _client(self) -> Client:
        connected = super()._client()
        return _ComparingClient(connected._iprot, connected._oprot)


class _ComparingClient(Client):
    def alter_table_with_environment_context(
        self, dbname: str, tbl_name: str, new_tbl: Table, environment_context: EnvironmentContext
    ) -> None:
        """Change a table, but only if its metadata file is still the one that is replaced."""
        replaced = new_tbl.parameters.get(PROP_PREVIOUS_METADATA_LOCATION)
        if replaced is not None:
            # Known to Hive 2.3.10 and 4.0 (HIVE-26882); others ignore both, so that nothing but their lock protects a commit.
            compared = {"expected_parameter_key": PROP_METADATA_LOCATION, "expected_parameter_value": replaced}
            environment_context = EnvironmentContext(properties={**environment_context.properties, **compared})
        super().alter_table_with_environment_context(dbname, tbl_name, new_tbl, environment_context)
