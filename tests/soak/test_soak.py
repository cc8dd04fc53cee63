"""The soak program: pipelines of all kinds under random kills, zombies and commands, with every record counted after each.

``make soak MINUTES=60 SEED=7``. Without a seed each run takes a new one, and prints it.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack

import pytest

from airflow_kafka_spark.testing import EmbeddedKafka
from tests.soak.campaign import Campaign
from tests.soak.subjects import kinds, variable
from tests.support.oracle import RecordsDiffer
from tests.support.victim import TIMEOUT

MINUTES = float(os.environ.get("SOAK_MINUTES") or 0)
STEPS = 3
"""The least number of steps, which show that the program works."""
SEED = int(os.environ.get("SOAK_SEED") or secrets.randbelow(10**6))
ONLY = os.environ.get("SOAK_ONLY", "")
"""The beginning of the names of the pipelines that are troubled. Default: all."""


@pytest.fixture(scope="module")
def broker():
    """A broker that may be killed."""
    with EmbeddedKafka() as kafka:
        yield kafka


@pytest.mark.skipif("SOAK_MINUTES" not in os.environ, reason="random runs are those of `make soak` and of `.ci/run`")
@pytest.mark.timeout(MINUTES * 60 + 1200)
@pytest.mark.flaky(reruns=0)
def test_whatever_happens_at_whatever_moment_each_record_is_there_exactly_once(
    broker, postgres, unique, tmp_path, record_property, capsys
):
    import random

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    with ExitStack() as stack:
        every = kinds(broker, postgres, unique, tmp_path, random.Random(SEED), stack)
        chosen = [kind for kind in every if kind.name.startswith(ONLY)]
        campaign = Campaign(broker, chosen, stack, SEED, say if "SOAK_MINUTES" in os.environ else lambda line: None)
        say(f"soak: seed {SEED}, {MINUTES:g} minutes")
        try:
            campaign.run(MINUTES * 60, STEPS)
        except BaseException:
            say(
                "\n---\n".join([*campaign.logs(), f"soak: seed {SEED}: failed at {campaign.last}, after {dict(campaign.counts)}"])
            )
            raise
        summary = f"soak: seed {SEED}: {campaign.counts.total()} troubles and commands, {campaign.compared} records compared"
        record_property("soak", summary)
        say(f"{summary}\n{dict(campaign.counts.most_common())}")
    assert campaign.compared


@pytest.mark.extended
def test_the_count_fails_on_a_lost_a_doubled_and_a_changed_record(broker, postgres, unique, tmp_path):
    """The oracle of each sink, with one row less, one twice, and one with another value."""
    import random

    with ExitStack() as stack:
        every = kinds(broker, postgres, unique, tmp_path, random.Random(1), stack)
        subject = next(kind for kind in every if kind.name == "ToSink postgres").make(stack)
        table, chance = subject.flow.place, random.Random(2)
        subject.feed(chance)
        subject.flow.produce(10)
        subject.next_run()
        subject.run()
        assert subject.check() >= 10
        one = f'(SELECT min(ctid) FROM "{table}")'
        for spoil in (
            f'DELETE FROM "{table}" WHERE ctid = {one}',
            f'INSERT INTO "{table}" SELECT * FROM "{table}" WHERE ctid = {one}',
            f"UPDATE \"{table}\" SET customer = 'somebody else' WHERE ctid = {one}",
        ):
            with subject.flow.postgres.connect() as connection:
                connection.execute(f'CREATE TABLE kept AS SELECT * FROM "{table}"')
                connection.execute(spoil)
                connection.commit()
                with pytest.raises(RecordsDiffer):
                    subject.check()
                connection.execute(f'DELETE FROM "{table}"')
                connection.execute(f'INSERT INTO "{table}" SELECT * FROM kept')
                connection.execute("DROP TABLE kept")
                connection.commit()
        subject._end_transaction("commit")
        # An attempt that fails before it can leave a window open leaves no record behind.
        with variable(TIMEOUT, "0.001"):
            assert subject._other_deployment(random.Random(3)) is None
        assert subject.check() == subject.flow._produced
