"""The agent: one thread per engine that talks to the supervisor, whatever the training thread is doing."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

import zmq

from ftnb.core.watch import SLOW_STEPS
from ftnb.rank import cut, faults, stacks
from ftnb.rank.deadman import DeadManTimer
from ftnb.rank.orders import Fault, Orders
from ftnb.wire import messages, proc, reaper, sockets
from ftnb.wire.letters import Received, Sent

BEAT_S = 0.1
# A supervisor is silent when it is busy for a moment, or gone; then its successor may be somewhere else.
SILENT_S = 1.5
# A supervisor may be stopped for some seconds, or take a while to be replaced; and the guardian comes first.
ALONE_EXTRA_S = 20.0
# A supervisor that was killed has perhaps told the guardian that it lives after it had told this rank.
BEAT_AFTER_WORD_S = 5.0
# Where Python cannot run, `_end_alone` cannot either: then the kernel ends this process, later than that.
DEAD_MAN_EXTRA_S = 10.0
# As long as a supervisor lets Python be silent while a cell runs, or in the first step of a generation.
FIRST_STEP_S = 300.0
PATIENT_PLACES = ("evaluate", "save")
# A supervisor answers within moments that it has recorded an injected fault, or the fault is forgotten.
RECORDED_WITHIN_S = 5.0


class Agent:
    """Heartbeats and answers out, commands in; starts and owns the training thread."""

    def __init__(self, connection: sockets.Connection, rank: int | None, linger_s: float) -> None:
        self.rank = rank  # None: a spare
        self.names: bytes | None = None  # what came with the last cell, for processes that join later
        self.warm: dict[str, Any] = {}  # what was told when torch was loaded, for a new supervisor
        self.orders = Orders()
        self.training: Any = None  # ftnb.rank.loop.Training while a run is loaded
        self.last_training: Any = None
        self._connection = connection
        self._linger_s = linger_s
        self._context = zmq.Context()
        self._work: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._outbox: deque[dict[str, Any]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._last_word = time.monotonic()
        self._term = 0
        self._first_step = 0  # of the generation
        self._beats = 0
        self._received = Received()
        # What must arrive at the supervisor: one stream for each socket, since these overtake each other.
        self.sent = {stream: Sent(stream) for stream in ("agent", "work")}
        self._memory = _own_memory_file()
        self._dead_man = DeadManTimer()
        self._dead_man_set, self._patience_s = -1.0, FIRST_STEP_S
        self._leaked: list[dict[str, Any]] = []  # messages that came in although this rank is cut off
        self._due: tuple[Fault, float] | None = None  # a partition that is about to start, and until when it may
        self._training_thread: threading.Thread | None = None
        self.phase = "starting"

    def start(self) -> None:
        from ftnb.rank.worker import work  # torch is imported there, in the training thread

        self._training_thread = threading.Thread(target=work, args=(self,), name="ftnb-training", daemon=True)
        threading.Thread(target=self._serve, name="ftnb-agent", daemon=True).start()
        self._training_thread.start()

    def new_link(self) -> Any:
        """A line of its own for the thread that calls."""
        from ftnb.rank.link import WorkLink

        return WorkLink(self._context, self, self.orders)

    @property
    def connection(self) -> sockets.Connection:
        return self._connection

    def next_work(self) -> dict[str, Any]:
        return self._work.get()

    def tell(self, op: str, **fields: Any) -> None:
        """Send a message from any thread."""
        self._outbox.append({"op": op, "rank": self.rank, **fields})
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    # --- the agent thread

    def _serve(self) -> None:
        identity = f"agent-{os.getpid()}".encode()
        sock = sockets.peer_socket(
            self._context, zmq.DEALER, self._connection, self._connection.rank_port, identity
        )
        me = proc.identify(os.getpid())
        assert me is not None
        self._send(
            sock, "hello", key=os.environ["FTNB_KEY"], pid=me.pid, started=me.started, host=platform.node(),
            python=platform.python_version(),
        )
        poller = zmq.Poller()
        poller.register(sock, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        now = next_beat = looked = time.monotonic()
        self._set_dead_man()
        while True:
            ready = dict(poller.poll(max(0.0, next_beat - time.monotonic()) * 1000))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            while self._outbox:
                sock.send_multipart(messages.encode(self._outbox.popleft()))
            while sock.poll(0):
                try:
                    self._hear(sock, messages.decode(sock.recv_multipart()))
                except Exception:  # a command that fails must not silence the heartbeats
                    self._send(sock, "agent_error", traceback=traceback.format_exc())
            before, now = now, time.monotonic()
            if now - before > SILENT_S:
                # Python could not run (the interpreter lock was held, this process was stopped), so no beat was sent
                # and no answer could come: that is no silence of the supervisor's.
                self._last_word = min(now, self._last_word + now - before)
            if now >= next_beat:
                if self._patience() != self._patience_s:
                    self._set_dead_man()  # before Python falls silent, in evaluate() say
                self._beat(sock)
                next_beat = max(next_beat + BEAT_S, now)
            if now - self._last_word > self._linger_s + ALONE_EXTRA_S:
                self._end_alone()
            if now - self._last_word > SILENT_S and now - looked > SILENT_S:
                looked = now
                self._follow(sock)

    def _hear(self, sock: zmq.Socket, message: dict[str, Any]) -> None:
        if cut.of_this_process.is_on:
            # ZeroMQ has connected again, and got something in before the new connection was cut: it shall count as
            # little as if it had come after the healing, least of all as a word from the supervisor.
            self._leaked.append(message)
            return
        self._last_word = time.monotonic()
        if self._last_word - self._dead_man_set > 1.0:
            self._set_dead_man()
        heard, self._leaked = [*self._leaked, message], []
        for order in heard:
            if order.get("term", 0) > self._term:
                self._term, self._received = order["term"], Received()
            # Else from a supervisor that has been replaced, or out of turn.
            if order.get("term", 0) == self._term and self._received.is_next(order):
                self._obey(sock, order)

    def _set_dead_man(self) -> None:
        """Time for `_end_alone` first, and for what a supervisor that is there would put up with."""
        self._dead_man_set, self._patience_s = time.monotonic(), self._patience()
        seconds = max(self._linger_s + ALONE_EXTRA_S, self._patience_s) + DEAD_MAN_EXTRA_S
        self._dead_man.set(max(DEAD_MAN_EXTRA_S, seconds - (self._dead_man_set - self._last_word)))

    def _patience(self) -> float:
        """How long a supervisor would let Python be silent, where this rank stands now."""
        training = self.training
        goes_on = training is not None and training.stage == "training" and training.committed >= self._first_step
        if goes_on and (self._place() or (None,))[0] not in PATIENT_PLACES:
            return max(training.options.get("hang_timeout_s") or 0.0, SLOW_STEPS * training.last_step_s)
        return FIRST_STEP_S

    def _end_alone(self) -> None:
        """No word for too long: nobody could stop this process any more.

        The guardian should have ended the whole cluster by now; should it be gone as well, this rank does it, except
        when there is a supervisor, from which this rank alone is cut off.
        """
        cluster_dir = Path(os.environ["FTNB_CONNECTION"]).parent
        # Its last sign of life may be younger than its last word to this rank, by a second or two.
        if not reaper.beats(cluster_dir, within_s=self._linger_s + ALONE_EXTRA_S - BEAT_AFTER_WORD_S):
            reaper.reap(cluster_dir)
        os._exit(3)

    def _follow(self, sock: zmq.Socket) -> None:
        """A supervisor that took over keeps keys and, if it can, ports; else it tells the new ones in the file."""
        try:
            found = sockets.Connection.load(Path(os.environ["FTNB_CONNECTION"]))
        except (OSError, ValueError, TypeError):
            return
        before, self._connection = self._connection, found
        if found.rank_port != before.rank_port:
            sock.disconnect(before.url(before.rank_port))
            sock.connect(found.url(found.rank_port))

    def _send(self, sock: zmq.Socket, op: str, **fields: Any) -> None:
        message = {"op": op, "rank": self.rank, **fields}
        sock.send_multipart(messages.encode(self.sent["agent"].numbered(message, time.monotonic())))

    def _beat(self, sock: zmq.Socket) -> None:
        self._beats += 1
        now = time.monotonic()
        place, place_step, since = self._place() or (None, None, now)
        self._send(
            sock, "beat", phase=self.phase, step=self._step(), term=self._term, n=self._beats, at=now, place=place,
            place_step=place_step, place_s=round(now - since, 3), rss_mb=self._rss_mb(),
            heard=self._received.heard, told={stream: sent.last for stream, sent in self.sent.items()},
        )

    def _step(self) -> int | None:
        """The step in flight, else the last one; None for who takes no part in a training."""
        training = self.training
        if training is None or training.rank is None:
            return None
        return training.in_flight or max(training.committed, 0)

    def _place(self) -> tuple[str, int | None, float] | None:
        """What the training thread does, in which step, and since when (`time.monotonic`)."""
        return getattr(self.training, "place", None)

    def _rss_mb(self) -> float:
        if self._memory is None:
            return 0.0
        return round(int(os.pread(self._memory, 128, 0).split()[1]) * _PAGE_BYTES / 1e6, 1)

    def _standing(self) -> dict[str, Any]:
        """Where this rank stands, for a supervisor that has just taken over."""
        training = self.training
        standing = {"phase": self.phase, "host": platform.node(), **self.warm}
        if training is not None:
            standing |= {
                "run": training.options["name"], "generation": training.generation, "stage": training.stage,
                "committed": training.committed, "digest": training.digest,
            }
        return standing

    def _obey(self, sock: zmq.Socket, message: dict[str, Any]) -> None:
        op = message.get("op")
        if op == "regroup":
            self.orders.want(message["generation"])
            if self.training is not None:
                self.training.abort()
        elif op == "go":
            self._first_step = message["first_step"]
            self.orders.go(message)
        elif op == "hold":
            accepted, step = self.orders.hold(message["hold_id"], message["after_step"])
            self._send(sock, "hold_answer", hold_id=message["hold_id"], accepted=accepted, step=step)
        elif op == "release":
            self.orders.release()
        elif op == "drop":
            self.orders.drop()
            if self.training is not None:
                self.training.abort()
        elif op == "load":
            self.names = message.get("names")
            self._work.put(message)
        elif op == "assign":
            self._take_slot(message["rank"])
        elif op == "adopt":
            self._send(sock, "standing", **self._standing())
        elif op == "give_names":
            self._send(sock, "names", names=self.names or b"")
        elif op == "fault":
            self._plan_fault(sock, message)
        elif op == "fault_go":
            self._allow_fault(message["fault_id"])
        elif op == "beat_seen":
            for stream, heard in message.get("heard", {}).items():
                self.sent[stream].arrived(heard or 0)
        elif op == "again":
            for lost in self.sent[message["stream"]].again(message["after"]):
                sock.send_multipart(messages.encode(lost))
        elif op == "stacks":
            self._send(sock, "stacks", id=message["id"], **self._stands())
        elif op == "weights":
            self._weights(sock)
        elif op == "exit":
            os._exit(0)

    def _plan_fault(self, sock: zmq.Socket, message: dict[str, Any]) -> None:
        fault = Fault(
            message["fault_id"], message["kind"], message["at_step"], message.get("duration_s"), message.get("factor"),
            message.get("seed", 0),
        )
        at_once = fault.kind == "partition" and fault.at_step is None  # the training thread may be anywhere
        accepted = at_once or self.orders.add_fault(fault)
        self._send(sock, "fault_answer", fault_id=fault.fault_id, accepted=accepted)
        if at_once:
            self._due = fault, time.monotonic() + RECORDED_WITHIN_S
            self._send(sock, "fault_due", fault_id=fault.fault_id, step=self._step())

    def _allow_fault(self, fault_id: int) -> None:
        if self._due is not None and self._due[0].fault_id == fault_id:
            (fault, until), self._due = self._due, None
            if time.monotonic() < until:
                faults.strike(fault, self.rank, self._step() or 0)
        else:
            self.orders.allow_fault(fault_id)

    def _stands(self) -> dict[str, Any]:
        """Where the training thread stands at this moment."""
        place, step, _ = self._place() or (None, self._step(), 0.0)
        thread = self._training_thread
        return {"place": place, "step": step, "stack": stacks.stack_of(thread.ident if thread else None)}

    def _take_slot(self, rank: int) -> None:
        self.rank = rank
        os.environ["FTNB_RANK"] = str(rank)
        if self.training is not None:
            self.training.rank = rank  # it waits for its first generation

    def _weights(self, sock: zmq.Socket) -> None:
        """Lay a copy of the weights ready: between two steps while a run goes on, else right away."""
        if (training := self.training) is not None:
            self.orders.want_snapshot()
            if self.training is training or not self.orders.take_snapshot_wish():
                return  # the training thread answers
            # It has left the run in this very moment, without having seen the wish.
        if self.last_training is not None:
            self._send(sock, "weights", **self.last_training.take_weights())
        else:
            self._send(sock, "weights", step=None)


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _own_memory_file() -> int | None:
    """Kept open: it is read ten times a second."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no /proc
        return None
