"""The kernel ends a process that nobody can reach any more, although no line of Python runs in it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

DEADLINE_S = 30.0


def ended(code: str) -> int:
    """Exit status of a Python process that runs `code`, in which `timer` is a timer that is set to 0.5 s."""
    start = (
        "import ctypes, os, signal, sys, time\nfrom ftnb.rank.deadman import DeadManTimer\ntimer = DeadManTimer()\n"
        "assert timer.exists\ntimer.set(0.5)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", start + code])
    try:
        return process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "code",
    [
        "ctypes.PyDLL(None).poll(None, 0, 60_000)",  # keeps the interpreter lock
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 60))\ntime.sleep(60)",
    ],
)
def test_it_ends_a_process_that_cannot_do_anything(code):
    assert ended(code) == -signal.SIGKILL


def test_it_starts_anew_when_it_is_set_and_can_be_switched_off():
    code = "for _ in range(20):\n    time.sleep(0.05)\n    timer.set(0.5)\ntimer.set(0)\ntime.sleep(0.6)\nsys.exit(5)"
    assert ended(code) == 5


def test_a_fork_does_not_inherit_it():
    # The child outlives the time, although its parent's timer runs; the parent switches it off to be able to tell.
    code = (
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(1)\n    os._exit(6)\n"
        "timer.set(0)\nsys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert ended(code) == 6


def test_it_can_be_set_for_less_than_a_second_and_for_hours():
    started = time.monotonic()
    assert ended("timer.set(10_000)\ntime.sleep(0.7)\nsys.exit(4)") == 4
    assert ended("timer.set(0.001)\ntime.sleep(60)") == -signal.SIGKILL
    assert time.monotonic() - started < DEADLINE_S
