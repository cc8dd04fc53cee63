"""Run chains over Spark Connect in a separate program, because a process has sessions of one kind only."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.transforms import Cast, Condition, Filter, Sql, apply_chain
from tests.transforms.cases import SETTINGS, Case, Row, check, run
from tests.transforms.test_chain import CASES

WANTED = (
    "the end of a split passes all transforms as it was",
    "what does not meet the predicate keeps what it had, and lacks what is new",
    "what cannot be cast is the record's error, and later transforms leave it alone",
    "names with dots, backticks, spaces and umlauts are names",
)


def main() -> None:
    spark = SparkSession.builder.remote(f"sc://127.0.0.1:{sys.argv[1]}").getOrCreate()
    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    cases = [case for case in CASES if case.name in WANTED]
    assert len(cases) == len(WANTED)
    outcomes = run(spark, cases)
    for case in cases:
        check(case, outcomes[case.name])
    frame = Case("", [], [Row((1, "a"))], [], value="struct<id:int,amount:string>").frame(spark)
    wrong = [Cast("no:int8"), Filter(predicate=Condition("no = 1")), Sql({"a": "1 +"}), lambda f: f.withColumn("more", F.lit(1))]
    for transform in wrong:
        try:
            apply_chain(frame, [transform])
        except ValidationError as error:
            print(error)
        else:
            raise AssertionError(f"{transform} was accepted")
    spark.stop()


if __name__ == "__main__":
    main()
