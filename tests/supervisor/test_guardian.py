"""The guardian, a real process, of a made-up cluster of real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "wire"))

from process_trees import Trees, wait_until

from ftnb.supervisor import guardian
from ftnb.wire import proc, reaper, records

MAX_PSS_MB = 12  # one runs beside every cluster, for as long as it lives


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Trees]:
    made = Trees(tmp_path / "cluster")
    yield made
    made.end()


@pytest.fixture
def guard(trees: Trees) -> Iterator:
    started: list[subprocess.Popen] = []

    def start(limit_s: float) -> subprocess.Popen:
        environment = {**os.environ, records.TOKEN_VARIABLE: trees.token}
        started.append(guardian.start(trees.directory, limit_s, environment))
        trees.records.note(records.GUARDIAN, proc.identify(started[-1].pid))
        office = trees.directory / guardian.OFFICE_NAME
        wait_until(lambda: office.exists() and office.read_text().startswith(f"{started[-1].pid} "), "it is in office")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def log_of(trees: Trees) -> str:
    return (trees.directory / "supervisor.log").read_text()


def test_a_supervisor_that_gives_no_sign_of_life_any_more(trees: Trees, guard) -> None:
    """Everything is stopped, the supervisor too: nobody but the guardian can end it."""
    trees.start("setsid SLEEP & env -i setsid SLEEP & exec SLEEP", records.SUPERVISOR, count=3)
    trees.start("exec SLEEP")
    (trees.directory / "connection.json").touch()
    process = guard(1.0)
    for stopped in trees.alive():
        stopped.signal(signal.SIGSTOP)
    assert process.wait(30) == 0
    assert trees.alive() == set()
    assert log_of(trees).count("no sign of life of the supervisor for 1 s and no successor; ending the cluster: ") == 1
    assert "supervisor (pid" in log_of(trees) and "rank (pid" in log_of(trees)
    assert not (trees.directory / "connection.json").exists()


def test_as_long_as_the_beat_is_renewed_it_does_nothing(trees: Trees, guard) -> None:
    trees.start("exec SLEEP", records.SUPERVISOR)
    process = guard(2.0)
    beats = 0

    def beat() -> bool:
        nonlocal beats
        guardian.renew_beat(trees.directory)
        beats += 1
        return beats > 500

    wait_until(beat, "five seconds have passed")
    assert process.poll() is None and len(trees.alive()) == 1


def test_what_would_be_out_of_sight_after_its_parents_death_is_recorded(trees: Trees, guard) -> None:
    rank = trees.start("env -i setsid SLEEP & exec SLEEP", count=2)
    stray = next(process for process in trees.alive() if process.pid != rank.pid)
    guard(60.0)
    limit_s = 3.0 * guardian.NOTE_STRAYS_EVERY
    wait_until(lambda: stray in {r.process for r in reaper.living(trees.directory)}, "the stray is recorded", limit_s)
    assert reaper.note_strays(trees.directory) == 0
    rank.signal(signal.SIGKILL)
    wait_until(lambda: trees.alive() == {stray}, "the rank is dead")
    assert reaper.reap(trees.directory) == [] and trees.alive() == set()


@pytest.mark.parametrize("gone", ["directory", "beat"])
def test_a_cluster_that_was_stopped_needs_none(trees: Trees, guard, gone: str) -> None:
    trees.start("exec SLEEP")
    process = guard(60.0)
    if gone == "directory":
        shutil.rmtree(trees.directory)
    else:
        (trees.directory / "beat").unlink()
    assert process.wait(30) == 0
    assert len(trees.alive()) == 1


def test_the_older_of_two_gives_way(trees: Trees, guard) -> None:
    trees.start("exec SLEEP")
    first, second = guard(60.0), guard(60.0)
    assert first.wait(30) == 0
    assert second.poll() is None and len(trees.alive()) == 1


def test_of_many_started_at_once_exactly_one_remains(trees: Trees) -> None:
    many = [guardian.start(trees.directory, 60.0, dict(os.environ)) for _ in range(6)]
    try:
        wait_until(lambda: sum(process.poll() is None for process in many) == 1, "one remains")
        (trees.directory / "beat").unlink()
        for process in many:
            assert process.wait(30) == 0
    finally:
        for process in many:
            process.kill()
            process.wait()


def test_it_is_small_and_alone_in_its_session(trees: Trees, guard) -> None:
    process = guard(60.0)
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    pss_kb = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    assert pss_kb < MAX_PSS_MB * 1024
    assert os.getsid(process.pid) == process.pid
    assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1


def test_who_was_suspended_itself_draws_no_conclusion() -> None:
    patience = guardian.Patience(limit_s=10.0)
    assert not patience.look("sign", 0.0)
    assert not patience.look("sign", 1.0)
    assert not patience.look("sign", 4000.0)
    now = 4000.0
    while not patience.look("sign", now := now + 1.0):
        pass
    assert now == 4007.0  # 1 + 2 + 7
    assert not patience.look("another sign", now + 1.0)
    assert patience.silent_s == 0.0


def test_wrong_arguments_are_told(capsys) -> None:
    assert guardian.main(["--directory", "x", "--limit", "soon"]) == 2
    assert "usage" in capsys.readouterr().err
