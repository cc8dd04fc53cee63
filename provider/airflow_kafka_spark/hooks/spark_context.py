"""The Spark context of this process: find out that it has ended, and discard it, so that the next window starts another one.

PySpark keeps the JVM and the context in class attributes. It hands them out again after the JVM was killed, or after the context
was stopped because its master went away.
"""

from __future__ import annotations

import signal
import warnings
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

_REAPED_SECONDS = 2.0
"""How long the exit code of a JVM that does not answer is waited for."""


def discard_ended() -> str:
    """Discard the context of this process, and its JVM, if they no longer work.

    :return: why they do not, as the end of a sentence; "" if they work, or if there are none.
    """
    reason = _why_ended()
    if reason:
        discard()
    return reason


def discard() -> None:
    """Forget the session and the context of this process, stopped or not; and the JVM if it has ended."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.context import SQLContext

    gateway, context, jvm = SparkContext._gateway, SparkContext._active_spark_context, SparkContext._jvm
    has_ended = gateway is not None and _jvm_ended(gateway) != ""
    if context is not None:
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            context.stop()
    if jvm is not None and not has_ended:
        with suppress(Exception):
            jvm.SparkSession.clearDefaultSession()
            jvm.SparkSession.clearActiveSession()
    SparkSession._instantiatedSession = SparkSession._activeSession = None
    SQLContext._instantiatedContext = None
    SparkContext._active_spark_context = None
    if gateway is not None and has_ended:
        with suppress(Exception):
            gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None


def java_session_class(jvm: Any) -> Any:
    """Return Java's class of sessions: Spark 4 has two, and this is the one with a JVM behind it."""
    from pyspark.sql import SparkSession

    find = getattr(SparkSession, "_get_j_spark_session_class", None)
    return jvm.SparkSession if find is None else find(jvm)


def _why_ended() -> str:
    from pyspark import SparkContext

    gateway, context = SparkContext._gateway, SparkContext._active_spark_context
    if gateway is None:
        return ""
    if reason := _jvm_ended(gateway):
        return reason
    if context is not None and (context._jsc is None or context._jsc.sc().isStopped()):
        return "its Spark context was stopped, most likely because the master went away or gave the application up"
    return ""


def _jvm_ended(gateway: JavaGateway) -> str:
    process = getattr(gateway, "proc", None)
    if process is None or process.poll() is None:
        try:
            gateway.jvm.java.lang.System.nanoTime()
            return ""
        except Exception:
            if process is None:
                return "its JVM does not answer"
            # The connection breaks a moment before the process can be waited for.
            with suppress(TimeoutExpired):
                process.wait(_REAPED_SECONDS)
    code = process.returncode
    if code is None:
        return "its JVM does not answer"
    if code < 0:
        killed = f"its JVM was killed by {signal.Signals(-code).name}"
        return f"{killed}, perhaps because the machine ran out of memory" if code == -signal.SIGKILL else killed
    return f"its JVM ended with exit code {code}"
