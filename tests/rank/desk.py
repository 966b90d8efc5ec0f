"""The supervisor's side of a rank's sockets, in the hands of a test: it hears everything and says what it is told to.

Ranks are processes with the real agent (`lone_rank`); store requests are answered by the supervisor's own store.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import lone_rank
import zmq
from peers import new_process
from zmq.utils.monitor import recv_monitor_message

from ftnb.supervisor.store import StoreServer
from ftnb.wire import messages, sockets
from ftnb.wire.ring import RingReader

DEADLINE_S = 60.0
WORD_EVERY_S = 0.2
OPTIONS = {
    "name": "run", "total_steps": 100_000, "steps": 100_000, "epochs": 1, "global_batch": 8, "seed": 0, "workers": 0,
    "clip_norm": None, "evaluate_every": None, "scheduler_interval": "step", "hang_timeout_s": 30.0,
}  # fmt: skip
CELL = """
import time
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
dataset = [(torch.full((4,), float(i)), torch.zeros(1)) for i in range(16)]

def loss_fn(output, target):
    time.sleep(0.01)
    return torch.nn.functional.mse_loss(output, target)
"""


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {deadline_s:g} s in vain: {what}"
        time.sleep(0.005)
    return value


def state_of(pid: int) -> str:
    """One letter, as in /proc: R(unning), S(leeping), T (stopped), Z(ombie)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Desk:
    """Use it with `with`: in the end all ranks are gone."""

    def __init__(self, directory: Path, heartbeat_ms: tuple[int, int] | None = None) -> None:
        self.directory = directory
        self.ranks: dict[int, ForkServerProcess] = {}
        self.rings: dict[int, RingReader] = {}
        self.heard: dict[int, list[dict[str, Any]]] = {}
        self.links: deque[int] = deque()  # events of the socket's monitor
        self._store = StoreServer()
        self._reports: dict[int, list[list[Any]]] = {}
        self._outbox: deque[tuple[int, dict[str, Any]]] = deque()
        self._agents: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._context = zmq.Context()
        server_public, server_secret = zmq.curve_keypair()
        peer_public, peer_secret = zmq.curve_keypair()
        self.socket = sockets.server_socket(self._context, zmq.ROUTER, server_secret, server_public)
        if heartbeat_ms is not None:
            self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = heartbeat_ms
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.connection = sockets.Connection(
            "test", os.getpid(), "0", "127.0.0.1", port, port, server_public.decode(), peer_public.decode(),
            peer_secret.decode(), "0",
        )
        (directory / "connection.json").write_text(self.connection.to_json())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks.values():
            process.kill()
            process.join()
        self._closing = True
        self._thread.join()
        self._monitor.close(0)
        self.socket.close(0)
        self._context.term()
        for ring in self.rings.values():
            ring.close()

    def start(self, rank: int, linger_s: float = 60.0, **constants: float) -> ForkServerProcess:
        """Start a rank and wait until it is idle; `constants`: see `lone_rank`."""
        self.heard[rank] = []
        self.rings[rank] = RingReader(self.directory / f"rank-{rank}.ring")
        environment = {
            "FTNB_CONNECTION": str(self.directory / "connection.json"), "FTNB_RANK": str(rank),
            "FTNB_RING": str(self.rings[rank].path), "FTNB_KEY": f"rank{rank}", "FTNB_LINGER_S": str(linger_s),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(self.directory),
            "FTNB_RUNTIME_DIR": str(self.directory),
        }
        self.ranks[rank] = new_process(lone_rank.main, environment, str(self._output(rank)), constants)
        self.ranks[rank].start()
        self.hear(rank, "warm")
        return self.ranks[rank]

    def _output(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.out"

    def train(self, *ranks: int, cell: str = CELL, **options: Any) -> None:
        """Let these ranks train that cell, and wait until each has done a step."""
        self.load(*ranks, cell=cell, **options)
        for rank in ranks:
            answer = self.hear(rank, "loaded")
            assert answer["ok"], answer
        self.go(1, ranks)
        wait_until(lambda: all(self.steps(rank) >= 2 for rank in ranks), "the first steps")

    def load(self, *ranks: int, cell: str = CELL, **options: Any) -> None:
        for rank in ranks:
            self.tell(
                rank, "load", run="run", cell=cell, options={**OPTIONS, **options}, backend="gloo", gpu=None, threads=1,
                cwd=str(self.directory), sys_path=[], world_size=len(ranks),
            )

    def go(self, generation: int, members: tuple[int, ...], first_step: int = 1) -> None:
        for rank in members:
            self.tell(rank, "regroup", generation=generation)
        for rank in members:
            self.hear(rank, "ready", lambda m: m["generation"] == generation)
        self._store.open(generation)
        for rank in members:
            self.tell(
                rank, "go", generation=generation, members=list(members), first_step=first_step, source=None, behind=[],
                hold_after=None,
            )

    def tell(self, rank: int, op: str, **fields: Any) -> None:
        self._outbox.append((rank, {"op": op, "term": 1, **fields}))

    def hear(
        self, rank: int, op: str, which: Callable[[dict[str, Any]], bool] = lambda message: True,
        deadline_s: float = DEADLINE_S,
    ) -> dict[str, Any]:
        """The first message of that kind, heard already or waited for."""
        def found() -> dict[str, Any] | None:
            return next((m for m in self.heard[rank] if m["op"] == op and which(m)), None)

        with self._changed:
            there = self._changed.wait_for(lambda: found() is not None, deadline_s)
            assert there, f"no {op} of rank {rank}: {self._about(rank)}"
            return found()

    def forget(self, rank: int) -> None:
        """What has been heard so far does not count any more."""
        with self._changed:
            self.heard[rank] = []

    def last_beat(self, rank: int) -> dict[str, Any]:
        """The newest heartbeat; waits for one that comes after this call."""
        before = sum(m["op"] == "beat" for m in self.heard[rank])
        wait_until(lambda: sum(m["op"] == "beat" for m in self.heard[rank]) > before, "a heartbeat")
        return [m for m in self.heard[rank] if m["op"] == "beat"][-1]

    def inject(self, rank: int, kind: str, fault_id: int = 1, at_step: int | None = None, **fields: Any) -> int:
        """Let a fault happen, as the supervisor does; returns the step in which the rank said that it was due."""
        self.tell(rank, "fault", fault_id=fault_id, kind=kind, at_step=at_step, **fields)
        assert self.hear(rank, "fault_answer", lambda m: m["fault_id"] == fault_id)["accepted"]
        due = self.hear(rank, "fault_due", lambda m: m["fault_id"] == fault_id)
        self.tell(rank, "fault_go", fault_id=fault_id)
        return due["step"]

    def steps(self, rank: int) -> int:
        """The last step of which the rank has reported that it is committed."""
        return max((record[2] for record in self.reports(rank) if record[0] == "committed"), default=0)

    def reports(self, rank: int) -> list[list[Any]]:
        reports = self._reports.setdefault(rank, [])
        for end, raw in self.rings[rank].read():
            reports.append(json.loads(raw))
            self.rings[rank].free(end)
        return reports

    def printed(self, rank: int) -> list[str]:
        return [record[3] for record in self.reports(rank) if record[0] == "log"]

    def _about(self, rank: int) -> str:
        ops = [m for m in self.heard[rank] if m["op"] != "beat"][-3:]
        output = self._output(rank).read_text(errors="replace")[-2000:] if self._output(rank).exists() else ""
        return f"{ops}, exit status {self.ranks[rank].exitcode}, {output}"

    # --- the thread that has the socket

    def _serve(self) -> None:
        last_word: dict[bytes, float] = {}
        while not self._closing:
            while self._outbox and self._outbox[0][0] in self._agents:
                rank, message = self._outbox.popleft()
                self.socket.send_multipart([self._agents[rank], *messages.encode(message)])
            while self._monitor.poll(0):
                self.links.append(recv_monitor_message(self._monitor)["event"])
            if self.socket.poll(5):
                sender, *frames = self.socket.recv_multipart()
                message = messages.decode(frames)
                if message["op"] == "store":
                    for answer in self._store.handle(sender, message):
                        fields = {"id": answer.request_id, "ok": answer.ok, **answer.fields}
                        self.socket.send_multipart([answer.to, *messages.encode(fields)])
                    continue
                if sender.startswith(b"agent-"):
                    self._agents[message["rank"]] = sender
                    # At once, as the supervisor does it: a rank that has just connected again hears it at once.
                    if message["op"] == "beat" and time.monotonic() - last_word.get(sender, 0.0) > WORD_EVERY_S:
                        last_word[sender] = time.monotonic()
                        self.socket.send_multipart([sender, *messages.encode({"op": "beat_seen", "term": 1})])
                with self._changed:
                    self.heard[message["rank"]].append({**message, "came": time.monotonic()})
                    self._changed.notify_all()


def end(process: ForkServerProcess) -> int | None:
    """The exit status (negative: a signal) of a process that ends by itself; None when it does not."""
    process.join(DEADLINE_S)
    return process.exitcode


def stopped(pid: int) -> bool:
    return state_of(pid) in "Tt"


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
