"""Ending a cluster by force: everything that it ever started, whoever of them is dead, stopped or hung by now.

What belongs to a cluster is found in four ways, since each of them alone misses something: by the record of
what was started, by the sessions that recorded processes lead, by descent, and by the cluster's token in
the environment. Whoever ends a cluster holds its lock meanwhile, so that no successor takes it up in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ftnb.wire import proc, records
from ftnb.wire.records import Recorded

LOCK_NAME = "lock"
LOG_NAME = "supervisor.log"
BEAT_NAME = "beat"
# The supervisor first, so that it neither starts anything again nor reports that its ranks have died; then who
# could start processes; the controller last, since engines complain about its loss.
_ORDER = (
    records.SUPERVISOR, records.GUARDIAN, records.FORK_SERVER, records.RANK, records.SPARE, records.OTHER,
    records.CONTROLLER,
)  # fmt: skip
_LOCK_LIMIT_S = 2.0
_LOOK_EVERY_S = 0.01
_QUIET_LOOKS = 3  # so many times in a row nothing may be found before all is taken to be gone


def reap(
    cluster_dir: Path, spare_pids: Iterable[int] = (), limit_s: float = 10.0, *, locked: bool = False,
    give_way: bool = False, keep_log: bool = True, token: str | None = None,
) -> list[Recorded]:
    """SIGKILL everything of the cluster and remove its files; returns what is still there after `limit_s`.

    Never touched: this process, `spare_pids`, and this process's ancestors unless they are recorded. `locked`:
    the caller holds the cluster's lock. `give_way`: return at once (None left) when another supervisor holds
    it after the recorded one has been ended. The log stays, for whoever wants to know what happened. `token`:
    which cluster is meant; nothing happens when another one has been started in its place.
    """
    deadline = time.monotonic() + limit_s
    hunt = _Hunt(cluster_dir, spare_pids)
    if not hunt.is_of(token):
        return []
    if hunt.has_record and not give_way:
        # Else notebooks that see the supervisor die would start a successor.
        _forget_connection(cluster_dir)
    hunt.end_supervisors(deadline)
    with _lock(cluster_dir, min(_LOCK_LIMIT_S, limit_s)) as owned:
        owned = owned or locked
        if give_way and not owned:
            return []
        if owned:
            _forget_connection(cluster_dir)
        left = hunt.end_all(deadline)
        if owned:
            if not left:
                hunt.remove_files(keep_log)
            return left
    # A successor that was being started held the lock; it has been ended with the rest.
    with _lock(cluster_dir, 0.2) as owned:
        if owned and not left:
            hunt.remove_files(keep_log)
    return left


def living(cluster_dir: Path) -> list[Recorded]:
    """The recorded processes that run (stopped ones too); a cheap look that changes nothing."""
    path = cluster_dir / records.FILE_NAME
    header = records.read_header(path)
    if header is None or not header.is_here:
        return []
    return [recorded for recorded in records.by_process(records.read(path)).values() if recorded.process.is_alive()]


def note_strays(cluster_dir: Path) -> int:
    """Record what belongs to the cluster and is not recorded yet; returns how many were found.

    Done now and then while it lives, this finds what a rank has started in a session of its own and without the
    environment: after the rank's death nothing would lead to it.
    """
    return _Hunt(cluster_dir, ()).note_strays()


def end_supervisors(cluster_dir: Path, limit_s: float = 2.0) -> list[Recorded]:
    """SIGKILL the recorded supervisors other than this process; returns those still there after `limit_s`."""
    return _Hunt(cluster_dir, ()).end_supervisors(time.monotonic() + limit_s)


def clear_away(cluster_dir: Path, *, keep_log: bool) -> bool:
    """Remove the files of a cluster of which nothing runs; False when somebody holds its lock (a new one starts)."""
    with _lock(cluster_dir, 0.2) as owned:
        if owned:
            _remove_files(cluster_dir, keep_log)
        return owned


def beats(cluster_dir: Path, within_s: float = 60.0) -> bool:
    """Whether a supervisor, on whatever machine, has given a sign of life lately."""
    try:
        return time.time() - (cluster_dir / BEAT_NAME).stat().st_mtime < within_s
    except OSError:
        return False


class _Hunt:
    """What is known of one cluster's processes while it is being ended."""

    def __init__(self, cluster_dir: Path, spare_pids: Iterable[int]) -> None:
        self._path = cluster_dir / records.FILE_NAME
        self._header = records.read_header(self._path)
        self._known: dict[proc.ProcessId, Recorded] = {}
        self._spared = {os.getpid(), *spare_pids}
        self._ancestors = _ancestors()
        self._noted: set[Recorded] = set()
        self._record: records.ProcessRecords | None = None
        if self._header is not None and self._header.is_here:
            self._mark = f"{records.TOKEN_VARIABLE}={self._header.token}".encode()
            self._record = records.ProcessRecords(self._path, self._header.token, compacting=False)

    def remove_files(self, keep_log: bool) -> None:
        """Remove the cluster's files, unless they are another's by now, or of a cluster of another machine."""
        elsewhere = self._header is not None and not self._header.is_here and beats(self._path.parent)
        if self._is_same_cluster() and not elsewhere:
            _remove_files(self._path.parent, keep_log)

    def _is_same_cluster(self) -> bool:
        """False once another cluster has been started in the same place."""
        return records.read_header(self._path) == self._header

    @property
    def has_record(self) -> bool:
        return self._record is not None

    def is_of(self, token: str | None) -> bool:
        """Whether there is a record of that cluster, or none at all."""
        return token is None or self._header is None or self._header.token == token

    def note_strays(self) -> int:
        self._read()
        found = [recorded for recorded in self._find() if recorded.what == records.OTHER]
        new = set(found) - set(records.read(self._path))
        self._note(sorted(new, key=lambda recorded: recorded.process.pid))
        return len(new)

    def end_supervisors(self, deadline: float) -> list[Recorded]:
        self._read()
        supervisors = [
            recorded for recorded in self._known.values()
            if recorded.what == records.SUPERVISOR and recorded.process.pid not in self._spared
        ]  # fmt: skip
        # What it has started is looked for while it is there: its death cuts the descent.
        _signal_all(supervisors, signal.SIGSTOP)
        self._note(self._find())
        _signal_all(supervisors, signal.SIGKILL)
        while left := [recorded for recorded in supervisors if recorded.process.is_alive()]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return left

    def end_all(self, deadline: float) -> list[Recorded]:
        quiet = 0
        while True:
            self._read()
            # Stopped first, then looked for again: what is stopped cannot start anything in between.
            victims: list[Recorded] = []
            while new := [found for found in self._find() if found not in victims]:
                self._note(new)
                _signal_all(new, signal.SIGSTOP)
                victims += new
            _signal_all(victims, signal.SIGKILL)
            quiet = 0 if victims else quiet + 1
            if quiet >= _QUIET_LOOKS:
                return []
            if time.monotonic() > deadline:
                return sorted(victims, key=_place)
            time.sleep(_LOOK_EVERY_S)

    def _read(self) -> None:
        """What has been recorded since, too: a successor that began in between records itself."""
        if self._record is not None and self._is_same_cluster():
            self._known = records.by_process([*self._known.values(), *records.read(self._path)])

    def _note(self, found: Iterable[Recorded]) -> None:
        """Before anything is signalled: should this process be killed, the next one still knows them."""
        if self._record is not None:
            self._record.note_all(other for other in found if other.what == records.OTHER and other not in self._noted)
            self._noted.update(found)

    def _find(self) -> list[Recorded]:
        """The living processes of the cluster, in the order in which they are to be ended."""
        if self._record is None:
            return []
        table = proc.table()
        ours = {pid for pid, entry in table.items() if entry.process in self._known}
        sessions = {
            known.pid for known in self._known
            # A pid that somebody else has by now was free before: nothing of the old session can be left.
            if (entry := table.get(known.pid)) is None or entry.process == known
        }  # fmt: skip
        sessions -= {pid for pid in sessions if pid in table and table[pid].session != pid}
        for pid, entry in table.items():
            if pid not in ours and (entry.session in sessions or self._carries_token(entry)):
                ours.add(pid)
        children: dict[int, list[int]] = {}
        for pid, entry in table.items():
            children.setdefault(entry.parent, []).append(pid)
        # From ourselves nothing descends that would have to go: a caller's own children are its own business.
        to_look_at = [pid for pid in ours if pid not in self._spared]
        while to_look_at:
            for child in children.get(to_look_at.pop(), ()):
                if child not in ours and child not in self._spared:
                    ours.add(child)
                    to_look_at.append(child)
        found = []
        for pid in ours - self._spared:
            entry = table[pid]
            recorded = self._known.get(entry.process)
            if entry.zombie or (recorded is None and pid in self._ancestors):
                continue
            if recorded is None:
                recorded = self._known[entry.process] = Recorded(records.OTHER, entry.process)
            found.append(recorded)
        return sorted(found, key=_place)

    def _carries_token(self, entry: proc.Entry) -> bool:
        # Asked anew each time: a process that has just been forked gets the token by its exec.
        return not entry.zombie and self._mark in proc.environment_of(entry.process.pid)


def _place(recorded: Recorded) -> int:
    return _ORDER.index(recorded.what) if recorded.what in _ORDER else _ORDER.index(records.OTHER)


def _signal_all(found: Iterable[Recorded], signum: int) -> None:
    for recorded in found:
        with contextlib.suppress(PermissionError):
            recorded.process.signal(signum)


def _ancestors() -> set[int]:
    """The processes from which this one descends, but not itself; init, whatever else it is, among them."""
    found, pid = {1}, os.getppid()
    table = proc.table()
    while pid > 1 and pid not in found:
        found.add(pid)
        pid = table[pid].parent if pid in table else 1
    return found


@contextlib.contextmanager
def _lock(cluster_dir: Path, limit_s: float) -> Iterator[bool]:
    """Try for `limit_s` to hold the cluster's lock; gives whether it is held (True where there is no cluster)."""
    deadline = time.monotonic() + limit_s
    try:
        fd = os.open(cluster_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield True
        return
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.02)
            else:
                yield True
                return
    finally:
        os.close(fd)


def _forget_connection(cluster_dir: Path) -> None:
    for name in ("connection.json", "cluster.json"):
        with contextlib.suppress(OSError):
            (cluster_dir / name).unlink()


def _remove_files(cluster_dir: Path, keep_log: bool) -> None:
    try:
        entries = list(cluster_dir.iterdir())
    except OSError:
        return
    for entry in entries:
        # The lock goes last, and only with the directory: who waits for it must not be left with a deleted file.
        if entry.name == LOCK_NAME or (keep_log and entry.name == LOG_NAME):
            continue
        with contextlib.suppress(OSError):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
    if not (keep_log and (cluster_dir / LOG_NAME).exists()):
        shutil.rmtree(cluster_dir, ignore_errors=True)
