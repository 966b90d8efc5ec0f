"""Engines: forked, replaced under their ids, taken over by a successor, started by a profile's launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

SCENARIOS = Path(__file__).with_name("engine_scenarios.py")

pytestmark = pytest.mark.cluster


def run(scenario: str, directory: Path, **environment: str) -> dict[str, Any]:
    """What the scenario prints; afterwards nothing of its cluster may be there."""
    mark = f"FTNB_RUNTIME_DIR={directory}"
    started = subprocess.Popen(
        [sys.executable, str(SCENARIOS), scenario, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=directory, env={**os.environ, "FTNB_RUNTIME_DIR": str(directory), **environment},
    )
    try:
        output, errors = started.communicate(timeout=120)
        assert started.returncode == 0, errors[-3000:]
        assert processes_with(mark) == []
        return json.loads(output.splitlines()[-1])
    finally:
        for process in [started, *processes_with(mark)]:
            if process.poll() is None if process is started else True:
                process.kill()
        started.wait()


def processes_with(mark: str) -> list[psutil.Process]:
    name, value = mark.split("=", 1)
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_forked_engines_are_like_others(tmp_path: Path) -> None:
    told = run("forked", tmp_path)
    assert told["server_threads"] == 1
    for rank, engine in enumerate(told["engines"]):
        assert engine["pid"] == engine["session"] == told["pids"][rank]
        assert engine["parent"] == told["me"] and engine["cwd"] == str(tmp_path)
        assert engine["rank"] == str(rank) and not engine["room"]
        assert engine["cmdline"][1:5] == ["-P", "-m", "ftnb.rank.engine", f"--IPEngine.id={rank}"]
    assert told["mark"] in told["engines"][0]["shown"]
    # Nobody draws the numbers of another.
    assert all(a != b for a, b in zip(told["engines"][0]["random"], told["engines"][1]["random"], strict=True))
    # What left the session of a rank is known by its environment; its nanny and the other engine are not taken for it.
    assert told["orphans"] == [told["stray"]]
    assert told["exits"] == {str(told["pids"][0]): -signal.SIGKILL}
    assert told["replaced"] and told["without_server"] and told["server_ended"] and told["another_server"]
    assert told["left"] == []


def test_a_replacement_gets_its_id_without_the_nannys_help(tmp_path: Path) -> None:
    assert run("ids", tmp_path) == {"ids": [0, 1], "left": []}


def test_a_successor_takes_over_and_the_controller_is_replaced(tmp_path: Path) -> None:
    told = run("adoption", tmp_path)
    assert told == {
        "same_engines": True, "status": None, "pids": True, "new_client": True, "stray_ended": True, "new_server": True,
        "left": [],
    }


def test_profiles(tmp_path: Path) -> None:
    configs = {
        "nothing": "c.LocalEngineSetLauncher.engine_cmd = ['sh', '-c', 'echo no engines today; exit 7']\n",
        "own": "from ipyparallel.cluster.launcher import LocalEngineSetLauncher\n"
               "class Own(LocalEngineSetLauncher): pass\n"
               "c.Cluster.engine_launcher_class = Own\n",
    }  # fmt: skip
    for name, config in configs.items():
        directory = tmp_path / "ipython" / f"profile_{name}"
        directory.mkdir(parents=True)
        (directory / "ipcluster_config.py").write_text(config)
    told = run("profile", tmp_path, IPYTHONDIR=str(tmp_path / "ipython"))
    assert "no IPython profile 'nowhere'" in told["nowhere"]
    assert told["nothing"]["process"] is None and told["nothing"]["exit"] == 7
    assert "no engines today" in told["nothing"]["output"]
    assert told["own"] == {"process": None, "servers": 1}
    assert told["nothing_left"] == told["own_left"] == []
    left = [path for name in configs for path in (tmp_path / "ipython" / f"profile_{name}").rglob("*.json")]
    assert left == []
