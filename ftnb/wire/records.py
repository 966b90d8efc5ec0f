"""What a cluster has started, one line per process, so that it can be ended by whoever comes later.

The first line names the cluster's token and the machine; each further one is a process by pid and start time.
Lines are only appended, so a writer that is killed in the middle costs its own last line and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftnb.wire import paths, proc

FILE_NAME = "processes.jsonl"
# Every process of a cluster carries its token in this variable.
TOKEN_VARIABLE = "FTNB_CLUSTER"

SUPERVISOR, GUARDIAN, FORK_SERVER = "supervisor", "guardian", "fork server"
RANK, SPARE, CONTROLLER = "rank", "spare", "controller"
OTHER = "other"  # what a rank had started, found when the cluster was ended

# The file is rewritten without the dead when it has so many bytes, and twice as many as after the last time.
_COMPACT_AT_BYTES = 32_768


@dataclass(frozen=True)
class Recorded:
    """A process of a cluster: what it is for, and which one."""

    what: str
    process: proc.ProcessId
    rank: int | None = None

    def __str__(self) -> str:
        who = f"{self.what} {self.rank}" if self.rank is not None else self.what
        return f"{who} (pid {self.process.pid})"


@dataclass(frozen=True)
class Header:
    """The first line: whose processes these are, and where their pids mean something."""

    token: str
    machine: str

    @property
    def is_here(self) -> bool:
        """Whether the pids are of this machine (container) since its last start."""
        return self.machine == this_machine()


class ProcessRecords:
    """The record of one cluster, open for appending. No method raises `OSError`: see `problem`."""

    def __init__(self, path: Path, token: str, *, compacting: bool = True) -> None:
        """Go on with the record of the cluster `token`, or begin a new one in the place of another cluster's.

        Only one writer may be `compacting`, or it could drop what another one is appending: the supervisor.
        """
        self.path, self.token = path, token
        self._compact_at: float = _COMPACT_AT_BYTES if compacting else math.inf
        self.problem: OSError | None = None  # why the last line could not be written
        self._unwritten: list[Recorded] = []
        header = read_header(path)
        if header is None or header.token != token or not header.is_here:
            self._rewrite([])

    def note(self, what: str, process: proc.ProcessId, rank: int | None = None) -> None:
        """Append a process. What cannot be written now (a full disk) is tried again with the next one."""
        self.note_all([Recorded(what, process, rank)])

    def note_all(self, found: Iterable[Recorded]) -> None:
        self._unwritten += found
        if not self._unwritten:
            return
        try:
            size = _append(self.path, "".join(map(_line, self._unwritten)))
        except OSError as error:
            self.problem = error
            return
        self.problem, self._unwritten = None, []
        if size >= self._compact_at:
            self.compact()

    def compact(self) -> None:
        """Drop what has ended and left nothing behind in its session.

        A leader that is dead, with members of its session alive, stays: they are found through it.
        """
        table = proc.table()
        sessions = {entry.session for entry in table.values() if not entry.zombie}
        kept = []
        for recorded in dict.fromkeys([*read(self.path), *self._unwritten]):
            entry = table.get(recorded.process.pid)
            lives = entry is not None and entry.process == recorded.process and not entry.zombie
            if lives or (recorded.process.pid in sessions and (entry is None or entry.process == recorded.process)):
                kept.append(recorded)
        self._rewrite(kept)
        with contextlib.suppress(OSError):
            self._compact_at = max(_COMPACT_AT_BYTES, 2 * self.path.stat().st_size)

    def _rewrite(self, kept: list[Recorded]) -> None:
        header = json.dumps({"what": "cluster", "token": self.token, "machine": this_machine()}) + "\n"
        try:
            paths.write_private(self.path, header + "".join(map(_line, kept)))
        except OSError as error:
            self.problem = error
        else:
            self.problem, self._unwritten = None, []


def read(path: Path) -> list[Recorded]:
    """The recorded processes in order, dead ones too. A line that is torn or damaged is passed over."""
    found = []
    for record in _objects(path):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            process = proc.ProcessId(int(record["pid"]), str(record["started"]))
            found.append(Recorded(str(record["what"]), process, record.get("rank")))
    return found


def by_process(found: Iterable[Recorded]) -> dict[proc.ProcessId, Recorded]:
    """The last word on each process: a spare becomes a rank; one that was found before it was recorded is no stray."""
    last: dict[proc.ProcessId, Recorded] = {}
    for recorded in found:
        if recorded.what != OTHER or recorded.process not in last:
            last[recorded.process] = recorded
    return last


def read_header(path: Path) -> Header | None:
    for record in _objects(path):
        if record.get("what") == "cluster" and record.get("token"):
            return Header(str(record.get("token", "")), str(record.get("machine", "")))
    return None


def this_machine() -> str:
    """Tells where and since when a pid means something: this start of the machine, or of the container.

    The files may lie in a home directory that several machines share.
    """
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return ":".join([*parts, str(proc.start_time(1))])


def _objects(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                found.append(record)
    return found


def _line(recorded: Recorded) -> str:
    record: dict[str, Any] = {
        "what": recorded.what, "pid": recorded.process.pid, "started": recorded.process.started
    }  # fmt: skip
    if recorded.rank is not None:
        record["rank"] = recorded.rank
    return json.dumps(record) + "\n"


def _append(path: Path, text: str) -> int:
    """Append whole lines at once, on lines of their own even after a writer that was killed in its last one.

    Returns the size of the file.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = (("\n" if torn else "") + text).encode()
        if os.write(fd, data) < len(data):  # the disk became full in the middle: the rest comes with the next try
            raise OSError(errno.ENOSPC, "the record of processes could be written in part only")
        return size + len(data)
    finally:
        os.close(fd)
