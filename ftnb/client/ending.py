"""The end of a cluster, in whatever state it is: by word where its supervisor listens, else by force."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time

from ftnb.errors import ClusterError, NoClusterError
from ftnb.wire import paths, reaper, records
from ftnb.wire.client import ClientConnection, connect
from ftnb.wire.finding import DeadCluster

STOP_TIMEOUT_S = 15.0
# A supervisor that does not say within this time that it will stop is ended by force.
STOP_ANSWER_S = 5.0


def stop_by_name(name: str) -> None:
    """End the cluster `name`, to which this process has no session, in whatever state it is."""
    try:
        connection = connect(name)
    except DeadCluster:
        connection = None
    except NoClusterError:
        if not living(name):
            raise
        connection = None  # it was being stopped, and was not finished
    if connection is not None:
        stop(connection, None)
    else:
        _raise_if_left(name, force_end(name))


def stop(connection: ClientConnection, process: subprocess.Popen | None) -> None:
    """End the cluster of `connection`: by word, or by force when the supervisor is dead, stopped or at odds.

    Returns when nothing of it is left; `process` is the supervisor, if it is our child.
    """
    name, problem = connection.connection.name, None
    connection.expect_end()  # no successor for a supervisor that ends
    if connection.supervisor_alive():
        try:
            connection.request("stop_cluster", timeout_s=STOP_ANSWER_S)
        except (ClusterError, NoClusterError) as error:
            problem = error
    if process is not None and process.pid != connection.supervisor_pid:
        process = None  # our child was a predecessor
    gone = problem is None and wait_until_gone(connection, process)
    # A supervisor that was killed leaves its connection file; so does one that has just been started.
    ended_well = gone and (process is None or process.returncode == 0) and not paths.connection_file(name).exists()
    # After a good end there is nothing to find; it is looked for all the same, which takes some milliseconds.
    left = reaper.reap(paths.cluster_dir(name), token=connection.token, keep_log=not ended_well)
    if not gone:
        connection.kill_supervisor()  # one that could not record itself
        if not wait_until_gone(connection, process, timeout_s=2.0) and problem is not None:
            raise problem
    connection.close()
    _raise_if_left(name, left)


def _raise_if_left(name: str, left: list[records.Recorded]) -> None:
    if left:
        raise ClusterError(
            f"Of cluster {name!r} these processes could not be ended, not even by SIGKILL: "
            f"{', '.join(map(str, left))}. A process that waits for a disk or a device ends when that answers; then "
            f"type %ft_cluster stop {name} again."
        )


def living(name: str) -> list[records.Recorded]:
    """The processes of the cluster `name` that are recorded and run, whatever has become of its supervisor."""
    return reaper.living(paths.cluster_dir(name))


def ranks_of(found: list[records.Recorded]) -> list[records.Recorded]:
    return [recorded for recorded in found if recorded.what == records.RANK]


def force_end(name: str) -> list[records.Recorded]:
    """End whatever is left of the cluster `name` by SIGKILL; returns what is there still."""
    return reaper.reap(paths.cluster_dir(name))


def clear_remains(name: str) -> None:
    """Before a start: take away what a dead cluster of that name has left; raises `ClusterError` when ranks live."""
    header = records.read_header(paths.cluster_dir(name) / records.FILE_NAME)
    remains = living(name)
    supervisors = [recorded for recorded in remains if recorded.what == records.SUPERVISOR]
    if supervisors or not (remains or paths.connection_file(name).exists()):
        return  # one is being started this moment, which the new one will find out; or nothing is there
    if ranks := ranks_of(remains):
        raise ClusterError(
            f"The cluster {name!r} has lost its supervisor, but {count_ranks(ranks)} of it live on "
            f"({', '.join(f'pid {rank.process.pid}' for rank in ranks)}). Take it over with all it is doing: "
            f"%ft_cluster attach {name} (in Python: Session.attach({name!r})), or end it: %ft_cluster stop {name} "
            f"(ftnb.client.session.stop_cluster({name!r})). A second one beside it: %ft_cluster start --name NAME "
            "(Session.start(name=NAME))."
        )
    # Somebody may be starting a new one this moment: that one is left alone.
    reaper.reap(paths.cluster_dir(name), token=header.token if header else None, give_way=True)


def end(process: subprocess.Popen, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Make our own supervisor end: by word first, by force (False then) when that did not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return process.returncode in (0, paths.EXIT_NAME_TAKEN)


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


def log_hint(name: str) -> str:
    log = paths.cluster_dir(name) / "supervisor.log"
    return f"Its log: {log}. " if log.exists() else ""


def count_ranks(ranks: list[records.Recorded]) -> str:
    return "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
