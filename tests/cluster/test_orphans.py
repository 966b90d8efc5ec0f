"""Whoever is killed or stopped, in whatever combination: of the cluster nothing is left, within the linger time + 30 s."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import comings
import pytest
from cluster_tools import (
    CELL,
    DEADLINE_S,
    GLOBAL_BATCH,
    SAME_F64,
    Census,
    assert_same,
    check_books,
    losses_of,
    wait_until,
)
from comings import Gate, check_changes, check_end, finish, paced

import ftnb
from ftnb.wire import paths, proc, records

LINGER_S = 2.0
LIMIT_S = LINGER_S + 30.0
NUM_RANKS = 2

KERNEL = """
import sys
import ftnb
session = ftnb.Session.start({num_ranks}, name={name!r}, linger_s={linger_s}, show=lambda text: None)
if {cell!r}:
    run = session.train({cell!r}, steps={steps}, global_batch={global_batch}, names={{}}, show=lambda text: None)
print("READY", flush=True)
sys.stdin.read()
"""


class Kernel:
    """A notebook's kernel in a process of its own, with a cluster that trains below a runtime directory of its own."""

    def __init__(self, directory: Path, *, linger_s: float = LINGER_S, cell: str | None = None, steps: int = 1_000_000) -> None:
        self.directory = directory
        self.runtime_dir = directory / "runtime"
        self.census = Census(self.runtime_dir)
        directory.mkdir(parents=True, exist_ok=True)
        cell = paced(CELL, Gate(directory)) if cell is None else cell
        code = KERNEL.format(
            num_ranks=NUM_RANKS, name="orphans", linger_s=linger_s, cell=cell, steps=steps, global_batch=GLOBAL_BATCH
        )
        with (directory / "kernel.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], env={**os.environ, "FTNB_RUNTIME_DIR": str(self.runtime_dir)}, cwd=directory,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        assert self.process.stdout.readline() == "READY\n", (self.directory / "kernel.log").read_text()
        found = wait_until(lambda: (found := self.members()) and "guardian" in found and found, "all are on record")
        assert {"supervisor", "controller", "fork server", "rank 0", "rank 1"} <= found.keys(), found
        self.census.take()

    @property
    def cluster_dir(self) -> Path:
        return self.runtime_dir / "clusters" / "orphans"

    def members(self) -> dict[str, proc.ProcessId]:
        """The living processes of the cluster by what they are for, and the kernel."""
        found = {"kernel": proc.identify(self.process.pid)}
        for recorded in records.read(self.cluster_dir / records.FILE_NAME):
            if recorded.process.is_alive():
                name = f"rank {recorded.rank}" if recorded.what == records.RANK else recorded.what
                found[name] = recorded.process
        return {name: process for name, process in found.items() if process is not None}

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.census.end_all()


def do_to(members: dict[str, proc.ProcessId], names: str, signum: int) -> None:
    """`names`: separated by commas, or all with exceptions as in "all but guardian"."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if names.startswith("all but "):
        spared = [name.strip() for name in names.removeprefix("all but ").split(",")]
        chosen = [name for name in members if name not in spared]
    for name in chosen:
        assert members[name].signal(signum), name


def check_case(directory: Path, stopped: str, killed: str) -> str:
    """"" if nothing is left after this; else what is."""
    kernel = Kernel(directory)
    try:
        kernel.wait_ready()
        members = kernel.members()
        do_to(members, stopped, signal.SIGSTOP)
        do_to(members, killed, signal.SIGKILL)
        if members["kernel"].is_alive() and "kernel" not in killed and "kernel" not in stopped:
            kernel.process.stdin.close()  # the notebook is closed, without a stop
        with contextlib.suppress(subprocess.TimeoutExpired):
            kernel.process.wait(5)
        began = time.monotonic()
        while (left := kernel.census.left()) and time.monotonic() - began < LIMIT_S:
            time.sleep(0.1)
        if not left:
            return ""
        log = kernel.cluster_dir / "supervisor.log"
        tail = log.read_text()[-1500:] if log.exists() else "no log"
        return f"stopped: {stopped or 'none'}; killed: {killed or 'none'}: after {LIMIT_S:g} s there is {left}\n{tail}"
    finally:
        kernel.close()


def check_cases(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    """Several clusters at once, so that their waiting overlaps."""
    with ThreadPoolExecutor(len(cases)) as pool:
        jobs = [pool.submit(check_case, tmp_path / str(n), *case) for n, case in enumerate(cases)]
    problems = [problem for job in jobs if (problem := job.result())]
    assert not problems, "\n\n".join(problems)


# Who is stopped before, and who is killed then.
CASES = {
    "kernel and others": [
        ("", "kernel"),
        ("", "kernel, supervisor"),
        ("", "kernel, supervisor, controller"),
        ("", "kernel, rank 0"),
    ],
    "helpers": [
        ("", "kernel, fork server, guardian"),
        ("", "kernel, supervisor, guardian"),
        ("", "supervisor, guardian, fork server"),  # while the kernel lives: a successor, which ends it all later
        ("", "kernel, supervisor, guardian, fork server, controller, rank 0"),
    ],
    "with stopped ones": [
        ("rank 1", "kernel, supervisor"),
        ("supervisor", "kernel"),
        ("rank 0, rank 1, controller", "kernel"),
        ("guardian", "kernel, supervisor"),
    ],
    "with nearly all stopped": [
        ("supervisor, controller, fork server, rank 0, rank 1", "kernel"),
        ("rank 0, rank 1, controller, fork server", "kernel, supervisor"),
        ("guardian, rank 0, fork server", "kernel, supervisor"),
        ("supervisor, guardian, controller", "kernel"),
    ],
}


@pytest.mark.parametrize("group", CASES)
def test_nothing_is_left(tmp_path: Path, group: str) -> None:
    check_cases(tmp_path, CASES[group])


def random_case(dice: random.Random) -> tuple[str, str]:
    """The kernel is killed, and of the others some are stopped and some killed; but not all of those who could act."""
    names = ["supervisor", "guardian", "controller", "fork server", "rank 0", "rank 1"]
    while True:
        fates = {name: dice.choice(("lives", "lives", "stopped", "killed")) for name in names}
        if any(fates[name] == "lives" for name in ("supervisor", "guardian", "rank 0", "rank 1")):
            break
    stopped = [name for name in names if fates[name] == "stopped"]
    # A stopped one may be killed as well.
    killed = [n for n in names if fates[n] == "killed"] + ["kernel"]
    return ", ".join(stopped), ", ".join(killed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_random_combinations(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    check_cases(tmp_path, [random_case(dice) for _ in range(3)])


@pytest.fixture
def kernel_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path, linger_s=60, steps=comings.STEPS)
    monkeypatch.setenv("FTNB_RUNTIME_DIR", str(kernel.runtime_dir))
    monkeypatch.chdir(tmp_path)
    try:
        kernel.wait_ready()
        yield kernel
    finally:
        kernel.close()


@pytest.mark.parametrize("also", ["", "supervisor"])
def test_a_new_kernel_finds_the_run_going_on(kernel_that_trains: Kernel, tmp_path: Path, also: str) -> None:
    """kill -9 of the kernel (and of the supervisor) in the middle of a run; then attach from elsewhere."""
    kernel = kernel_that_trains
    run_json = tmp_path / "ftnb_runs" / "run" / "run.json"
    metrics = run_json.with_name("metrics.jsonl")
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5, "five steps are done")
    members = kernel.members()
    do_to(members, f"kernel, {also}", signal.SIGKILL)
    kernel.process.wait()
    wait_until(lambda: members["supervisor"].is_alive() != bool(also), "the supervisor is gone, if it was killed")
    assert json.loads(run_json.read_text())["state"] not in ("finished", "stopped", "failed")
    said: list[str] = []
    with ftnb.Session.attach("orphans", show=said.append) as session:
        run = session.run
        assert run is not None and run.name == "run" and run.state == "running"
        assert any("successor" in line for line in said) == bool(also), said
        step = run.step
        wait_until(lambda: run.step >= step + 5, "it goes on")
        check_end(finish(run, Gate(tmp_path)), [], world_size=NUM_RANKS, at_start=NUM_RANKS)
        check_books(run, comings.STEPS)
        check_changes(run, [])
        assert_same(losses_of(run), comings.reference().losses, SAME_F64)
        assert {line["generation"] for line in run.ledger()} == {1}
    wait_until(lambda: not kernel.census.left(), "nothing is left after a stop", DEADLINE_S)
    assert not paths.cluster_dir("orphans").exists()
