"""Real ranks without engines: processes with a real process group and a real `Training`, driven by the test.

Their store is a file instead of the supervisor's socket; everything else is what runs in an engine. They are forked
from a server process that has imported torch, so that starting four of them costs little.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftnb.rank import cell, loop, state
from ftnb.rank.group import Group
from ftnb.rank.orders import Fault, Orders, Superseded

CPU = torch.device("cpu")
DEADLINE_S = 60.0
FORM_TIMEOUT_S = 20.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["peers", "torch._dynamo"])

OPTIONS = {
    "total_steps": 8, "global_batch": 8, "seed": 0, "workers": 0, "clip_norm": None, "evaluate_every": None,
    "scheduler_interval": "step",
}  # fmt: skip
DATA = """
import torch
dataset = [(torch.full((4,), float(i)), torch.zeros(4)) for i in range(16)]
loss_fn = torch.nn.functional.mse_loss
"""


class FileLink:
    """What a `Training` needs of its link: keys in a file, and messages kept for the test."""

    def __init__(self, path: Path, orders: Orders) -> None:
        self.store = dist.FileStore(str(path), -1)
        self.store.set_timeout(timedelta(milliseconds=20))
        self._orders = orders
        self.told: list[dict[str, Any]] = []
        self.reports: list[list[Any]] = []
        self._changed = threading.Condition()

    def ask_store(self, generation: int, command: str, **args: Any) -> dict[str, Any]:
        key = f"{generation}:{args.get('key')}"
        if command == "set":
            self.store.set(key, args["value"])
            return {}
        if command == "add":
            return {"number": self.store.add(key, args["amount"])}
        keys = [f"{generation}:{k}" for k in args.get("keys", [args.get("key")])]
        if command == "check":
            return {"number": int(self.store.check(keys))}
        deadline = time.monotonic() + DEADLINE_S
        while not self.store.check(keys):
            self._orders.check(generation)
            if time.monotonic() > deadline:
                raise Superseded(generation)
            time.sleep(0.001)
        return {"value": self.store.get(key)} if command == "get" else {}

    def tell(self, op: str, **fields: Any) -> None:
        if op == "fault_due":  # as the supervisor answers, once it is on record
            self._orders.allow_fault(fields["fault_id"])
        with self._changed:
            self.told.append({"op": op, **fields})
            self._changed.notify_all()

    def report(self, record: list[Any]) -> None:
        with self._changed:
            self.reports.append(record)
            self._changed.notify_all()

    def wait_told(self, op: str, generation: int) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next((m for m in self.told if m["op"] == op and m.get("generation") == generation), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, DEADLINE_S), (op, generation, self.told)
            return found()

    def wait_reported(self, kind: str, step: int) -> list[Any]:
        def found() -> list[Any] | None:
            return next((r for r in self.reports if r[0] == kind and r[2] == step), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, DEADLINE_S), (kind, step, self.reports)
            return found()

    def reported(self, kind: str) -> list[list[Any]]:
        with self._changed:
            return [record for record in self.reports if record[0] == kind]


class Peer:
    """One rank: its job from a cell's source, its training, its link."""

    def __init__(self, rank: int, directory: Path, source: str, options: dict[str, Any] | None = None) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.rank = rank
        self.namespace: dict[str, Any] = {}
        options = {**OPTIONS, **(options or {})}
        cell.run_cell(DATA + source, self.namespace, {"rank": rank}, seed=0)
        self.job = cell.check(self.namespace, options, CPU, world_size=1)
        self.orders = Orders()
        self.link = FileLink(directory / "store", self.orders)
        # There is no supervisor to try again when a busy machine is slow to connect.
        loop.FORM_TIMEOUT_S = FORM_TIMEOUT_S
        self.training = loop.Training(self.job, options, rank, "gloo", self.link, self.orders)

    def form(self, members: list[int], generation: int = 1) -> Group:
        group = Group(generation, members, self.rank, "gloo", CPU)
        group.form(self.link, DEADLINE_S)
        self.training._group = group
        return group

    def learn(self, steps: int) -> None:
        """Updates that are the same on every rank: gradients that depend on the step alone."""
        for step in range(1, steps + 1):
            numbers = torch.Generator().manual_seed(step)
            for parameter in self.job.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=numbers).to(parameter.dtype)
            self.job.optimizer.step()
            if self.job.scheduler is not None:
                self.job.scheduler.step()
            self.job.optimizer.zero_grad()

    def share(self, group: Group, source: int, behind: list[int], first_step: int) -> None:
        order = {"source": source, "behind": behind, "members": group.members, "first_step": first_step}
        self.training._share_state(group, order)

    def regroup(self, generation: int) -> dict[str, Any]:
        """As the agent thread does it; returns what the rank answers, once it is ready."""
        self.orders.want(generation)
        self.training.abort()
        return self.link.wait_told("ready", generation)

    def go(
        self, generation: int, members: list[int], source: int | None, behind: list[int], first_step: int,
        **more: Any,
    ) -> None:  # fmt: skip
        self._last_go = f"ended {generation} {members}", len(members)
        self.orders.go({
            "generation": generation, "members": members, "first_step": first_step, "source": source,
            "behind": behind, **more,
        })  # fmt: skip

    def inject(self, kind: str, at_step: int | None, **fields: Any) -> None:
        assert self.orders.add_fault(Fault(0, kind, at_step, **fields))

    def start(
        self, members: list[int], source: int | None = None, behind: Sequence[int] = (), generation: int = 1,
        **more: Any,
    ) -> threading.Thread:  # fmt: skip
        """Train in a thread of its own, from this generation on."""
        thread = threading.Thread(target=self.training.run, daemon=True)
        thread.start()
        self.orders.want(generation)
        self.link.wait_told("ready", generation)
        self.go(generation, members, source, list(behind), 1, **more)
        return thread

    def end(self, thread: threading.Thread) -> None:
        """Leave the run when all members of the last group want to: whose connections go might be needed till then."""
        key, num_members = self._last_go
        self.link.store.add(key, 1)
        wait_until(lambda: self.link.store.add(key, 0) >= num_members, "all members have come to the end")
        self.orders.drop()
        self.training.abort()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Ask again and again until the answer is true; returns it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.001)
    return answer


def contents(job: cell.Job) -> dict[str, Any]:
    """Everything that a rank holds, copied."""
    full = {
        "model": dict(job.model.state_dict()), "buffers": dict(job.model.named_buffers()),
        "optimizer": job.optimizer.state_dict(),
        "scheduler": cell.scheduler_state(job.scheduler) if job.scheduler is not None else None,
    }  # fmt: skip
    description, tensors = state.take_apart(full)
    return state.put_together(description, [t.clone() for t in tensors])


def same(a: Any, b: Any) -> bool:
    """Bitwise, and of the same types."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(state.as_bytes(a), state.as_bytes(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


def new_process(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process that has torch imported; it is to be started, and to be ended, by the caller."""
    # IPython, where other tests have started it, puts a module of its own in the place of __main__, without this.
    sys.modules["__main__"].__dict__.setdefault("__spec__", None)
    return _context.Process(target=target, args=args)


def run_ranks(work: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """What `work(rank, *args)` returns in a process for each rank; -signal for a rank that was killed by one.

    An assertion or any other error in a rank is raised here. No process outlives this call.
    """
    processes, ends = [], []
    try:
        for rank in range(num_ranks):
            here, there = _context.Pipe(duplex=False)
            process = new_process(_main, there, work, rank, args)
            process.start()
            there.close()
            processes.append(process)
            ends.append(here)
        deadline = time.monotonic() + DEADLINE_S
        results: list[Any] = [None] * num_ranks
        open_ends = dict(zip(ends, range(num_ranks)))
        while open_ends:
            ready = wait(list(open_ends), max(0, deadline - time.monotonic()))
            assert ready, f"rank(s) {sorted(open_ends.values())} did not come to an end"
            for end in ready:
                rank = open_ends.pop(end)
                try:
                    results[rank] = pickle.loads(end.recv_bytes())
                except EOFError:
                    processes[rank].join(DEADLINE_S)
                    results[rank] = (True, processes[rank].exitcode)
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
            assert process.exitcode in (0, -signal.SIGKILL), f"exit status {process.exitcode}"
        for rank, (ok, result) in enumerate(results):
            assert ok, f"rank {rank}:\n{result}"
        return [result for _, result in results]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for end in ends:
            end.close()


def _main(end: Connection, work: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    try:
        answer = (True, work(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # By plain pickle: torch would send handles of memory that goes away with this process.
    end.send_bytes(pickle.dumps(answer))
    end.close()
