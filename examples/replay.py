"""Move a pipeline back to an instant that a person gives when the DAG is triggered. Needs `kafka_default`."""

from airflow.sdk import DAG, Param

from airflow_kafka_spark.operators import PipelineOffsetsOperator

with DAG(
    "move_back",
    schedule=None,
    params={"since": Param("2026-01-01T00:00:00Z", type="string"), "why": Param(type="string", minLength=5)},
):
    PipelineOffsetsOperator(
        task_id="reset",
        pipeline="orders.orders_to_warehouse",
        action="reset",
        to="{{ params.since }}",
        why="{{ params.why }}",
    )
