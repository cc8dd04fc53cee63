"""A librdkafka client is ended on a dedicated thread: ended on another thread, it may abort the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

from airflow_kafka_spark.hooks.kafka import client as kafka_client
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, KafkaCalls, KeptConsumers, keep_client, make_admin_client
from tests.support.waiting import eventually


class Client:
    """Records the thread that ends it."""

    def __init__(self, ends: list[str]) -> None:
        self.ends = ends

    def __del__(self) -> None:
        self.ends.append(threading.current_thread().name)


class Owner:
    pass


def test_a_client_without_references_ends_on_the_reapers_thread():
    ends: list[str] = []
    owner, client = Owner(), Client(ends)
    let_go = keep_client(client, owner)
    let_go()
    gc.collect()
    assert not ends, "somebody still holds it"
    del client
    eventually(lambda: ends)
    assert ends == ["airflow-kafka-spark-clients"]


def test_a_client_whose_owner_is_garbage_in_a_cycle_ends_there_too():
    ends: list[str] = []
    owner = Owner()
    owner.itself, owner.client = owner, Client(ends)
    keep_client(owner.client, owner)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    eventually(lambda: ends)
    assert ends == ["airflow-kafka-spark-clients"]


def test_an_answer_that_is_none_of_kafka_is_explained_without_the_advice_of_librdkafka():
    events = ClientEvents()
    size = "Receive failed: Invalid response size 1213486160 (0..100000000): increase receive.message.max.bytes"
    events.log(3, "%s", "FAIL", f"[thrd:127.0.0.1:80/bootstrap]: 127.0.0.1:80/bootstrap: {size}")
    expected = "what answers there is no Kafka broker, or its listener expects another `security.protocol`"
    assert events.find_reason() == ("log", f"127.0.0.1:80: Receive failed: {expected}")


def test_a_request_whose_broker_has_left_the_metadata_is_asked_again():
    """Of several brokers, the metadata name only those that the controller knows at that moment; a slow one is missing."""
    client = make_admin_client({"bootstrap.servers": "127.0.0.1:1"}, events := ClientEvents())
    calls = KafkaCalls(lambda _: client, events, conn_id="x", identity="nobody", timeout=60)
    left, answered = Future[str](), Future[str]()
    left.set_exception(KafkaException(KafkaError(-137)))  # confluent-kafka has no name for it: _DESTROY_BROKER
    answered.set_result("here")
    answers = iter([left, answered])
    assert calls.request_one("asking", lambda *_: next(answers)) == "here"
    assert next(answers, None) is None
    calls.discard_client()


ABORTS = """
import gc, os, time
os.environ["AIRFLOW_CONN_X"] = '{"conn_type": "kafka", "extra": {"bootstrap.servers": "127.0.0.1:1"}}'
from confluent_kafka import TopicCollection
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
collected = []

def forget():
    hook = KafkaHook("x")
    hook.itself = hook
    asked = hook.get_conn.describe_topics(TopicCollection(["t"]), request_timeout=1)
    # The answer comes on the client's own thread.
    asked["t"].add_done_callback(lambda _: collected.append(gc.collect()))

gc.disable()
forget()
deadline = time.monotonic() + 60
while not collected and time.monotonic() < deadline:
    time.sleep(0.05)
assert collected
print("alive")
"""


def test_a_hook_that_is_collected_on_the_thread_of_its_own_client_does_not_abort_the_process():
    done = subprocess.run([sys.executable, "-c", ABORTS], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout.strip()[-5:]) == (0, "alive"), done.stderr[-2000:]


def test_a_consumer_is_lent_again_until_it_is_old_has_failed_or_would_read_what_it_has_read(monkeypatch):
    kept, made = KeptConsumers(), []

    def make(_: ClientEvents) -> Consumer:
        made.append(Consumer({"group.id": "none"}))
        return made[-1]

    def lend(start: int = 0, kind: str = "ledger") -> Consumer:
        with kept.lend(kind, make, start) as lent:
            lent.past = max(lent.past, start)
            return lent.consumer

    assert lend(5) is lend(5) is lend(9) is made[0]
    assert lend(0, "committed") is made[1], "one of another kind"
    with kept.lend("ledger", make, 9) as used:
        assert lend(9) is made[2], "one that is in use is not lent"
    assert used.consumer is lend(9) is made[0]
    assert lend(8) is made[3], "what lies before may still be in its queue"
    with pytest.raises(KeyError), kept.lend("ledger", make, 9) as used:
        raise KeyError
    assert used.consumer is made[3]
    assert lend(9) is made[4], "one that has failed is not lent again"
    monkeypatch.setattr(kafka_client, "KEEP_SECONDS", -1.0)
    assert lend(9) is made[5], "an old one has old metadata"
    kept.close()
    closed = []
    for consumer in made:
        try:
            consumer.assignment()
        except RuntimeError:
            closed.append(consumer)
    assert closed == made


def test_a_kept_consumer_that_is_not_closed_ends_on_the_reapers_thread():
    ends: list[str] = []

    class Told(Consumer):
        def __del__(self) -> None:
            ends.append(threading.current_thread().name)

    kept = KeptConsumers()
    with kept.lend("ledger", lambda _: Told({"group.id": "none"})):
        pass
    del kept
    gc.collect()
    eventually(lambda: ends)
    assert ends == ["airflow-kafka-spark-clients"]
