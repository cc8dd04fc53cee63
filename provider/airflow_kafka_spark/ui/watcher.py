"""What the api-server knows of all ledgers: kept fresh in the background while somebody looks, and let be when nobody does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.ui.catalog import (
    DEFAULT_CONNECTION,
    DEFAULT_TOPIC,
    Catalog,
    CatalogReader,
    LedgerName,
    Task,
)
from airflow_kafka_spark.ui.ledgers import HOOK_SECONDS, LedgerWatch

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

log = logging.getLogger(__name__)

IDLE_SECONDS = 300.0
"""So long after the last request the watch ends; the next request takes it up where it was."""
CATALOG_SECONDS = 10.0
FIRST_SECONDS = 3.0
"""How long the very first request waits for the catalog, so that a page is not empty for no reason."""


def make_hook(conn_id: str) -> KafkaHook:
    """A hook that does not wait long."""
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    return KafkaHook(conn_id, timeout=HOOK_SECONDS)


def read_catalog(reader: CatalogReader) -> Catalog:
    """The catalog from Airflow's database."""
    from airflow.utils.session import create_session

    with create_session() as session:
        return reader.read(session)


def configured_ledgers() -> tuple[LedgerName, ...]:
    """What ``[kafka_spark] ledgers`` names, ``<kafka_conn_id>/<ledger_topic>`` separated by commas; what is none is logged."""
    from airflow.configuration import conf

    found = []
    for text in str(conf.get("kafka_spark", "ledgers", fallback="") or "").split(","):
        if text.strip():
            try:
                found.append(LedgerName.parse(text))
            except ValueError as error:
                log.warning("[kafka_spark] ledgers: %s", error)
    return tuple(found)


@dataclass
class Watcher:
    """One thread that keeps the catalog, and one for each ledger, all of which end with the process, or when nobody looks.

    :param ledgers: by name, as they are known now.
    """

    catalog_of: Callable[[CatalogReader], Catalog] = read_catalog
    configured: Callable[[], tuple[LedgerName, ...]] = configured_ledgers
    hook_of: Callable[[str], KafkaHook] = make_hook
    idle_seconds: float = IDLE_SECONDS
    catalog: Catalog = field(default_factory=Catalog)
    ledgers: dict[LedgerName, LedgerWatch] = field(default_factory=dict)
    by_pipeline: dict[tuple[LedgerName, str], tuple[Task, ...]] = field(default_factory=dict)
    problem: str | None = None
    _reader: CatalogReader = field(default_factory=CatalogReader)
    _asked: float = 0.0
    _lock: Any = field(default_factory=Lock)
    _first: Event = field(default_factory=Event)
    _wake: Event = field(default_factory=Event)
    _thread: Thread | None = None
    _ended: bool = False

    def touch(self) -> None:
        """Somebody asks: the watch begins, or goes on. The first one waits a moment for the catalog, nobody ever for Kafka."""
        self._asked = time.monotonic()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._ended = False
                self._thread = Thread(target=self._run, name="kafka-spark-ui", daemon=True)
                self._thread.start()
        self._first.wait(FIRST_SECONDS)

    def stop(self) -> None:
        """End all threads."""
        self._ended = True
        self._wake.set()

    @property
    def is_watching(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._ended and time.monotonic() - self._asked < self.idle_seconds:
                self._refresh()
                self._first.set()
                self._wake.wait(min(CATALOG_SECONDS, self.idle_seconds))
        finally:
            with self._lock:
                for ledger in self.ledgers.values():
                    ledger.stop()

    def _refresh(self) -> None:
        try:
            self.catalog = self.catalog_of(self._reader)
            self.by_pipeline = self.catalog.by_pipeline()
            self.problem = None
        except Exception:
            # The database may be away for a while: what was known is shown meanwhile.
            log.exception("Reading the serialized DAGs failed; it is tried again")
            self.problem = "Airflow's database does not answer"
        wanted = {*self.catalog.ledgers, *self.configured()} or {LedgerName(DEFAULT_CONNECTION, DEFAULT_TOPIC)}
        for name in self.ledgers.keys() - wanted:
            self.ledgers[name].stop()
        kept = {name: ledger for name, ledger in self.ledgers.items() if name in wanted}
        new = {name: LedgerWatch(name, self.hook_of, self._topics_of(name)) for name in wanted - kept.keys()}
        # Replaced, never changed: requests read it meanwhile.
        self.ledgers = dict(sorted({**kept, **new}.items()))
        for ledger in self.ledgers.values():
            ledger.start()

    def _topics_of(self, name: LedgerName) -> Callable[[str], tuple[tuple[str, ...], str | None]]:
        def topics_of(pipeline: str) -> tuple[tuple[str, ...], str | None]:
            tasks = self.by_pipeline.get((name, pipeline), ())
            return tasks[0].topics if tasks else (), tasks[0].group if tasks else None

        return topics_of


_watcher: Watcher | None = None
_lock = Lock()


def the_watcher() -> Watcher:
    """This process's only one."""
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = Watcher()
        return _watcher
