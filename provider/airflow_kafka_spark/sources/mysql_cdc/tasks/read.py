"""Reading a window of the log inside a Spark task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from airflow_kafka_spark.errors import LogLost
from airflow_kafka_spark.sources.cdc.tasks.events import Event
from airflow_kafka_spark.sources.cdc.tasks.reader import EventReader
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.events import LogEventWriter, MysqlEventForm
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import NEW_PIPELINE, LogServer, Place


@dataclass(frozen=True)
class BinlogReader(EventReader):
    """Reads windows of the log.

    :param server: the server.
    :param form: the form of events.
    """

    server: LogServer
    form: MysqlEventForm

    def events(self, split: int) -> Iterator[Event]:
        """Yield the events of a split, in the order of the log. Its token is the place at which its last transaction ends.

        :raises SourceUnavailable: the server does not answer, or does not send the whole window.
        :raises SourceRejected: the server no longer has the window, or a value cannot be written.
        """
        bounds = self.splits[split]
        start, end = Place.parse(bounds["start"]), Place.parse(bounds["end"])
        writer, place, created = LogEventWriter(self.server, self.form), start, 0
        for located in self.server.events_up_to(start, end):
            if located.end.file != place.file:
                created = 0
            if located.event.kind == binlog.FORMAT:
                created = located.event.seconds
                if located.start == start and created != bounds["log"]["created"]:
                    found = f"its file {start.file} is another one than when the window was planned"
                    raise LogLost(self.server.where, found, NEW_PIPELINE)
            yield from writer.write(located)
            place = located.end
            if place.order >= end.order and writer.is_between_transactions and created:
                self._tokens[split] = {"end": str(place), "created": created, "gtid": writer.gtid}
                return
