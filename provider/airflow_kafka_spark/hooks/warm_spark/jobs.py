"""Spark jobs by who has started them: found and ended in a Spark that several tasks share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

GROUP = "spark.jobGroup.id"
TAGS = "spark.job.tags"
_LOOK_SECONDS = 0.05


def end_jobs(spark: Any, name: str, value: str, *, seconds: float, gateway: Any = None) -> int:
    """Cancel all jobs with a property, and wait until none of their tasks runs any more.

    :param spark: the JVM's ``SparkContext``.
    :param name: :data:`GROUP` or :data:`TAGS`.
    :param value: the group, or one of the tags.
    :param seconds: how long to wait.
    :param gateway: of :func:`open_gateway`. Its connections have to be closed, too: what still runs in one may start a job.
    :return: the number of jobs that were found.
    :raises TimeoutError: some of them still run.
    """
    deadline = time.monotonic() + seconds
    found: set[int] = set()
    while True:
        connected = gateway is not None and _connections(gateway) > 0
        jobs = {int(job.jobId()) for job in _active_jobs(spark, name, value)}
        found |= jobs
        if jobs and name == TAGS:
            spark.cancelJobsWithTag(value)
        elif jobs:
            spark.cancelJobGroup(value)
        if not (connected or jobs or any(_task_sets(spark, name, value))):
            return len(found)
        if time.monotonic() > deadline:
            raise TimeoutError(f"jobs {sorted(found)} did not end within {seconds:g} s")
        time.sleep(_LOOK_SECONDS)


def open_gateway(spark: Any, jvm: Any) -> Any:
    """Return a new gateway to a JVM (``Py4JServer``), with a port and a secret of its own, whose connections can be counted."""
    gateway = jvm.org.apache.spark.api.python.Py4JServer(spark.conf())
    # Its own list of connections forgets those that are closed only if it listens to itself.
    server = _java_server(gateway)
    server.addListener(server)
    gateway.start()
    return gateway


def _connections(gateway: Any) -> int:
    server = _java_server(gateway)
    declared = server.getClass()
    while declared.getSimpleName() != "GatewayServer":
        declared = declared.getSuperclass()
    field = declared.getDeclaredField("connections")
    field.setAccessible(True)
    return int(field.get(server).size())


def _java_server(gateway: Any) -> Any:
    return gateway.server().getJavaServer()


def _active_jobs(spark: Any, name: str, value: str) -> Iterator[Any]:
    return (job for job in _scala(spark.dagScheduler().activeJobs()) if _has(job.properties(), name, value))


def _task_sets(spark: Any, name: str, value: str) -> Iterator[Any]:
    """Return the sets of tasks that have not ended. One of a job that was cancelled is here until its last task is gone."""
    return (tasks for tasks in _queued(spark.taskScheduler().rootPool()) if _has(tasks.taskSet().properties(), name, value))


def _queued(pool: Any) -> Iterator[Any]:
    for one in pool.schedulableQueue().toArray():
        if one.getClass().getSimpleName() == "Pool":
            yield from _queued(one)
        else:
            yield one


def _scala(collection: Any) -> list[Any]:
    iterator, found = collection.toSeq().iterator(), []
    while iterator.hasNext():
        found.append(iterator.next())
    return found


def _has(properties: Any, name: str, value: str) -> bool:
    found = properties.getProperty(name) if properties is not None else None
    return found is not None and value in (found.split(",") if name == TAGS else [found])
