"""One run: feeds the planner with what happened, carries out what it decides, keeps the books."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftnb.core import planner, protocol, sampler
from ftnb.core.events import make_event
from ftnb.core.ledger import Line, StepAssembler
from ftnb.core.report import useful_seconds
from ftnb.core.stragglers import Stragglers
from ftnb.errors import RunError
from ftnb.supervisor import joining
from ftnb.supervisor.chaos import Chaos
from ftnb.supervisor.faults import Faults
from ftnb.supervisor.pace import Pace, milliseconds
from ftnb.supervisor.recorder import Recorder

if TYPE_CHECKING:
    from ftnb.supervisor.server import Supervisor

log = logging.getLogger("ftnb.runs")

ENDED = ("finished", "stopped", "failed")
NO_STACK = "It does not answer: it holds the interpreter lock, or is stopped."

# Transitions that need not be on record: a successor hears of them again, from the ranks or their reports.
_TOLD_AGAIN = (
    protocol.Tick, protocol.StepCommitted, protocol.RankReady, protocol.RankFormed, protocol.HoldAnswered,
    protocol.RankHeld, protocol.RankFinished,
)
_INWARD = (protocol.Emit, protocol.OpenGeneration, protocol.CloseGeneration, protocol.End)


def _strategy(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the planner is told of a run's options."""
    recovery, on_nan = options["recovery"], options.get("on_nan", "stop")
    strategy: dict[str, Any] = {"refill": recovery in ("replace", "restart")}
    if recovery == "restart":
        strategy["restart"] = True
    if on_nan != "stop":
        strategy["on_nan"] = on_nan
    return strategy


class ActiveRun:
    """A run from its start to its end; afterwards it only answers questions.

    `job` is what does not change: name, directory, options, cell, cwd, sys_path, backend, dataset_len, total_steps,
    num_ranks, started, versions, signature. With it and `record()` a successor goes on (`restored`).
    """

    def __init__(
        self, supervisor: Supervisor, job: dict[str, Any], names: bytes | None, record: dict[str, Any] | None = None
    ) -> None:
        self._supervisor, self._job = supervisor, job
        self._final_ranks: list[dict[str, Any]] | None = None
        self.name, self.directory, self.options = job["name"], Path(job["directory"]), job["options"]
        self.cell, self.cwd, self.sys_path, self.backend = job["cell"], job["cwd"], job["sys_path"], job["backend"]
        self.dataset_len, self.total_steps = job["dataset_len"], job["total_steps"]
        self.num_ranks, self.started, self.signature = job["num_ranks"], job["started"], job["signature"]
        self.names = names  # the notebook's names that the cell needs; None: to be asked for (a new supervisor)
        self.no_joining = ""  # why nobody can join any more
        self.ended: float | None = None
        self.state = "starting"
        self.reason = ""
        self.error: dict[str, Any] | None = None
        self.step = 0
        self.loss: float | None = None
        self.failures = 0
        self.changed = asyncio.Event()  # set and replaced whenever something that people wait for happens
        self.recent: deque[str] = deque(maxlen=12)
        self.faults, self.chaos = Faults(supervisor, self), Chaos(supervisor, self)
        self._digests: dict[int, str] = {}
        self.pace = Pace()
        self._stragglers = Stragglers()
        # How large the shares were that each process (by its key) has done a step with, and in which generation and
        # step it did so first: see `is_first`.
        self._sizes_done: dict[str, dict[int, tuple[int, int]]] = {}
        self._skipped: dict[int, dict[int, tuple[str, bool]]] = {}  # by step and rank: (where, whether it is a source)
        self._skips_told = 0  # the last step of which that was told
        self._told_cut_off: set[str] = set()  # keys of processes that do not end although they were killed
        self._useful_s: list[float] = []  # up to each step, summed up; what is undone counts no more
        self._last_commit: float | None = None
        self._state = planner.new(self.total_steps, **_strategy(self.options))
        self._open_generation, self._open_members, self._open_first = 0, (), 1
        self._evaluated_step = self._to_evaluate = 0
        self._flushed_step = 0
        self._names_asked = float("-inf")
        self._pending: list[dict[str, Any]] = []
        self._handling = 0
        sizes = (self.dataset_len, self.options["global_batch"], self.options["evaluate_every"])
        if record is not None:
            self._restore(record, sizes)
            return
        self._recorder = Recorder(self.directory)
        self._assembler = StepAssembler(*sizes)
        self._write_run()
        self._handling += 1  # on record together with the start itself: before that there is nothing to take over
        self.emit(
            "run_started",
            f"{self.total_steps} steps on {self.num_ranks} ranks, {self.options['global_batch']} samples each step.",
            world_size=self.num_ranks,
        )
        self._handling -= 1
        self.handle(protocol.Started(tuple(range(self.num_ranks))))

    # --- for a successor

    def record(self) -> dict[str, Any]:
        """What changes; together with the files of the run it is all that a successor needs to go on."""
        return {
            "planner": planner.to_json(self._state), "faults": self.faults.record(), "chaos": self.chaos.record(),
            "books": [self._open_generation, list(self._open_members), self._open_first],
            "state": self.state, "reason": self.reason, "error": self.error, "ended": self.ended,
            "evaluated_step": self._evaluated_step, "skips_told": self._skips_told, "no_joining": self.no_joining,
            "sizes_done": {key: sorted(sizes) for key, sizes in self._sizes_done.items()},
            "final_ranks": self._final_ranks, "digests": {str(r): d for r, d in self._digests.items()},
            # What is being written right now: the events file ends with these lines, or they are still to be written.
            "events_size": self._recorder.events_size, "events": self._pending,
        }

    def save(self) -> None:
        """Put the state on record, then the events of this moment into their file: after a crash none is lost or
        there twice."""
        self._supervisor.office.save_run(self)
        for event in self._pending:
            self._recorder.event(event)
        self._pending = []

    def _save_soon(self) -> None:
        if not self._handling:
            self.save()

    def _restore(self, record: dict[str, Any], sizes: tuple[Any, ...]) -> None:
        self.state, self.reason, self.error, self.ended = (
            record["state"], record["reason"], record["error"], record["ended"]
        )
        self._state = planner.from_json(record["planner"])
        self.num_ranks = self._state.wanted  # it may have been resized
        self._evaluated_step, self._skips_told = record["evaluated_step"], record["skips_told"]
        self.no_joining = record["no_joining"]
        self._final_ranks = record["final_ranks"]
        self._sizes_done = {key: dict.fromkeys(sizes, (0, 0)) for key, sizes in record["sizes_done"].items()}
        self._digests = {int(rank): digest for rank, digest in record["digests"].items()}
        self._recorder, kept = Recorder.reopen(self.directory, record["events_size"], record["events"])
        for event in kept.events:
            self.failures += event["kind"] == "rank_failed"
            self.recent.appendleft(event.get("reason", ""))
        before = None
        for line in kept.metrics:
            self._note_useful(line, before)
            before = line.get("time") or before
        self.pace.recall(line["step_s"] for line in kept.metrics)
        for line in kept.metrics:
            self._note_line(line)
        generation, members, first_step = record["books"]
        last = kept.metrics[-1] if kept.metrics else {"step": 0, "generation": 0}
        # A generation that has written nothing yet may begin before the last line, after a rollback.
        next_step = last["step"] + 1 if last["generation"] == generation or self.is_over else first_step
        self.step = self._flushed_step = next_step - 1
        self._to_evaluate = self.step if self._is_evaluated_after(self.step) else 0
        self._assembler = StepAssembler(*sizes, next_step=next_step)
        if generation and not self.is_over:
            self._open_generation, self._open_members, self._open_first = generation, tuple(members), first_step
            self._assembler.open_generation(generation, members, next_step)
        if self.is_over:
            self._recorder.close()
        else:
            self.faults.restore(record["faults"])
            self.chaos.restore(record["chaos"])

    def adopted(self, standing: dict[int, protocol.Standing], digests: dict[int, str], reason: str) -> None:
        """A new supervisor has found its ranks: go on."""
        committed = max([self._state.committed, self.step])
        self._state = dataclasses.replace(self._state, committed=committed)
        self.emit("supervisor_started", reason)
        unfenced = dict(self._state.unfenced)
        self.handle(protocol.Adopted(standing))
        # What the ranks have reported comes into the books first: they may be closed below, when the run is over.
        for slot in self._supervisor.fleet.slots():
            self._supervisor.drain(slot)
        for rank, number in unfenced.items():
            for _ in range(number):
                self._supervisor.fleet.fence_former(rank, self._fenced)
        for rank in sorted(self._state.has_run - standing.keys()):
            if not self._supervisor.fleet.is_alive(rank):
                self.rank_died(rank, "unknown", "it ended while there was no supervisor", time.time())
        for rank, digest in digests.items():
            if rank in standing and standing[rank].stage == "finished":
                self.finished(rank, standing[rank].generation, digest)

    def came_late(self, rank: int, generation: int) -> None:
        """A rank that did not answer while it was taken over is back, and has not heard what was sent meanwhile."""
        state, tell = self._state, self._supervisor.tell_rank
        if state.phase == "regrouping" and rank in state.alive | state.left_out and rank not in state.ready:
            if generation < state.generation:
                tell(rank, "regroup", generation=state.generation)
        elif state.phase == "training" and state.hold_why and rank in state.members and rank not in state.hold_answers:
            tell(rank, "hold", hold_id=state.hold_id, after_step=state.hold_after)

    def ask_for_names(self) -> None:
        """Some rank still has what the notebook had sent along with the cell (it may be large: asked now and then)."""
        now = time.monotonic()
        if now - self._names_asked < 2.0:
            return
        self._names_asked = now
        for rank in sorted(self.living):
            if self._supervisor.ranks[rank].agent is not None:
                self._supervisor.tell_rank(rank, "give_names")
                return

    # --- in

    def handle(self, event: Any) -> None:
        """Something happened: decide, put it on record, act."""
        try:
            self._handle(event)
        except Exception as error:
            # Half of what was decided is not done, and nobody would ever decide it again: no run may hang like that.
            if self.is_over or self._supervisor.run is not self:
                raise
            log.exception("internal error while acting on %s", event)
            self._supervisor.own_fault(error)

    def _handle(self, event: Any) -> None:
        before = self._state
        self._state, actions = planner.step(time.time(), before, event)
        if self._state is before and not actions:
            return
        was_over = self.is_over
        self._handling += 1
        try:
            for action in actions:
                if isinstance(action, _INWARD):
                    self._carry_out(action)
        finally:
            self._handling -= 1
        if not self.is_over:
            self.state = self._shown_state()
        if any(isinstance(action, protocol.OpenGeneration) for action in actions):
            self.flush()  # the books of the last generation, before it is on record that they are closed
        if actions or self._state.phase != before.phase or not isinstance(event, _TOLD_AGAIN):
            self.save()
        try:
            for action in actions:
                if not isinstance(action, _INWARD):
                    self._carry_out(action)
        finally:
            if self.is_over and not was_over:
                self._let_go()
            if actions:
                self.notify()

    def fetched(self, record: list[Any]) -> None:
        _, generation, step, rank, samples, digest, loss, weight, scalars = record
        self._write(self._assembler.fetched(generation, step, rank, samples, digest, loss, weight, scalars))

    def committed(self, record: list[Any], key: str) -> None:
        """`key`: of the process that tells it; its slot may have another one by now."""
        _, generation, step, rank, when, lr, norm, step_s, *own_s = record
        if generation == self._open_generation:
            size, done = self._share_size(rank, step), self._sizes_done.setdefault(key, {})
            if size not in done:
                done[size] = (generation, step)
                self._save_soon()  # or a successor would give a rank that is stuck by then the time of a first step
            if self._is_evaluated_after(step) and rank == self._open_members[0]:
                self._to_evaluate = step
            if own_s:
                self._stragglers.step(step, rank, own_s[0])
        # The books' generation, not the planner's: commits may still come in when the next one is being formed.
        if generation == self._open_generation and step > self.step:
            first, self.step = self.step == 0, step
            if first:
                self.state = self._shown_state()
                self._write_run()
            self.pace.committed(when, step, step_s)
            if first:
                self.notify()
        self.faults.moved(rank, when)
        self._write(self._assembler.committed(generation, step, rank, when, lr, norm, step_s))
        if step > self._state.committed:
            self.handle(protocol.StepCommitted(rank, generation, step, when))

    def evaluated(self, step: int, scalars: dict[str, float]) -> None:
        self._evaluated_step = max(self._evaluated_step, step)
        self._write(self._assembler.evaluated(step, scalars))

    def update_skipped(self, record: list[Any]) -> None:
        """The gradient of a step was not finite, and its update is not made (`on_nan` is skip)."""
        _, generation, step, rank, where, source = record
        if generation != self._open_generation or step <= self._skips_told:
            return  # the latter: a supervisor before has told it, and not yet let go of the report
        told = self._skipped.setdefault(step, {})
        told[rank] = (where, source)
        if told.keys() >= self.living:
            self._tell_skipped(step)

    def _tell_skipped(self, step: int) -> None:
        told, self._skips_told = self._skipped.pop(step), step
        sources = sorted(rank for rank, (_, source) in told.items() if source)
        where = {told[rank][0] for rank in sources or told} - {""}
        if not sources:
            words = f"{' and '.join(sorted(where)) or 'the sum over all ranks'} was not finite, on no rank alone"
        else:
            names = f"rank{'s' if len(sources) > 1 else ''} {', '.join(map(str, sources))}"
            words = f"{' and '.join(sorted(where)) or 'the gradient'} was not finite on {names}"
        self.emit(
            "nan_detected", f"Step {step}: {words}. The update of this step is skipped.",
            rank=sources[0] if len(sources) == 1 else None, step=step, ranks=sources, skipped=True,
        )

    def log(self, rank: int, when: float, text: str) -> None:
        if not self.is_over:
            self._recorder.log(rank, when, text)

    def rank_died(self, rank: int, failure: str, reason: str, fault_time: float) -> None:
        if self.is_over or rank not in self._state.has_run:
            return
        if rank in self._state.alive | self._state.left_out:  # else it had not entered: it is not in the books
            self._write(self._assembler.lost(rank))
        self.handle(protocol.RankDied(rank, failure, reason, fault_time))

    def condemn(
        self, rank: int, failure: str, reason: str, fault_time: float, fields: Mapping[str, Any] | None = None
    ) -> None:
        """The others cannot go on with this rank, although its process is there (see `protocol.RankCondemned`)."""
        slot = self._supervisor.ranks.get(rank)
        if self.is_over or rank not in self._state.has_run or slot is None:
            return
        self._supervisor.drain(slot)  # what it has done up to now counts
        if rank in self._state.alive | self._state.left_out:
            self._write(self._assembler.lost(rank))
        self.handle(protocol.RankCondemned(rank, failure, reason, fault_time, fields or {}))

    def look_for_stragglers(self) -> None:
        for found in self._stragglers.look():
            own = self._stragglers.typical()
            others = statistics.median(own_s for rank, own_s in own.items() if rank != found.rank)
            reason = (
                f"takes {found.factor:.1f} times as long as the others for its own part of a step "
                f"({milliseconds(own[found.rank])} against {milliseconds(others)})"
            )
            self.emit(
                "straggler_detected", f"Rank {found.rank} {reason}.", rank=found.rank, step=self.step,
                factor=found.factor,
            )
            if self.options.get("evict_stragglers") and len(self.living - {found.rank}) > 0:
                slot = self._supervisor.ranks[found.rank]
                self.condemn(found.rank, "straggler", reason, slot.fault_time or time.time())

    def finished(self, rank: int, generation: int, digest: str) -> None:
        if generation == self._state.generation and rank in self._state.members:  # else told late: of other weights
            self._digests[rank] = digest
        self.handle(protocol.RankFinished(rank, generation))

    def give_up(self, outcome: str, reason: str) -> None:
        """End the run whatever its ranks do (the cluster is being stopped, or ftnb itself is at fault)."""
        self.handle(protocol.GiveUp(outcome, reason))

    def tick(self) -> None:
        if not self.is_over:
            self.handle(protocol.Tick())
        if not self.is_over and self.options["recovery"] == "restart" and (why := self._why_nobody_comes()):
            self.handle(protocol.NobodyComes(why))  # said again and again: it matters only while the run waits
        if not self.is_over:
            self.flush()
            if self._recorder.problem:
                self.give_up("failed", f"The files of this run cannot be written ({self._recorder.problem}).")

    def _why_nobody_comes(self) -> str:
        """Why a slot that is vacant will stay so; empty when somebody may come."""
        given_up, vacant = self._supervisor.fleet.given_up, sorted(self._state.vacant)
        if vacant and self.no_joining:
            return self.no_joining
        return next((f"Rank {r} is not started again: {given_up[r]}" for r in vacant if r in given_up), "")

    def flush(self) -> None:
        """Lines to the disk; only then may the ranks' reports be forgotten."""
        due = self._assembler.next_step - 1
        self._recorder.flush()
        self._flushed_step = due

    # --- commands

    def pause(self) -> None:
        if self._state.hold_why == "pause":
            return
        self.handle(protocol.HoldWanted("pause", self.max_step()))

    def unpause(self) -> None:
        if self._state.hold_why != "pause":
            raise RunError(f"Run {self.name!r} is not paused (it is {self.state}).")
        self.handle(protocol.Unpause())

    def stop(self) -> None:
        self.handle(protocol.HoldWanted("stop", self.max_step()))

    def resize(self, num_ranks: int) -> None:
        if num_ranks >= self.num_ranks:
            self.no_joining = ""  # asked for: tried again
        self.num_ranks = num_ranks
        self.handle(protocol.Resized(num_ranks))

    # --- out

    def _carry_out(self, action: Any) -> None:
        supervisor = self._supervisor
        if isinstance(action, protocol.Emit):
            self.emit(
                action.kind, self._words(action), rank=action.rank, step=action.step,
                **{**action.fields, **self._last_output(action)},
            )
            if action.kind == "rank_joined" and action.step is not None:
                supervisor.ranks[action.rank].joined_step = action.step
            if action.kind == "rank_failed":
                self._rank_failed(action)
            elif action.kind == "rank_fenced" and not supervisor.ranks[action.rank].usable:
                supervisor.ranks[action.rank].state = "fenced"
        elif isinstance(action, protocol.Kill):
            supervisor.fence(action.rank, self._fenced)
        elif isinstance(action, protocol.TakeSpare):
            supervisor.fleet.take_spare(action.rank, self.name)
            self.faults.rearm(action.rank)
        elif isinstance(action, protocol.Release):
            supervisor.fleet.release(action.ranks)
        elif isinstance(action, protocol.SendRegroup):
            supervisor.open_store(action.generation)
            for rank in action.ranks:
                supervisor.tell_rank(rank, "regroup", generation=action.generation)
        elif isinstance(action, protocol.OpenGeneration):
            self._assembler.open_generation(action.generation, action.members, action.first_step)
            self._open_generation, self._open_members = action.generation, action.members
            self._open_first = action.first_step
            self.step = action.first_step - 1  # after a rollback it is less than before
            del self._useful_s[self.step :]
            self._skipped.clear()
            self._stragglers.changed(action.members, self._state.newcomers)
            self._skips_told = min(self._skips_told, action.first_step - 1)
            self._digests.clear()  # those of ranks that had finished, should one die at the very end
        elif isinstance(action, protocol.CloseGeneration):
            self._write(self._assembler.close_generation(action.last_committed))
            self.step = action.last_committed
        elif isinstance(action, protocol.SendGo):
            last = action.first_step - 1
            evaluate = last if self._is_evaluated_after(last) and self._evaluated_step < last else None
            self._to_evaluate = evaluate or 0
            for rank in action.members:
                supervisor.ranks[rank].state = "training"
                supervisor.ranks[rank].went_on(time.monotonic(), "form", action.first_step)
                supervisor.tell_rank(
                    rank, "go", generation=action.generation, members=list(action.members),
                    first_step=action.first_step, source=action.source, behind=list(action.behind),
                    hold_after=action.hold_after, evaluate=evaluate, restore=action.restore,
                )
        elif isinstance(action, protocol.SendHold):
            for rank in action.ranks:
                supervisor.tell_rank(rank, "hold", hold_id=action.hold_id, after_step=action.after_step)
        elif isinstance(action, protocol.SendRelease):
            for rank in action.ranks:
                supervisor.tell_rank(rank, "release")
                supervisor.ranks[rank].went_on(time.monotonic(), "fetch", self._state.committed + 1)
        elif isinstance(action, protocol.SendDrop):
            for rank in action.ranks:
                # Also one that was left out for an exception: its process lives and can train again.
                supervisor.tell_rank(rank, "drop")
                if supervisor.ranks[rank].usable or supervisor.ranks[rank].agent is not None:
                    supervisor.ranks[rank].state, supervisor.ranks[rank].problem = "idle", None
        elif isinstance(action, protocol.End):
            self._end(action)
        else:
            raise AssertionError(f"unknown action {action}")

    def _words(self, action: protocol.Emit) -> str:
        if action.kind != "rank_fenced":
            return action.reason
        # Somebody else may fill the slot by now.
        found = [s for s in self._supervisor.fleet.slots() if s.cut_off and s.rank == action.rank]
        if {slot.key for slot in found} <= self._told_cut_off:
            return action.reason
        self._told_cut_off.update(slot.key for slot in found)
        return (
            f"Rank {action.rank} does not end although it was killed (its process hangs in the kernel): it is cut off, "
            "nothing that it says is heard any more."
        )

    def _last_output(self, action: protocol.Emit) -> dict[str, Any]:
        """What a rank that was lost had printed at last."""
        slot = self._supervisor.ranks.get(action.rank) if action.kind == "rank_failed" else None
        if slot is None or action.fields.get("failure") == "exception" or slot.fault_time is not None:
            return {}
        lines = slot.last_output or list(slot.printed)
        return {"last_output": lines} if lines else {}

    def _rank_failed(self, action: protocol.Emit) -> None:
        self.failures += 1
        slot = self._supervisor.ranks[action.rank]
        slot.problem = action.reason
        if action.fields.get("failure") != "exception":
            self.faults.lost(action.rank)
            return
        slot.state = "failed"
        if slot.joined_step is None:
            return
        slot.joined_step = None
        if slot.fault == "exception":
            self._supervisor.fleet.failed(action.rank, action.reason)
        else:  # it had just come: the next one would do the same
            ready = self._state.ready.get(action.rank)
            error = dict(ready.failure.error) if ready and ready.failure else {}
            joining.refuse(self, None, f"The replacement of rank {action.rank} raised an exception.", error)

    def _fenced(self, rank: int) -> None:
        self.handle(protocol.RankFenced(rank))

    def _end(self, action: protocol.End) -> None:
        self.chaos.end()
        self.faults.end()
        self.state, self.reason, self.ended = action.state, action.reason, time.time()
        self.error = dict(action.error) if action.error else None
        if action.state == "stopped":
            self.reason += " Nothing was saved: this version of ftnb has no checkpoints yet"
            if why := self._supervisor.stop_reason:
                self.reason = self.reason.replace("Stopped on request", "Stopped") + "."
                self.reason += "" if why in self.reason else f" The cluster was stopped: {why}."
            else:
                self.reason += "; run.state_dict() has the weights."
        kind = {"finished": "run_finished", "stopped": "run_stopped", "failed": "run_failed"}[action.state]
        self.emit(kind, self.reason, step=self.step, **action.fields)
        self.flush()
        self._write_run()
        if self._recorder.problem and "cannot be written" not in self.reason:
            self.reason += f" The files of this run could not be written completely ({self._recorder.problem})."

    def _let_go(self) -> None:
        """All is written down."""
        self._recorder.close()
        self.names = b""  # perhaps many megabytes, and this run is part of a cycle: it would stay for long
        self._final_ranks = self._supervisor.fleet.statuses()
        self.save()
        self._supervisor.run_ended(self)

    def emit(self, kind: str, reason: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        # What broke a generation belongs to it, although the next one is under way when it is written down.
        broke = kind in ("rank_suspected", "rank_failed")
        generation = self._state.trained if broke else self._state.generation
        event = make_event(kind, time.time(), max(generation, 1), rank=rank, step=step, reason=reason, **fields)
        self._pending.append(event)
        self.recent.appendleft(reason)
        self._save_soon()

    def say(self, text: str) -> None:
        """Something that is no event, but that whoever looks at the run now should see."""
        self.recent.appendleft(text)
        if not self._handling:
            self.save()
            self.notify()

    def _write(self, lines: list[Line]) -> None:
        for line in lines:
            if line.metrics["step"] in self._skipped:
                self._tell_skipped(line.metrics["step"])
            self._recorder.step(line.metrics, line.ledger)
            self._note_useful(line.metrics, self._last_commit)
            self._note_line(line.metrics)

    def _note_useful(self, metrics: Mapping[str, Any], before: float | None) -> None:
        del self._useful_s[metrics["step"] - 1 :]
        so_far = self._useful_s[-1] if self._useful_s else 0.0
        self._useful_s.append(so_far + useful_seconds([metrics], before=before))

    def _note_line(self, metrics: Mapping[str, Any]) -> None:
        if not metrics["loss_shares"].startswith("0/"):  # else nobody lived to report it
            self.loss = metrics["loss"]  # None when it is not finite
        self._last_commit = metrics.get("time") or self._last_commit
        self.step = max(self.step, metrics["step"])

    def _write_run(self) -> None:
        digests = {str(rank): digest for rank, digest in sorted(self._digests.items())}
        self._recorder.write_run(
            {
                "name": self.name, "state": self.state, "reason": self.reason, "options": self.options,
                "total_steps": self.total_steps, "dataset_len": self.dataset_len, "num_ranks": self._job["num_ranks"],
                "started": self.started, "ended": self.ended, "error": self.error,
                "weights_digest": next(iter(digests.values()), None), "weights_digests": digests or None,
                "versions": self._job["versions"], "cell": self.cell, "directory": str(self.directory),
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

    @property
    def living(self) -> frozenset[int]:
        """Ranks that take part, neither dead nor left out."""
        return self._state.alive

    @property
    def healthy(self) -> frozenset[int]:
        """Members of the generation that trains: they live and hold the state of the training."""
        return self._state.alive & frozenset(self._state.members) if self._state.phase == "training" else frozenset()

    @property
    def has_run(self) -> frozenset[int]:
        """Slots whose process belongs to this run."""
        return self._state.has_run

    @property
    def unfenced(self) -> frozenset[int]:
        """Slots of which a lost process may have left something."""
        return frozenset(self._state.unfenced)

    @property
    def vacant(self) -> frozenset[int]:
        """Slots that wait for a process."""
        return self._state.vacant

    @property
    def missing(self) -> frozenset[int]:
        """Slots whose process is lost, or has not entered yet; another one is on its way."""
        return (self._state.vacant | self._state.has_run) - self._state.alive

    @property
    def job(self) -> dict[str, Any]:
        return self._job

    @property
    def written_through(self) -> int:
        """The last step whose lines are in the files."""
        return self._flushed_step

    def notify(self) -> None:
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    def _shown_state(self) -> str:
        if self._state.paused:
            return "paused"
        if self._state.incident is not None:
            return "recovering"
        if self._state.hold_why == "pause" and self._state.paused_at is not None:
            return "paused"  # somebody joins or leaves meanwhile
        if self.step == 0 and self._state.phase != "training":
            return "starting"
        return "running"  # also while somebody joins or leaves on purpose

    def _share_size(self, rank: int, step: int) -> int:
        """How many samples of the step are this rank's, in the generation whose books are open."""
        batch = sampler.batch_at(step, self.dataset_len, self.options["global_batch"])
        shares = dict(zip(self._open_members, sampler.split(batch.start, batch.stop, len(self._open_members))))
        start, stop = shares.get(rank, (0, 0))
        return stop - start

    def is_first(self, rank: int, step: int | None) -> bool:
        """Whether the process of this rank has not yet done a step with so many samples, whatever the generation.

        Code may be compiled for the shapes that it meets (torch.compile), which takes its time once in each process.
        """
        slot = self._supervisor.ranks.get(rank)
        done = self._sizes_done.get(slot.key) if slot is not None else None
        if not done or step is None or step < 1:  # ranks that have gone back to the start may stand "after step 0"
            return not done
        # The commit is known before the heartbeat that says that the rank has left this step.
        return done.get(self._share_size(rank, step)) in (None, (self._open_generation, step))

    def evaluates(self, rank: int) -> bool:
        """Whether this rank runs `evaluate`, or is just about to.

        Known from what it has reported: should the user's code keep the interpreter lock, no heartbeat tells of it.
        """
        return self._to_evaluate > self._evaluated_step and self._open_members[:1] == (rank,)

    def _is_evaluated_after(self, step: int) -> bool:
        every = self.options["evaluate_every"]
        return bool(every and step and step % every == 0)

    def typical_step_s(self, rank: int) -> float | None:
        """What a step takes this rank, without waiting for the others."""
        return self._stragglers.typical().get(rank)

    async def stacks(self, limit_s: float = 1.0) -> dict[int, dict[str, Any]]:
        """Where the training thread of each living rank stands."""
        answers = await self._supervisor.stacks.ask(sorted(self.living), limit_s)
        return {rank: answer or {"problem": NO_STACK} for rank, answer in answers.items()}

    def max_step(self) -> int:
        steps = [slot.step or 0 for slot in self._supervisor.ranks.values()]
        return max([self.step, *steps])

    def info(self) -> dict[str, Any]:
        """What a client shows while the run goes on (and afterwards)."""
        now = time.time()
        elapsed = (self.ended or now) - self.started
        useful_s = self._useful_s[-1] if self._useful_s else 0.0
        rate = self.pace.steps_per_s(now)
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
            "num_spares": self._state.spares,
            "goodput": min(1.0, useful_s / elapsed) if elapsed > 0 else None,
            "ranks": self._final_ranks or self._supervisor.fleet.statuses(),
            "recent": list(self.recent), "error": self.error, "chaos": self.chaos.info(),
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
