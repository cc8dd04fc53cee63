"""Kafka -> PostgreSQL: window-atomic and split-atomic against Spark's own JDBC append, and against a bare binary COPY."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import events
from benchmarks.bench import SCHEMA, Stand, compare, operate, plain_spark

JDBC = "Spark JDBC append (at-least-once)"


def run(stand: Stand) -> None:
    from airflow_kafka_spark.sinks import PostgresSink

    def jdbc(turn: int) -> None:
        table = stand.table("jdbc")
        url = (
            f"jdbc:postgresql://{stand.postgres.host}:{stand.postgres.port}/{stand.postgres.database}?reWriteBatchedInserts=true"
        )
        (
            plain_spark(stand)
            .write.format("jdbc")
            .options(
                url=url, dbtable=table, user=stand.postgres.user, password=stand.postgres.password, batchsize="10000",
                driver="org.postgresql.Driver",
            )
            .mode("append")
            .save()
        )  # fmt: skip
        stand.count(table)

    def ours(name: str, **options: Any) -> Any:
        def contestant(turn: int) -> None:
            table = stand.table(name)
            operate(stand, name, turn, PostgresSink(conn_id="warehouse", table=table, **options))
            stand.count(table)

        return contestant

    rows = _rows(stand)

    def copy(turn: int) -> None:
        table = stand.table("bare")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda half: _copy(stand, table, half), (rows[::2], rows[1::2])))
        stand.count(table)

    compare(
        stand,
        "Kafka -> PostgreSQL, table with a primary key",
        {
            JDBC: jdbc,
            "window-atomic append (overlap)": ours("ours_overlap"),
            "window-atomic append (merge after)": ours("ours_after", merge="after"),
            "window-atomic upsert": ours("ours_upsert", mode="upsert", key=["id"]),
            "split-atomic append": ours("ours_split", atomic="split"),
            "prepared transactions: COPY per split, committed by the driver": lambda turn: _prepared(stand, turn),
            "limit: bare binary COPY of decoded rows, 2 connections": copy,
        },
        base=JDBC,
    )


def _rows(stand: Stand) -> list[Any]:
    """The topic's events, decoded beforehand."""
    from airflow_kafka_spark.formats import Json

    decoder = Json(schema=SCHEMA).make_decoder()
    # At least one batch for each connection.
    step = min(50_000, stand.records // 2)
    return [
        decoder.decode([events.order(n) for n in range(s, min(s + step, stand.records))]).batch
        for s in range(0, stand.records, step)
    ]


def _copy(stand: Stand, table: str, batches: list[Any]) -> None:
    import adbc_driver_postgresql.dbapi as adbc
    import pyarrow as pa

    with adbc.connect(stand.postgres.dsn) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest(table, pa.RecordBatchReader.from_batches(batches[0].schema, batches), mode="append")
        connection.commit()


def _prepared(stand: Stand, turn: int) -> None:
    """The third way: each task COPYs into the table and prepares its transaction; the driver commits them one by one.

    Not offered by the sink: it needs ``max_prepared_transactions``, and a reader sees the splits appear one after the other.
    """
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader
    from airflow_kafka_spark.windows.model import OffsetRange, Window
    from airflow_kafka_spark.windows.plan import make_splits

    table = stand.table("prepared")
    with KafkaHook() as hook:
        config, found = hook.make_consumer_config(), hook.read_offsets([events.TOPIC])
    window = Window("prepared", 1, tuple(OffsetRange(*tp, o.low, o.lso) for tp, o in sorted(found.items())), "", "")
    splits, decoder, dsn = make_splits(window, 1_000_000), Json(schema=SCHEMA).make_decoder(), stand.postgres.dsn

    def load(batches: Any) -> Any:
        import adbc_driver_postgresql.dbapi as adbc
        import pyarrow as pa

        for batch in batches:
            for index in batch.column(0).to_pylist():
                decoded = (decoder.decode(records.values).batch for records in KafkaSplitReader(config, splits[index].range))
                first = next(decoded)
                connection = adbc.connect(dsn)
                with connection.cursor() as cursor:
                    reader = pa.RecordBatchReader.from_batches(first.schema, _chain(first, decoded))
                    cursor.adbc_ingest(table, reader, mode="append")
                    cursor.execute(f"PREPARE TRANSACTION 'split-{turn}-{index}'")
                connection.close()
                yield pa.RecordBatch.from_pydict({"index": [index]})

    stand.spark.range(0, len(splits), 1, len(splits)).mapInArrow(load, "index bigint").collect()
    with stand.postgres.connect(autocommit=True) as connection:
        for split in splits:
            connection.execute(f"COMMIT PREPARED 'split-{turn}-{split.index}'")
    stand.count(table)


def _chain(first: Any, rest: Any) -> Any:
    yield first
    yield from rest
