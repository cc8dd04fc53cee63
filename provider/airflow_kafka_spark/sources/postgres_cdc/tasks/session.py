"""Sessions that use a replication slot: their settings, the slot's state, and the end of a dead attempt that still holds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaSparkError, LogLost, SourceRejected, SourceUnavailable
from airflow_kafka_spark.hooks.databases import (
    APPLICATION,
    PostgresServer,
    apply_session_settings,
    describe_driver_message,
    fetch_rows,
    find_access_remedy,
    make_settings_query,
    read_system_identifier,
)

if TYPE_CHECKING:
    import psycopg

SESSION = make_settings_query(
    {
        "TimeZone": "UTC",
        "DateStyle": "ISO, MDY",
        "IntervalStyle": "iso_8601",
        "extra_float_digits": "1",
        "bytea_output": "hex",
        "xmlbinary": "base64",
        "client_min_messages": "warning",
        "statement_timeout": "0",
        "transaction_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "idle_session_timeout": "0",
        "search_path": "pg_catalog",
        "row_security": "off",
        "default_transaction_isolation": "read committed",
    }
)
"""Gives all sessions equal settings, because values of the log are transferred as text. Row security would hide rows from a
snapshot that the log has; if it is off, the server refuses the statement.
"""

RELEASE_SECONDS = 30.0
"""Seconds that a session which was ended may take to give the slot back."""

_REFUSED = ("22", "23", "42", "55", "58")
_UNDEFINED, _SKIPPED, _NO_FILE = "42704", "55000", "58P01"


@dataclass(frozen=True)
class SlotState:
    """A replication slot.

    :param confirmed: the LSN up to which it was advanced.
    :param wal_status: ``lost`` if WAL that it needs was removed; "" before PostgreSQL 13.
    :param pid: process of the session that uses it now; None without one.
    :param application: the name of that session.
    :param two_phase: True if it decodes prepared transactions before they are committed.
    """

    plugin: str
    database: str
    confirmed: int
    wal_status: str
    temporary: bool
    pid: int | None
    application: str
    two_phase: bool = False


def parse_lsn(text: str) -> int:
    """Return an LSN as a number."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) + int(low, 16)


def format_lsn(lsn: int) -> str:
    """Return an LSN as PostgreSQL writes it, ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def format_publication_names(publication: str) -> str:
    """Return the name of a publication as the option ``publication_names`` takes it: a list of identifiers."""
    return '"' + publication.replace('"', '""') + '"'


def make_session_name(slot: str) -> str:
    """Return the name of our sessions that use a slot, as long as the server keeps it."""
    return f"{APPLICATION} cdc {slot}"[:63]


@dataclass(frozen=True)
class SlotServer:
    """A server and one of its slots. It is sent to the tasks, with the password.

    :param server: host, database and login, with the password.
    :param slot: the name of the slot.
    """

    server: PostgresServer
    slot: str

    @contextmanager
    def open_session(self, doing: str) -> Iterator[psycopg.Connection[Any]]:
        """Open a session.

        :raises SourceUnavailable: the server does not answer, or ends the session.
        :raises SourceRejected: the server refuses a statement.
        """
        import psycopg

        try:
            conninfo = f"{self.server.make_connection_string(make_session_name(self.slot))} client_encoding=UTF8"
            with psycopg.connect(conninfo, autocommit=True) as connection:
                apply_session_settings(SESSION, connection.execute, connection.execute)
                yield connection
        except psycopg.Error as error:
            raise self._convert_error(error, doing) from self.server.get_safe_cause(error)

    def _convert_error(self, error: psycopg.Error, doing: str) -> KafkaSparkError:
        text = describe_driver_message(" ".join(self.server.scrub(str(error)).split()))
        # 55006: another session uses the slot; it may end.
        if error.sqlstate == _UNDEFINED and "publication" in text:
            return SourceRejected(
                self.server.where, f"{doing}: {text}, when changes after the last window were made", NO_PUBLICATION
            )
        if error.sqlstate == _NO_FILE and "WAL segment" in text:
            return LogLost(self.server.where, f"{doing}: {text}: its log was reset, or its files were removed", NEW_PIPELINE)
        remedy = find_access_remedy(text)
        if remedy or ((error.sqlstate or "")[:2] in _REFUSED and error.sqlstate not in ("55006", "55P03")):
            return SourceRejected(self.server.where, f"{doing}: {text}", remedy)
        return SourceUnavailable(self.server.where, doing, text)

    def read_state(self, connection: psycopg.Connection[Any]) -> SlotState | None:
        """Return the state of the slot; None if the slot does not exist."""
        version = connection.info.server_version
        found = connection.execute(
            "SELECT s.plugin, s.database, s.confirmed_flush_lsn::text, "
            f"{'s.wal_status' if version >= 130000 else 'NULL'}, s.temporary, s.active_pid, a.application_name, "
            f"{'s.two_phase' if version >= 140000 else 'false'} "
            "FROM pg_catalog.pg_replication_slots s LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid "
            "WHERE s.slot_name = %s",
            [self.slot],
        ).fetchone()
        if found is None:
            return None
        plugin, database, confirmed, status, temporary, pid, application, two_phase = found
        lsn = parse_lsn(confirmed) if confirmed else 0
        return SlotState(plugin or "", database or "", lsn, status or "", temporary, pid, application or "", two_phase)

    def watch_publication(self, connection: psycopg.Connection[Any], publication: str) -> Callable[[], None]:
        """Return a function that checks that the log which was read so far contains all changes.

        From PostgreSQL 18 on, a publication that does not exist when a change was made is a warning, and the change is left out.
        Before, it is an error.
        """
        warned: list[bool] = []

        def note(diagnostic: psycopg.errors.Diagnostic) -> None:
            if diagnostic.sqlstate == _SKIPPED:
                warned.append(True)

        def refuse() -> None:
            """Raise an error if the server has warned.

            :raises SourceRejected: it has.
            """
            if warned:
                found = f"publication `{publication}` did not exist when changes after the last window were made"
                raise SourceRejected(self.server.where, found, NO_PUBLICATION)

        connection.add_notice_handler(note)
        return refuse

    def release(self, connection: psycopg.Connection[Any]) -> None:
        """End the session of an earlier attempt that still uses the slot.

        Sessions of this provider are recognised by their name. The attempt that runs here is the newest one: the ledger has
        fenced earlier ones.

        :raises SourceUnavailable: another program uses the slot, or our session does not end.
        """
        deadline = time.monotonic() + RELEASE_SECONDS
        while (found := self.read_state(connection)) is not None and found.pid is not None:
            if found.application != make_session_name(self.slot):
                raise SourceUnavailable(
                    self.server.where, f"using the slot `{self.slot}`", describe_foreign_use(self.slot, found)
                )
            connection.execute("SELECT pg_catalog.pg_terminate_backend(%s)", [found.pid])
            if time.monotonic() > deadline:
                detail = f"process {found.pid} of an earlier attempt has not ended in {RELEASE_SECONDS:.0f} s"
                raise SourceUnavailable(self.server.where, f"taking over the slot `{self.slot}`", detail)
            time.sleep(0.05)

    def read_identity(self, connection: psycopg.Connection[Any]) -> dict[str, Any]:
        """Return the facts that identify this server's log: system identifier, timeline and database."""
        query = "SELECT substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8)"
        timeline = fetch_rows(connection, query)[0][0]
        return {
            "slot": self.slot,
            "database": connection.info.dbname,
            "system": read_system_identifier(connection),
            "timeline": int(timeline, 16),
        }

    def refuse_other_history(
        self, connection: psycopg.Connection[Any], publication: str, state: SlotState, start: int, planned: dict[str, Any]
    ) -> None:
        """Make sure that the log between the slot and an LSN ends with the transaction that was published last.

        The slot is before the LSN if an attempt has died before it has advanced the slot, or if the server has lost the last
        state of the slot in a crash. Then the log is as before. It is another one if a backup was restored, and used since.

        :param publication: the publication, as the slot's reader names it.
        :param state: the slot, which no session uses.
        :param planned: the identity of the log for which the LSN was recorded.
        :raises LogLost: the log is another one.
        """
        if state.confirmed >= start or "last" not in planned:
            return
        lsn, xid = planned["last"]
        expected = (parse_lsn(lsn), xid) if parse_lsn(lsn) >= state.confirmed else None
        found = connection.execute(_LAST_BEGIN, [self.slot, format_lsn(start), publication, start.to_bytes(8, "big")]).fetchone()
        last = None if found is None else (int.from_bytes(found[0][1:9], "big"), int.from_bytes(found[0][17:21], "big"))
        if last != expected:
            shown = [f"transaction {of[1]} at {format_lsn(of[0])}" if of else "no transaction" for of in (last, expected)]
            raise LogLost(
                self.server.where,
                f"the last window ended at {format_lsn(start)}. Between the slot `{self.slot}` at {format_lsn(state.confirmed)} "
                f"and this position, the log ends with {shown[0]}, and {shown[1]} was published: a backup was restored",
                NEW_PIPELINE,
            )

    def refuse_other_rows(self, connection: psycopg.Connection[Any], behind: str) -> None:
        """Make sure that the log goes beyond the chunks of rows that are published.

        :param behind: an LSN after the transactions that they include; "" without such chunks.
        :raises LogLost: the log ends before it.
        """
        if not behind:
            return
        end = fetch_rows(connection, "SELECT pg_catalog.pg_current_wal_insert_lsn()::text")[0][0]
        if parse_lsn(end) < parse_lsn(behind):
            raise LogLost(self.server.where, _describe_short_log(end, behind, "rows were read"), NEW_PIPELINE)

    def refuse_other(
        self, connection: psycopg.Connection[Any], start: int, planned: dict[str, Any], end: int | None = None
    ) -> SlotState:
        """Refuse a slot that no longer has the log from an LSN on.

        :param planned: the identity of the log for which the LSN was recorded.
        :param end: the LSN at which the window ends that is read; None if none is read.
        :raises LogLost: the log is missing after a failover, or the slot is gone, is lost or was advanced.
        :raises SourceRejected: it is another server.
        """
        if connection.execute("SELECT pg_catalog.pg_is_in_recovery()").fetchone() == (True,):
            raise SourceUnavailable(self.server.where, "reading the log", "the server is a standby, or is recovering")
        found = self.read_identity(connection)
        for name, called in (("slot", "slot"), ("database", "database"), ("system", "system identifier")):
            if planned.get(name) and found[name] and planned[name] != found[name]:
                raise SourceRejected(
                    self.server.where,
                    f"its {called} is `{found[name]}`, and the windows so far were read with `{planned[name]}`",
                    f"Connect to the server of before. {NEW_PIPELINE}",
                )
        if planned.get("timeline") not in (None, found["timeline"]):
            raise LogLost(
                self.server.where,
                f"it is on timeline {found['timeline']}, and the windows so far were read on timeline {planned['timeline']}: a "
                "standby was promoted, or a backup restored, and changes that were published may be gone",
                NEW_PIPELINE,
            )
        flushed = read_flushed_lsn(connection)
        needed, called = (start, "last window ended") if end is None else (end, "window ends")
        if planned and flushed < needed:
            short = _describe_short_log(format_lsn(flushed), format_lsn(needed), f"the {called}")
            raise LogLost(self.server.where, short, NEW_PIPELINE)
        state = self.read_state(connection)
        if state is None:
            raise LogLost(
                self.server.where, f"the slot `{self.slot}` is gone, and with it the log behind {format_lsn(start)}", NEW_PIPELINE
            )
        if state.wal_status == "lost":
            why = "grew beyond `max_slot_wal_keep_size`"
            if connection.info.server_version >= 180000:
                why += ", or the slot was not used for `idle_replication_slot_timeout`"
            raise LogLost(
                self.server.where,
                f"the slot `{self.slot}` is lost: the log behind {format_lsn(start)} {why}",
                f"Raise the setting or run more often. {NEW_PIPELINE}",
            )
        if state.confirmed > start:
            raise LogLost(
                self.server.where,
                f"the slot `{self.slot}` was advanced to {format_lsn(state.confirmed)}, and the changes from {format_lsn(start)} "
                "on can no longer be read. This pipeline advances it behind a complete window only, so another program has, or "
                "the window is a replay",
                f"A window of a log cannot be replayed. Let no other program use the slot. {NEW_PIPELINE}",
            )
        return state


def _describe_short_log(end: str, needed: str, called: str) -> str:
    """Return a text for a log that ends before an LSN that was in it."""
    ends = f"its log ends at {end}, before {needed}, where {called}"
    return f"{ends}: a backup was restored, or the server has lost the end of its log in a crash"


_LAST_BEGIN = (
    "SELECT data FROM pg_catalog.pg_logical_slot_peek_binary_changes(%s, %s::pg_lsn, NULL, 'proto_version', '1', "
    "'publication_names', %s) WHERE get_byte(data, 0) = ascii('B') AND substring(data FROM 2 FOR 8) < %s::bytea "
    "ORDER BY substring(data FROM 2 FOR 8) DESC LIMIT 1"
)
"""Returns the message with which the last transaction begins that is committed before an LSN: in it are the LSN of its commit,
the time of that, and its 32-bit id."""


def read_flushed_lsn(connection: psycopg.Connection[Any]) -> int:
    """Return the LSN up to which the log is on the server's disk."""
    found = connection.execute("SELECT pg_catalog.pg_current_wal_flush_lsn()::text").fetchone()
    assert found is not None
    return parse_lsn(found[0])


NEW_PIPELINE = "To start over, use a new slot and a new pipeline, and copy the tables again"

NO_PUBLICATION = f"It was dropped and created again, and changes in between are in no publication. {NEW_PIPELINE}"


def describe_foreign_use(slot: str, state: SlotState) -> str:
    """Return a text that names the other program which uses the slot."""
    return f"process {state.pid} ({state.application or 'without a name'}) uses it; one slot serves one pipeline"
