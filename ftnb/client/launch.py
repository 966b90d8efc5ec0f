"""Start a supervisor, or find the one that runs; wait until its ranks have answered."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftnb.client.ending import STOP_ANSWER_S, count_ranks, end, living, log_hint, ranks_of
from ftnb.errors import ClusterError, NoClusterError
from ftnb.wire import paths, proc, reaper, records
from ftnb.wire.client import ClientConnection
from ftnb.wire.finding import DeadCluster, load
from ftnb.wire.takeover import Spawn, Takeover

Progress = Callable[[dict[str, Any]], None]  # gets a cluster status with "elapsed_s" and "num_ranks" added

POLL_S = 0.1
START_TIMEOUT_S = 180.0  # loading torch four times from a cold network disk takes its time


@dataclass(frozen=True)
class Plan:
    """What a supervisor is started with."""

    name: str
    num_ranks: int
    threads: int
    num_spares: int = 0
    backend: str = "auto"
    linger_s: float = 60.0
    keep: bool = False
    profile: str | None = None

    def command(self) -> list[str]:
        # -P: a json.py beside the notebook must not stand in for the standard library's.
        command = [
            sys.executable, "-P", "-m", "ftnb.supervisor", "--name", self.name,
            "--num-ranks", str(self.num_ranks), "--threads", str(self.threads),
            "--backend", self.backend, "--linger", f"{self.linger_s:g}",
        ]  # fmt: skip
        if self.num_spares:
            command += ["--spares", str(self.num_spares)]
        if self.keep:
            command.append("--keep")
        if self.profile is not None:
            command += ["--profile", self.profile]
        return command


def start(plan: Plan, progress: Progress) -> tuple[ClientConnection, subprocess.Popen]:
    """A connection to a new cluster whose ranks have all answered.

    Whatever goes wrong on the way (Ctrl-C too), nothing that was started here stays behind.
    """
    began = time.monotonic()
    log = paths.make_private_dir(paths.cluster_dir(plan.name)) / "supervisor.log"
    token = secrets.token_hex(8)
    process = _spawn(plan.command(), log, token)
    connection = None
    try:
        connection = _wait_for_connection(plan, process, log, began, progress)
        _wait_for_ranks(plan, connection, log, began, progress)
        return connection, process
    except BaseException:
        if connection is not None:
            connection.expect_end()
            with contextlib.suppress(ClusterError):
                connection.request("stop_cluster", timeout_s=STOP_ANSWER_S)
            connection.close()
        if not end(process):
            reaper.reap(paths.cluster_dir(plan.name), token=token)
        raise


def running(name: str) -> bool:
    """Whether a living supervisor owns the cluster `name`."""
    try:
        load(name)
    except NoClusterError:
        return False
    return True


def attach(name: str, show: Callable[[str], None] = print) -> ClientConnection:
    """A connection to the cluster `name`; when its supervisor is dead and its ranks are not, to a successor."""
    try:
        return ClientConnection(load(name), successor_of(name))
    except DeadCluster as dead:
        remains = living(name)
        if not ranks_of(remains):
            raise NoClusterError(_nothing_to_adopt(name, dead.connection.pid, remains)) from None
        show(
            f"The supervisor of cluster {name!r} (pid {dead.connection.pid}) is gone; "
            f"{count_ranks(ranks_of(remains))} of it live on. A successor is being started."
        )
        return _adopt(name, dead)


def _adopt(name: str, dead: DeadCluster) -> ClientConnection:
    lost = proc.ProcessId(dead.connection.pid, dead.connection.pid_started)
    takeover = Takeover(successor_of(name), lost, "is gone")
    while True:
        try:
            present = load(name)
        except DeadCluster as error:
            present = error.connection
        except NoClusterError:
            present = None
        if (found := takeover.step(present)) is not None:
            connection = ClientConnection(found, successor_of(name))
            for child in takeover.new_children():
                connection.own(child)
            return connection
        if takeover.problem is not None:
            raise NoClusterError(
                f"The supervisor of cluster {name!r} (pid {lost.pid}) is gone. {takeover.problem} "
                f"{log_hint(name)}Type %ft_cluster start (in Python: Session.start())."
            )
        time.sleep(0.05)


def successor_of(name: str) -> Spawn:
    """What starts a successor for the supervisor of the cluster `name`."""

    def spawn(lost: proc.ProcessId) -> subprocess.Popen:
        directory = paths.cluster_dir(name)
        header = records.read_header(directory / records.FILE_NAME)
        # With the token it can be found, should it have to be ended before it has recorded itself.
        command = [
            sys.executable, "-P", "-m", "ftnb.supervisor", "--name", name, "--adopt",
            "--lost", f"{lost.pid}:{lost.started}",
        ]  # fmt: skip
        return _spawn(command, directory / "supervisor.log", header.token if header else "")

    return spawn


def log_tail(log: Path, num_lines: int = 15) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return ""
    return "\n".join(lines)


def _spawn(command: list[str], log: Path, token: str) -> subprocess.Popen:
    environment = dict(os.environ)
    environment.pop(records.TOKEN_VARIABLE, None)  # of a cluster in one of whose ranks this process runs
    if token:
        environment[records.TOKEN_VARIABLE] = token
    home = Path(__file__).resolve().parents[2]
    if not {"site-packages", "dist-packages"} & set(home.parts):
        # A checkout that is not installed: only this process knows where it lies.
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(home) + (os.pathsep + known if known else "")
    with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, env=environment
        )


def _wait_for_connection(
    plan: Plan, process: subprocess.Popen, log: Path, began: float, progress: Progress
) -> ClientConnection:
    while True:
        try:
            found = load(plan.name)
        except NoClusterError:
            found = None
        if found is not None and found.pid == process.pid:
            connection = ClientConnection(found, successor_of(plan.name))
            connection.own(process)
            return connection
        if process.poll() == paths.EXIT_NAME_TAKEN:
            raise ClusterError(
                f"A cluster named {plan.name!r} is being started elsewhere at this moment. Use it with %ft_cluster "
                f"attach {plan.name} (in Python: ftnb.Session.attach({plan.name!r})), or start one with --name NAME."
            )
        if process.poll() is not None:
            raise _failed(plan, f"its supervisor ended with exit code {process.returncode}", log)
        _check_time(plan, began, log)
        progress({"state": "starting", "ranks": [], "elapsed_s": time.monotonic() - began,
                  "num_ranks": plan.num_ranks})  # fmt: skip
        time.sleep(0.05)


def _wait_for_ranks(
    plan: Plan, connection: ClientConnection, log: Path, began: float, progress: Progress
) -> None:
    while True:
        status = connection.request("status")
        progress({**status, "elapsed_s": time.monotonic() - began, "num_ranks": plan.num_ranks})
        if status["state"] == "failed":
            raise _failed(plan, _error_text(status.get("error")), log)
        if status["state"] != "starting":
            return
        _check_time(plan, began, log)
        time.sleep(POLL_S)


def _check_time(plan: Plan, began: float, log: Path) -> None:
    if time.monotonic() - began > START_TIMEOUT_S:
        raise _failed(plan, f"not all ranks had answered after {START_TIMEOUT_S:.0f} s", log)


def _nothing_to_adopt(name: str, pid: int, remains: list[records.Recorded]) -> str:
    others = f" Of it there is still: {', '.join(map(str, remains))}, of no use without ranks." if remains else ""
    return (
        f"The cluster {name!r} is gone: its supervisor (pid {pid}) no longer runs, and no rank of it lives.{others} "
        f"{log_hint(name)}Start a new one with %ft_cluster start{'' if name == 'default' else f' --name {name}'} "
        "(in Python: ftnb.Session.start()), which clears that away."
    )


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or "no reason given")


def _failed(plan: Plan, reason: str, log: Path) -> ClusterError:
    tail = log_tail(log)
    return ClusterError(
        f"The cluster {plan.name!r} could not be started: {reason}. Nothing was left running."
        + (f"\nThe end of {log}:\n{tail}" if tail else f" (Log: {log})"),
        log=str(log),
    )
