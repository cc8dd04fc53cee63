"""A DAG that runs after new rows have arrived in a table. Needs no connection."""

from airflow.sdk import DAG, Asset, task

orders = Asset("x-postgres://warehouse/sales/orders")

with DAG("reports", schedule=orders):

    @task
    def print_windows(triggering_asset_events):
        for event in triggering_asset_events[orders]:
            print(event.extra["window"], event.extra["records_written"])

    print_windows()
