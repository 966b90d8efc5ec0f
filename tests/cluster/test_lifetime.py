"""Whoever dies, nothing is left behind: notebook and supervisor killed without a chance to clean up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster_tools import Census, wait_until

NOTEBOOK = """
import ftnb, sys
session = ftnb.Session.start(2, name="lifetime", linger_s=1, show=lambda text: None)
print(session.status()["supervisor_pid"], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("victims", [["notebook"], ["supervisor"], ["notebook", "supervisor"]], ids="+".join)
def test_after_kill_9_everything_ends_by_itself(victims: list[str], tmp_path: Path) -> None:
    runtime_dir = tmp_path / "runtime"
    census = Census(runtime_dir)
    notebook = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK], env={**os.environ, "FTNB_RUNTIME_DIR": str(runtime_dir)}, cwd=tmp_path,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    try:
        supervisor = psutil.Process(int(notebook.stdout.readline()))
        census.take()
        assert len(census.left()) >= 4  # supervisor, controller, two engines, and what they started
        if "supervisor" in victims:
            supervisor.kill()
        if "notebook" in victims:
            notebook.kill()
        else:
            notebook.stdin.close()
        notebook.wait(30)
        wait_until(lambda: not census.left(), "nothing of the cluster is left", 40)
    finally:
        if notebook.poll() is None:
            notebook.send_signal(signal.SIGKILL)
            notebook.wait()
        census.end_all()


START = """
import ftnb, sys
try:
    session = ftnb.Session.start(1, name="race", show=lambda text: None)
    print("started", flush=True)
    sys.stdin.read()
    session.stop()
except ftnb.FtnbError as error:
    print(error, flush=True)
"""


def test_two_starts_of_one_name_at_once_give_one_cluster(tmp_path: Path) -> None:
    census = Census(tmp_path / "runtime")
    notebooks = [
        subprocess.Popen(
            [sys.executable, "-c", START], env={**os.environ, "FTNB_RUNTIME_DIR": str(tmp_path / "runtime")}, cwd=tmp_path,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]
    try:
        said = sorted(notebook.stdout.readline() for notebook in notebooks)
        assert said[0].startswith("A cluster named 'race' is") and said[1] == "started\n", said
        for notebook in notebooks:
            notebook.stdin.close()
            assert notebook.wait(60) == 0
        wait_until(lambda: not census.left(), "nothing of the cluster is left", 40)
    finally:
        for notebook in notebooks:
            notebook.kill()
            notebook.wait()
        census.end_all()
