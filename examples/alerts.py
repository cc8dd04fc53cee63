"""Alerts: a failed task, a run that is late, and a backlog that grows. Needs `warehouse` and the connection `smtp_default`."""

from datetime import timedelta

from airflow.providers.smtp.notifications.smtp import SmtpNotifier
from airflow.sdk import DAG, AsyncCallback, DeadlineAlert, DeadlineReference, task

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator, PipelineOffsetsOperator
from airflow_kafka_spark.sinks import PostgresSink

TO = "data-team@example.com"
MOST_BEHIND = 1_000_000

with DAG(
    "orders_with_alerts",
    schedule="@hourly",
    catchup=False,
    max_active_runs=1,
    default_args={
        "retries": 3,
        # Called after the last retry. The class of the error is the heading of its entry in the troubleshooting page.
        "on_failure_callback": SmtpNotifier(
            to=TO,
            subject="{{ ti.task_id }} failed: {{ exception.__class__.__name__ }}",
            html_content="<pre>{{ exception }}</pre><a href='{{ ti.log_url }}'>Log</a>",
        ),
    },
    # Called when a run is not complete 30 minutes after it was queued, whatever it waits for.
    deadline=DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(minutes=30),
        callback=AsyncCallback(SmtpNotifier, {"to": TO, "subject": "Orders are late", "html_content": "See Kafka pipelines"}),
    ),
) as dag:
    KafkaToSinkOperator(
        task_id="load",
        topics="orders",
        group_id="orders-warehouse",
        value=Json(schema="id bigint NOT NULL, amount decimal(12,2)"),
        sink=PostgresSink(conn_id="warehouse", table="sales.orders", mode="upsert", key=["id"]),
    )

with DAG("orders_backlog", schedule="*/10 * * * *", catchup=False, default_args=dag.default_args):
    state = PipelineOffsetsOperator(task_id="show", action="show", pipeline="orders_with_alerts.load")

    @task
    def check(state: dict) -> None:
        behind = sum(partition["lag"] or 0 for partition in state["partitions"])
        if behind > MOST_BEHIND:
            raise ValueError(f"{state['pipeline']} is {behind:,} records behind")

    check(state.output)
