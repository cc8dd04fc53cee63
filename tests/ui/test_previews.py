"""Records that a page shows: formats as the configuration of a task describes them."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark.formats import Avro, Csv, Debezium, Json, String
from airflow_kafka_spark.operators.visibility.operator import convert_argument
from airflow_kafka_spark.ui.previews import TopicFormats, decode_columns, find_topic_formats, make_format


@pytest.mark.parametrize(
    "format", [Json(schema="id bigint, name string"), Csv(schema="a int", delimiter=";"), String(), Avro(registry="r")], ids=str
)
def test_a_format_is_made_again_as_it_was_described(format):
    through_json = json.loads(json.dumps(convert_argument(format)))
    assert make_format(through_json) == format


def test_what_is_no_format_of_this_package_is_not_made():
    for name in ("Format", "os", "KafkaSink"):
        with pytest.raises(ValueError, match="no format of this package"):
            make_format({"class": name, "arguments": {}})
    with pytest.raises(ValueError, match="other"):
        make_format({"class": "Json", "arguments": {"other": 1}})
    with pytest.raises(ValueError, match="only a run knows"):
        make_format({"class": "Json", "arguments": {"schema": "{{ params.schema }}"}})


def test_values_are_decoded_and_a_bad_one_says_why():
    format = convert_argument(Json(schema="id bigint, price decimal(20,2), raw binary"))
    big = 2**60
    values = [b'{"id": %d, "price": 1.5, "raw": "AAE="}' % big, None, b"no json", b'{"id": 1}']
    found, problem = decode_columns(format, "value", "orders", values)
    assert problem == ""
    # JavaScript would round it.
    assert found[0] == ({"id": str(big), "price": "1.50", "raw": "0001"}, None)
    assert found[1] == (None, None)
    assert found[2][0] is None and found[2][1]
    assert found[3] == ({"id": 1, "price": None, "raw": None}, None)


def test_without_a_usable_format_records_are_bytes():
    assert decode_columns(None, "key", "orders", [b"x"]) == ([(None, None)], "")
    found, problem = decode_columns(convert_argument(Csv(schema="id bigint,")), "value", "orders", [b"x"])
    assert found == [(None, None)] and problem.startswith("The values are shown as bytes: ")


def test_records_that_a_sink_has_written_as_json_without_a_schema_are_decoded():
    values = [b'{"id": %d, "price": 1.50}' % (2**60), None, b"[1]", b"no json"]
    found, problem = decode_columns(convert_argument(Json()), "value", "orders", values)
    assert problem == ""
    assert found[:3] == [({"id": str(2**60), "price": "1.50"}, None), (None, None), (None, None)]
    assert found[3][0] is None and found[3][1].startswith("it is no JSON: ")


def test_topics_of_a_pipeline_are_those_that_it_reads_and_writes():
    value, key = convert_argument(Debezium("id bigint")), convert_argument(String())
    arguments = {
        "value": value,
        "key": key,
        "errors_deadletterqueue_topic_name": "dead",
        "sink": {"class": "KafkaSink", "arguments": {"topic": "copy", "value": convert_argument(Json())}},
    }
    assert find_topic_formats({"arguments": arguments}, ["orders"]) == {
        "copy": TopicFormats(convert_argument(Json())), "dead": TopicFormats(), "orders": TopicFormats(value, key),
    }  # fmt: skip
    assert find_topic_formats({}, ["orders"]) == {"orders": TopicFormats()}
