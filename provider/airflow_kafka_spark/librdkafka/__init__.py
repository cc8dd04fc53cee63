"""Sending of whole Arrow columns by librdkafka, the C library below confluent-kafka.

This is own code where a library exists. ``Producer.produce`` of confluent-kafka takes one record per call, and its
``produce_batch`` a dictionary per record. Both take more of a core for a record than librdkafka itself: ``python -m benchmarks
send`` compares them.

The package imports nothing from the rest of the provider.
"""
