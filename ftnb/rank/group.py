"""The process group of one generation: formed through the supervisor, torn down from any thread.

The rendezvous is a `torch.distributed.Store` answered by the supervisor over the encrypted socket, so there
is no unauthenticated TCPStore and no leader that could be lost.

A blocked Gloo collective ends, as a rule, within milliseconds when the group's connected sockets are shut down
from another thread; nothing else that torch 2.13 offers does it. (For the exceptions see `collectives`.)
Listening sockets are left alone: shutting one down kills the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ftnb.rank.collectives import Collectives, keep_until_settled
from ftnb.rank.link import Superseded, WorkLink
from ftnb.rank.whereabouts import Whereabouts

# Connecting takes tens of milliseconds. A peer that dies meanwhile leaves others waiting for its call, which
# nothing can end but this; doubled for every attempt that failed for no other reason (a very busy machine).
FORM_TIMEOUT_S = 1.0
MAX_FORM_TIMEOUT_S = 60.0
# A running collective never times out by itself: whether a rank hangs is for the supervisor to say.
COLLECTIVE_TIMEOUT = timedelta(days=7)
CLOSE_TIMEOUT_S = 2.0  # far more than it takes on a busy machine


class SupervisorStore(dist.Store):
    """Keys of one generation, kept by the supervisor. `get` and `wait` block until the keys are there."""

    def __init__(self, link: WorkLink, generation: int) -> None:
        super().__init__()
        self._link, self._generation = link, generation

    def clone(self) -> SupervisorStore:
        return self

    def _ask(self, command: str, **args: Any) -> dict[str, Any]:
        return self._link.ask_store(self._generation, command, **args)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key=key, value=_to_bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", key=key)["value"]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key=key, amount=amount)["number"]

    def append(self, key: str, value: Any) -> None:
        self._ask("append", key=key, value=_to_bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask("compare_set", key=key, expected=_to_bytes(expected), desired=_to_bytes(desired))["value"]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys=list(keys))["number"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys=list(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key=key)["number"])

    def num_keys(self) -> int:
        return self._ask("num_keys")["number"]

    def has_extended_api(self) -> bool:
        return False


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Group:
    """The default process group of one generation. `torch_rank` and `world_size` are internal to it."""

    def __init__(
        self, generation: int, members: list[int], rank: int, backend: str, device: torch.device,
        whereabouts: Whereabouts | None = None,
    ) -> None:  # fmt: skip
        self.generation = generation
        self.members = members
        self.torch_rank = members.index(rank)
        self.world_size = len(members)
        self._backend = backend
        self._device = device
        self.collectives = Collectives(whereabouts)
        self._lock = threading.Lock()
        self._sockets: list[tuple[int, int]] = []  # (fd, inode)
        self._aborted = False
        self._before: set[tuple[int, int]] = set()

    @property
    def aborted(self) -> bool:
        return self._aborted

    def form(self, link: WorkLink, timeout_s: float) -> None:
        """Connect all members; raises `Superseded` when the supervisor has moved on, else torch's error."""
        with self._lock:
            if self._aborted:
                raise Superseded(self.generation)
            self._before = _socket_fds()
        # Kept: torch does not hold a reference to the Python object behind the store.
        self._store = SupervisorStore(link, self.generation)
        store = dist.PrefixStore(f"g{self.generation}", self._store)
        # torch numbers the groups of a process and uses the number in its keys. An attempt that was broken off
        # has counted too, on some ranks and not on others: they would wait for each other's keys for ever.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            self._backend, store=store, rank=self.torch_rank, world_size=self.world_size,
            # Gloo waits five times as long as it is told for a connection (Pair::waitUntilConnected).
            timeout=timedelta(seconds=timeout_s / 5),
            device_id=self._device if self._backend == "nccl" else None,
        )
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)
        with self._lock:
            self._sockets = sorted(_socket_fds() - self._before)
            aborted = self._aborted
        if aborted:
            self.abort()
            raise Superseded(self.generation)
        # Nobody begins before all are connected: whoever failed in its first step would leave others connecting.
        if self._store.add("formed", 1) == self.world_size:
            self._store.set("all formed", b"1")
        self._store.wait(["all formed"])

    def abort(self) -> None:
        """Make every collective of this group raise, on this rank and on its peers. From any thread."""
        self.collectives.break_off()
        with self._lock:
            self._aborted = True
            # Still forming: whatever has appeared since then belongs to the group.
            targets = self._sockets or (sorted(_socket_fds() - self._before) if self._before else [])
            for fd, inode in targets:
                _shut_down(fd, inode)
            if self._backend == "nccl" and dist.is_initialized():
                with contextlib.suppress(Exception):  # experimental until it has been tried on GPUs
                    dist.distributed_c10d._abort_process_group()

    def destroy(self) -> None:
        self._wait_until_closed()
        with self._lock:
            self._sockets, self._before = [], set()
        if dist.is_initialized():
            keep_until_settled(dist.group.WORLD, self.collectives)
            # The group may be broken already; what matters is that torch forgets it.
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def _wait_until_closed(self) -> None:
        """After an abort, until Gloo has closed the connections of what it did not finish (1 or 2 ms, as a rule).

        Up to then it may read what is left in them, straight into this rank's parameters or buffers. Gradients are
        another matter: those of a step that is given up are thrown away, and this may last as long as it is let (one
        time in fifty Gloo stops reading from a connection that is gone, and never closes it).
        """
        if not self.collectives.writes_state:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while not self.collectives.settled(within_s=0.001) and time.monotonic() < deadline:
            still_open = _socket_fds()
            if not any(s in still_open and not _is_listening(s[0]) for s in self._sockets):
                return


def _socket_fds() -> set[tuple[int, int]]:
    """(fd, inode) of all sockets this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found.add((int(name), int(target[8:-1])))
    return found


def _is_listening(fd: int) -> bool:
    try:
        with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as duplicate:
            return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # closed just now
        return False


def _shut_down(fd: int, inode: int) -> None:
    """Shut the connection down if `fd` still is that very socket, connected, and speaks TCP."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        return
    try:
        if os.fstat(duplicate).st_ino != inode:
            return
        sock = socket.socket(fileno=duplicate)
        duplicate = -1
        with sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return
            listening = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN, 4))[0]
            if not listening:
                sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # closed or not connected any more: nothing left to shut
    finally:
        if duplicate >= 0:
            os.close(duplicate)
