"""Injected faults of one run: planned, recorded before they take effect, and reported when they never did."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

from ftnb.errors import RunError, UsageError

if TYPE_CHECKING:
    from ftnb.supervisor.runs import ActiveRun
    from ftnb.supervisor.server import Supervisor


class Faults:
    """The faults that are planned for a run. Each is plain data, so that a successor can go on with it."""

    def __init__(self, supervisor: Supervisor, run: ActiveRun) -> None:
        self._supervisor, self._run = supervisor, run
        self._planned: dict[int, dict[str, Any]] = {}
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._ids = itertools.count(1)

    def record(self) -> dict[str, dict[str, Any]]:
        return {str(number): fault for number, fault in self._planned.items()}

    def restore(self, record: dict[str, dict[str, Any]]) -> None:
        """Those planned for a step wait on their ranks; those planned for a time get a new timer."""
        self._planned = {int(number): fault for number, fault in record.items()}
        self._ids = itertools.count(max(self._planned, default=0) + 1)
        for number, fault in self._planned.items():
            if "due" in fault:
                wait_s = max(0.0, fault["due"] - time.time())
                asyncio.get_running_loop().call_later(wait_s, self._fire_later, number)

    async def inject(self, kind: str, rank: int | None, at_step: int | None, after_s: float | None) -> dict[str, Any]:
        """Plan a fault, or let it happen now; refuses what cannot happen."""
        living = sorted(self._run.living)
        if rank is None:
            rank = living[-1] if living else 0
        if rank not in living:
            raise UsageError(
                f"Rank {rank} takes no part in run {self._run.name!r} (living ranks: {', '.join(map(str, living))}). "
                "%ft_status shows all ranks."
            )
        if at_step is not None:
            return await self._at_step(kind, rank, at_step)
        if after_s is not None:
            fault_id = next(self._ids)
            self._planned[fault_id] = {"kind": kind, "rank": rank, "after_s": after_s, "due": time.time() + after_s}
            asyncio.get_running_loop().call_later(after_s, self._fire_later, fault_id)
            self._run.save()
            return {"rank": rank, "reason": f"Rank {rank} will be killed in {after_s:g} s."}
        self._fire(kind, rank)
        return {"rank": rank, "reason": f"Rank {rank} is killed now (SIGKILL)."}

    async def _at_step(self, kind: str, rank: int, at_step: int) -> dict[str, Any]:
        run = self._run
        if at_step > run.total_steps:
            raise UsageError(f"Step {at_step} will never come: run {run.name!r} has {run.total_steps} steps.")
        fault_id = next(self._ids)
        answered = self._answers[fault_id] = asyncio.get_running_loop().create_future()
        self._planned[fault_id] = {"kind": kind, "rank": rank, "at_step": at_step}
        self._supervisor.tell_rank(rank, "fault", fault_id=fault_id, kind=kind, at_step=at_step)
        try:
            accepted = await asyncio.wait_for(answered, 5)
        except TimeoutError:
            self._planned.pop(fault_id, None)
            raise RunError(f"Rank {rank} does not answer, so no fault can be planned on it.") from None
        finally:
            self._answers.pop(fault_id, None)
        if not accepted:
            self._planned.pop(fault_id, None)
            raise UsageError(
                f"Step {at_step} is past already: run {run.name!r} is at step {run.max_step()}. Choose a later one."
            )
        run.save()
        return {"rank": rank, "reason": f"Rank {rank} will be killed (SIGKILL) inside step {at_step}."}

    def answer(self, fault_id: int, accepted: bool) -> None:
        if (future := self._answers.get(fault_id)) and not future.done():
            future.set_result(accepted)

    def due(self, rank: int, fault_id: int, step: int) -> None:
        """The rank has reached the step of its fault: on record first, then it may happen."""
        fault = self._planned.pop(fault_id, None)
        if fault is None or self._run.is_over:
            return
        self._record(fault["kind"], rank, step)
        self._supervisor.tell_rank(rank, "fault_go", fault_id=fault_id)

    def rearm(self, rank: int) -> None:
        """Another process fills the slot: what was planned for a step of it is planned on that one."""
        for fault_id, fault in self._planned.items():
            if fault["rank"] == rank and "at_step" in fault:
                step = fault["at_step"]
                self._supervisor.tell_rank(rank, "fault", fault_id=fault_id, kind=fault["kind"], at_step=step)

    def end(self) -> None:
        for fault in self._planned.values():
            self._not_fired(fault)
        self._planned.clear()

    def _fire_later(self, fault_id: int) -> None:
        fault = self._planned.pop(fault_id, None)
        if fault is None or self._run.is_over:
            return
        if fault["rank"] not in self._run.living:
            self._not_fired(fault)
            return
        self._fire(fault["kind"], fault["rank"])

    def _fire(self, kind: str, rank: int) -> None:
        self._record(kind, rank, self._supervisor.current_step(rank))
        self._supervisor.signal_rank(rank)

    def _record(self, kind: str, rank: int, step: int | None) -> None:
        self._run.emit("fault_injected", f"SIGKILL to rank {rank}.", rank=rank, step=step, fault=kind)
        self._supervisor.ranks[rank].fault_time = time.time()

    def _not_fired(self, fault: dict[str, Any]) -> None:
        when = f"at step {fault['at_step']}" if fault.get("at_step") else f"after {fault['after_s']:g} s"
        self._run.emit(
            "fault_not_fired", f"The {fault['kind']} of rank {fault['rank']} {when} did not happen.",
            rank=fault["rank"], step=fault.get("at_step"), fault=fault["kind"],
        )
