"""Start a supervisor, or find the one that runs; wait until its ranks have answered."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftnb.errors import ClusterError, NoClusterError
from ftnb.wire import paths
from ftnb.wire.client import ClientConnection, connect, load

Progress = Callable[[dict[str, Any]], None]  # gets a cluster status with "elapsed_s" and "num_ranks" added

POLL_S = 0.1
START_TIMEOUT_S = 180.0  # loading torch four times from a cold network disk takes its time
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Plan:
    """What a supervisor is started with."""

    name: str
    num_ranks: int
    threads: int
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
    process = _spawn(plan, log)
    connection = None
    try:
        connection = _wait_for_connection(plan, process, log, began, progress)
        _wait_for_ranks(plan, connection, log, began, progress)
        return connection, process
    except BaseException:
        if connection is not None:
            with contextlib.suppress(ClusterError):
                connection.request("stop_cluster", timeout_s=5)
            connection.close()
        end(process)
        raise


def running(name: str) -> bool:
    """Whether a living supervisor owns the cluster `name`."""
    try:
        load(name)
    except NoClusterError:
        return False
    return True


def attach(name: str) -> ClientConnection:
    return connect(name)


def end(process: subprocess.Popen, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Make our own supervisor end: by word first, by force when that did not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_gone(
    connection: ClientConnection, process: subprocess.Popen | None, timeout_s: float = STOP_TIMEOUT_S
) -> bool:
    """Whether the supervisor of `connection` has ended within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while connection.supervisor_alive():
        if process is not None:
            process.poll()  # reap it, if it is our child
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    if process is not None:
        # Its main thread has gone; the exit code comes when the last of its threads has.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, deadline - time.monotonic()))
    return True


def log_tail(log: Path, num_lines: int = 15) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return ""
    return "\n".join(lines)


def _spawn(plan: Plan, log: Path) -> subprocess.Popen:
    environment = dict(os.environ)
    home = Path(__file__).resolve().parents[2]
    if not {"site-packages", "dist-packages"} & set(home.parts):
        # A checkout that is not installed: only this process knows where it lies.
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(home) + (os.pathsep + known if known else "")
    with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
        return subprocess.Popen(
            plan.command(), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            start_new_session=True, env=environment,
        )  # fmt: skip


def _wait_for_connection(
    plan: Plan, process: subprocess.Popen, log: Path, began: float, progress: Progress
) -> ClientConnection:
    while True:
        try:
            found = load(plan.name)
        except NoClusterError:
            found = None
        if found is not None and found.pid == process.pid:
            return ClientConnection(found)
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
