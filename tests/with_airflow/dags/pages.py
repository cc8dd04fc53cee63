"""A pipeline whose task waits until a test lets it continue."""

import os
import pathlib

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink
from airflow_kafka_spark.testing._processes import wait_until
from tests.support.pipelines import SCHEMA

GATE = pathlib.Path(os.environ["SITE_FILES"], "gate")


class Gated(KafkaToSinkOperator):
    """A task that waits at its gate before it moves a window. The gate's text is the progress that it reports, or "fail", or
    "go".
    """

    def move(self, window, ledger):
        said = []

        def is_open():
            word = GATE.read_text()
            if "/" in word and word not in said:
                self.progress.on_progress(*map(int, word.split("/")))
            said.append(word)
            return word in ("go", "fail")

        if not wait_until(is_open, 1200, every=0.1) or said[-1] == "fail":
            raise RuntimeError("the gate stays shut")
        return super().move(window, ledger)


with DAG("pages", schedule=None):
    Gated(
        task_id="gated",
        topics=["pages-orders"],
        group_id="pages-gated",
        sink=FilesSink(path=f"{os.environ['SITE_LAKE']}/pages"),
        value=Json(schema=SCHEMA),
        errors_tolerance="all",
        errors_deadletterqueue_topic_name="pages-dead",
    )
