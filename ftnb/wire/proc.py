"""Processes by pid *and* start time, so that a reused pid is never mistaken for one of ours."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# psutil is asked only where there is no /proc: it costs memory, which the guardian of a cluster does without.
_HAS_PROC = Path("/proc/self/stat").exists()


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine: its pid and its start time as the kernel gives it (opaque)."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        """True while this very process runs; a zombie (dead, not yet waited for) counts as gone."""
        return start_time(self.pid) == self.started and not _is_zombie(self.pid)

    def signal(self, signum: int) -> bool:
        """Send `signum` to this very process; False when it is gone."""
        if start_time(self.pid) != self.started:
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


def identify(pid: int) -> ProcessId | None:
    started = start_time(pid)
    return None if started is None else ProcessId(pid, started)


def start_time(pid: int) -> str | None:
    """Start time of `pid`, or None when there is no such process.

    From `/proc` in clock ticks since boot, which unlike psutil's value does not move when somebody sets
    the clock; psutil where there is no `/proc`.
    """
    fields = _stat(pid)
    if fields is not None:
        return fields[19]
    if _HAS_PROC:
        return None
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def parent(pid: int) -> int | None:
    """The pid of a process's parent, or None when there is no such process (or no `/proc`)."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def session_members(session_id: int) -> list[ProcessId]:
    """All living processes whose session is `session_id` (a rank leads its own: so it and what it started)."""
    members = []
    for pid in _pids():
        try:
            if os.getsid(pid) == session_id and (found := identify(pid)) and found.is_alive():
                members.append(found)
        except (ProcessLookupError, PermissionError):
            continue
    return members


def kill_session(session_id: int) -> int:
    """SIGKILL every process of the session; returns how many were told. Works on stopped processes too."""
    told = 0
    for member in session_members(session_id):
        with contextlib.suppress(PermissionError):
            told += member.signal(signal.SIGKILL)
    return told


class Entry(NamedTuple):
    """What the process table says of one process."""

    process: ProcessId
    parent: int
    session: int
    zombie: bool


def table() -> dict[int, Entry]:
    """All processes of this user, by pid."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            if _HAS_PROC and os.stat(f"/proc/{pid}").st_uid != os.getuid():
                continue
            if (entry := _entry(pid)) is not None:
                found[pid] = entry
    return found


def _entry(pid: int) -> Entry | None:
    if _HAS_PROC:
        fields = _stat(pid)
        if fields is None:
            return None
        return Entry(ProcessId(pid, fields[19]), int(fields[1]), int(fields[3]), fields[0] in "ZX")
    import psutil

    try:
        with (process := psutil.Process(pid)).oneshot():
            if process.uids().real != os.getuid():
                return None
            zombie = process.status() == psutil.STATUS_ZOMBIE
            return Entry(ProcessId(pid, str(process.create_time())), process.ppid(), os.getsid(pid), zombie)
    except (psutil.Error, OSError):
        return None


def is_stopped(pid: int) -> bool | None:
    """Whether the process is stopped (by SIGSTOP, or by a debugger); None where that cannot be known."""
    fields = _stat(pid)
    return None if fields is None else fields[0] in "Tt"


def environment_of(pid: int) -> list[bytes]:
    """The environment that the process was started with, as `NAME=value`; empty when it cannot be read."""
    if _HAS_PROC:
        try:
            with open(f"/proc/{pid}/environ", "rb") as stream:
                return stream.read().split(b"\0")
        except OSError:
            return []
    import psutil

    try:
        return [os.fsencode(f"{key}={value}") for key, value in psutil.Process(pid).environ().items()]
    except (psutil.Error, OSError):
        return []


def describe_exit(status: int | None) -> tuple[str, str]:
    """Exit status as Popen gives it (negative: signal) in words.

    Returns (failure, words), failure being one of "kill", "crash", "exit", "unknown": *kill* came from
    outside, *crash* is a fault of the program itself.
    """
    if status is None:
        # Only its parent is told, and that was a supervisor that is gone.
        return "unknown", "it ended (exit status unknown: it was adopted from an earlier supervisor)"
    if status >= 0:
        return "exit", f"it exited with code {status}{_exit_code_words(status)}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    words = {
        "SIGKILL": "it was killed (SIGKILL): by somebody, or by the kernel because memory ran out",
        "SIGTERM": "it was told to end (SIGTERM)",
        "SIGINT": "it was interrupted (SIGINT)",
        "SIGSEGV": "it crashed in native code (SIGSEGV: invalid memory access)",
        "SIGABRT": "it aborted in native code (SIGABRT)",
        "SIGBUS": "it crashed in native code (SIGBUS: often a full /dev/shm or a truncated file)",
        "SIGFPE": "it crashed in native code (SIGFPE: arithmetic error)",
        "SIGILL": "it crashed in native code (SIGILL: instruction unknown to this processor)",
    }.get(name, f"it was ended by {name}")
    crash = name in {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"}
    return ("crash" if crash else "kill"), words


def _exit_code_words(code: int) -> str:
    """What a code usually means: by the conventions of Python, shells and libc."""
    words = {
        0: "a clean exit", 1: "a program's ordinary error, such as an exception that nobody caught",
        2: "a command that was called wrongly", 126: "a command that cannot be executed",
        127: "a command or library that was not found",
    }.get(code, "")  # fmt: skip
    if not words and 128 < code < 128 + signal.NSIG:
        with contextlib.suppress(ValueError):
            words = f"128 + {code - 128}: something that it had run was ended by {signal.Signals(code - 128).name}"
    return f" ({words})" if words else ""


def _pids() -> list[int]:
    if _HAS_PROC:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    import psutil

    return psutil.pids()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third on (the second, the name, may contain anything)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            text = stream.read()
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    if fields is not None:
        return fields[0] in "ZX"
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
