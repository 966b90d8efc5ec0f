"""The supervisor's event loop: sockets in, decisions by the core, actions out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import platform
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

import ftnb
from ftnb.core import protocol
from ftnb.errors import ClusterError, FtnbError, UsageError
from ftnb.supervisor import requests
from ftnb.supervisor.engines import Engines
from ftnb.supervisor.ranks import Slot
from ftnb.supervisor.runs import ActiveRun
from ftnb.supervisor.store import Answer, StoreServer
from ftnb.wire import messages, paths, proc, sockets
from ftnb.wire.ring import RingReader

log = logging.getLogger("ftnb.supervisor")

START_TIMEOUT_S = 120.0
DRAIN_S = 0.05  # reports of steps are read this often; what is urgent comes over the socket
TICK_S = 0.1


class Supervisor:
    """Owns one cluster. `serve` runs until the cluster is stopped."""

    def __init__(
        self, *, name: str, num_ranks: int, threads: int, backend: str, linger_s: float, keep: bool,
        profile: str | None,
    ) -> None:
        self.name, self.num_ranks, self.threads = name, num_ranks, threads
        self.wanted_backend, self.linger_s, self.keep, self.profile = backend, linger_s, keep, profile
        self.directory = paths.make_private_dir(paths.cluster_dir(name))
        self.connection_file = self.directory / "connection.json"
        self.ranks: dict[int, Slot] = {}
        self.run: ActiveRun | None = None
        self.training_task_active = False
        self.called_off = False  # the start of a run was interrupted
        self.state, self.error = "starting", None
        self.store = StoreServer()
        self.loads: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.load_output: dict[int, list[str]] | None = None
        self.weights: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._rank_changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self.stop_reason = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clients: set[int] = set()  # descriptors of connected clients
        self._alone_since = time.monotonic()
        self.engines: Engines | None = None

    # --- life

    async def serve(self) -> int:
        """Run until stopped; returns the exit code."""
        context = zmq.asyncio.Context()
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        server_public, server_secret = zmq.curve_keypair()
        peer_public, peer_secret = zmq.curve_keypair()
        authenticator.configure_curve_callback(domain="ftnb", credentials_provider=_OnlyKey(peer_public))
        self._client_socket = sockets.server_socket(context, zmq.ROUTER, server_secret, server_public)
        self._rank_socket = sockets.server_socket(context, zmq.ROUTER, server_secret, server_public)
        monitor = self._client_socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        host = "127.0.0.1"
        ports = [
            s.bind_to_random_port(f"tcp://{host}")
            for s in (self._client_socket, self._rank_socket)
        ]
        me = proc.identify(os.getpid())
        assert me is not None
        connection = sockets.Connection(
            self.name, me.pid, me.started, host, *ports, server_public.decode(), peer_public.decode(),
            peer_secret.decode(), ftnb.__version__,
        )
        paths.write_private(self.connection_file, connection.to_json())
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.stop, f"the supervisor got {signal.Signals(signum).name}")
        for work in (
            self._serve_clients(), self._serve_ranks(), self._watch_clients(monitor), self._drain_forever(),
            self._tick_forever(), self._start_cluster(),
        ):
            self.spawn(work)
        await self._stopping.wait()
        log.info("stopping: %s", self.stop_reason)
        code = await self._shut_down()
        # Last answers (to the one who asked for the stop) get a moment to leave.
        for sock in (self._client_socket, self._rank_socket):
            sock.close(200)
        for task in list(self._tasks):
            task.cancel()
        authenticator.stop()
        return code

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("internal error", exc_info=error)

    def stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self._stopping.set()

    async def _shut_down(self) -> int:
        if self.run is not None and not self.run.is_over:
            self.run.handle(protocol.HoldWanted("stop", 0))
            await self.run.wait(lambda: self.run.is_over, 0.5)
            if not self.run.is_over:
                self.run.give_up("stopped", f"The cluster was stopped: {self.stop_reason}.")
        self.connection_file.unlink(missing_ok=True)
        for slot in self.ranks.values():
            slot.state = "stopping" if slot.alive else slot.state
            if slot.agent:
                self.tell_rank(slot.rank, "exit")
        await asyncio.sleep(0)
        left = await self.engines.end_all() if self.engines else []
        for slot in self.ranks.values():
            if slot.ring is not None:
                slot.ring.close()
                slot.ring = None
        if left:
            log.error("these processes did not end: %s", left)
        return 1 if left else 0

    async def _start_cluster(self) -> None:
        environment = {
            "OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads),
            "GLOO_SOCKET_IFNAME": "lo", "IPP_NONINTERACTIVE": "1", "FTNB_LINGER_S": str(max(self.linger_s, 5.0)),
        }
        try:
            self.engines = Engines(self.directory, self.profile, environment)
            self.ranks = {rank: Slot(rank) for rank in range(self.num_ranks)}
            await self.engines.start_controller()
            await self.start_ranks(list(self.ranks))
        except Exception as error:
            log.exception("the cluster did not start")
            self.state = "failed"
            self.error = error.to_wire() if isinstance(error, FtnbError) else ClusterError(str(error)).to_wire()
        else:
            self.state = "idle"

    async def start_ranks(self, ranks: list[int]) -> None:
        """(Re)start the engines of these slots and wait until all are ready; raises `ClusterError`."""
        assert self.engines is not None
        for rank in ranks:
            if (old := self.ranks[rank].ring) is not None:
                old.close()
            ring = RingReader(self.directory / f"rank-{rank}.ring")
            self.ranks[rank] = Slot(rank, ring=ring)
            environment = {
                "FTNB_RANK": str(rank), "FTNB_CONNECTION": str(self.connection_file), "FTNB_RING": str(ring.path)
            }
            if controller := self.engines.controller:
                environment["FTNB_CONTROLLER"] = f"{controller.pid}:{controller.started}"
            self.ranks[rank].process = await self.engines.start_engine(
                f"rank{rank}", rank, environment, functools.partial(self._rank_exited, rank)
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(self.ranks[rank].state == "starting" for rank in ranks):
            self._rank_changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._rank_changed.wait(), 1.0)
            if time.monotonic() > deadline:
                late = [r for r in ranks if self.ranks[r].state == "starting"]
                raise ClusterError(
                    f"Rank {late[0]} did not get ready within {START_TIMEOUT_S:.0f} s. The end of its output:\n"
                    f"{self.engines.output_of(f'rank{late[0]}')}"
                )
        for rank in ranks:
            if self.ranks[rank].state != "idle":
                raise ClusterError(
                    f"Rank {rank} could not start: {self.ranks[rank].problem} The end of its output:\n"
                    f"{self.engines.output_of(f'rank{rank}')}"
                )

    # --- ranks

    async def _serve_ranks(self) -> None:
        while True:
            frames = await self._rank_socket.recv_multipart()
            try:
                self._from_rank(frames[0], messages.decode(frames[1:]))
            except messages.BadMessage as error:
                log.warning("bad message from a rank: %s", error)
            except Exception as error:
                log.exception("internal error while handling a message of a rank")
                self._own_fault(error)

    def _own_fault(self, error: Exception) -> None:
        """An error of ftnb itself must end a run with a reason, never leave it hanging."""
        if self.run is not None and not self.run.is_over:
            text = f"{type(error).__name__}: {error}"
            self.run.give_up("failed", f"Internal error of ftnb ({text}); see {self.directory / 'supervisor.log'}.")

    def _from_rank(self, sender: bytes, message: dict[str, Any]) -> None:
        rank, op = message["rank"], message["op"]
        slot = self.ranks.get(rank)
        if slot is None or slot.process is None or _pid_of(sender) != slot.process.pid:
            return  # somebody who is not (or no longer) this rank
        slot.last_sign = time.time()
        if op == "beat":
            self._beat(slot, message)
        elif op == "store":
            self._send_answers(self.store.handle(sender, message))
        elif op == "hello":
            slot.agent, slot.host = sender, message["host"]
        elif op == "warm":
            slot.num_gpus, slot.torch, slot.state = message["num_gpus"], message["torch"], "idle"
            slot.phase = "idle"
            self._rank_changed.set()
        elif op == "broken":
            slot.state, slot.problem = "failed", message["reason"]
            log.error("rank %d: %s", rank, message["reason"])
            self._rank_changed.set()
            self.signal_rank(rank)
        elif op == "loaded":
            self._drain(slot)
            if (future := self.loads.get(rank)) and not future.done():
                future.set_result(message)
        elif op == "weights":
            if (future := self.weights.pop(rank, None)) and not future.done():
                future.set_result(message)
        elif op == "agent_error":
            log.error("agent of rank %d: %s", rank, message["traceback"])
        elif self.run is not None:
            self._drain(slot)  # what it reported before it sent this message comes first
            self._about_run(self.run, rank, op, message)

    def _about_run(self, run: ActiveRun, rank: int, op: str, message: dict[str, Any]) -> None:
        if op == "ready":
            failure = message["failure"]
            run.handle(
                protocol.RankReady(
                    rank, message["generation"], message["committed"], message["in_flight"],
                    protocol.Failure(**failure) if failure else None,
                )
            )
        elif op == "formed":
            run.handle(
                protocol.RankFormed(rank, message["generation"], message["formed_at"], message["restored_at"])
            )
        elif op == "step_failed":
            run.handle(protocol.StepFailed(rank, message["generation"], protocol.Failure(**message["failure"])))
        elif op == "finished":
            run.finished(rank, message["generation"], message["digest"])
        elif op == "held":
            run.handle(protocol.RankHeld(rank, message["generation"], message["step"]))
        elif op == "hold_answer":
            run.handle(protocol.HoldAnswered(rank, message["hold_id"], message["accepted"], message["step"]))
        elif op == "fault_answer":
            run.fault_answer(message["fault_id"], message["accepted"])
        elif op == "fault_due":
            run.fault_due(rank, message["fault_id"], message["step"])

    def _beat(self, slot: Slot, message: dict[str, Any]) -> None:
        slot.heartbeats.beat(time.monotonic())
        slot.phase = message["phase"]
        slot.step = message["step"] if message["step"] is not None else slot.step
        now = time.monotonic()
        if now - slot.answered > 1.0 and slot.agent:
            slot.answered = now
            self.tell_rank(slot.rank, "beat_seen")

    def tell_rank(self, rank: int, op: str, **fields: Any) -> None:
        slot = self.ranks[rank]
        if slot.agent is not None:
            self._rank_socket.send_multipart([slot.agent, *messages.encode({"op": op, **fields})])

    def signal_rank(self, rank: int, signum: int = signal.SIGKILL) -> None:
        process = self.ranks[rank].process
        if process is not None:
            process.signal(signum)

    def current_step(self, rank: int) -> int | None:
        self._drain(self.ranks[rank])
        return self.ranks[rank].step

    def fence(self, rank: int, fenced: Callable[[int], None]) -> None:
        """Kill the rank and all it had started; call `fenced(rank)` once nothing of it is left."""
        process = self.ranks[rank].process
        if process is None:
            asyncio.get_running_loop().call_soon(fenced, rank)
            return
        self.ranks[rank].state = "failed"
        if self._kill_all_of(rank, process):
            self.spawn(self._fence_when_gone(rank, process, fenced))
        else:
            asyncio.get_running_loop().call_soon(fenced, rank)

    def _kill_all_of(self, rank: int, process: proc.ProcessId) -> bool:
        """SIGKILL to the rank and to whatever it had started; False when nothing of it is left."""
        told = process.is_alive() and process.signal(signal.SIGKILL)
        told = bool(proc.kill_session(process.pid)) or told
        # What left the rank's session is found by its environment, once the rank's death made it an orphan.
        ring = f"FTNB_RING={self.directory / f'rank-{rank}.ring'}"
        for orphan in self.engines.orphans(ring) if self.engines else []:
            told = orphan.signal(signal.SIGKILL) or told
        return told

    async def _fence_when_gone(self, rank: int, process: proc.ProcessId, fenced: Callable[[int], None]) -> None:
        while self._kill_all_of(rank, process):
            await asyncio.sleep(0.003)
        fenced(rank)

    def _rank_exited(self, rank: int, pid: int, status: int | None) -> None:
        slot = self.ranks.get(rank)
        if slot is None or slot.process is None or slot.process.pid != pid:
            return
        failure, words = proc.describe_exit(status)
        was, slot.state, slot.agent = slot.state, "failed", None
        if was == "failed" and slot.problem:
            words = slot.problem.rstrip(".")  # it said itself why it had to be ended
        slot.problem = slot.problem or f"{words[0].upper()}{words[1:]}."
        if slot.fault_time is not None:
            words = "it was killed (SIGKILL, injected)" if status == -signal.SIGKILL else words
        log.info("rank %d (pid %d) is gone, it was %s: %s", rank, pid, was, words)
        self._rank_changed.set()
        if (future := self.loads.get(rank)) and not future.done():
            future.set_result({"ok": False, "kind": "died", "error": {"evalue": words}})
        if (future := self.weights.pop(rank, None)) and not future.done():
            future.set_result({"step": None})
        self._drain(slot)
        if self.run is not None:
            fault_time = slot.fault_time or slot.last_sign or time.time()
            self.run.rank_died(rank, failure, words, fault_time)

    def open_store(self, generation: int) -> None:
        self._send_answers(self.store.open(generation))

    def _send_answers(self, answers: list[Answer]) -> None:
        for answer in answers:
            message = {"id": answer.request_id, "ok": answer.ok, **answer.fields}
            self._rank_socket.send_multipart([answer.to, *messages.encode(message)])

    def rank_statuses(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [self.ranks[rank].status(now) for rank in sorted(self.ranks)]

    # --- reports of steps

    async def _drain_forever(self) -> None:
        while True:
            try:
                for slot in self.ranks.values():
                    self._drain(slot)
            except Exception as error:
                log.exception("internal error while reading reports of the ranks")
                self._own_fault(error)
            busy = self.training_task_active or (self.run is not None and not self.run.is_over)
            await asyncio.sleep(DRAIN_S if busy else TICK_S)

    def _drain(self, slot: Slot) -> None:
        if slot.ring is not None:
            for raw in slot.ring.read():
                self._report(json.loads(raw))

    def _report(self, record: list[Any]) -> None:
        """A record of a rank: ["fetched"|"committed", generation, step, rank, …] or ["log"|"evaluated", rank, …]."""
        kind = record[0]
        run = self.run if self.run is not None and not self.run.is_over else None
        if kind == "log" and self.load_output is not None:
            self.load_output.setdefault(record[1], []).append(record[3])
        elif run is None:
            return
        elif kind == "fetched":
            self.ranks[record[3]].step = record[2]
            run.fetched(record)
        elif kind == "committed":
            run.committed(record)
        elif kind == "evaluated":
            run.evaluated(record[2], record[3])
        elif kind == "log":
            run.log(record[1], record[2], record[3])

    # --- clients

    async def _serve_clients(self) -> None:
        while True:
            sender, *frames = await self._client_socket.recv_multipart()
            try:
                message = messages.decode(frames)
            except messages.BadMessage as error:
                log.warning("bad message from a client: %s", error)
                continue
            self.spawn(self._answer(sender, message))

    async def _answer(self, sender: bytes, message: dict[str, Any]) -> None:
        number, op = message.pop("id", None), message.pop("op", "")
        reply: dict[str, Any] = {"id": number}
        try:
            handler = requests.HANDLERS.get(op)
            if handler is None:
                raise UsageError(
                    f"The supervisor (ftnb {ftnb.__version__}) does not know the request {op!r}. Is the notebook's "
                    "ftnb another version? %ft_cluster stop, then start again."
                )
            reply |= {"ok": True, "result": await handler(self, **message)}
        except FtnbError as error:
            reply |= {"ok": False, "error": error.to_wire()}
        except Exception as error:
            log.exception("internal error in %s", op)
            text = f"Internal error in the supervisor ({type(error).__name__}: {error}); its log has more."
            reply |= {"ok": False, "error": ClusterError(text).to_wire()}
        self._client_socket.send_multipart([sender, *messages.encode(reply)])

    async def _watch_clients(self, monitor: Any) -> None:
        """Count connected clients by their connections, which ZeroMQ keeps up while a notebook is busy."""
        while True:
            event = await recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._clients.add(event["value"])
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._clients.discard(event["value"])
                self._alone_since = time.monotonic()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self.run is not None:
                    self.run.tick()
                if self.engines is not None:
                    self.engines.reap_orphans()
            except Exception as error:
                log.exception("internal error")
                self._own_fault(error)
            alone = not self._clients and time.monotonic() - self._alone_since > self.linger_s
            if alone and not self.keep:
                self.stop(f"no notebook was connected for {self.linger_s:g} s")

    # --- for the parts of the supervisor

    def run_ended(self, run: ActiveRun) -> None:
        for slot in self.ranks.values():
            slot.fault_time = None

    def backend(self) -> str:
        """`nccl` when every rank has a GPU of its own (ranks of one host share its GPUs by number)."""
        if self.wanted_backend != "auto":
            return self.wanted_backend
        usable = [s for s in self.ranks.values() if s.usable]
        per_host: dict[str | None, int] = {}
        for slot in usable:
            slot.gpu = per_host.get(slot.host, 0)
            per_host[slot.host] = slot.gpu + 1
        return "nccl" if usable and all(per_host[s.host] <= s.num_gpus for s in usable) else "gloo"

    def versions(self) -> dict[str, str]:
        import ipyparallel

        return {
            "ftnb": ftnb.__version__, "python": platform.python_version(),
            "torch": next((s.torch for s in self.ranks.values() if s.torch), None) or "unknown",
            "ipyparallel": ipyparallel.__version__, "pyzmq": zmq.__version__,
        }


class _OnlyKey:
    """Lets one public key in (the peers' key of the connection file) and nobody else."""

    def __init__(self, public_key: bytes) -> None:
        self._key = public_key  # as text (Z85), the form in which pyzmq asks

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def _pid_of(identity: bytes) -> int:
    """The pid in a rank's socket identity (`agent-<rank>-<pid>`, `work-<rank>-<pid>`)."""
    try:
        return int(identity.rsplit(b"-", 1)[1])
    except (IndexError, ValueError):
        return -1
