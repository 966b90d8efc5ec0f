"""The supervisor's event loop: sockets in, decisions by the core, actions out."""

from __future__ import annotations

import asyncio
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
from ftnb.errors import ClusterError, FtnbError, RunError, UsageError
from ftnb.supervisor import joining, requests
from ftnb.supervisor.adoption import Adoption
from ftnb.supervisor.engines import Engines
from ftnb.supervisor.fleet import Fleet
from ftnb.supervisor.lastwords import last_lines
from ftnb.supervisor.office import Office
from ftnb.supervisor.ranks import Slot
from ftnb.supervisor.ranksocket import RankSocket
from ftnb.supervisor.runs import ActiveRun
from ftnb.supervisor.stacks import Stacks
from ftnb.supervisor.store import Answer, StoreServer
from ftnb.supervisor.watching import Watcher
from ftnb.wire import messages, paths, proc, reaper, sockets
from ftnb.wire.once import OnceOnly
from ftnb.wire.records import TOKEN_VARIABLE

log = logging.getLogger("ftnb.supervisor")

DRAIN_S = 0.05  # reports of steps are read this often; what is urgent comes over the socket
TICK_S = 0.1


class Supervisor:
    """Owns one cluster. `serve` runs until the cluster is stopped.

    `options`: num_ranks, num_spares, threads, backend, linger_s, keep, profile. With `recorded` (the content of
    cluster.json) it takes over the cluster of a supervisor that is gone.
    """

    def __init__(self, name: str, options: dict[str, Any], recorded: dict[str, Any] | None = None) -> None:
        self.name, self.options, self.recorded = name, options, recorded
        self.threads, self.wanted_backend = options["threads"], options["backend"]
        self.linger_s, self.keep, self.profile = options["linger_s"], options["keep"], options["profile"]
        self.term = recorded["term"] + 1 if recorded else 1
        # Whoever started this process may know its cluster by a token that is in the environment already.
        self.token = recorded["token"] if recorded else os.environ.get(TOKEN_VARIABLE) or os.urandom(8).hex()
        self.directory = paths.make_private_dir(paths.cluster_dir(name))
        self.connection_file = self.directory / "connection.json"
        self.office = Office(self, self.directory, self.token)
        self.fleet = Fleet(self, options["num_ranks"], options["num_spares"])
        self.run: ActiveRun | None = None
        self.training_task_active = False
        self.called_off = False  # the start of a run was interrupted
        self.state, self.error = "starting", None
        self.store = StoreServer()
        self.loads: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.load_output: dict[int, list[str]] | None = None
        self.weights: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.adoption: Adoption | None = None  # while the ranks of a predecessor are being taken over
        self._once = OnceOnly()
        self._in_charge = asyncio.Event()  # what a predecessor left has been taken over
        self._stopping = asyncio.Event()
        self.stop_reason = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.stacks = Stacks(self)
        self._clients: set[int] = set()  # descriptors of connected clients
        self._alone_since = time.monotonic()

    @property
    def num_ranks(self) -> int:
        return self.fleet.num_ranks

    @property
    def ranks(self) -> dict[int, Slot]:
        return self.fleet.ranks

    @property
    def engines(self) -> Engines | None:
        return self.fleet.engines

    @property
    def going_run(self) -> ActiveRun | None:
        """The run, unless it is over."""
        return self.run if self.run is not None and not self.run.is_over else None

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    # --- life

    async def serve(self) -> int:
        """Run until stopped; returns the exit code."""
        context = zmq.asyncio.Context()
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        self.keys = self.recorded["keys"] if self.recorded else _new_keys()
        secret, public = self.keys["server_secret"].encode(), self.keys["server_key"].encode()
        authenticator.configure_curve_callback(
            domain="ftnb", credentials_provider=_OnlyKey(self.keys["peer_public_key"].encode())
        )
        self._client_socket = sockets.server_socket(context, zmq.ROUTER, secret, public)
        expected = self.fleet.num_ranks + self.fleet.num_spares
        self.rank_socket = RankSocket(context, secret, public, expected, self._heard)
        self.watcher = Watcher(self)
        monitor = self._client_socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        before = self.recorded["ports"] if self.recorded else [None, None]
        self.host = "127.0.0.1"
        self.ports = [sockets.bind(self._client_socket, self.host, before[0])]
        self.ports.append(self.rank_socket.bind(self.host, before[1]))
        self.office.open()
        me = self.office.me
        connection = sockets.Connection(
            self.name, me.pid, me.started, self.host, *self.ports, self.keys["server_key"],
            self.keys["peer_public_key"], self.keys["peer_secret_key"], ftnb.__version__, self.term,
        )
        self.office.save_cluster()
        paths.write_private(self.connection_file, connection.to_json())
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.stop, f"the supervisor got {signal.Signals(signum).name}")
        for work in (
            self._serve_clients(), self._watch_clients(monitor), self._drain_forever(),
            self._start_cluster() if self.recorded is None else self._take_over(), self._tick_forever(),
        ):
            self.spawn(work)
        if self.recorded is None:
            self._in_charge.set()
        await self._stopping.wait()
        log.info("stopping: %s", self.stop_reason)
        code = await self._shut_down()
        # Last answers (to the one who asked for the stop) get a moment to leave.
        self._client_socket.close(200)
        self.rank_socket.close(200)
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
        try:
            await self._end_run()
        except Exception:  # whatever it is, the processes must go
            log.exception("internal error while ending the run")
        self.office.close_to_successors()
        for slot in self.fleet.slots():
            self.tell(slot, "exit")
            slot.state = "leaving" if slot.alive else slot.state
        await asyncio.sleep(0)
        if self.engines is None and self.recorded is not None:  # nothing could be taken over
            return 1 if reaper.reap(self.directory, locked=True) else 0
        left = await self.engines.end_all(known=self.office.known()) if self.engines else []
        self.fleet.close()
        if left:
            log.error("these processes did not end: %s", left)
            return 1
        self.office.clear()
        return 0

    async def _end_run(self) -> None:
        if (run := self.going_run) is not None:
            run.stop()
            await run.wait(lambda: run.is_over, 0.5)
            if not run.is_over:
                run.give_up("stopped", f"The cluster was stopped: {self.stop_reason}.")

    def environment(self) -> dict[str, str]:
        """What every process that is started gets."""
        return {
            "FTNB_CLUSTER": self.token, "OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads),
            "GLOO_SOCKET_IFNAME": "lo", "IPP_NONINTERACTIVE": "1", "FTNB_LINGER_S": str(self.linger_s),
        }

    async def _start_cluster(self) -> None:
        try:
            engines = Engines(self.directory, self.profile, self.environment())
            engines.on_controller_exit = self.office.controller_ended
            await self.fleet.begin(engines)
        except Exception as error:
            log.exception("the cluster did not start")
            self.state = "failed"
            self.error = error.to_wire() if isinstance(error, FtnbError) else ClusterError(str(error)).to_wire()
        else:
            self.state = "idle"
        self.office.save_cluster()

    async def _take_over(self) -> None:
        assert self.recorded is not None
        self.adoption = Adoption(self, self.recorded)
        try:
            engines = Engines(self.directory, self.profile, self.environment(), recorded=self.recorded["engines"])
            engines.on_controller_exit = self.office.controller_ended
            self.fleet.engines = engines
            await self.adoption.carry_out()
        except Exception as error:
            log.exception("the cluster could not be taken over")
            self.state = "failed"
            self.error = ClusterError(f"The cluster could not be taken over: {error}").to_wire()
            self.adoption = None
            self.stop("it could not be taken over from a supervisor that was lost")
        self._in_charge.set()

    # --- ranks

    def _heard(self, sender: bytes, frames: list[bytes]) -> None:
        try:
            self._from_rank(sender, messages.decode(frames))
        except messages.BadMessage as error:
            log.warning("bad message from a rank: %s", error)
        except Exception as error:
            log.exception("internal error while handling a message of a rank")
            self.own_fault(error)

    def own_fault(self, error: Exception) -> None:
        """An error of ftnb itself must end a run with a reason, never leave it hanging."""
        if self.run is not None and not self.run.is_over:
            text = f"{type(error).__name__}: {error}"
            self.run.give_up("failed", f"Internal error of ftnb ({text}); see {self.directory / 'supervisor.log'}.")

    def _from_rank(self, sender: bytes, message: dict[str, Any]) -> None:
        op, pid = message.get("op"), _pid_of(sender)
        slot = self.fleet.by_pid(pid)
        if slot is None:
            slot = self._introduced(pid, message) if op == "hello" else None
        if slot is None:
            if op == "hello":  # an engine that was given up before it came
                self.rank_socket.send([sender, *messages.encode({"op": "exit", "term": self.term})])
            return  # somebody who is not (or no longer) one of ours
        slot.last_sign = time.time()
        if "letter" in message and not slot.received[message["letter"][0]].is_next(message):
            return  # out of turn, or heard already
        if op == "beat":
            self._beat(slot, sender, message)
        elif op == "store":
            self._send_answers(self.store.handle(sender, message))
        elif op == "hello":
            slot.agent, slot.host = sender, message["host"]
        elif op == "warm":
            slot.num_gpus, slot.torch, slot.phase = message["num_gpus"], message["torch"], "idle"
            slot.engine_id = message.get("engine_id", slot.engine_id)
            self.fleet.warm(slot)
        elif op == "broken":
            slot.problem = message["reason"]
            slot.state = "failed"
            log.error("%s (rank %s): %s", slot.key, slot.rank, message["reason"])
            self.fleet.kill_slot(slot)
            self.fleet.notify()
        elif op == "loaded":
            self.drain(slot)
            if slot.rank is None:
                joining.loaded(self, slot, message)
            elif (future := self.loads.get(slot.rank)) and not future.done():
                future.set_result(message)
            elif slot.rank not in self.loads:
                self.tell(slot, "drop")  # who had asked for it is gone
        elif op == "weights":
            if (future := self.weights.pop(slot.rank, None)) and not future.done():
                future.set_result(message)
        elif op == "standing":
            if self.adoption is not None:
                self.adoption.found(slot, message)
            elif (run := self.going_run) is not None and slot.rank is not None and "generation" in message:
                run.came_late(slot.rank, message["generation"])
        elif op == "names":
            if self.run is not None and self.run.names is None:
                self.run.names = message["names"]
                self.fleet.run_began()
        elif op == "stacks":
            self.stacks.answered(slot, message)
        elif op == "agent_error":
            log.error("agent of %s: %s", slot.key, message["traceback"])
        elif self.adoption is not None:
            self.adoption.defer(slot, op, message)
        elif self.run is not None and slot.rank is not None:
            self.hear(self.run, slot, op, message)

    def _introduced(self, pid: int, message: dict[str, Any]) -> Slot | None:
        """An engine that a profile's launcher has started tells its pid itself."""
        slot = self.fleet.by_key(message.get("key", ""))
        process = proc.ProcessId(pid, message["started"])
        if slot is None or slot in self.fleet.retired or slot.process is not None:
            return None
        if message["host"] != platform.node() or not process.is_alive():
            return None
        slot.process = process
        self.fleet.note_process(slot)
        self.fleet.watch(slot)
        return slot

    def hear(self, run: ActiveRun, slot: Slot, op: str, message: dict[str, Any]) -> None:
        """What a rank says about the run."""
        rank = slot.rank
        assert rank is not None
        self.drain(slot)  # what it reported before it sent this message comes first
        if op == "ready":
            failure = message["failure"]
            run.handle(
                protocol.RankReady(
                    rank, message["generation"], message["committed"], message["in_flight"],
                    protocol.Failure(**failure) if failure else None, message.get("anchor"),
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
            run.faults.answer(message["fault_id"], message["accepted"])
        elif op == "fault_due":
            run.faults.due(rank, message["fault_id"], message["step"])

    def _beat(self, slot: Slot, sender: bytes, message: dict[str, Any]) -> None:
        now = time.monotonic()
        slot.agent = slot.agent or sender
        if message.get("term") != self.term:
            self.tell(slot, "adopt")  # also after its first contact: so it learns who is in charge
        slot.beat(now, message)
        # Who has not heard of this supervisor yet speaks of the orders of the one before.
        if (heard := message.get("heard")) is not None and message["term"] == self.term:
            self._find_lost(slot, heard, message["told"], now)
        if now - slot.answered > 1.0:
            slot.answered = now
            heard = {stream: received.heard for stream, received in slot.received.items()}
            self.tell(slot, "beat_seen", heard=heard)

    def _find_lost(self, slot: Slot, heard: int, told: dict[str, int], now: float) -> None:
        """Connections break, and what was under way is lost: it is sent again, or asked for again."""
        if heard < slot.sent.last:
            for message in slot.sent.again(heard, now):
                self.rank_socket.send([slot.agent, *messages.encode(message)])
        elif slot.sent.keeps_any:
            slot.sent.arrived(heard)  # a cell may have come with many megabytes of names
        for stream, last in told.items():
            received = slot.received[stream]
            if received.heard != last and received.lacks(last, now):
                self.tell(slot, "again", stream=stream, after=received.heard)

    def tell(self, slot: Slot, op: str, **fields: Any) -> None:
        if slot.agent is not None:
            message = slot.sent.numbered({"op": op, "term": self.term, **fields}, time.monotonic())
            self.rank_socket.send([slot.agent, *messages.encode(message)])

    def is_connected(self, slot: Slot) -> bool:
        """Whether its agent has a connection, although it has said nothing since this process is in charge."""
        if slot.process is None:
            return False
        nothing_new = messages.encode({"op": "beat_seen", "term": self.term})
        return self.rank_socket.reaches(b"agent-%d" % slot.process.pid, nothing_new)

    def tell_rank(self, rank: int, op: str, **fields: Any) -> None:
        self.tell(self.ranks[rank], op, **fields)

    def signal_rank(self, rank: int, signum: int = signal.SIGKILL) -> None:
        self.fleet.kill_slot(self.ranks[rank], signum)

    def current_step(self, rank: int) -> int | None:
        self.drain(self.ranks[rank])
        return self.ranks[rank].step

    def fence(self, rank: int, fenced: Callable[[int], None]) -> None:
        """Kill the rank and all it had started; call `fenced(rank)` once nothing of it is left."""
        self.fleet.fence(self.ranks.get(rank), lambda: fenced(rank))

    def rank_lost(self, slot: Slot, failure: str, words: str) -> None:
        """The process of a slot has ended."""
        rank = slot.rank
        assert rank is not None
        if (future := self.loads.get(rank)) and not future.done():
            future.set_result({"ok": False, "kind": "died", "error": {"evalue": words}})
        if (future := self.weights.pop(rank, None)) and not future.done():
            future.set_result({"step": None})
        if self.run is not None:
            fault_time = slot.fault_time or slot.last_sign or time.time()
            self.run.rank_died(rank, failure, words, fault_time)

    def open_store(self, generation: int) -> None:
        self._send_answers(self.store.open(generation))

    def _send_answers(self, answers: list[Answer]) -> None:
        for answer in answers:
            message = {"id": answer.request_id, "ok": answer.ok, **answer.fields}
            self.rank_socket.send([answer.to, *messages.encode(message)])

    # --- reports of steps

    async def _drain_forever(self) -> None:
        while True:
            try:
                if self.adoption is None:
                    for slot in self.fleet.slots():
                        self.drain(slot)
            except Exception as error:
                log.exception("internal error while reading reports of the ranks")
                self.own_fault(error)
            busy = self.training_task_active or (self.run is not None and not self.run.is_over)
            await asyncio.sleep(DRAIN_S if busy else TICK_S)

    def drain(self, slot: Slot) -> None:
        if slot.ring is not None:
            for end, raw in slot.ring.read():
                slot.unfreed.append((end, self._report(slot, json.loads(raw))))

    def _report(self, slot: Slot, record: list[Any]) -> int | None:
        """A record of a rank: ["fetched"|"committed"|"nan", generation, step, …] or ["log"|"evaluated", rank, …].

        Returns the step that it is about: it is kept until the lines of this step are in the files.
        """
        kind, run = record[0], self.going_run
        if kind == "log":
            slot.printed.extend(last_lines(record[3]))
            if self.load_output is not None and slot.rank is not None:
                self.load_output.setdefault(slot.rank, []).append(record[3])
            elif run is not None and (rank := slot.rank if slot.rank is not None else slot.intended) is not None:
                run.log(rank, record[2], record[3])
            return None
        if run is None or slot.rank is None:
            return None
        if kind == "fetched":
            slot.step = record[2]
            run.fetched(record)
        elif kind == "committed":
            slot.moved = time.monotonic()
            run.committed(record, slot.key)
        elif kind == "evaluated":
            slot.went_on(time.monotonic(), "fetch", record[2] + 1)
            run.evaluated(record[2], record[3])
        elif kind == "nan":
            run.update_skipped(record)
        return record[2]

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
        if not self._once.is_new(sender, number):
            if (before := self._once.answer(sender, number)) is not None:
                self._client_socket.send_multipart([sender, *messages.encode(before)])
            return
        reply: dict[str, Any] = {"id": number}
        try:
            await self._in_charge.wait()
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
        reply = self._once.answered(sender, number, reply)
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
                self.office.sign_of_life()
                if self.adoption is None:
                    self.watcher.tick()
                    if self.run is not None:
                        self.run.tick()
                    self.fleet.tick()
                    self._free_reports()
                if self.engines is not None:
                    self.engines.reap_orphans()
            except Exception as error:
                log.exception("internal error")
                self.own_fault(error)
            if self._left_directory():
                self.stop("its directory was removed")
            alone = not self._clients and time.monotonic() - self._alone_since > self.linger_s
            if alone and not self.keep:
                self.stop(f"no notebook was connected for {self.linger_s:g} s")

    def _left_directory(self) -> bool:
        """Somebody has removed the cluster's files: nobody could find it any more."""
        return not self.directory.exists()

    def _free_reports(self) -> None:
        run = self.going_run
        through = run.written_through if run is not None else None
        for slot in self.fleet.slots():
            slot.free_reports(through)

    # --- for the parts of the supervisor

    def check_called_off(self) -> None:
        if self.called_off:
            raise RunError("The training was called off before the ranks had run the cell.")

    def run_ended(self, run: ActiveRun) -> None:
        self.fleet.run_ended(run.vacant, run.living)

    def resize_problem(self) -> str | None:
        """Why the cluster does not get to the number of ranks that is wanted."""
        if self.going_run is not None and self.going_run.no_joining:
            return self.going_run.no_joining
        return next((f"Rank {rank}: {why}" for rank, why in self.fleet.given_up.items() if rank is not None), None)

    def backend(self) -> str:
        """`nccl` when every rank has a GPU of its own (ranks of one host share its GPUs by number)."""
        if self.wanted_backend != "auto":
            return self.wanted_backend
        usable = [s for s in self.ranks.values() if s.usable]
        per_host: dict[str | None, int] = {}
        for slot in usable:
            slot.gpu = per_host.get(slot.host, 0)
            per_host[slot.host] = slot.gpu + 1
        # Spares and replacements may come to the same host: they use the GPU of the rank that they replace.
        return "nccl" if usable and all(per_host[s.host] <= s.num_gpus for s in usable) else "gloo"

    def versions(self) -> dict[str, str]:
        import ipyparallel

        return {
            "ftnb": ftnb.__version__, "python": platform.python_version(),
            "torch": next((s.torch for s in self.ranks.values() if s.torch), None) or "unknown",
            "ipyparallel": ipyparallel.__version__, "pyzmq": zmq.__version__,
        }


def _new_keys() -> dict[str, str]:
    server_public, server_secret = zmq.curve_keypair()
    peer_public, peer_secret = zmq.curve_keypair()
    return {
        "server_key": server_public.decode(), "server_secret": server_secret.decode(),
        "peer_public_key": peer_public.decode(), "peer_secret_key": peer_secret.decode(),
    }


class _OnlyKey:
    """Lets one public key in (the peers' key of the connection file) and nobody else."""

    def __init__(self, public_key: bytes) -> None:
        self._key = public_key  # as text (Z85), the form in which pyzmq asks

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def _pid_of(identity: bytes) -> int:
    """The pid in a rank's socket identity (`agent-<pid>`, `work-<pid>`)."""
    try:
        return int(identity.rsplit(b"-", 1)[1])
    except (IndexError, ValueError):
        return -1
