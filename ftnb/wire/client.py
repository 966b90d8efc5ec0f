"""The notebook's end of the line: requests to the supervisor, answered in any order.

One background thread owns the socket; `request` may be called from any thread, and being interrupted in it
(Ctrl-C) harms nothing: a late answer is dropped. The same thread sees to it that there is a supervisor: when
it has died without taking leave, or has not answered for a while, a successor is started (`wire/takeover.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from typing import Any

import zmq

from ftnb.errors import ClusterError, FtnbError, NoClusterError, from_wire
from ftnb.wire import messages, paths, proc, records, sockets
from ftnb.wire.finding import is_alive, load, trusted
from ftnb.wire.takeover import Spawn, Takeover

# Asking these twice does no harm, so they are put to a successor again.
REPEATABLE = frozenset({"hello", "status", "run_info", "wait", "prepare_weights", "ping"})
PING_EVERY_S = 5.0
# A supervisor that lives but has answered nothing for this long is replaced.
SILENT_LIMIT_S = 20.0
_TICK_S = 0.25  # while there is something to look after
_IDLE_TICK_S = 1.0
# Supervisors that die one after the other have a reason, which starting more of them does not mend.
_MAX_TAKEOVERS, _WITHIN_S = 5, 120.0
# An answer may have been lost with a connection; a supervisor that does each request once is asked again (`once.py`).
ASK_AGAIN_S = 5.0

_log = logging.getLogger(__name__)


class _Pending:
    def __init__(self, op: str, frames: list[bytes]) -> None:
        self.op, self.frames = op, frames
        self.done = threading.Event()
        self.reply: dict[str, Any] | None = None
        self.error: FtnbError | None = None
        self.sent_at: float | None = None

    def fail(self, error: FtnbError) -> None:
        self.error = error
        self.done.set()


class ClientConnection:
    """A connection to the supervisor that `connection` describes, and to its successors.

    `spawn` starts a successor; without it, a supervisor that dies is lost.
    """

    def __init__(self, connection: sockets.Connection, spawn: Spawn | None = None) -> None:
        self.connection = connection
        self._process = proc.ProcessId(connection.pid, connection.pid_started)
        # Which cluster this is: another one may be started under its name later, and is not ours to end.
        header = records.read_header(paths.cluster_dir(connection.name) / records.FILE_NAME)
        self.token = header.token if header is not None else "unknown"
        self._spawn = spawn
        self._takeover: Takeover | None = None
        self._lost: str | None = None  # why there is no supervisor any more
        self._takeovers: deque[float] = deque(maxlen=_MAX_TAKEOVERS)  # when they began
        self._children: list[subprocess.Popen] = []
        self._adopted: deque[subprocess.Popen] = deque()  # children that other threads hand over
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outbox: deque[int] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._closing = self._ended = False
        self._owner_pid = os.getpid()
        self._sock: zmq.Socket | None = None
        self._pidfd: int | None = None
        self._silent_s, self._heard_at, self._pinged = 0.0, time.monotonic(), False
        self._once = False  # the supervisor does no request twice, however often it is sent
        self._thread = threading.Thread(target=self._serve, name="ftnb-client", daemon=True)
        self._thread.start()

    @property
    def supervisor_pid(self) -> int:
        return self.connection.pid

    @property
    def closed(self) -> bool:
        return self._closing

    def supervisor_alive(self) -> bool:
        """Whether the present supervisor's process runs."""
        return self._process.is_alive()

    @property
    def usable(self) -> bool:
        """Whether there is a supervisor, or a successor is on its way."""
        if self._closing or self._lost is not None:
            return False
        return self.supervisor_alive() or (self._spawn is not None and self._read_file() is not None)

    def kill_supervisor(self) -> None:
        self._process.signal(signal.SIGKILL)

    def own(self, process: subprocess.Popen) -> None:
        """Wait for this child when it ends, so that no zombie stays."""
        self._adopted.append(process)

    def expect_end(self) -> None:
        """The cluster is being stopped: no successor is to be started from now on."""
        self._spawn = None
        self._wake()

    def request(self, op: str, timeout_s: float | None = 30.0, **args: Any) -> dict[str, Any]:
        """Ask the supervisor to do `op`; returns its result.

        Raises the `FtnbError` that the supervisor answered with, or `ClusterError` when it is gone or did
        not answer within `timeout_s` (None: as long as it lives). A question that changes nothing is put to a
        successor by itself if the supervisor is lost meanwhile; whether anything else was done is not known then.
        """
        if self._closing:
            raise ClusterError(
                f"The connection to cluster {self.connection.name!r} is closed. Type %ft_cluster attach "
                "(or start)."
            )
        number = next(self._ids)
        pending = _Pending(op, messages.encode({"id": number, "op": op, **args}))
        self._pending[number] = pending
        try:
            self._outbox.append(number)
            self._wake()
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not pending.done.wait(0.25):
                if self._closing:
                    raise ClusterError(f"The connection to cluster {self.connection.name!r} was closed meanwhile.")
                if deadline is not None and time.monotonic() > deadline:
                    raise ClusterError(
                        f"The supervisor of cluster {self.connection.name!r} (pid {self.supervisor_pid}) did "
                        f"not answer {op!r} within {timeout_s:g} s. Look at it with %ft_cluster status, or end "
                        "it with %ft_cluster stop."
                    )
        finally:
            self._pending.pop(number, None)
        if pending.error is not None:
            raise pending.error
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
        if not self._ended:
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(self._wake_write, b"x")

    # --- the thread

    def _serve(self) -> None:
        context = zmq.Context()
        try:
            self._meet(context)
            while not self._closing:
                self._look(context)
        except Exception as error:  # a fault of ours must not leave those hanging who wait for an answer
            _log.exception("the client's thread has ended")
            self._lost = f"The connection has failed inside ftnb ({type(error).__name__}: {error}). Attach again."
            self._closing = True
            self._fail_all()
        finally:
            self._part()
            context.destroy(linger=0)
            self._ended = True
            for child in [*self._children, *self._adopted]:
                if (process := proc.identify(child.pid)) is None or not process.is_alive():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(1.0)
            for fd in (self._wake_read, self._wake_write):
                os.close(fd)

    def _meet(self, context: zmq.Context) -> None:
        """Connect to the supervisor that `self.connection` names, and watch its process."""
        self._sock = sockets.peer_socket(
            context, zmq.DEALER, self.connection, self.connection.client_port,
            identity=f"client-{self._owner_pid}-{os.urandom(4).hex()}".encode(),
        )
        with contextlib.suppress(OSError, AttributeError):  # gone already, or a system without it: each tick looks
            self._pidfd = os.pidfd_open(self.connection.pid)
        self._silent_s, self._pinged, self._once = 0.0, False, False

    def _part(self) -> None:
        """Drop the connection with all that was not sent yet: nothing of it must reach a successor behind our back."""
        if self._sock is not None:
            self._sock.close(0)
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._sock = self._pidfd = None

    def _look(self, context: zmq.Context) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        if self._sock is not None:
            poller.register(self._sock, zmq.POLLIN)
        if self._pidfd is not None:
            poller.register(self._pidfd, zmq.POLLIN)
        busy = self._takeover is not None or self._pending or self._pinged or self._pidfd is None
        before = time.monotonic()
        ready = dict(poller.poll((0.05 if self._takeover else _TICK_S if busy else _IDLE_TICK_S) * 1000))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        self._receive()
        # Not longer than this thread could have looked: it may have been held up itself (a stopped kernel).
        self._silent_s += min(time.monotonic() - before, 2 * _IDLE_TICK_S) if self._pinged else 0.0
        while self._adopted:
            self._children.append(self._adopted.popleft())
        self._children = [child for child in self._children if child.poll() is None]
        if self._takeover is not None:
            pass
        elif self._lost is not None:
            self._look_for_another(context)
        elif not self.supervisor_alive():
            self._supervisor_died(context)
        elif self._silent_s >= SILENT_LIMIT_S and self._spawn is not None:
            self._begin_takeover(f"did not answer for {SILENT_LIMIT_S:.0f} s")
        if self._takeover is not None:
            self._go_on_with_takeover(context)
        if self._sock is not None:
            self._send()

    def _receive(self) -> None:
        while self._sock is not None and self._sock.poll(0):
            try:
                message = messages.decode(self._sock.recv_multipart())
            except messages.BadMessage:
                continue
            self._silent_s, self._heard_at, self._pinged = 0.0, time.monotonic(), False
            self._once = bool(message.get("once"))
            if pending := self._pending.get(message.get("id")):
                pending.reply = message
                pending.done.set()

    def _send(self) -> None:
        assert self._sock is not None
        now = time.monotonic()
        while self._outbox:
            if (pending := self._pending.get(self._outbox.popleft())) and not pending.done.is_set():
                self._sock.send_multipart(pending.frames)
                pending.sent_at = now
        for pending in list(self._pending.values()):
            late = pending.sent_at is not None and now - pending.sent_at > ASK_AGAIN_S
            if late and (self._once or pending.op in REPEATABLE) and not pending.done.is_set():
                self._sock.send_multipart(pending.frames)
                pending.sent_at = now
        if not self._pinged and now - self._heard_at >= PING_EVERY_S:
            # Any answer is a sign of life, so there need not be a request of that name.
            self._sock.send_multipart(messages.encode({"id": 0, "op": "ping"}))
            self._pinged = True

    # --- who is in charge

    def _supervisor_died(self, context: zmq.Context) -> None:
        self._part()
        found = self._read_file()
        if found is None or self._spawn is None:
            self._lose(f"is gone{'; it was stopped' if found is None else ''}")
        elif found.pid != self.connection.pid and is_alive(found):
            self._follow(context, found)
        else:
            self._begin_takeover("is gone")

    def _begin_takeover(self, what: str) -> None:
        assert self._spawn is not None
        _log.info("the supervisor of cluster %r (pid %d) %s; starting a successor", self.connection.name,
                  self.supervisor_pid, what)  # fmt: skip
        now = time.monotonic()
        if len(self._takeovers) == _MAX_TAKEOVERS and now - self._takeovers[0] < _WITHIN_S:
            self._lose(what, f"It was the {_MAX_TAKEOVERS}th within {_WITHIN_S:.0f} s, so no successor was started.")
            return
        self._takeovers.append(now)
        self._takeover = Takeover(self._spawn, self._process, what)

    def _go_on_with_takeover(self, context: zmq.Context) -> None:
        takeover = self._takeover
        assert takeover is not None
        if self._spawn is None:  # the cluster is being stopped
            self._lose(takeover.what)
            return
        if self._sock is not None and not self.supervisor_alive():
            self._part()
        found = takeover.step(self._read_file())
        self._children += takeover.new_children()
        if found is not None:
            self._part()
            self._follow(context, found)
        elif takeover.problem is not None:
            self._lose(takeover.what, takeover.problem)

    def _follow(self, context: zmq.Context, found: sockets.Connection) -> None:
        """A successor is in charge: connect to it, ask it again what may be asked twice, tell of the rest."""
        before = self.supervisor_pid
        self.connection, self._takeover, self._lost = found, None, None
        self._process = proc.ProcessId(found.pid, found.pid_started)
        self._heard_at = time.monotonic()
        self._meet(context)
        for number, pending in list(self._pending.items()):
            if pending.done.is_set() or pending.sent_at is None:
                continue  # what was not sent yet goes out now
            if pending.op in REPEATABLE:
                pending.sent_at = None
                self._outbox.append(number)
                continue
            pending.fail(ClusterError(
                f"The supervisor of cluster {found.name!r} (pid {before}) was lost before it had answered "
                f"{pending.op!r}. A successor (pid {found.pid}) has taken over, and the training goes on. Whether "
                f"{pending.op!r} was still done is not known: look at %ft_status (in Python: session.status(), "
                "run.info()) before you do it again."
            ))  # fmt: skip

    def _look_for_another(self, context: zmq.Context) -> None:
        """Given up here, but another notebook may have found a successor."""
        found = self._read_file() if self._spawn is not None else None
        if found is not None and found.pid != self.connection.pid and is_alive(found):
            self._follow(context, found)
        else:
            self._fail_all()

    def _lose(self, what: str, problem: str = "") -> None:
        self._part()
        self._takeover = None
        text = f"The supervisor of cluster {self.connection.name!r} (pid {self.supervisor_pid}) {what}. "
        self._lost = text + (f"{problem} " if problem else "") + self._what_to_type()
        self._fail_all()

    def _what_to_type(self) -> str:
        log = paths.cluster_dir(self.connection.name) / "supervisor.log"
        return (f"Its log: {log}. " if log.exists() else "") + "Type %ft_cluster start."

    def _fail_all(self) -> None:
        for pending in list(self._pending.values()):
            if not pending.done.is_set():
                pending.fail(ClusterError(self._lost or "The connection is closed."))

    def _read_file(self) -> sockets.Connection | None:
        """The connection file as it is now; None when a clean stop has removed it, or it is another cluster's."""
        try:
            found = trusted(self.connection.name)
        except (NoClusterError, OSError):
            return None
        return found if found.server_key == self.connection.server_key else None


def connect(name: str, spawn: Spawn | None = None) -> ClientConnection:
    return ClientConnection(load(name), spawn)
