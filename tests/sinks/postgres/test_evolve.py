"""Columns of the rows that the table lacks: added on request, otherwise refused with the difference shown."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import Problem, SinkRejected
from airflow_kafka_spark.sinks import FilesSink
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.attempt import Victim, apply
from tests.sinks.feed import SCHEMA, Feed, row
from tests.sinks.postgres.kit import Pipeline, Place, names, new_place, write

OLD = pa.schema([("id", pa.int64()), ("v", pa.string())])
NEW = pa.schema(
    [*OLD, ("Amount", pa.decimal128(12, 2)), ("tags", pa.list_(pa.string())), ("where", pa.struct([("city", pa.string())])),
     ("seen", pa.timestamp("us", "UTC"))]
)  # fmt: skip
ADDED = [("id", "bigint"), ("v", "text"), ("Amount", "numeric(12,2)"), ("tags", "text[]"), ("where", "jsonb")]
SEEN = ("seen", "timestamp with time zone")


def columns(place: Place, table: str = "t") -> list[tuple[str, str]]:
    return place.rows(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
        f"WHERE attrelid = to_regclass('\"{table}\"') AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
    )


def evolved(pipeline: Pipeline, schema: pa.Schema) -> Pipeline:
    """Return the pipeline with other columns from now on."""
    pipeline.shape = Shape(pipeline.shape.pipeline, schema)
    return pipeline


def problems(place: Place, schema: pa.Schema, **options) -> list[Problem]:
    return place.sink(**options).validate(Shape("dag.task", schema))


@pytest.mark.parametrize("options", [{}, {"atomic": "split"}, {"mode": "upsert", "key": ["id"]}], ids=str)
def test_missing_columns_are_added_as_nullable_with_the_type_of_the_rows(place: Place, options: dict):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    pipeline = Pipeline(OLD)
    write(place.sink(**options), pipeline, [{"id": 1, "v": "a"}])
    sink = place.sink(auto_evolve=True, **options)
    assert sink.validate(Shape("dag.task", NEW)) == []
    assert columns(place) == ADDED[:2], "validate changes nothing"
    rows = [{"id": 2, "v": "b", "Amount": 1, "tags": ["x"], "where": {"city": "Łódź"}}, {"id": 3}]
    write(sink, evolved(pipeline, NEW), rows)
    assert columns(place) == [*ADDED, SEEN]
    found = place.rows('SELECT id, v, "Amount"::text, tags, "where"->>\'city\', seen FROM t ORDER BY id')
    assert found == [(1, "a", None, None, None, None), (2, "b", "1.00", ["x"], "Łódź", None), (3, None, None, None, None, None)]


def test_without_the_option_every_difference_is_named_with_what_can_be_done(place: Place):
    place.execute("CREATE TABLE t (id bigint, v integer, needed text NOT NULL)")
    found = {problem.where.split("`")[1]: problem for problem in problems(place, NEW)}
    assert set(found) == {"v", "Amount", "tags", "where", "seen", "needed"}
    amount = str(found["Amount"])
    assert "found `id`, `v`, `needed`; expected `Amount` numeric(12,2)" in amount
    assert "`auto_evolve=True`" in amount and 'ADD COLUMN "Amount" numeric(12,2)' in amount
    assert "integer" in found["v"].what and 'ALTER COLUMN "v" TYPE text USING "v"::text' in found["v"].action
    # The proposed statement works unchanged.
    place.execute(found["v"].action.partition("run: ")[2])
    for name in ("Amount", "tags", "where", "seen"):
        place.execute(found[name].action.partition("run: ")[2].partition(";")[0])
    assert names(problems(place, NEW)) == {"sink.table column `needed`"}
    with pytest.raises(SinkRejected, match="`more`"):
        write(place.sink(), Pipeline(NEW.append(pa.field("more", pa.int64()))), [{"id": 1}])


def test_no_column_is_dropped_or_given_another_type_or_left_without_a_value_it_needs(place: Place):
    place.execute("CREATE TABLE t (id integer, v text, old text DEFAULT 'd', needed text NOT NULL)")
    found = problems(place, NEW, auto_evolve=True)
    assert names(found) == {"sink.table column `needed`"}, "a column that no row fills is reported as before"
    place.execute("ALTER TABLE t ALTER COLUMN needed DROP NOT NULL, ALTER COLUMN v TYPE integer USING 1")
    assert names(problems(place, NEW, auto_evolve=True)) == {"sink.table column `v`"}
    place.execute("ALTER TABLE t ALTER COLUMN v TYPE varchar(5)")
    write(place.sink(auto_evolve=True), Pipeline(NEW), [{"id": 7, "v": "short"}])
    assert columns(place)[:4] == [("id", "integer"), ("v", "character varying(5)"), ("old", "text"), ("needed", "text")]
    assert place.rows("SELECT id, v, old, needed FROM t") == [(7, "short", "d", None)]


def test_columns_that_cannot_be_added_automatically_are_reported(place: Place):
    place.execute('CREATE TABLE t (v text, "ID2" text)')
    schema = pa.schema(
        [("id", pa.int64()), ("v", pa.string()), ("id2", pa.string()), ("unknown", pa.null()), ("ctid", pa.int64())]
    )
    found = {p.where: str(p) for p in problems(place, schema, auto_evolve=True, mode="upsert", key=["id"])}
    wrong = ("id", "id2", "unknown", "ctid")
    assert set(found) == {f"sink.table column `{name}`" for name in wrong}
    for name, says in zip(wrong, ("part of the key", "only `ID2`", "Arrow's null", "in every table"), strict=True):
        assert says in found[f"sink.table column `{name}`"]


def test_a_role_that_does_not_own_the_table_gets_the_statement_for_the_owner(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text)")
    with place.connect_as_new_role("x") as role:
        place.execute(f'GRANT ALL ON SCHEMA {place.quoted} TO "{role}"; GRANT ALL ON t TO "{role}"')
        (problem,) = problems(place, OLD.append(pa.field("more", pa.int32())), auto_evolve=True)
        assert problem.where == "sink.auto_evolve" and f"`{role}` does not own" in problem.what
        assert problems(place, OLD, auto_evolve=True) == [], "where nothing is missing nobody needs to"
        place.execute(problem.action.removeprefix("Have the owner run: "))
        assert columns(place)[-1] == ("more", "integer")


def test_offset_and_window_columns_are_added_too(place: Place):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    pipeline = Pipeline(OLD)
    write(place.sink(mode="upsert", key=["id"]), pipeline, [{"id": 1, "v": "a"}])
    sink = place.sink(auto_evolve=True, mode="upsert", key=["id"], offset_columns=True, window_column="loaded")
    assert sink.validate(pipeline.shape) == []
    write(sink, pipeline, [{"id": 1, "v": "b"}, {"id": 2, "v": "c"}])
    assert place.rows("SELECT id, v, __connect_partition, __connect_offset, loaded FROM t ORDER BY id") == [
        (1, "b", 0, 1, "dag.task#2"),
        (2, "c", 0, 2, "dag.task#2"),
    ]


def test_two_pipelines_that_add_the_same_column_at_once_both_go_through(place: Place):
    place.execute("CREATE TABLE t (id bigint)")
    wide = pa.schema([("id", pa.int64()), *((f"c{n}", pa.int64()) for n in range(40))])
    sink = place.sink(auto_evolve=True, lock_timeout=20)
    pipelines = [Pipeline(wide, f"dag.task{n}", topic=f"t{n}") for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: write(sink, p, [{"id": 1, "c39": 5}]), pipelines))
    assert place.rows("SELECT id, c39 FROM t") == [(1, 5)] * 4 and len(columns(place)) == 41


def test_a_column_that_was_added_meanwhile_with_another_type_is_refused_not_rounded_into(place: Place):
    place.execute("CREATE TABLE t (id bigint)")
    schema = pa.schema([("id", pa.int64()), ("share", pa.float64())])
    sink = place.sink(auto_evolve=True)
    assert sink.validate(Shape("dag.task", schema)) == []
    place.execute("ALTER TABLE t ADD COLUMN share integer")
    with pytest.raises(SinkRejected, match=r"`share` is integer, the rows have double precision"):
        write(sink, Pipeline(schema), [{"id": 1, "share": 0.5}])
    assert place.one("SELECT count(*) FROM t") == 0


@pytest.mark.faults
@pytest.mark.parametrize("point", ["split.mid", "sink.in_transaction"])
def test_killed_behind_the_new_columns_the_retry_finds_them_and_each_row_is_there_once(
    postgres: EmbeddedPostgres, unique, tmp_path: Path, point: str
):
    with new_place(postgres, unique("evolve")) as place:
        place.execute("CREATE TABLE t (id bigint, v text)")
        pipeline = Pipeline(OLD)
        write(place.sink(), pipeline, [{"id": 1}])
        sink, job = place.sink(auto_evolve=True), evolved(pipeline, NEW).job([{"id": n, "Amount": n} for n in range(2, 50)])
        with Victim(sink, job, point, tmp_path) as victim:
            assert victim.died() and victim.fired
        assert columns(place) == [*ADDED, SEEN] and place.one("SELECT count(*) FROM t") == 1
        apply(sink, job)
        found = place.rows('SELECT id, "Amount"::int FROM t ORDER BY id')
        assert found == [(1, None), *((n, n) for n in range(2, 50))]


# --- files ---------------------------------------------------------------------------------------------------------------

FIRST = pa.schema([SCHEMA.field(name) for name in ("id", "name", "amount")])


def test_a_directory_takes_new_columns_on_request_and_a_reader_sees_both_windows(tmp_path: Path):
    import duckdb

    feed = Feed(FIRST)
    plain, open_ = (FilesSink(str(tmp_path / "t"), auto_evolve=on) for on in (False, True))
    first = feed.next(5, 0, 0)
    apply(plain, first)
    feed.schema = pa.schema([SCHEMA.field(name) for name in ("id", "amount", "small", "tags")])
    found = {p.where.split("`")[1]: str(p) for p in plain.validate(feed.shape)}
    assert set(found) == {"small", "tags"} and "`id` int64, `name` string" in found["small"] and "auto_evolve" in found["tags"]
    assert open_.validate(feed.shape) == []
    second = feed.next(5, 0, 0)
    apply(open_, second)
    select = "SELECT id, name, small FROM read_parquet(?, hive_partitioning = true, union_by_name = true) ORDER BY id"
    rows = duckdb.sql(select, params=[f"{tmp_path}/t/**/*.parquet"]).fetchall()
    assert rows == [(n, row(n)["name"] if n < 5 else None, None if n < 5 else row(n)["small"]) for n in range(10)]
    # A column that went, and comes back: its type is still known.
    feed.schema = pa.schema([("id", pa.int64()), ("name", pa.int32())])
    (problem,) = open_.validate(feed.shape)
    assert problem.where == "sink.path column `name`" and "found int32; expected string" in problem.what
    feed.schema = FIRST
    assert plain.validate(feed.shape) == []


def test_csv_takes_new_columns_behind_the_others_only_since_its_readers_go_by_position(tmp_path: Path):
    sink, feed = FilesSink(str(tmp_path / "t"), format="csv", auto_evolve=True), Feed(FIRST)
    apply(sink, feed.next(5, 0, 0))
    for columns_, fine in (
        (("id", "name", "amount", "small"), True),
        (("id", "small", "name", "amount"), False),
        (("id",), False),
    ):
        schema = pa.schema([SCHEMA.field(name) for name in columns_])
        assert (sink.validate(Shape(feed.pipeline, schema)) == []) is fine
    assert os.listdir(tmp_path / "t")
