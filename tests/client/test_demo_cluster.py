"""`ftnb demo` for real, in a process of its own as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(tmp_path):
    """Starts `ftnb demo` with further arguments; everything that it starts carries a mark of its own."""
    runtime = tmp_path / "runtime"
    environment = os.environ | {
        "FTNB_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}  # fmt: skip
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "ftnb.cli", "demo", *arguments], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            # Ignored where the tests run in a shell's background, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        started.append(process)
        return process

    start.left_over = lambda: _marked(str(runtime))
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def _marked(runtime):
    """Processes whose environment names this test's runtime directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("FTNB_RUNTIME_DIR") == runtime:
                found.append((process.pid, process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def test_the_demo_loses_a_rank_recovers_and_leaves_nothing(demo):
    process = demo("-n", "2", "--steps", "60")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "rank 1 will be killed (SIGKILL) in step 30" in output
    assert "step 60 of 60: finished" in output
    assert re.search("2 at the start, [12] at the end", output)  # 2, if it lasts until the replacement has joined
    assert demo.left_over() == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["Starting cluster", "step "])
def test_a_demo_that_is_told_to_end_takes_everything_with_it(demo, number, code, moment):
    process = demo("-n", "2", "--steps", "1000000")
    for line in process.stdout:
        if line.startswith(moment):
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert demo.left_over() == []
