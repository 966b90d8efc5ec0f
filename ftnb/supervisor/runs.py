"""One run: feeds the planner with what happened, carries out what it decides, keeps the books."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftnb.core import planner, protocol, sampler
from ftnb.core.events import make_event
from ftnb.core.ledger import Line, StepAssembler
from ftnb.core.report import useful_seconds
from ftnb.errors import RunError, UsageError
from ftnb.supervisor.recorder import Recorder

if TYPE_CHECKING:
    from ftnb.supervisor.server import Supervisor

ENDED = ("finished", "stopped", "failed")


class ActiveRun:
    """A run from its start to its end; afterwards it only answers questions."""

    def __init__(
        self, supervisor: Supervisor, *, name: str, directory: Path, options: dict[str, Any], cell: str,
        dataset_len: int, total_steps: int, members: list[int], versions: dict[str, str],
    ) -> None:
        self._supervisor = supervisor
        self._final_ranks: list[dict[str, Any]] | None = None
        self.name, self.directory, self.options = name, directory, options
        self.dataset_len, self.total_steps = dataset_len, total_steps
        self.num_ranks = len(members)
        self.started = time.time()
        self.ended: float | None = None
        self.state = "starting"
        self.reason = ""
        self.error: dict[str, Any] | None = None
        self.step = 0
        self.loss: float | None = None
        self.failures = 0
        self.changed = asyncio.Event()  # set and replaced whenever something that people wait for happens
        self.recent: deque[str] = deque(maxlen=12)
        self._digests: dict[int, str] = {}
        self._versions, self._cell = versions, cell
        self._steps_s: deque[tuple[float, int]] = deque(maxlen=50)  # (commit time, step)
        self._useful_s = 0.0
        self._last_commit: float | None = None
        self._state = planner.new(total_steps)
        self._assembler = StepAssembler(dataset_len, options["global_batch"], options["evaluate_every"])
        self._recorder = Recorder(directory)
        self._open_generation = 0
        self._evaluated_step = 0
        self._faults: dict[int, dict[str, Any]] = {}
        self._fault_ids = itertools.count(1)
        self._write_run()
        self._emit(
            "run_started", f"{total_steps} steps on {len(members)} ranks, {options['global_batch']} samples each step.",
            world_size=len(members),
        )
        self.handle(protocol.Started(tuple(members)))

    # --- in

    def handle(self, event: Any) -> None:
        """Something happened: decide and act."""
        now = time.time()
        self._state, actions = planner.step(now, self._state, event)
        for action in actions:
            self._carry_out(action)
        if not self.is_over:
            self.state = self._shown_state()
        if actions:
            self.notify()

    def fetched(self, record: list[Any]) -> None:
        _, generation, step, rank, samples, digest, loss, weight, scalars = record
        self._write(self._assembler.fetched(generation, step, rank, samples, digest, loss, weight, scalars))

    def committed(self, record: list[Any]) -> None:
        _, generation, step, rank, when, lr, norm, step_s = record
        # The books' generation, not the planner's: commits may still come in when the next one is being formed.
        if generation == self._open_generation and step > self.step:
            first, self.step = self.step == 0, step
            self._steps_s.append((when, step))
            if first:
                self.notify()
        self._write(self._assembler.committed(generation, step, rank, when, lr, norm, step_s))
        if step > self._state.committed:
            self.handle(protocol.StepCommitted(rank, generation, step, when))

    def evaluated(self, step: int, scalars: dict[str, float]) -> None:
        self._evaluated_step = max(self._evaluated_step, step)
        self._write(self._assembler.evaluated(step, scalars))

    def log(self, rank: int, when: float, text: str) -> None:
        if not self.is_over:
            self._recorder.log(rank, when, text)

    def rank_died(self, rank: int, failure: str, reason: str, fault_time: float) -> None:
        if self.is_over or rank not in self._state.alive | self._state.left_out:
            return
        self._write(self._assembler.lost(rank))
        self.handle(protocol.RankDied(rank, failure, reason, fault_time))

    def finished(self, rank: int, generation: int, digest: str) -> None:
        self._digests[rank] = digest
        self.handle(protocol.RankFinished(rank, generation))

    def give_up(self, outcome: str, reason: str) -> None:
        """End the run whatever its ranks do (the cluster is being stopped, or ftnb itself is at fault)."""
        self.handle(protocol.GiveUp(outcome, reason))

    def tick(self) -> None:
        if not self.is_over:
            self.handle(protocol.Tick())
            self._recorder.flush()
            if self._recorder.problem:
                self.give_up("failed", f"The files of this run cannot be written ({self._recorder.problem}).")

    # --- commands

    def pause(self) -> None:
        if self._state.hold_why == "pause":
            return
        self.handle(protocol.HoldWanted("pause", self._max_step()))

    def unpause(self) -> None:
        if self._state.hold_why != "pause":
            raise RunError(f"Run {self.name!r} is not paused (it is {self.state}).")
        self.handle(protocol.Unpause())

    def stop(self) -> None:
        self.handle(protocol.HoldWanted("stop", self._max_step()))

    async def inject(self, kind: str, rank: int | None, at_step: int | None, after_s: float | None) -> dict[str, Any]:
        """Plan a fault, or let it happen now; refuses what cannot happen."""
        living = sorted(self._state.alive)
        if rank is None:
            rank = living[-1] if living else 0
        if rank not in living:
            raise UsageError(
                f"Rank {rank} takes no part in run {self.name!r} (living ranks: {', '.join(map(str, living))}). "
                "%ft_status shows all ranks."
            )
        if at_step is not None:
            return await self._inject_at_step(kind, rank, at_step)
        if after_s is not None:
            fault_id = next(self._fault_ids)
            self._faults[fault_id] = {"kind": kind, "rank": rank, "after_s": after_s}
            asyncio.get_running_loop().call_later(after_s, self._fire_later, fault_id)
            return {"rank": rank, "reason": f"Rank {rank} will be killed in {after_s:g} s."}
        self._fire(kind, rank)
        return {"rank": rank, "reason": f"Rank {rank} is killed now (SIGKILL)."}

    async def _inject_at_step(self, kind: str, rank: int, at_step: int) -> dict[str, Any]:
        if at_step > self.total_steps:
            raise UsageError(f"Step {at_step} will never come: run {self.name!r} has {self.total_steps} steps.")
        fault_id = next(self._fault_ids)
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._faults[fault_id] = {"kind": kind, "rank": rank, "at_step": at_step, "answered": answered}
        self._supervisor.tell_rank(rank, "fault", fault_id=fault_id, kind=kind, at_step=at_step)
        try:
            accepted = await asyncio.wait_for(answered, 5)
        except TimeoutError:
            self._faults.pop(fault_id, None)
            raise RunError(f"Rank {rank} does not answer, so no fault can be planned on it.") from None
        if not accepted:
            self._faults.pop(fault_id, None)
            raise UsageError(
                f"Step {at_step} is past already: run {self.name!r} is at step {self._max_step()}. Choose a later one."
            )
        return {"rank": rank, "reason": f"Rank {rank} will be killed (SIGKILL) inside step {at_step}."}

    def fault_answer(self, fault_id: int, accepted: bool) -> None:
        fault = self._faults.get(fault_id)
        if fault and not fault["answered"].done():
            fault["answered"].set_result(accepted)

    def fault_due(self, rank: int, fault_id: int, step: int) -> None:
        """The rank has reached the step of its fault: on record first, then it may happen."""
        fault = self._faults.pop(fault_id, None)
        if fault is None or self.is_over:
            return
        self._record_fault(fault["kind"], rank, step)
        self._supervisor.tell_rank(rank, "fault_go", fault_id=fault_id)

    def _fire_later(self, fault_id: int) -> None:
        fault = self._faults.pop(fault_id, None)
        if fault is None or self.is_over or fault["rank"] not in self._state.alive:
            if fault is not None:
                self._not_fired(fault)
            return
        self._fire(fault["kind"], fault["rank"])

    def _fire(self, kind: str, rank: int) -> None:
        self._record_fault(kind, rank, self._supervisor.current_step(rank))
        self._supervisor.signal_rank(rank)

    def _record_fault(self, kind: str, rank: int, step: int | None) -> None:
        self._emit("fault_injected", f"SIGKILL to rank {rank}.", rank=rank, step=step, fault=kind)
        self._supervisor.ranks[rank].fault_time = time.time()

    def _not_fired(self, fault: dict[str, Any]) -> None:
        if fault.get("at_step"):
            when = f"at step {fault['at_step']}"
        else:
            when = f"after {fault['after_s']:g} s"
        self._emit(
            "fault_not_fired", f"The {fault['kind']} of rank {fault['rank']} {when} did not happen.",
            rank=fault["rank"], step=fault.get("at_step"), fault=fault["kind"],
        )

    # --- out

    def _carry_out(self, action: Any) -> None:
        supervisor, state = self._supervisor, self._state
        if isinstance(action, protocol.Emit):
            if action.kind == "rank_failed":
                self.failures += 1
                supervisor.ranks[action.rank].problem = action.reason
                if action.fields.get("failure") == "exception":
                    supervisor.ranks[action.rank].state = "failed"
            elif action.kind == "rank_fenced" and not supervisor.ranks[action.rank].usable:
                supervisor.ranks[action.rank].state = "fenced"
            self._emit(action.kind, action.reason, rank=action.rank, step=action.step, **action.fields)
        elif isinstance(action, protocol.Kill):
            supervisor.fence(action.rank, self._fenced)
        elif isinstance(action, protocol.SendRegroup):
            supervisor.open_store(action.generation)
            for rank in action.ranks:
                supervisor.tell_rank(rank, "regroup", generation=action.generation)
        elif isinstance(action, protocol.OpenGeneration):
            self._assembler.open_generation(action.generation, action.members, action.first_step)
            self._open_generation = action.generation
            self._digests.clear()  # those of ranks that had finished, should one die at the very end
        elif isinstance(action, protocol.CloseGeneration):
            self._write(self._assembler.close_generation(action.last_committed))
            self.step = action.last_committed
        elif isinstance(action, protocol.SendGo):
            every, last = self.options["evaluate_every"], action.first_step - 1
            evaluate = last if every and last and last % every == 0 and self._evaluated_step < last else None
            for rank in action.members:
                supervisor.ranks[rank].state = "training"
                supervisor.tell_rank(
                    rank, "go", generation=action.generation, members=list(action.members),
                    first_step=action.first_step, source=action.source, behind=list(action.behind),
                    hold_after=action.hold_after, evaluate=evaluate,
                )
        elif isinstance(action, protocol.SendHold):
            for rank in action.ranks:
                supervisor.tell_rank(rank, "hold", hold_id=action.hold_id, after_step=action.after_step)
        elif isinstance(action, protocol.SendRelease):
            for rank in action.ranks:
                supervisor.tell_rank(rank, "release")
        elif isinstance(action, protocol.SendDrop):
            for rank in action.ranks:
                # Also one that was left out for an exception: its process lives and can train again.
                supervisor.tell_rank(rank, "drop")
                supervisor.ranks[rank].state, supervisor.ranks[rank].problem = "idle", None
        elif isinstance(action, protocol.End):
            self._end(action, state)
        else:
            raise AssertionError(f"unknown action {action}")

    def _fenced(self, rank: int) -> None:
        self.handle(protocol.RankFenced(rank))

    def _end(self, action: protocol.End, state: planner.State) -> None:
        for fault in self._faults.values():
            self._not_fired(fault)
        self._faults.clear()
        self.state, self.reason, self.ended = action.state, action.reason, time.time()
        self.error = dict(action.error) if action.error else None
        if action.state == "stopped":
            if (why := self._supervisor.stop_reason) and why not in self.reason:
                self.reason += f" The cluster was stopped: {why}."
            self.reason += (
                " Nothing was saved: this version of ftnb has no checkpoints yet; run.state_dict() has the weights."
            )
        self._final_ranks = self._supervisor.rank_statuses()
        kind = {"finished": "run_finished", "stopped": "run_stopped", "failed": "run_failed"}[action.state]
        self._emit(kind, self.reason, step=self.step)
        self._write_run()
        if self._recorder.problem and "cannot be written" not in self.reason:
            self.reason += f" The files of this run could not be written completely ({self._recorder.problem})."
        self._recorder.close()
        self.notify()
        self._supervisor.run_ended(self)

    def _emit(self, kind: str, reason: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        # What broke a generation belongs to it, although the next one is under way when it is written down.
        broke = kind in ("rank_suspected", "rank_failed")
        generation = self._state.trained if broke else self._state.generation
        event = make_event(kind, time.time(), max(generation, 1), rank=rank, step=step, reason=reason, **fields)
        self._recorder.event(event)
        self.recent.appendleft(reason)

    def _write(self, lines: list[Line]) -> None:
        for line in lines:
            self._recorder.step(line.metrics, line.ledger)
            if not line.metrics["loss_shares"].startswith("0/"):  # else nobody lived to report it
                self.loss = line.metrics["loss"]  # None when it is not finite
            self._useful_s += useful_seconds([line.metrics], before=self._last_commit)
            self._last_commit = line.metrics.get("time") or self._last_commit
            self.step = max(self.step, line.metrics["step"])

    def _write_run(self) -> None:
        digests = {str(rank): digest for rank, digest in sorted(self._digests.items())}
        self._recorder.write_run(
            {
                "name": self.name, "state": self.state, "reason": self.reason, "options": self.options,
                "total_steps": self.total_steps, "dataset_len": self.dataset_len, "num_ranks": self.num_ranks,
                "started": self.started, "ended": self.ended, "error": self.error,
                "weights_digest": next(iter(digests.values()), None), "weights_digests": digests or None,
                "versions": self._versions, "cell": self._cell, "directory": str(self.directory),
            }
        )

    # --- questions

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def generation(self) -> int:
        return self._state.generation

    @property
    def members(self) -> tuple[int, ...]:
        return self._state.members

    def notify(self) -> None:
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    def _shown_state(self) -> str:
        if self._state.paused:
            return "paused"
        if self._state.incident is not None:
            return "recovering"
        return "running" if self._state.phase == "training" else ("starting" if self.step == 0 else "recovering")

    def _max_step(self) -> int:
        steps = [slot.step or 0 for slot in self._supervisor.ranks.values()]
        return max([self.step, *steps])

    def info(self) -> dict[str, Any]:
        """What a client shows while the run goes on (and afterwards)."""
        now = time.time()
        elapsed = (self.ended or now) - self.started
        rate = None
        if len(self._steps_s) > 1:
            (first_time, first_step), (last_time, last_step) = self._steps_s[0], self._steps_s[-1]
            if last_time > first_time:
                rate = (last_step - first_step) / (last_time - first_time)
        global_batch = self.options["global_batch"]
        per_epoch = sampler.steps_per_epoch(self.dataset_len, global_batch)
        return {
            "run": self.name, "directory": str(self.directory), "state": self.state, "reason": self.reason,
            "step": self.step, "total_steps": self.total_steps, "epoch": max(self.step - 1, 0) // per_epoch + 1,
            "epochs": -(-self.total_steps // per_epoch), "loss": self.loss,
            "steps_per_s": rate if not self.is_over else None, "generation": self.generation,
            "world_size": len(self._state.members), "num_ranks": self.num_ranks, "global_batch": global_batch,
            "samples": sampler.samples_through(self.step, self.dataset_len, global_batch),
            "failures": self.failures, "elapsed_s": elapsed,
            "eta_s": (self.total_steps - self.step) / rate if rate and not self.is_over else None,
            "goodput": min(1.0, self._useful_s / elapsed) if elapsed > 0 else None,
            "ranks": self._final_ranks or self._supervisor.rank_statuses(),
            "recent": list(self.recent), "error": self.error,
        }

    async def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `done()`; False when the time is over first."""
        deadline = time.monotonic() + timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            event = self.changed
            try:
                await asyncio.wait_for(event.wait(), left)
            except TimeoutError:
                return done()
        return True

