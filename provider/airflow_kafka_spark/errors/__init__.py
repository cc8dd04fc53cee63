"""Every error this package raises on purpose, in one hierarchy.

Each message says what was found, what was expected and what to do; the facts it was built from are attributes, so that a
callback or a retry policy can look at them. ``retryable`` tells whether the same task may succeed when it runs again
without anybody changing anything.
"""

from airflow_kafka_spark.errors.base import KafkaSparkError
from airflow_kafka_spark.errors.formats import (
    AvroNotInstalled,
    AvroSchemaInvalid,
    ProtobufNotInstalled,
    RegistryRefused,
    RegistryUnavailable,
    SchemaUnusable,
)
from airflow_kafka_spark.errors.kafka import GroupHasMembers, KafkaRefused, TopicMissing
from airflow_kafka_spark.errors.ledger import Fenced, LedgerUnreadable
from airflow_kafka_spark.errors.offsets import (
    AttemptAtWork,
    BoundRefused,
    ConsumerUnwell,
    PipelineUnknown,
    ReplayRefused,
    ResetRefused,
    WindowOpen,
)
from airflow_kafka_spark.errors.planning import (
    ClusterChanged,
    DataLoss,
    FollowBroken,
    FollowedMismatch,
    IntervalNotOver,
    IntervalOverlaps,
    IntervalsOpen,
    NotYetStable,
    OffsetsWentBack,
    PartitionsVanished,
    PlanError,
    TopicRecreated,
)
from airflow_kafka_spark.errors.setup import (
    ConnectionInvalid,
    JarsUnavailable,
    JavaMissing,
    KafkaUnavailable,
    Problem,
    ServerFailed,
    ValidationError,
)
from airflow_kafka_spark.errors.sinks import (
    BadRecords,
    CountMismatch,
    ForeignOffsets,
    SinkRejected,
    SinkUnavailable,
    SparkJobFailed,
    TooManyBadRecords,
    TooManyDeadLetters,
    TooManyRouted,
    WindowConflict,
)
from airflow_kafka_spark.errors.sources import (
    PartitionsChanged,
    RowRejected,
    RowsCutOff,
    RowsRejected,
    SchemaInvalid,
    SourceRejected,
    SourceUnavailable,
    TransactionTimedOut,
)
from airflow_kafka_spark.errors.testing import ServerInvalid, TestingUnavailable

__all__ = [
    "AttemptAtWork",
    "AvroNotInstalled",
    "AvroSchemaInvalid",
    "BadRecords",
    "BoundRefused",
    "ClusterChanged",
    "ConnectionInvalid",
    "ConsumerUnwell",
    "CountMismatch",
    "DataLoss",
    "Fenced",
    "FollowBroken",
    "FollowedMismatch",
    "ForeignOffsets",
    "GroupHasMembers",
    "IntervalNotOver",
    "IntervalOverlaps",
    "IntervalsOpen",
    "JarsUnavailable",
    "JavaMissing",
    "KafkaRefused",
    "KafkaSparkError",
    "KafkaUnavailable",
    "LedgerUnreadable",
    "NotYetStable",
    "OffsetsWentBack",
    "PartitionsChanged",
    "PartitionsVanished",
    "PipelineUnknown",
    "PlanError",
    "Problem",
    "ProtobufNotInstalled",
    "RegistryRefused",
    "RegistryUnavailable",
    "ReplayRefused",
    "ResetRefused",
    "RowRejected",
    "RowsCutOff",
    "RowsRejected",
    "SchemaInvalid",
    "SchemaUnusable",
    "ServerFailed",
    "ServerInvalid",
    "SinkRejected",
    "SinkUnavailable",
    "SourceRejected",
    "SourceUnavailable",
    "SparkJobFailed",
    "TestingUnavailable",
    "TooManyBadRecords",
    "TooManyDeadLetters",
    "TooManyRouted",
    "TopicMissing",
    "TopicRecreated",
    "TransactionTimedOut",
    "ValidationError",
    "WindowConflict",
    "WindowOpen",
]
