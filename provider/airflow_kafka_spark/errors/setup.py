"""Errors found before a window starts: options, connections, Java, jars, and brokers that do not answer or refuse a request; and
errors of the embedded servers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_kafka_spark.errors.base import KafkaSparkError, quote_names


@dataclass(frozen=True)
class Problem:
    """One problem of a pipeline that was found before it started.

    :param where: the argument or connection, as the user wrote it (``topics``, ``sink.table``).
    :param what: the value that was found, and the expected one.
    :param action: the action for the user.
    :param retryable: True if the problem may be gone at a retry, as when a server did not answer.
    """

    where: str
    what: str
    action: str = ""
    retryable: bool = field(default=False, compare=False, kw_only=True)

    @classmethod
    def of(cls, where: str, error: KafkaSparkError, action: str | None = None) -> Problem:
        """Return an error as the problem of an argument.

        :param action: the action; default: that of the error.
        """
        what = f"{error.found}{f' (expected {error.expected})' if error.expected else ''}"
        return cls(where, what, error.action if action is None else action, retryable=error.retryable)

    def __str__(self) -> str:
        action = f" {self.action.rstrip('.')}." if self.action else ""
        return f"{self.where}: {self.what.rstrip('.')}.{action}"


@dataclass(frozen=True)
class Unchecked(Problem):
    """A check that could not be made because of another problem, in a list of problems.

    :param where: the argument that was not checked, as the user wrote it (``sink.key``).
    :param what: the arguments whose problems come first.
    """

    def __str__(self) -> str:
        return f"{self.where}: not checked until `{self.what}` is corrected."


class ValidationError(KafkaSparkError):
    """Raised when a pipeline is invalid, with all of its problems, before any data is moved. Nothing was changed.

    :param problems: the problems, and checks that could not be made because of them (:class:`Unchecked`).
    :param retryable: True if a retry may succeed, as when a server did not answer; None (default): if all problems do.

    The attribute ``problems`` has the problems, ``unchecked`` the checks that have to wait.
    """

    def __init__(self, problems: Sequence[Problem], *, retryable: bool | None = None) -> None:
        self.problems = tuple(p for p in problems if not isinstance(p, Unchecked))
        self.unchecked = tuple(dict.fromkeys(p for p in problems if isinstance(p, Unchecked)))
        self.retryable = all(p.retryable for p in self.problems) if retryable is None else retryable
        listed = "\n".join(f"  {n}. {p}" for n, p in enumerate(self.problems, 1))
        waiting = "".join(f"\n  - {p}" for p in self.unchecked)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(f"{count} found before starting; nothing was read, written or committed\n{listed}{waiting}")


class JavaMissing(KafkaSparkError):
    """Raised when no usable Java runtime was found.

    :param detail: where it was searched for.
    """

    def __init__(self, detail: str = "neither JAVA_HOME/bin/java nor java on the PATH could be run") -> None:
        self.detail = detail
        super().__init__(
            f"Java was not found: {detail}",
            expected="a Java 17 or 21 runtime",
            action="Install one (for instance `apt-get install openjdk-17-jre-headless`) or set JAVA_HOME",
        )


class PackageMissing(KafkaSparkError):
    """Raised when a package is missing that an extra of this package installs.

    :param feature: the feature that needs it, as ``Avro``.
    :param package: the missing package.
    :param extra: the extra that installs it.
    """

    def __init__(self, feature: str, package: str, extra: str) -> None:
        self.feature, self.package, self.extra = feature, package, extra
        also = "" if extra == "testing" else ", on the executors too"
        super().__init__(
            f"{feature} needs the package `{package}`, which is not installed here",
            action=f"Install it with `pip install 'airflow-provider-kafka-spark[{extra}]'`{also}",
        )


class JarsUnavailable(KafkaSparkError):
    """Raised when jars of connectors or of the broker could not be resolved.

    :param coordinates: their Maven coordinates.
    :param detail: the resolver's message.
    """

    retryable = True

    def __init__(self, coordinates: Sequence[str], detail: str) -> None:
        self.coordinates, self.detail = tuple(coordinates), detail
        super().__init__(
            f"The jars of {', '.join(coordinates)} could not be resolved: {detail}",
            expected="a Maven repository that serves them, or a filled jar cache",
            action="Check the network or proxy, or name a directory of jars in `AIRFLOW_KAFKA_SPARK_CACHE`",
        )


class ConnectionInvalid(KafkaSparkError):
    """Raised when an Airflow connection cannot be used.

    :param conn_id: the connection.
    :param detail: the reason why it cannot be used.
    """

    def __init__(self, conn_id: str, detail: str, action: str = "") -> None:
        self.conn_id, self.detail = conn_id, detail
        super().__init__(f"Connection `{conn_id}`: {detail}", action=action or f"Correct the connection `{conn_id}` in Airflow")


class SparkUnavailable(KafkaSparkError):
    """Raised when a Spark session cannot be started, or ended while it was used: its JVM was killed, or its master went away.

    :param conn_id: the Airflow connection.
    :param master: the master, or the address of the Connect server.
    :param detail: what happened, as the end of a sentence.
    """

    retryable = True

    def __init__(self, conn_id: str, master: str, detail: str) -> None:
        self.conn_id, self.master, self.detail = conn_id, master, detail
        super().__init__(
            f"Spark at `{master}` (connection `{conn_id}`) cannot be used: {detail}",
            action="Check the master and the memory of its machines; a retry starts a new session, and continues with the same "
            "window if one is open",
        )


class ExecutorUnfit(KafkaSparkError):
    """Raised when a Python worker of an executor cannot run the tasks of a window. It has read no record.

    :param window: the window.
    :param detail: the executor, and the packages that are missing, too old or too new there.
    """

    def __init__(self, window: str, detail: str) -> None:
        self.window, self.detail = window, detail
        super().__init__(
            f"Spark cannot run the tasks of window {window}: {detail}",
            action="Install it on every executor, or send it there with `spark.archives` (`python -m airflow_kafka_spark pack`); "
            "a retry continues with the same window",
        )


class KafkaUnavailable(KafkaSparkError):
    """Raised when the brokers did not answer in time, or refused the client.

    :param conn_id: the Airflow connection.
    :param doing: what was requested.
    :param detail: the client's message.
    """

    retryable = True

    def __init__(self, conn_id: str, doing: str, detail: str) -> None:
        self.conn_id, self.doing, self.detail = conn_id, doing, detail
        super().__init__(
            f"Kafka (connection `{conn_id}`) failed while {doing}: {detail}",
            expected="an answer from the brokers",
            action="Check the brokers, `bootstrap.servers` and the credentials, and then run the task again",
        )


class ServerInvalid(KafkaSparkError):
    """Raised when an embedded server cannot do what was requested.

    :param server: name of the server.
    :param detail: why it cannot.
    """

    def __init__(self, server: str, detail: str, expected: str = "") -> None:
        self.server, self.detail = server, detail
        super().__init__(f"The embedded {server} cannot do this: {detail}", expected=expected)


class ServerFailed(KafkaSparkError):
    """Raised when an embedded server did not start, died, or refused a request.

    :param server: name of the server.
    :param detail: what happened, with the path of its log if it did not start or died.
    """

    def __init__(self, server: str, detail: str) -> None:
        self.server, self.detail = server, detail
        super().__init__(
            f"The embedded {server} failed: {detail}", expected="a server that runs and answers", action="See the reason above"
        )


class KafkaRefused(KafkaSparkError):
    """Raised when the brokers refuse a request, for example because a permission is missing or a setting is invalid.

    :param conn_id: the Airflow connection.
    :param doing: what was requested.
    :param code: Kafka's name of the error, as ``TOPIC_AUTHORIZATION_FAILED``.
    :param detail: Kafka's message.
    """

    def __init__(self, conn_id: str, doing: str, code: str, detail: str, action: str = "") -> None:
        self.conn_id = conn_id
        self.doing = doing
        self.code = code
        self.detail = detail
        super().__init__(
            f"Kafka (connection `{conn_id}`) refused while {doing}: {detail} ({code})",
            action=action or "Correct the request",
        )


class RightMissing(KafkaRefused):
    """Raised when the brokers refuse a request because the connection's user lacks a right (an ACL). A retry does not help.

    :param conn_id: the Airflow connection; "" if unknown, as in a Spark task. The operator adds it.
    :param doing: what was requested.
    :param code: Kafka's name of the error, as ``GROUP_AUTHORIZATION_FAILED``.
    :param user: the user, in words.
    :param resource: the kind of resource: ``topic``, ``group``, ``transactional id`` or ``cluster``.
    :param name: the resource's name; "" if the brokers do not name it.
    :param rights: Kafka's names of the missing rights, as ``Describe``; empty if they are unknown.
    :param needed: all rights on the resource that its use needs; default: the missing ones. The command grants them.
    """

    def __init__(
        self,
        conn_id: str,
        doing: str,
        code: str,
        user: str,
        resource: str,
        name: str,
        rights: Sequence[str],
        needed: Sequence[str] = (),
    ) -> None:
        self.user, self.resource, self.name, self.rights, self.needed = user, resource, name, tuple(rights), tuple(needed)
        named = f"{resource} `{name}`" if name else f"the {resource}"
        called = f"the right{'s' if len(rights) > 1 else ''} {', '.join(rights)}" if rights else "a right"
        missing = f"{called} on {named}"
        command = f": {self._make_command()}" if name and rights else ""
        super().__init__(
            conn_id,
            doing,
            code,
            f"{user or 'its user'} lacks {missing}",
            f"Grant {missing} to {user or 'the user'} of connection `{conn_id}`{command}; docs/connections.md lists all rights",
        )

    def _make_command(self) -> str:
        """Return the command that grants the rights, in backquotes. Its placeholders have the form ``<name>``."""
        user = re.match("user `([^`]+)`", self.user)
        if self.resource == "cluster":
            resource = "--cluster"
        elif self.resource == "transactional id":
            # The ids of all pipelines of a ledger have one prefix.
            prefix = f"{self.name.partition('.')[0]}."
            resource = f"--transactional-id {shlex.quote(prefix)} --resource-pattern-type prefixed"
        else:
            resource = f"--{self.resource} {shlex.quote(self.name)}"
        operations = " ".join(f"--operation {right}" for right in self.needed or self.rights)
        return (
            "`kafka-acls.sh --bootstrap-server <broker> --command-config <admin.properties> --add "
            f"--allow-principal {shlex.quote(f'User:{user[1]}') if user else 'User:<user>'} {resource} {operations}`"
        )

    def name_connection(self, conn_id: str) -> RightMissing:
        """Return this error with the connection, if it has none."""
        return self if self.conn_id else self.describe_as(conn_id, self.doing)

    def describe_as(self, conn_id: str, doing: str) -> RightMissing:
        """Return this error for another connection and another description of what was requested."""
        return RightMissing(conn_id, doing, self.code, self.user, self.resource, self.name, self.rights, self.needed)


class TopicMissing(KafkaSparkError):
    """Raised when topics or partitions do not exist on the cluster.

    :param conn_id: the Airflow connection.
    :param topics: the topics or partitions.
    """

    def __init__(self, conn_id: str, topics: Sequence[str]) -> None:
        self.conn_id = conn_id
        self.topics = tuple(topics)
        names = quote_names(self.topics)
        verb = "does" if len(self.topics) == 1 else "do"
        super().__init__(
            f"{names} {verb} not exist on the cluster of connection `{conn_id}`",
            expected="topics that exist",
            action="Create them, or correct their names",
        )


class GroupHasMembers(KafkaSparkError):
    """Raised when the offsets of a consumer group cannot be set because the group has live members.

    :param group_id: the consumer group.
    :param members: its members.
    """

    def __init__(self, group_id: str, members: Sequence[str]) -> None:
        self.group_id = group_id
        self.members = tuple(members)
        super().__init__(
            f"Consumer group `{group_id}` has live members: {', '.join(self.members) or 'unknown'}",
            expected="a group without other members, since its offsets belong to the pipeline",
            action="Stop these consumers, or give the pipeline a `group_id` of its own",
        )


class ConsumerUnhealthy(KafkaSparkError):
    """Raised when a sensor waits for a consumer whose status is in ``fail_on``.

    :param consumer: the consumer, in words.
    :param status: its status, as ``STOP``.
    :param reason: reason of the status.
    :param lag: its lag, in words.
    """

    def __init__(self, consumer: str, status: str, reason: str, lag: str) -> None:
        self.consumer, self.status, self.reason, self.lag = consumer, status, reason, lag
        super().__init__(
            f"{consumer[:1].upper()}{consumer[1:]} has the status {status}: {reason}. {lag[:1].upper()}{lag[1:]}",
            expected="a consumer that works off its backlog",
            action="Find the reason, or remove the status from `fail_on`",
        )
