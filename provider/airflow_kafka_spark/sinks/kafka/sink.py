"""The Kafka sink: rows become records of a topic, each split in one transaction together with a marker in the ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow_kafka_spark.arguments import OptionsType
from airflow_kafka_spark.errors import KafkaRefused, KafkaSparkError, Problem, Unchecked
from airflow_kafka_spark.formats.base import END, ERROR, Encoder, Format, Kind, StructEncoder, find_kind, make_spark_column
from airflow_kafka_spark.formats.types import Column as TypedColumn
from airflow_kafka_spark.formats.types import parse_columns
from airflow_kafka_spark.sinks.base import Guarantee
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.model import TOPIC_NAME

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.sinks.kafka.tasks.encode import RecordEncoder

_TOPICS, _NUMBERS, _TIMES = ("text",), ("integer",), ("integer", "zoned", "local")
"""The kinds of columns that name a topic, a partition and a time."""

OWN_SETTINGS = frozenset(
    {"transactional.id", "transaction.timeout.ms", "message.timeout.ms", "enable.idempotence", "partitioner"}
)
"""Producer settings that the operators set themselves, because exactly-once depends on them."""

_ADDRESSES = frozenset({"bootstrap.servers", "metadata.broker.list"})

_LAST_PARTITION = 2**31 - 1
"""The highest number that a partition may have."""

LARGEST_RECORD = 120 << 20
"""Maximum size in bytes of a record in the client, before it is compressed. The client's queue holds little more. Brokers compare
the compressed size with the topic's ``max.message.bytes``. The marker of a split may be larger than its topic's records."""


@dataclass(frozen=True)
class KafkaSink(metaclass=OptionsType):
    """A Kafka topic, and the conversion of rows to its records.

    Guarantee: exactly-once, split by split. A ``read_committed`` reader sees each row of a window once, whatever is killed,
    retried or paused: the records of a split and its marker are one Kafka transaction (KIP-98), and a task looks for the marker
    before it writes. While a window is published, such a reader may see some of its splits; the ledger's COMPLETE record says
    that all of them are there.

    :param topic: the topic, on the cluster of the operator's ledger. Either this or ``topic_column`` is required. Default None.
        Templated.
    :param value: the format of the values; default :class:`~airflow_kafka_spark.formats.Json`. Between topics: the format of new
        values; None (default) is Json for new columns, and leaves values unchanged if there are no new columns.
    :param topic_column: the column (text) that names each row's topic. These topics have to exist. Default None.
    :param value_columns: the columns of the value, in order; None (default): all columns of the source.
    :param key: the column of the key, or several; None (default) for records without a key. Between topics: the column of the new
        key; None leaves keys as they are.
    :param key_format: the format of the keys; default :class:`~airflow_kafka_spark.formats.String` for one column,
        :class:`~airflow_kafka_spark.formats.Json` for several.
    :param headers: header name -> column (text or binary; a null leaves the header out). Default: no headers.
    :param partition: the column (integer) of each record's partition. Where it is null, and by default, keys are placed as the
        Java client places them (murmur2), and records without a key are spread over all partitions.
    :param timestamp: the column (timestamp, or bigint milliseconds since the epoch) of each record's time; default, and for
        nulls: the time when it is written. Rows of a source with 0 or -1 milliseconds are refused, because Kafka's client
        cannot write these.
    :param auto_create: True: create the topic if it is missing. Default False.
    :param partitions: partitions of a topic that is created; -1 (default) is the brokers' default.
    :param replication_factor: replicas of a topic that is created; -1 (default) is the brokers' default.
    :param topic_config: settings of a topic that is created; default none. Templated.
    :param producer_config: producer settings, in librdkafka's names (Connect's ``producer.override.*``); default none. Templated.
    :param transaction_timeout: seconds that a split may take before the broker aborts it, at most the brokers'
        ``transaction.max.timeout.ms``; default 300.
    :param allow_new_partitions: True: continue a window after partitions were added to its topic, which moves keys. Default
        False.
    :param conn_id: the Airflow connection of type ``kafka``; None (default) is the operator's ``kafka_conn_id``. It cannot be
        another one, because records and ledger change in one transaction. Templated.
    """

    template_fields: ClassVar[Sequence[str]] = ("topic", "topic_config", "producer_config", "conn_id")
    used_by: ClassVar[str] = "KafkaToKafkaOperator and SourceToKafkaOperator"

    topic: str | None = None
    value: Format | None = None
    topic_column: str | None = None
    value_columns: Sequence[str] | None = None
    key: str | Sequence[str] | None = None
    key_format: Format | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    partition: str | None = None
    timestamp: str | None = None
    auto_create: bool = False
    partitions: int = -1
    replication_factor: int = -1
    topic_config: Mapping[str, str] = field(default_factory=dict)
    producer_config: Mapping[str, Any] = field(default_factory=dict)
    transaction_timeout: float = 300.0
    allow_new_partitions: bool = False
    conn_id: str | None = None

    guarantee: ClassVar[Guarantee] = Guarantee.EXACTLY_ONCE_PER_SPLIT

    @property
    def uri(self) -> str:
        """``kafka://conn_id/topic``."""
        return f"kafka://{self.conn_id or 'kafka_default'}/{self.topic or '*'}"

    def find_destination(self) -> Endpoint:
        """Return the topic. Its cluster is that of the ledger."""
        return Endpoint({"topic": self.topic} if self.topic else {"topic_column": str(self.topic_column)})

    # --- validate ---

    def find_problems(
        self, columns: Sequence[str] | None, *, connect: Collection[str] = (), transformed: bool = False
    ) -> list[Problem]:
        """Return the problems of the options, without asking a server other than a schema registry.

        :param columns: the columns of the source; None if only Spark knows them.
        :param connect: the columns whose values carry their schema.
        :param transformed: True if transforms change these columns, so that only Spark knows the columns that are written.
        """
        problems = [*self._find_topic_problems(), *self._find_producer_problems()]
        used: dict[str, Sequence[str | None]] = {
            "key": self.key_columns,
            "value_columns": self.value_columns or (),
            "headers": tuple(self.headers.values()),
            "topic_column": (self.topic_column,),
            "partition": (self.partition,),
            "timestamp": (self.timestamp,),
        }
        for where, names in used.items():
            missing = [n for n in names if n is not None and columns is not None and n not in columns]
            for name in missing:
                problems.append(
                    Problem(f"sink.{where}", f"the source has no column `{name}`", f"It has {', '.join(columns or ())}")
                )
        if transformed:
            return problems
        written = tuple(self.value_columns or columns or ())
        if self._keeps_schemas(self.value_writer, written, connect):
            problems += self.value_writer.find_connect_problems("sink.value")
        elif columns is not None or self.value_columns:
            problems += self.value_writer.find_encoding_problems("sink.value", written)
        if self._keeps_schemas(self.key_writer, self.key_columns, connect):
            problems += self.key_writer.find_connect_problems("sink.key_format")
        elif self.key_columns:
            problems += self.key_writer.find_encoding_problems("sink.key", self.key_columns)
        return problems

    @staticmethod
    def _keeps_schemas(format: Format, columns: Sequence[str], connect: Collection[str]) -> bool:
        """Return True if a format writes values with the schemas that they carry."""
        return format.takes_connect_schemas and len(columns) == 1 and columns[0] in connect

    def keeps_schemas(self, connect: Collection[str]) -> bool:
        """Return True if keys or values are written with the schemas that they carry, which only tasks do.

        :param connect: the columns of the source whose values carry their schema.
        """
        parts = ((self.value_writer, tuple(self.value_columns or ())), (self.key_writer, self.key_columns))
        return any(self._keeps_schemas(format, columns, connect) for format, columns in parts)

    def _find_topic_problems(self) -> list[Problem]:
        problems = []
        if bool(self.topic) == bool(self.topic_column):
            given = "both are given" if self.topic else "none is given"
            problems.append(Problem("sink.topic", f"either `topic` or `topic_column`: {given}", "Give one of them"))
        if self.topic and not self.has_valid_name:
            action = "Use letters, digits, `.`, `_` and `-`, at most 249 of them"
            problems.append(Problem("sink.topic", f"`{self.topic}` cannot be a topic's name", action))
        if self.topic_column and self.auto_create:
            problems.append(
                Problem("sink.auto_create", "it creates `topic`, not the topics of a column", "Create those beforehand")
            )
        return [*problems, *self._find_size_problems()]

    def _find_size_problems(self) -> Iterator[Problem]:
        for name, value in (("partitions", self.partitions), ("replication_factor", self.replication_factor)):
            if value != -1 and value < 1:
                yield Problem(f"sink.{name}", f"it is {value}; expected a whole number from 1, or -1 for the brokers' default")

    @property
    def has_valid_name(self) -> bool:
        """True if the topic has a name that a topic can have."""
        return isinstance(self.topic, str) and TOPIC_NAME.fullmatch(self.topic) is not None

    def _find_producer_problems(self) -> list[Problem]:
        taken = sorted(OWN_SETTINGS & set(self.producer_config))
        problems = [Problem("sink.producer_config", f"`{name}` is set by the operator itself", "Leave it out") for name in taken]
        for name in sorted(_ADDRESSES & set(self.producer_config)):
            what = f"`{name}` would lead to other brokers than `kafka_conn_id`: exactly-once needs one cluster"
            problems.append(Problem("sink.producer_config", what, "Leave it out"))
        acks = str(self.producer_config.get("acks", "all"))
        if acks not in ("all", "-1"):
            problems.append(
                Problem("sink.producer_config", f"`acks={acks}` loses records", "Leave it out: a transaction needs `all`")
            )
        timeout = self.transaction_timeout
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or timeout < 1:
            problems.append(Problem("sink.transaction_timeout", f"`{timeout}` is not a number of seconds, at least 1"))
        return [*problems, *self._find_client_problems()]

    def _find_client_problems(self) -> list[Problem]:
        """Return the problems of settings that the producers of tasks would not accept, except those of settings that a sink may
        not have."""
        from airflow_kafka_spark.hooks.kafka.config_problems import find_producer_problems

        left_out = {*OWN_SETTINGS, *_ADDRESSES, "acks"}
        reasons = find_producer_problems({name: value for name, value in self.producer_config.items() if name not in left_out})
        action = "Use librdkafka's names and values"
        return [Problem("sink.producer_config", f"the client does not accept it: {reason}", action) for reason in reasons]

    def find_server_problems(self, hook: KafkaHook, *, keyless: bool = False) -> list[Problem]:
        """Return the problems for which the brokers would refuse the window: a topic that is missing and is not or cannot be
        created, records without keys for a compacted topic, a transaction timeout that is too long. Changes nothing.

        :param keyless: True if all records are written without a key.
        """
        problems: list[Problem] = []
        try:
            if self.has_valid_name:
                rights = ("Describe", "Write", *(("Create",) if self.auto_create else ()))
                there, lacking = hook.check_topics({str(self.topic): rights})
                problems += [Problem.of("sink.topic", error) for error in lacking.values()]
                is_there = bool(there)
                problems += [] if is_there or lacking else self._find_missing_topic_problems(hook)
                if keyless and "compact" in (hook.read_cleanup_policy(str(self.topic)) if is_there else self._planned_policy):
                    found = f"topic `{self.topic}` is compacted (`cleanup.policy`) and takes no record without a key"
                    problems.append(Problem("sink.key", found, "Name the column of the key, or a topic that is not compacted"))
            longest = hook.read_broker_config().get("transaction.max.timeout.ms")
        except KafkaSparkError as error:
            return [Problem.of("kafka_conn_id", error), Unchecked("sink.topic", "kafka_conn_id")]
        if longest and self.transaction_timeout * 1000 > int(longest):
            seconds = int(longest) / 1000
            found = f"{self.transaction_timeout:g} s is more than the brokers allow, {seconds:g} s (transaction.max.timeout.ms)"
            problems.append(Problem("sink.transaction_timeout", found, f"At most {seconds:g}, with splits that take less"))
        return problems

    @property
    def _planned_policy(self) -> str:
        """The ``cleanup.policy`` of a topic that is created."""
        return str(self.topic_config.get("cleanup.policy", "")) if self.auto_create else ""

    def _find_missing_topic_problems(self, hook: KafkaHook) -> Iterator[Problem]:
        """Yield the reasons why a missing topic cannot be created."""
        if not self.auto_create:
            yield Problem("sink.topic", f"topic `{self.topic}` does not exist", "Create it, or set `auto_create=True`")
        elif not list(self._find_size_problems()) and (
            error := hook.check_new_topic(str(self.topic), self.partitions, self.replication_factor, self.topic_config)
        ):
            refused = isinstance(error, KafkaRefused)
            action = "Correct `partitions`, `replication_factor` or `topic_config` of the sink" if refused else error.action
            yield Problem("sink.auto_create", f"the brokers do not create topic `{self.topic}`: {error.found}", action)

    # --- formats, topic and producer ---

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns of the source that are needed; None: all of them."""
        if self.value_columns is None:
            return None
        single = [name for name in (self.topic_column, self.partition, self.timestamp) if name is not None]
        return tuple(dict.fromkeys([*self.value_columns, *self.key_columns, *self.headers.values(), *single]))

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns of the key; empty for records without a key."""
        return (self.key,) if isinstance(self.key, str) else tuple(self.key or ())

    @property
    def value_format(self) -> Format:
        """The format of values, once the default is known."""
        from airflow_kafka_spark.formats import Json

        return self.value or Json()

    @property
    def value_writer(self) -> Format:
        """The format of the values, for this topic."""
        return self.value_format.to_write(self.topic, "value")

    @property
    def key_writer(self) -> Format:
        """The format of the keys, for this topic."""
        from airflow_kafka_spark.formats import Json, String

        return (self.key_format or (String() if len(self.key_columns) == 1 else Json())).to_write(self.topic, "key")

    @property
    def may_refuse(self) -> bool:
        """True if a row may hold a value that its format cannot encode."""
        return self.value_writer.encodes_in_tasks or (bool(self.key_columns) and self.key_writer.encodes_in_tasks)

    def ensure_topic(self, hook: KafkaHook) -> None:
        """Create the topic if it is missing and ``auto_create`` is set."""
        if self.topic and self.auto_create:
            hook.create_topic(self.topic, self.partitions, self.replication_factor, self.topic_config)

    def make_producer_config(self, hook: KafkaHook) -> dict[str, Any]:
        """Return the configuration of the tasks' producers."""
        config = hook.make_producer_config(**{"message.max.bytes": LARGEST_RECORD, **self.producer_config})
        return limit_batches(config, hook, self.topic) if self.topic else config

    def make_records(self, frame: DataFrame) -> DataFrame:
        """Return the rows of the source as records, with ``key``, ``value`` and, if set, ``topic``, ``partition``, ``timestamp``
        and ``headers``."""
        from pyspark.sql import functions as F

        names = [*(self.value_columns or (name for name in frame.columns if name not in (END, ERROR)))]
        columns = [
            (self.key_writer.encode(self.key_columns) if self.key_columns else F.lit(None).cast("binary")).alias("key"),
            self.value_writer.encode(names).alias("value"),
        ]
        if self.topic_column:
            columns.append(self.make_topic_column().alias("topic"))
        if self.partition:
            columns.append(self.make_partition_column().alias("partition"))
        if self.timestamp:
            columns.append(self.make_timestamp_column(frame).alias("timestamp"))
        if self.headers:
            columns.append(self.make_headers_column().alias("headers"))
        columns += [F.col(name) for name in (END, ERROR) if name in frame.columns]
        return frame.select(*columns)

    def make_encoder(self, columns: Sequence[tuple[str, Kind]]) -> RecordEncoder | str:
        """Return the encoder of a task that reads by itself, or a clause with the reason why only Spark can encode the records.

        :param columns: names and kinds of the source's columns.
        """
        from airflow_kafka_spark.formats import String
        from airflow_kafka_spark.sinks.kafka.tasks.encode import RecordEncoder

        kinds = dict(columns)
        value = self._make_part_encoder(self.value_writer, [(name, kinds[name]) for name in self.value_columns or kinds])
        of_key = [(name, kinds[name]) for name in self.key_columns]
        key = self._make_part_encoder(self.key_writer, of_key) if of_key else None
        headers = {
            header: self._make_part_encoder(String(), [(column, kinds[column])]) for header, column in self.headers.items()
        }
        if value is None:
            return "its values are written by Spark only"
        if self.key_columns and key is None:
            return f"column `{self.key_columns[0]}` is written as a key by Spark only"
        for column, fitting in ((self.topic_column, _TOPICS), (self.partition, _NUMBERS), (self.timestamp, _TIMES)):
            if column is not None and kinds[column] not in fitting:
                return f"column `{column}` is of another kind ({kinds[column]})"
        known = {header: encoder for header, encoder in headers.items() if encoder is not None}
        if missing := set(headers) - set(known):
            return f"column `{self.headers[min(missing)]}` is written as a header by Spark only"
        return RecordEncoder(key, value, self.topic_column, self.partition, self.timestamp, known)

    def _make_part_encoder(self, format: Format, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        if len(columns) == 1 and columns[0][1] == "connect":
            return format.make_connect_encoder(columns[0][0], self.topic_column)
        return format.make_encoder([(name, "binary" if kind == "connect" else kind) for name, kind in columns])

    # --- topic, partition, time and headers of a row, as Spark expressions ---

    def make_topic_column(self) -> Column:
        """Return the topic, of type string."""
        from pyspark.sql import functions as F

        return make_spark_column(self.topic_column).cast("string") if self.topic_column else F.lit(self.topic)

    def make_partition_column(self) -> Column:
        """Return the partition, of type int; null where the key decides. A value that is no number of a partition ends the job,
        because a cast would make another number of it."""
        from pyspark.sql import functions as F

        if not self.partition:
            return F.lit(None).cast("int")
        column = make_spark_column(self.partition)
        found = F.concat(F.lit(f"column `{self.partition}` holds "), column.cast("string"))
        refused = F.raise_error(F.concat(found, F.lit(f"; expected the number of a partition, from 0 to {_LAST_PARTITION}")))
        fits = column.between(0, _LAST_PARTITION) & (column == F.floor(column))
        return F.when(column.isNull() | fits, column.cast("int")).otherwise(refused)

    def make_timestamp_column(self, frame: DataFrame) -> Column:
        """Return milliseconds since the epoch, of type bigint; null for the time of writing."""
        from pyspark.sql import functions as F

        if not self.timestamp:
            return F.lit(None).cast("bigint")
        column = make_spark_column(self.timestamp)
        kind = frame.schema[self.timestamp].dataType.typeName()
        if kind.startswith("timestamp"):
            return F.unix_millis(column.cast("timestamp"))
        return column.cast("bigint")

    def make_headers_column(self) -> Column:
        """Return the headers, an array of structs of name and bytes."""
        from pyspark.sql import functions as F

        pairs = [
            F.when(
                make_spark_column(column).isNotNull(),
                F.struct(F.lit(name).alias("key"), make_spark_column(column).cast("string").cast("binary").alias("value")),
            )
            for name, column in self.headers.items()
        ]
        return F.filter(F.array(*pairs), lambda pair: pair.isNotNull())


def limit_batches(config: Mapping[str, Any], hook: KafkaHook, topic: str) -> dict[str, Any]:
    """Return a producer's configuration whose batches are no larger than a topic takes. A larger record is a batch of its own.

    :param config: the configuration.
    :param hook: the connection, to read the settings of the topic.
    :param topic: the topic.
    """
    from airflow_kafka_spark.sinks.kafka.tasks.publish import PRODUCER

    size = int(config.get("batch.size", PRODUCER["batch.size"]))
    return {**config, "batch.size": min(size, hook.read_largest_record(topic))}


class EncodedBySpark(Exception):
    """Raised for columns that tasks cannot encode as Spark does; the message names them."""


def make_struct_encoders(records: StructType, value: Format | None, key: Format | None) -> dict[str, StructEncoder]:
    """Return the encoders of keys and values that are still structs, for the tasks that publish them.

    :param records: the columns of the records, see :meth:`KafkaSink.make_records`.
    :param value: the format of the values.
    :param key: the format of the keys.
    :raises KafkaSparkError: the columns cannot be encoded.
    :raises EncodedBySpark: only Spark can encode a column.
    """
    return {
        part: format.make_struct_encoder(columns) if format.encodes_in_tasks else _make_column_encoder(format, columns)
        for part, format, columns in _list_structs(records, value, key)
    }


def find_struct_problems(records: StructType, value: Format | None, key: Format | None) -> list[Problem]:
    """Return the problems of encoding keys and values that are still structs. Asks a registry, and changes nothing there.

    The parameters are those of :func:`make_struct_encoders`.

    :raises KafkaSparkError: the registry does not answer, or a schema is missing.
    """
    return [
        problem
        for _, format, columns in _list_structs(records, value, key)
        if format.encodes_in_tasks
        for problem in format.find_column_problems(columns)
    ]


def can_encode_in_tasks(records: StructType, value: Format | None, key: Format | None) -> bool:
    """Return True if :func:`make_struct_encoders` does not raise :class:`EncodedBySpark`. No registry is asked.

    The parameters are those of :func:`make_struct_encoders`.
    """
    return all(
        format.encodes_in_tasks or _find_column_encoder(format, columns) is not None
        for _, format, columns in _list_structs(records, value, key)
    )


def _list_structs(
    records: StructType, value: Format | None, key: Format | None
) -> Iterator[tuple[str, Format, tuple[TypedColumn, ...]]]:
    """Yield the parts of records that are structs, with their formats and columns."""
    for part, format in (("value", value), ("key", key)):
        rows = records[part].dataType
        if format is not None and rows.typeName() == "struct":
            yield part, format, parse_columns(cast(Any, rows))


def _make_column_encoder(format: Format, columns: Sequence[TypedColumn]) -> StructEncoder:
    from airflow_kafka_spark.sinks.kafka.tasks.encode import ColumnEncoder

    encoder = _find_column_encoder(format, columns)
    if encoder is None:
        raise EncodedBySpark(f"{type(format).__name__} of {', '.join(str(column.type) for column in columns)}")
    return ColumnEncoder(encoder)


def _find_column_encoder(format: Format, columns: Sequence[TypedColumn]) -> Encoder | None:
    return format.make_encoder([(column.name, find_kind(column.type)) for column in columns])
