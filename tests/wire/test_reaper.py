"""Ending a cluster by force, on real processes: whatever belongs to it goes, and nothing else does."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_trees import Trees, wait_until

from ftnb.wire import proc, reaper, records

# The three ways of leaving: the session's other members, a session of its own, and both without the environment.
TREE = "SLEEP & setsid SLEEP & env -i setsid SLEEP & env -i SLEEP & wait"
# Its middle ends at once, so that nothing leads from the leader to what it has started.
ORPHANS = "(setsid sh -c 'SLEEP & wait' &) ; (SLEEP &) ; exec SLEEP"


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Trees]:
    made = Trees(tmp_path / "cluster")
    yield made
    made.end()


def test_children_in_any_session_and_without_the_environment(trees: Trees) -> None:
    trees.start(TREE, count=4)
    assert reaper.reap(trees.directory) == []
    assert trees.alive() == set()
    assert not trees.directory.exists()


def test_orphans_and_stopped_processes(trees: Trees) -> None:
    trees.start(ORPHANS, count=3)
    trees.start(TREE, records.CONTROLLER, count=4)
    for process in trees.alive():
        process.signal(signal.SIGSTOP)
    assert reaper.reap(trees.directory) == []
    assert trees.alive() == set()


def test_nobody_recorded_it_but_it_carries_the_token(trees: Trees) -> None:
    trees.start("exec SLEEP", None)
    trees.start(ORPHANS, None, count=3)
    assert reaper.reap(trees.directory) == []
    assert trees.alive() == set()


def test_the_session_of_a_leader_that_was_killed_before(trees: Trees) -> None:
    """Neither record nor token nor descent leads to its members any more."""
    leader = trees.start("env -i SLEEP & env -i SLEEP & wait", count=2)
    leader.signal(signal.SIGKILL)
    wait_until(lambda: not leader.is_alive(), "the leader is dead")
    assert len(trees.alive()) == 2
    assert reaper.reap(trees.directory) == []
    assert trees.alive() == set()


def test_what_starts_others_all_the_time_does_not_get_away(trees: Trees) -> None:
    trees.start("while :; do env -i setsid SLEEP & sleep 0.003; done", count=5)
    assert reaper.reap(trees.directory) == []
    for _ in range(20):
        assert trees.alive() == set()
        time.sleep(0.01)


def test_others_are_left_alone(trees: Trees) -> None:
    other_cluster = trees.start("exec SLEEP", None, token="another")
    # Recorded under a pid that somebody else has got since, who even leads a session of that number.
    reused = trees.start("SLEEP & exec SLEEP", None, token="", count=2)
    trees.records.note(records.RANK, proc.ProcessId(reused.pid, "1"))
    spared = trees.start("exec SLEEP")
    trees.start("exec SLEEP")
    assert reaper.reap(trees.directory, spare_pids=[spared.pid]) == []
    alive = trees.alive()
    assert len(alive) == 4 and {other_cluster, reused, spared} < alive


def test_the_reaper_itself_and_who_called_it_live_on_although_they_carry_the_token(trees: Trees) -> None:
    program = (
        "import sys; from pathlib import Path; from ftnb.wire import reaper\n"
        "left = reaper.reap(Path(sys.argv[1])); print(left, flush=True)"
    )
    trees.start("exec SLEEP")
    shell = subprocess.run(
        ["sh", "-c", '"$@"; echo the shell lives', "sh", sys.executable, "-c", program, str(trees.directory)],
        env={**os.environ, records.TOKEN_VARIABLE: trees.token}, capture_output=True, text=True, timeout=60,
    )
    assert shell.stdout.splitlines() == ["[]", "the shell lives"], shell
    assert trees.alive() == set()


def test_a_recorded_parent_of_the_reaper_is_ended(trees: Trees) -> None:
    """As the guardian ends the supervisor that has started it."""
    program = (
        "import sys; from pathlib import Path; from ftnb.wire import reaper\n"
        "left = reaper.reap(Path(sys.argv[1])); open(sys.argv[2], 'w').write(repr(left))"
    )
    said = trees.directory.parent / "said"
    supervisor = trees.start(
        f"SLEEP & until [ -e {trees.directory}/go ]; do sleep 0.01; done; "
        f"setsid {sys.executable} -c \"{program}\" {trees.directory} {said}; exec SLEEP", records.SUPERVISOR,
    )
    (trees.directory / "go").touch()
    wait_until(lambda: said.exists() and said.read_text() == "[]", "the reaper has finished")
    assert not supervisor.is_alive() and trees.alive() == set()


LOCK = "import fcntl, os, sys, time; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(fd, 2); " \
       "print('held', flush=True); time.sleep(600)"  # fmt: skip


def test_a_successor_in_charge_is_given_way_to_when_asked_for(trees: Trees) -> None:
    supervisor = trees.start("exec SLEEP", records.SUPERVISOR)
    rank = trees.start("exec SLEEP")
    (trees.directory / "connection.json").touch()
    with subprocess.Popen([sys.executable, "-c", LOCK, str(trees.directory / "lock")], stdout=subprocess.PIPE) as holder:
        try:
            holder.stdout.readline()
            assert reaper.reap(trees.directory, limit_s=0.2, give_way=True) == []
            assert trees.alive() == {rank} and not supervisor.is_alive()
            assert (trees.directory / "connection.json").exists()
        finally:
            holder.kill()


def test_a_successor_that_is_being_started_goes_with_the_rest(trees: Trees) -> None:
    trees.start("exec SLEEP")
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(trees.directory / "lock")], stdout=subprocess.PIPE,
        env={**os.environ, records.TOKEN_VARIABLE: trees.token},
    ) as holder:  # fmt: skip
        try:
            holder.stdout.readline()
            assert reaper.reap(trees.directory, limit_s=5.0) == []
            assert trees.alive() == set() and holder.wait(10) == -signal.SIGKILL
            assert not trees.directory.exists()
        finally:
            holder.kill()


def test_the_log_stays_and_what_would_lead_to_a_successor_goes(trees: Trees) -> None:
    for name in ("connection.json", "cluster.json", "supervisor.log", "rank-0.ring"):
        (trees.directory / name).touch()
    (trees.directory / "profile").mkdir()
    trees.start("exec SLEEP")
    assert reaper.reap(trees.directory) == []
    assert {path.name for path in trees.directory.iterdir()} <= {"supervisor.log", "lock"}
    assert (trees.directory / "supervisor.log").exists()


def test_who_holds_the_lock_itself_says_so(trees: Trees) -> None:
    trees.start("exec SLEEP")
    fd = os.open(trees.directory / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert reaper.reap(trees.directory, locked=True, limit_s=5.0) == []
    finally:
        os.close(fd)
    assert trees.alive() == set() and not trees.directory.exists()


def test_files_of_a_cluster_that_beats_on_another_machine_stay(trees: Trees) -> None:
    (trees.directory / "beat").touch()
    process = trees.start("exec SLEEP")
    path = trees.directory / records.FILE_NAME
    path.write_text(path.read_text().replace(records.this_machine(), "another"))
    assert reaper.reap(trees.directory) == []
    assert trees.alive() == {process}
    assert path.exists()


def test_no_directory_is_nothing_to_do(tmp_path: Path) -> None:
    assert reaper.reap(tmp_path / "never") == []
    assert reaper.living(tmp_path / "never") == []
