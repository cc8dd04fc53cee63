"""Processes that start an embedded server and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from airflow_kafka_spark.testing import _processes as processes


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def nothing_is_left_of(code: str, least: int) -> None:
    """Kill a parent and check that its servers end and their files are removed, although a fork of the parent lives on.

    :param code: the parent. It prints, as JSON, the ``pids`` of its servers and of their supervisor, that of its ``fork``,
        and the ``directory``, and waits.
    :param least: how many processes there are, at least.
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        facts = json.loads(parent.stdout.readline())
        try:
            # A server may have helpers for a moment.
            assert sum(not gone(pid) for pid in facts["pids"]) >= least
            assert Path(facts["directory"]).is_dir()
            parent.send_signal(signal.SIGKILL)
            assert processes.wait_until(lambda: all(map(gone, facts["pids"])), 120)
            assert not gone(facts["fork"])
            assert not Path(facts["directory"]).exists()
        finally:
            os.kill(facts["fork"], signal.SIGKILL)
