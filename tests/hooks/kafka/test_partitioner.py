"""Kafka's partitioner: one key, many keys, and a reference that hashes byte by byte."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest

from airflow_kafka_spark.hooks.kafka.partitioner import choose_partition, choose_partitions, compute_murmur2


def reference(data: bytes) -> int:
    """Return Kafka's hash of a key, never negative."""
    length, seed, m, mask = len(data), 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF
    h = seed ^ length
    for i in range(0, length - length % 4, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ (k >> 24)) * m & mask)
    if tail := data[length - length % 4 :]:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return (h ^ (h >> 15)) & 0x7FFFFFFF


@pytest.mark.parametrize(
    "key, hashed", [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536), (b"", 275646681)]
)
def test_the_home_partition_is_found_as_kafkas_own_partitioner_does(key, hashed):
    assert reference(key) == choose_partition(key, 1 << 31) == hashed & 0x7FFFFFFF


def test_murmur2_of_many_keys_is_that_of_each(unique):
    keys = [unique("k").encode() * n for n in range(200)] + [b"", b"a", b"ab", b"abc", b"abcd", b"x" * 5000]
    array = pa.array(keys, pa.binary())
    assert [int(h) & 0x7FFFFFFF for h in compute_murmur2(array)] == [reference(k) for k in keys]
    assert [int(h) & 0x7FFFFFFF for h in compute_murmur2(array.slice(3, 50))] == [reference(k) for k in keys[3:53]]
    assert (
        [choose_partition(k, 7) for k in keys] == choose_partitions(array, 7, turn=0).tolist() == [reference(k) % 7 for k in keys]
    )
    # Keys of several hundred bytes were hashed one by one, 4 ms each.
    began = time.process_time()
    compute_murmur2(pa.array([bytes(600 + n % 50) for n in range(2000)]))
    assert time.process_time() - began < 1
    assert choose_partitions(pa.array([None, b"a", None], pa.binary()), 4, turn=6).tolist()[::2] == [2, 2]
