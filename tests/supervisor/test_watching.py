"""Who answers and who does not: a real supervisor loop, real connections, real signals; ranks are agents only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).with_name("watch_scenarios.py")
LIMIT_S = 60.0


class Scenario:
    def __init__(self, name: str, runtime_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCENARIOS), name], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "FTNB_RUNTIME_DIR": str(runtime_dir)},
        )  # fmt: skip
        self.pids: list[int] = self.told()["pids"]

    def told(self) -> dict:
        line = self.process.stdout.readline()
        assert line, "the scenario ended early"
        return json.loads(line)

    def end(self) -> None:
        """Whatever has happened, nothing is left."""
        for pid in [self.process.pid, *getattr(self, "pids", [])]:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def scenario(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scenario]:
    running = Scenario(request.param, tmp_path)
    try:
        yield running
    finally:
        running.end()


@pytest.mark.parametrize("scenario", ["stopped"], indirect=True)
def test_a_stopped_rank_and_a_stopped_spare_are_found_and_ended(scenario: Scenario) -> None:
    told = scenario.told()
    assert "error" not in told, told
    for name in ("rank", "spare"):
        assert told[f"{name}_down_s"] < 1.0  # 0.5 s on a machine that has nothing else to do
        assert told[f"{name}_shown"] == "suspect"
        assert told[f"{name}_state"] == "failed"
        assert told[f"{name}_down_s"] + told[f"{name}_ended_s"] < 2.5
    assert len(told["notes"]) == 2
    assert told["notes"][0].startswith("Rank 1 has been stopped (SIGSTOP): no heartbeat for 0.")
    assert told["notes"][1].startswith("A spare (pid") and "stopped (SIGSTOP)" in told["notes"][1]
    assert sorted(told["ended"]) == sorted([scenario.pids[2], scenario.pids[4]])


@pytest.mark.parametrize("scenario", ["interpreter_lock"], indirect=True)
def test_a_held_interpreter_lock_is_no_failure(scenario: Scenario) -> None:
    told = scenario.told()
    assert "error" not in told, told
    assert told["linked"] is True and told["phi"] > 8, "silent, but its connection answers"
    assert told["shown"] == "suspect"
    assert told["alive"] is True and told["notes"] == [] and told["ended"] == []


@pytest.mark.parametrize("scenario", ["everybody"], indirect=True)
def test_a_pause_of_everybody_is_nobodys_failure(scenario: Scenario) -> None:
    time.sleep(1.0)  # some heartbeats first
    supervisor, *agents = scenario.pids
    for pid in [*agents, supervisor]:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    os.kill(supervisor, signal.SIGCONT)
    time.sleep(0.75)  # the agents later: their connections count as gone by then
    for pid in agents:
        os.kill(pid, signal.SIGCONT)
    told = scenario.told()
    assert "error" not in told, told
    assert told["alive"] == [True] * 4
    assert told["notes"] == [] and told["ended"] == []


@pytest.mark.parametrize("scenario", ["reconnect"], indirect=True)
def test_a_connection_with_the_number_of_another_one_is_not_taken_for_it(scenario: Scenario) -> None:
    told = scenario.told()
    assert "error" not in told, told
    assert told["reused"] is True, "this test needs numbers that are used again"
    assert told["down_s"] < 1.0
    assert told["others"] == [True] * 3


@pytest.mark.parametrize("scenario", ["stacks"], indirect=True)
def test_stacks_of_those_that_answer(scenario: Scenario) -> None:
    told = scenario.told()
    assert "error" not in told, told
    assert told["answers"]["1"] is None
    assert told["answers"]["0"] == told["answers"]["2"]
    assert told["answers"]["0"]["stack"] == ['File "x.py", line 1, in f']


@pytest.mark.parametrize("scenario", ["unkillable"], indirect=True)
def test_nobody_waits_for_ever_for_a_process_that_cannot_be_killed(scenario: Scenario) -> None:
    told = scenario.told()
    assert "error" not in told, told
    assert 5.0 <= told["took_s"] < 8.0
    assert told["cut_off"] is True and told["heard"] is False
    assert "Rank 1" in told["notes"][0] and "cut off" in told["notes"][0]


@pytest.mark.parametrize("scenario", ["books"], indirect=True)
def test_what_was_told_is_not_told_again_and_what_comes_late_does_not_count(scenario: Scenario) -> None:
    told = scenario.told()
    assert "error" not in told, told
    assert told["nan"] == ["Step 2: loss was not finite on rank 1. The update of this step is skipped."]
    assert told["digests"] is None
    assert told["limit_s"] == told["limit_s_then"] == 40.0
    assert told["first"] == [False, True, True]
    assert told["first_then"] == [False, True]
    assert told["names"] == [5, 0], "nobody needs them any more"
