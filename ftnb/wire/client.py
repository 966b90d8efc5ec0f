"""The notebook's end of the line: requests to the supervisor, answered in any order.

One background thread owns the socket; `request` may be called from any thread, and being interrupted in it
(Ctrl-C) harms nothing: a late answer is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from typing import Any

import zmq

from ftnb.errors import ClusterError, NoClusterError, from_wire
from ftnb.wire import messages, paths, proc, sockets


class _Pending:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply: dict[str, Any] | None = None


class ClientConnection:
    """A connection to the supervisor that `connection` describes."""

    def __init__(self, connection: sockets.Connection) -> None:
        self.connection = connection
        self._process = proc.ProcessId(connection.pid, connection.pid_started)
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outbox: deque[list[bytes]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._closing = False
        self._owner_pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="ftnb-client", daemon=True)
        self._thread.start()

    @property
    def supervisor_pid(self) -> int:
        return self.connection.pid

    @property
    def closed(self) -> bool:
        return self._closing

    def supervisor_alive(self) -> bool:
        return self._process.is_alive()

    def request(self, op: str, timeout_s: float | None = 30.0, **args: Any) -> dict[str, Any]:
        """Ask the supervisor to do `op`; returns its result.

        Raises the `FtnbError` that the supervisor answered with, or `ClusterError` when it is gone or did
        not answer within `timeout_s` (None: as long as it lives).
        """
        if self._closing:
            raise ClusterError(
                f"The connection to cluster {self.connection.name!r} is closed. Type %ft_cluster attach "
                "(or start)."
            )
        number, pending = next(self._ids), _Pending()
        self._pending[number] = pending
        try:
            self._outbox.append(messages.encode({"id": number, "op": op, **args}))
            self._wake()
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not pending.done.wait(0.25):
                if not self.supervisor_alive() and not pending.done.wait(0.1):
                    raise ClusterError(
                        f"The supervisor of cluster {self.connection.name!r} (pid {self.supervisor_pid}) is "
                        f"gone. Its log: {paths.cluster_dir(self.connection.name) / 'supervisor.log'}. "
                        "Type %ft_cluster start."
                    )
                if deadline is not None and time.monotonic() > deadline:
                    raise ClusterError(
                        f"The supervisor of cluster {self.connection.name!r} (pid {self.supervisor_pid}) did "
                        f"not answer {op!r} within {timeout_s:g} s. Look at it with %ft_cluster status, or end "
                        "it with %ft_cluster stop."
                    )
        finally:
            self._pending.pop(number, None)
        reply = pending.reply
        assert reply is not None
        if reply.get("ok"):
            return reply.get("result") or {}
        raise from_wire(reply.get("error") or {})

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(2)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    def _serve(self) -> None:
        context = zmq.Context()
        try:
            sock = sockets.peer_socket(
                context, zmq.DEALER, self.connection, self.connection.client_port,
                identity=f"client-{self._owner_pid}-{os.urandom(4).hex()}".encode(),
            )
            poller = zmq.Poller()
            poller.register(sock, zmq.POLLIN)
            poller.register(self._wake_read, zmq.POLLIN)
            while not self._closing:
                ready = dict(poller.poll())
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                while self._outbox:
                    sock.send_multipart(self._outbox.popleft())
                while sock.poll(0):
                    try:
                        message = messages.decode(sock.recv_multipart())
                    except messages.BadMessage:
                        continue
                    if pending := self._pending.get(message.get("id")):
                        pending.reply = message
                        pending.done.set()
            sock.close(0)
        finally:
            context.destroy(linger=0)
            for fd in (self._wake_read, self._wake_write):
                os.close(fd)


def load(name: str) -> sockets.Connection:
    """The connection of the living cluster `name`; raises `NoClusterError` when there is none."""
    path = paths.connection_file(name)
    try:
        connection = sockets.Connection.load(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NoClusterError(
            f"No cluster named {name!r} is running. Start one with %ft_cluster start"
            + ("" if name == "default" else f" --name {name}")
            + " (in Python: ftnb.Session.start())."
        ) from None
    except PermissionError:
        raise NoClusterError(
            f"The connection file {path} belongs to another user; ftnb only talks to your own clusters."
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise NoClusterError(
            f"The connection file {path} is damaged ({error}). Remove it, then type %ft_cluster start."
        ) from None
    if path.stat().st_uid != os.getuid():
        raise NoClusterError(f"The connection file {path} belongs to another user; it is not trusted.")
    if not proc.ProcessId(connection.pid, connection.pid_started).is_alive():
        raise NoClusterError(
            f"The cluster {name!r} is gone (its supervisor, pid {connection.pid}, no longer runs). "
            "Start a new one with %ft_cluster start."
        )
    return connection


def connect(name: str) -> ClientConnection:
    return ClientConnection(load(name))
