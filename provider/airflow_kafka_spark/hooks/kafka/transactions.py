"""Transactional producers, for the ledger on the driver and for splits in Spark's tasks. Imports neither Airflow nor pyspark."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaRefused
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, Right, name_missing_rights
from airflow_kafka_spark.hooks.kafka.config import ALL_BROKERS

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer
    from confluent_kafka import TopicPartition as KafkaTopicPartition

    from airflow_kafka_spark.windows.memory import LedgerRecord
    from airflow_kafka_spark.windows.model import TopicPartition

FENCED = frozenset({"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"})
"""Names of the errors of a producer that was fenced by a newer one."""

FOLLOWING = frozenset({"_PURGE_QUEUE", "_PURGE_INFLIGHT", "_STATE"})
"""Names of the errors of records that are dropped, or not accepted, after the transaction has failed."""

_GRACE_SECONDS = 1.0
"""Seconds after its own timeout in which librdkafka has to name the error itself."""

_LOGIN_SECONDS = 2.0
"""Seconds between two looks for a refused login, while the coordinator is awaited."""

OFFSETS_BYTES = 400_000
"""Approximate maximum size in bytes of a group's offsets in one request. Brokers write each request as one batch, and
``__consumer_offsets`` accepts batches of up to 1 MiB by default."""


def make_fencing_producer(config: Mapping[str, Any], transactional_id: str, seconds: float, events: ClientEvents) -> Producer:
    """Return a producer that has just fenced every earlier one of this id (KIP-98), without an open transaction.

    Use it for one transaction: librdkafka has no KIP-890, so a late ``EndTxn`` could end the next one of this producer.

    :param config: a producer's configuration.
    :param transactional_id: the id.
    :param seconds: timeout for the coordinator.
    :param events: collector of the errors that the client reports beside its answers.
    :raises RightMissing: the user may not use this id.
    :raises confluent_kafka.KafkaException: the coordinator cannot be reached, or refuses, or the login is refused.
    """
    from confluent_kafka import KafkaError, KafkaException, Producer

    begun = time.monotonic()
    # Without an error_cb a client raises fatal errors, as that of a fence, from any later call.
    own = {"transactional.id": transactional_id, "error_cb": events.on_error, "throttle_cb": events.on_throttle}
    settings = {**ALL_BROKERS, **config, **own}
    producer = Producer(settings, logger=events)
    right = Right("transactional id", "Write", transactional_id)
    try:
        with name_missing_rights(config, "fencing earlier attempts", right, events=events):
            while True:
                left = begun + seconds - time.monotonic()
                try:
                    # A call after one that has timed out continues with the same request.
                    producer.init_transactions(max(0.0, min(_LOGIN_SECONDS, left)))
                    break
                except KafkaException as error:
                    if error.args[0].code() != KafkaError._TIMED_OUT or left <= _LOGIN_SECONDS:
                        raise
                producer.poll(0)
                # The client would try again until the time is over. A password that was changed meanwhile stays wrong.
                if refused := events.find_refused_login(begun):
                    raise KafkaException(KafkaError(KafkaError._AUTHENTICATION, refused))
    except BaseException:
        # The error holds this frame for as long as it is kept, and a producer connects again and again.
        del producer
        raise
    return producer


def produce_all(producer: Producer, topic: str, partition: int, records: Sequence[LedgerRecord], seconds: float) -> list[int]:
    """Produce records, wait until all are acknowledged, and return their offsets.

    :raises confluent_kafka.KafkaException: a record was refused, or not acknowledged in time.
    """
    offsets: dict[int, int] = {}
    failures: list[KafkaError] = []

    def make_callback(index: int) -> Callable[[KafkaError | None, Message], None]:
        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if error:
                failures.append(error)
            elif (offset := message.offset()) is not None:
                offsets[index] = offset

        return on_delivery

    for index, record in enumerate(records):
        producer.produce(topic, record.value, record.key, partition, on_delivery=make_callback(index))
    producer.flush(seconds)
    if failures or len(offsets) != len(records):
        from confluent_kafka import KafkaError, KafkaException

        raise KafkaException(failures[0] if failures else KafkaError(KafkaError._TIMED_OUT, "records were not acknowledged"))
    return [offsets[index] for index in range(len(records))]


def send_offsets(
    producer: Producer,
    consumer_config: Mapping[str, Any],
    group_id: str,
    offsets: Iterable[tuple[TopicPartition, int, str]],
    seconds: float,
    epochs: Mapping[TopicPartition, int] | None = None,
) -> None:
    """Add a group's offsets to the transaction (KIP-98), in as many requests as they need. They are committed together.

    :param offsets: partitions with their offset and its metadata.
    :param epochs: the known leader epochs of these offsets, by which consumers of the group detect a truncated log (KIP-320).
    :raises RightMissing: the user may not commit offsets of this group, or of a topic.
    :raises confluent_kafka.KafkaException: the brokers refuse, or do not answer in time.
    """
    import confluent_kafka

    offsets = list(offsets)
    topics = "`, `".join(sorted({tp.topic for tp, _, _ in offsets}))
    rights = Right("group", "Read", group_id), Right("topic", "Read", topics)
    # This consumer only provides the group's metadata. Without brokers it opens no connection.
    consumer = confluent_kafka.Consumer({"group.id": group_id}, logger=ClientEvents())
    try:
        group = consumer.consumer_group_metadata()
        for part in _split_offsets(offsets, group_id):
            partitions = [
                confluent_kafka.TopicPartition(*tp, offset, metadata, (epochs or {}).get(tp, -1)) for tp, offset, metadata in part
            ]
            with name_missing_rights(consumer_config, f"committing offsets of group {group_id}", *rights):
                _send_part(producer, partitions, group, seconds)
    finally:
        consumer.close()


def _send_part(producer: Producer, partitions: list[KafkaTopicPartition], group: Any, seconds: float) -> None:
    """Add offsets to the transaction, and give up after ``seconds``.

    librdkafka waits without limit for a group's coordinator that cannot be reached (librdkafka#5456). After that, the producer
    cannot be used any more. The next one with its id ends the transaction.
    """
    from confluent_kafka import KafkaError, KafkaException

    outcome: list[BaseException | None] = []

    def send() -> None:
        try:
            producer.send_offsets_to_transaction(partitions, group, seconds)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            outcome.append(error)
        else:
            outcome.append(None)

    # A daemon, for which the end of the process does not wait.
    thread = threading.Thread(target=send, name="send-offsets", daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)
    if not outcome:
        found = f"the group's coordinator has not answered in {seconds:g} s"
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, found))
    if outcome[0] is not None:
        raise outcome[0]


def _split_offsets(
    offsets: Iterable[tuple[TopicPartition, int, str]], group_id: str
) -> Iterator[list[tuple[TopicPartition, int, str]]]:
    """Yield offsets in parts of at most :data:`OFFSETS_BYTES` each; one empty part if there are no offsets."""
    part: list[tuple[TopicPartition, int, str]] = []
    size = 0
    for tp, offset, metadata in offsets:
        # 64 bytes for the record's frame and the numbers in its key and value, beside the texts.
        more = len(group_id.encode()) + len(tp.topic) + len(metadata.encode()) + 64
        if part and size + more > OFFSETS_BYTES:
            yield part
            part, size = [], 0
        part.append((tp, offset, metadata))
        size += more
    yield part


def make_abort_command(tp: TopicPartition, start: int) -> str:
    """Return the command that ends a transaction which the brokers have lost (KIP-664).

    :param start: offset of its first record in the partition.
    """
    return f"`kafka-transactions.sh abort --topic {tp.topic} --partition {tp.partition} --start-offset {start}`"


def abort(producer: Producer) -> None:
    """Abort the transaction, so that readers need not wait for its timeout. Errors are ignored: the next attempt aborts it."""
    from confluent_kafka import KafkaException

    with suppress(KafkaException, SystemError):
        producer.purge()
        producer.abort_transaction(10)


def is_fenced(error: BaseException, events: ClientEvents) -> bool:
    """Return True if a producer's error means that a newer one has taken over.

    Calls after a fence fail with various errors ("purged in queue" ...), but the event callback has reported the fence before.
    """
    if events.find_first(FENCED, 0.0) is not None:
        return True
    name: Callable[[], str] | None = getattr(_find_client_error(error), "name", None)
    return callable(name) and name() in FENCED


def is_fatal(error: BaseException) -> bool:
    """Return True if the producer cannot be used any more for an unknown reason: the error has no name, or was lost in a
    callback."""
    if isinstance(error, SystemError) and error.__cause__ is None:
        return True
    name: Callable[[], str] | None = getattr(_find_client_error(error), "name", None)
    return callable(name) and name() == "_FATAL"


def find_fatal_error(producer: Producer, error: BaseException) -> BaseException:
    """Return the error that made a producer unusable; ``error`` itself if that names one.

    The client loses some errors that it raises within a callback ("returned NULL without setting an exception"). Every later
    call for the transaction raises them again.
    """
    from confluent_kafka import KafkaException

    if not is_fatal(error):
        return error
    try:
        producer.abort_transaction(10)
    except (KafkaException, SystemError) as again:
        # An error that is not fatal says nothing of the lost one: a commit that has begun cannot be aborted, for example.
        return again if getattr(_find_client_error(again), "fatal", bool)() else error
    return error


def find_abort_cause(producer: Producer, error: KafkaError) -> KafkaError:
    """Return the error for which a producer's transaction has to be aborted, if ``error`` only follows from it; else ``error``.

    When a record is refused, the client drops all that wait, may report them first, and accepts no more.
    """
    if error.name() not in FOLLOWING:
        return error
    return find_transaction_error(producer) or error


def find_transaction_error(producer: Producer) -> KafkaError | None:
    """Return the error for which a producer's open transaction has to be aborted; None if it has none."""
    from confluent_kafka import KafkaException

    try:
        # Within a transaction this always fails. After a refusal it raises the error of that.
        producer.begin_transaction()
    except KafkaException as again:
        cause: KafkaError = again.args[0]
        return None if cause.name() == "_STATE" else cause
    return None


def find_timeout_refusal(
    error: BaseException, conn_id: str, doing: str, seconds: float, instead: str = ""
) -> KafkaRefused | None:
    """Return the error to raise if the brokers refuse a producer because its transactions may stay open for too long; else None.

    :param conn_id: the connection, for the message.
    :param doing: the failed action, for the message.
    :param seconds: the producer's ``transaction.timeout.ms`` in seconds.
    :param instead: another remedy, for the message; default none.
    """
    from confluent_kafka import KafkaError

    cause = _find_client_error(error)
    if not isinstance(cause, KafkaError) or cause.code() != KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return None
    found = f"a transaction may take {seconds:g} s, which is more than the brokers' `transaction.max.timeout.ms`"
    action = f"Set `transaction.max.timeout.ms` of the brokers to {round(seconds * 1000)} or more (default: 900000)"
    return KafkaRefused(conn_id, doing, cause.name(), found, f"{action}{instead}")


def describe_producer_error(error: BaseException) -> str:
    """Return a producer's error in one line."""
    cause = _find_client_error(error)
    return f"{cause.str()} ({cause.name()})" if hasattr(cause, "str") and hasattr(cause, "name") else str(error)


def _find_client_error(error: BaseException) -> object:
    """Return the client's own error. A fatal error that is raised within a callback is the cause of a ``SystemError``."""
    while isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    return error.args[0] if error.args else error
