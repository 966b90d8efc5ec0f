"""A network partition of one process, made by itself and without root: nothing comes in, nothing goes out.

Two things are set on every TCP socket of the process. A socket filter that lets nothing pass drops what arrives,
acknowledgements included. And an IP option that is malformed for whoever receives it (a record route that has half an
entry of room left) goes out with every packet, so that the receiver's IP layer drops them, retransmissions included.
So nothing leaks out of a connection that was there when the cut began; for both ends it is silent, not closed. After
healing, TCP sends again whatever was lost, by its own timers: within about as long as the cut has lasted.

What is not cut: a connection that is made meanwhile (ZeroMQ tries again when its heartbeats time out) carries data for
up to LOOK_EVERY_S before it is found; the shared memory in which step reports are left; other processes' sockets.
What a socket that is closed during the cut still had to say (that it is closed, say) is never heard.
Over IPv6, which has no such option, sending is slowed down to a byte per second instead: one segment per connection
leaks, and healing may take for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import threading
import time

LOOK_EVERY_S = 0.01

_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MAX_PACING_RATE = 26, 27, 47  # not in Python's `socket`
_UNPACED = 0xFFFFFFFF
# One instruction: return 0, the number of bytes of the packet to keep.
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
# Record route, 8 bytes, next entry at 4: valid as it is given to the socket (an entry of four bytes fits). The kernel
# notes down an entry, so it sends it with the pointer at 8, where only one byte is left; receivers refuse that.
_REFUSED_OPTION = bytes([7, 8, 4, 0, 0, 0, 0, 0])


class Cut:
    """Cuts all TCP connections of this process, those that are made later as well, until it is healed. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, int] = {}  # fd → inode of all sockets that have been looked at
        self._blocked: dict[int, int] = {}
        self._until: float | None = None
        self._healed: threading.Event | None = None  # set: the thread of that cut has nothing left to do

    @property
    def is_on(self) -> bool:
        return self._healed is not None

    def start(self, duration_s: float | None = None) -> None:
        """Cut now, for `duration_s` or until `heal`. When it is on already, the new end counts."""
        with self._lock:
            self._until = None if duration_s is None else time.monotonic() + duration_s
            if self._healed is None:
                self._healed = threading.Event()
                self._look()
                threading.Thread(target=self._keep_cut, args=(self._healed,), name="ftnb-cut", daemon=True).start()

    def heal(self) -> None:
        """Let everything pass again."""
        with self._lock:
            if self._healed is not None:
                self._healed.set()
                self._healed = None
                for fd, inode in self._blocked.items():
                    _with_socket(fd, inode, _unblock)
                self._seen, self._blocked = {}, {}

    def _keep_cut(self, healed: threading.Event) -> None:
        while not healed.wait(LOOK_EVERY_S):
            with self._lock:
                if healed.is_set():
                    return
                is_over = self._until is not None and time.monotonic() >= self._until
                if not is_over:
                    self._look()
            if is_over:
                self.heal()

    def _look(self) -> None:
        """Block what has come since the last look."""
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            try:
                found = os.fstat(fd)
            except OSError:
                continue  # closed just now
            if stat.S_ISSOCK(found.st_mode) and self._seen.get(fd) != found.st_ino:
                self._seen[fd] = found.st_ino
                self._blocked.pop(fd, None)
                if _with_socket(fd, found.st_ino, _block):
                    self._blocked[fd] = found.st_ino


# The one of this process: faults are injected by two threads.
of_this_process = Cut()


def _with_socket(fd: int, inode: int, change) -> bool:
    """Call `change` if `fd` still is that very socket, and TCP; returns whether it was, and could be changed."""
    try:
        duplicate = os.dup(fd)  # so that it cannot become another one in the middle
    except OSError:
        return False
    if os.fstat(duplicate).st_ino != inode:
        os.close(duplicate)
        return False
    with socket.socket(fileno=duplicate) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        try:
            return change(sock)
        except OSError:
            return False


def _block(sock: socket.socket) -> bool:
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    program = ctypes.create_string_buffer(_DROP_ALL)
    description = struct.pack("@HP", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, description)
    try:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, _REFUSED_OPTION)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", 1))
    return True


def _unblock(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"")
    if sock.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE) == 1:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", _UNPACED))
    sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    return True
