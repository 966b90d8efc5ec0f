"""Attaching to what is not there, names in use, profiles that start nothing: a clear message, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_tools import CELL, GLOBAL_BATCH, Census, check_report, says, wait_until

import ftnb
from ftnb.errors import ClusterError, NoClusterError, UsageError
from ftnb.wire import paths


@pytest.fixture
def census(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Census]:
    """A runtime directory of this test's own; what is left there in the end fails it."""
    monkeypatch.setenv("FTNB_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)
    census = Census(tmp_path / "runtime")
    try:
        yield census
        wait_until(lambda: not census.left(), "nothing is left", 40)
    finally:
        census.end_all()


def attach_fails(*parts: str, name: str = "bad") -> None:
    with pytest.raises(NoClusterError) as caught:
        ftnb.Session.attach(name, show=lambda text: None)
    says(caught.value, *parts, "%ft_cluster start")


def test_nothing_to_attach_to(census: Census) -> None:
    attach_fails("No cluster named 'bad' is running", "--name bad", r"Session\.start")
    with pytest.raises(UsageError):
        ftnb.Session.attach("../up")
    assert census.take() == set()


def test_a_damaged_connection_file(census: Census) -> None:
    paths.make_private_dir(paths.cluster_dir("bad"))
    for text in ("", "{", "[1, 2]", '{"name": "bad"}'):
        paths.write_private(paths.connection_file("bad"), text)
        attach_fails("connection file", "damaged")
    assert census.take() == set()


def quiet_start(num_ranks: int = 1, **options) -> ftnb.Session:
    return ftnb.Session.start(num_ranks, name="bad", show=lambda text: None, **options)


def test_the_connection_file_of_a_dead_cluster(census: Census) -> None:
    """Everything was killed, by the kernel when memory ran out, say: attach says so, and start clears it away."""
    session = quiet_start()
    pid = session.status()["supervisor_pid"]
    session._connection.expect_end()  # as after the end of the notebook: nobody is left to start a successor
    census.take()
    census.end_all()
    wait_until(lambda: not census.left(), "all are dead")
    assert paths.connection_file("bad").exists()
    attach_fails("The cluster 'bad' is gone", str(pid), "no rank of it lives")
    assert not session.alive
    with quiet_start() as again:
        run = again.train(CELL, steps=4, global_batch=GLOBAL_BATCH, names={})
        check_report(run.wait(timeout_s=60), [], world_size=1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_the_connection_file_of_somebody_else(census: Census) -> None:
    with quiet_start():
        os.chown(paths.connection_file("bad"), 12345, 12345)
        ran = subprocess.run(
            [sys.executable, "-c", "import ftnb\nftnb.Session.attach('bad')"], capture_output=True, text=True, timeout=60
        )
        assert ran.returncode != 0 and "belongs to another user" in ran.stderr, ran.stderr
        os.chown(paths.connection_file("bad"), os.getuid(), os.getgid())


def test_a_name_that_is_in_use(census: Census) -> None:
    """From another process the name is taken, whether its supervisor lives or not; the cluster is not disturbed."""
    code = "import ftnb\nftnb.Session.start(1, name='bad', show=print)"
    with quiet_start() as session:
        pids = [entry["pid"] for entry in session.status()["ranks"]]
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert ran.returncode != 0, ran.stdout
        for words in ("A cluster named 'bad' is running already", "%ft_cluster attach bad", "--name NAME"):
            assert words in ran.stderr, ran.stderr
        assert [entry["pid"] for entry in session.status()["ranks"]] == pids


def test_a_name_whose_cluster_has_lost_its_supervisor(census: Census) -> None:
    session = quiet_start()
    session._connection.expect_end()
    os.kill(session.status()["supervisor_pid"], signal.SIGKILL)
    wait_until(lambda: not session._connection.supervisor_alive(), "the supervisor is gone")
    with pytest.raises(ClusterError) as caught:
        quiet_start()
    says(caught.value, "has lost its supervisor", "1 rank of it live", "%ft_cluster attach bad", "%ft_cluster stop bad")
    said: list[str] = []
    with ftnb.Session.attach("bad", show=said.append) as again:
        assert any("successor" in line for line in said), said
        run = again.train(CELL, steps=4, global_batch=GLOBAL_BATCH, names={})
        check_report(run.wait(timeout_s=60), [], world_size=1)


# What the launcher's command does -> what the message says
LAUNCHERS = {
    "exits with a message": (["sh", "-c", "echo no licence for this node; exit 7"], ["no licence for this node"]),
    "exits without a word": (["sh", "-c", "exit 3"], ["3"]),
    "is not there": (["/no/such/launcher"], ["/no/such/launcher"]),
}


@pytest.mark.parametrize("what", LAUNCHERS)
def test_a_profile_that_starts_nothing(
    census: Census, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    command, parts = LAUNCHERS[what]
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    profile = tmp_path / "ipython" / "profile_nothing"
    profile.mkdir(parents=True)
    (profile / "ipcluster_config.py").write_text(
        f"c = get_config()\nc.LocalEngineLauncher.engine_cmd = {command!r}\n"
        f"c.LocalEngineSetLauncher.engine_cmd = {command!r}\n"
    )
    with pytest.raises(ClusterError) as caught:
        quiet_start(2, profile="nothing")
    says(caught.value, "could not be started", "Nothing was left running", *parts)
    assert census.left() == []
    with quiet_start():
        pass  # the name is free


def test_a_profile_that_is_not_there(census: Census, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with pytest.raises(ftnb.FtnbError) as caught:
        quiet_start(profile="never-made")
    says(caught.value, "never-made", "ipython profile")
    assert census.left() == []
