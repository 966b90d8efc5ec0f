"""When the supervisor dies, stops or hangs, its clients see to a successor. Real processes, sockets and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "wire"))

from process_trees import Trees, wait_until

from ftnb.client import ending, launch
from ftnb.client import session as session_module
from ftnb.client.session import Session, stop_cluster
from ftnb.errors import ClusterError, NoClusterError
from ftnb.wire import client, paths, proc, reaper, records, takeover
from ftnb.wire.client import ClientConnection

PROGRAM = str(Path(__file__).with_name("scripted_supervisor.py"))
NAME = "taken"


class Place:
    """A runtime directory with scripted supervisors; ends whatever was started in it."""

    def __init__(self) -> None:
        self.directory = paths.cluster_dir(NAME)
        self.arguments: list[str] = []  # for successors
        self.connections: list[ClientConnection] = []
        self.started: list[subprocess.Popen] = []

    def spawn(self, *arguments: str, token: str | None = None) -> subprocess.Popen:
        environment = {**os.environ, **({records.TOKEN_VARIABLE: token} if token else {})}
        self.started.append(subprocess.Popen([sys.executable, PROGRAM, NAME, *arguments], env=environment))
        return self.started[-1]

    def successor(self, lost: proc.ProcessId) -> subprocess.Popen:
        header = records.read_header(self.directory / records.FILE_NAME)
        return self.spawn("--adopt", f"{lost.pid}:{lost.started}", *self.arguments, token=header and header.token)

    def start(self, token: str | None = None) -> subprocess.Popen:
        process = self.spawn(token=token)
        wait_until(paths.connection_file(NAME).exists, "the supervisor listens")
        return process

    def connect(self) -> ClientConnection:
        self.connections.append(client.connect(NAME, self.successor))
        assert self.connections[-1].request("hello")["num_ranks"] == 2
        return self.connections[-1]

    def lines(self, name: str) -> list[str]:
        return (self.directory / name).read_text().splitlines()

    def end(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("FTNB_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(session_module, "_sessions", {})
    made = Place()
    monkeypatch.setattr(launch, "successor_of", lambda name: made.successor)
    yield made
    made.end()


def in_background(ask) -> tuple[threading.Thread, list]:
    outcome: list = []

    def run() -> None:
        try:
            outcome.append(ask())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("arguments", [[], ["--new-ports"]], ids=["same ports", "other ports"])
def test_a_killed_supervisor_gets_a_successor_and_questions_are_put_to_it_again(place: Place, arguments: list[str]) -> None:
    first = place.start()
    connection = place.connect()
    place.arguments = arguments
    waiting, answer = in_background(lambda: connection.request("wait", timeout_s=None, hold_s=0.0 if len(place.started) > 1 else 60))
    changing, failure = in_background(lambda: connection.request("train", timeout_s=None, hold_s=60))
    wait_until(lambda: {"wait", "train"} <= {line.split()[1] for line in place.lines("asked")}, "both are being worked on")
    first.kill()
    changing.join(20)
    assert len(failure) == 1 and isinstance(failure[0], ClusterError)
    text = str(failure[0])
    assert f"(pid {first.pid}) was lost before it had answered 'train'" in text
    assert f"A successor (pid {place.started[1].pid}) has taken over" in text and "%ft_status" in text
    assert connection.request("status")["supervisor_pid"] == place.started[1].pid == connection.supervisor_pid
    assert connection.supervisor_alive() and connection.usable
    asked = [line.split() for line in place.lines("asked")]
    wait_until(lambda: [str(place.started[1].pid), "wait"] in [line.split() for line in place.lines("asked")], "asked again")
    assert [str(place.started[1].pid), "train"] not in asked, "nothing that changes something is done twice"
    assert first.returncode == -signal.SIGKILL or first.poll() is not None
    connection.close()
    waiting.join(5)
    assert isinstance(answer[0], ClusterError) and "closed" in str(answer[0])


def test_while_the_main_thread_computes(place: Place) -> None:
    first = place.start()
    connection = place.connect()
    first.kill()
    deadline = time.monotonic() + 20
    while connection.supervisor_pid == first.pid and time.monotonic() < deadline:
        sum(range(1000))  # never gives the interpreter lock away by itself
    assert connection.request("status")["supervisor_pid"] != first.pid


def test_supervisors_that_die_one_after_the_other_leave_no_zombie(place: Place) -> None:
    place.start()
    connection = place.connect()
    for _ in range(3):
        before = connection.supervisor_pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: connection.supervisor_pid != before and connection.supervisor_alive(), "there is another")  # noqa: B023
        assert connection.request("status")["supervisor_pid"] == connection.supervisor_pid
    # Those that the connection has started are waited for by it: by the kernel's table, not by our asking.
    for process in place.started[1:-1]:
        wait_until(lambda: proc.identify(process.pid) is None, "no zombie is left")  # noqa: B023


def test_several_clients_get_one_successor(place: Place) -> None:
    first = place.start()
    connections = [place.connect() for _ in range(4)]
    first.kill()
    pids = {connection.request("status")["supervisor_pid"] for connection in connections}
    assert len(pids) == 1 and first.pid not in pids
    wait_until(lambda: sum(process.poll() is None for process in place.started) == 1, "exactly one remains")
    assert {connection.request("status")["supervisor_pid"] for connection in connections} == pids


def test_one_that_is_stopped_for_some_seconds_is_waited_for(place: Place) -> None:
    """Longer than the heartbeats of the sockets allow, so the connection is made anew meanwhile."""
    first = place.start()
    connection = place.connect()
    changing, answer = in_background(lambda: connection.request("train", timeout_s=None, hold_s=1.0))
    wait_until(lambda: "train" in {line.split()[1] for line in place.lines("asked")}, "it is being worked on")
    first.send_signal(signal.SIGSTOP)
    asking, status = in_background(lambda: connection.request("status"))
    asking.join(7.5)
    assert asking.is_alive()
    first.send_signal(signal.SIGCONT)
    asking.join(20)
    changing.join(20)
    assert [status[0]["supervisor_pid"], answer[0]["supervisor_pid"]] == [first.pid, first.pid]
    assert len(place.started) == 1
    assert sum(line.split()[1] == "train" for line in place.lines("asked")) == 1, "it was asked again, and done once"


def test_one_that_hangs_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENT_LIMIT_S", 2.0)
    monkeypatch.setattr(client, "PING_EVERY_S", 0.3)
    first = place.start()
    connection = place.connect()
    first.send_signal(signal.SIGSTOP)
    assert connection.request("status")["supervisor_pid"] == place.started[1].pid
    wait_until(lambda: first.poll() == -signal.SIGKILL, "its successor has ended it")


def test_after_a_clean_stop_nobody_takes_over(place: Place) -> None:
    first = place.start()
    connection = place.connect()
    connection.request("stop_cluster")
    assert first.wait(20) == 0
    wait_until(lambda: not connection.usable, "it is over")
    with pytest.raises(ClusterError, match=r"was stopped.*%ft_cluster start"):
        connection.request("status")
    assert len(place.started) == 1


@pytest.mark.parametrize(
    ("code", "words", "spawned"), [(76, "could not take over", 1), (1, "ended with exit code 1 before they were in charge", 3)]
)
def test_a_successor_that_does_not_come_is_given_up(place: Place, code: int, words: str, spawned: int) -> None:
    first = place.start()
    connection = place.connect()
    place.arguments = ["--exit", str(code)]
    first.kill()
    with pytest.raises(ClusterError, match=words):
        connection.request("status")
    assert len(place.started) == 1 + spawned and not connection.usable
    with pytest.raises(ClusterError, match=words):
        connection.request("status")
    # Another notebook has more luck: this one follows.
    place.arguments = []
    other = place.spawn("--adopt", "1:none")
    wait_until(lambda: connection.supervisor_pid == other.pid, "it is found")
    assert connection.request("status")["supervisor_pid"] == other.pid


def test_no_successor_within_the_time_is_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "LIMIT_S", 1.0)
    first = place.start()
    connection = place.connect()
    place.arguments = ["--exit", "75"]
    first.kill()
    with pytest.raises(ClusterError, match="No successor was in charge after 1 s"):
        connection.request("status")


def test_another_cluster_under_the_same_name_is_not_followed(place: Place) -> None:
    first = place.start()
    connection = place.connect()
    connection.request("stop_cluster")
    assert first.wait(20) == 0
    wait_until(lambda: not connection.usable, "it is over")
    second = place.start(token="fedcba9876543210")
    with pytest.raises(ClusterError, match="was stopped"):
        connection.request("status")
    ending.stop(connection, None)
    assert second.poll() is None and client.connect(NAME).request("status")["supervisor_pid"] == second.pid


# --- stop, start and attach, whatever state the cluster is in


@pytest.fixture
def ranks(place: Place) -> Iterator[Trees]:
    """What stands in for ranks: recorded, one with a child of which no record knows, one of them stopped."""
    trees = Trees(place.directory)
    trees.start("env -i setsid SLEEP & exec SLEEP", count=2)
    stopped = trees.start("exec SLEEP")
    stopped.signal(signal.SIGSTOP)
    yield trees
    trees.end()


@pytest.mark.parametrize("state", ["running", "dead", "stopped"])
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by session"])
def test_stop_ends_everything_whatever_the_supervisor_does(
    place: Place, ranks: Trees, state: str, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "STOP_ANSWER_S", 1.0)
    first = place.start(ranks.token)
    session = None if by_name else Session(client.connect(NAME, place.successor), first)
    if state != "running":
        place.arguments = ["--exit", "75"]
        first.send_signal(signal.SIGKILL if state == "dead" else signal.SIGSTOP)
    if by_name:
        wait_until(lambda: state != "dead" or first.poll() is not None, "it is dead")
        stop_cluster(NAME)
    else:
        session.stop()
        assert not session.alive
        session.stop()
    assert ranks.alive() == set()
    assert first.wait(10) == (0 if state == "running" else -signal.SIGKILL)
    assert not paths.connection_file(NAME).exists()


def test_attach_to_a_cluster_without_a_supervisor(place: Place, ranks: Trees) -> None:
    first = place.start(ranks.token)
    first.kill()
    first.wait()
    said: list[str] = []
    session = Session.attach(NAME, show=said.append)
    assert len(said) == 1 and "is gone; 2 ranks of it live on. A successor is being started" in said[0]
    assert session.status()["supervisor_pid"] == place.started[1].pid
    assert session.num_ranks == 2 and len(ranks.alive()) == 3
    session.stop()
    assert ranks.alive() == set()


def test_attach_where_nothing_lives_says_what_was_found(place: Place) -> None:
    first = place.start()
    first.kill()
    first.wait()
    with pytest.raises(NoClusterError, match=rf"its supervisor \(pid {first.pid}\) no longer runs, and no rank.*%ft_cluster start --name taken"):
        Session.attach(NAME)
    assert len(place.started) == 1


def test_attach_to_a_name_that_never_was_names_those_that_run(place: Place) -> None:
    place.start()
    with pytest.raises(NoClusterError, match=r"No cluster named 'other' is running.*Running: taken \(%ft_cluster attach NAME\)"):
        Session.attach("other")
    with pytest.raises(NoClusterError, match=r"No cluster named 'other'"):
        stop_cluster("other")


def test_start_over_living_ranks_offers_to_take_them_or_to_end_them(place: Place, ranks: Trees) -> None:
    first = place.start(ranks.token)
    first.kill()
    first.wait()
    with pytest.raises(ClusterError, match=r"has lost its supervisor, but 2 ranks of it live on.*attach taken.*stop taken"):
        Session.start(2, name=NAME)
    assert len(ranks.alive()) == 3


def test_start_over_the_remains_clears_them_away(place: Place, ranks: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    first = place.start(ranks.token)
    controller = ranks.start("exec SLEEP", records.CONTROLLER)
    for rank in ending.ranks_of(ending.living(NAME)):
        reaper.note_strays(place.directory)  # once a rank is dead, nothing leads to its child
        rank.process.signal(signal.SIGKILL)
    first.kill()
    first.wait()
    wait_until(lambda: not ending.ranks_of(ending.living(NAME)), "the ranks are dead")
    assert controller.is_alive()

    def start(plan, progress):
        assert ranks.alive() == set() and not paths.connection_file(NAME).exists()
        place.start()
        return client.connect(NAME), place.started[-1]

    monkeypatch.setattr(launch, "start", start)
    with Session.start(2, name=NAME) as session:
        assert session.alive
