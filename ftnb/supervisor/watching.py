"""Who does not answer, or does not move: what is known of each rank goes into `core/watch`, its verdicts are acted on.

Ten times a second. Members of the run that goes on are judged by everything; whoever has nothing to do (ranks between
two runs, spares) only by whether it answers at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ftnb.core import protocol, watch
from ftnb.supervisor import stacks
from ftnb.wire import proc

if TYPE_CHECKING:
    from ftnb.supervisor.ranks import Slot
    from ftnb.supervisor.runs import ActiveRun
    from ftnb.supervisor.server import Supervisor

log = logging.getLogger("ftnb.watching")

# Stacks are worth this long a wait; ranks that hold the interpreter lock have none to show.
STACKS_LIMIT_S = 0.5
READ_LIMIT_S = 0.2
LOOK_AROUND_S = 1.0  # for stragglers, and for memory that ran out
# A successor hears of ranks that live within this time. One that has not connected by then is not linked.
FIRST_CONTACT_S = 5.0


class Watcher:
    """Looks at all ranks; to be called by the event loop, ten times a second."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        now = time.monotonic()
        self._began = now
        self._run: ActiveRun | None = None
        self._of_run, self._of_idle = watch.new(now), watch.new(now)
        self._looked_around = now
        self._noted: set[tuple[int, int | None]] = set()  # first steps that take long, told once

    def tick(self) -> None:
        supervisor = self._supervisor
        # What has come while this process was busy, or stopped, is no silence.
        if not supervisor.rank_socket.read_all(READ_LIMIT_S):
            return  # the silence would be its own
        now = time.monotonic()
        if (gap_s := watch.gap_s(now, self._of_idle)) > 0:
            log.warning("this process was stopped or busy for %.1f s", gap_s)
            for slot in supervisor.fleet.slots():
                slot.heartbeats.excuse(gap_s, now)
        run = supervisor.going_run
        if run is not self._run:
            self._run, self._of_run = run, watch.new(now)
            self._noted.clear()
        members = {slot.key: rank for rank, slot in self._members(run).items()}
        if run is not None:
            self._look_at_run(now, run)
        slots = [s for s in (*supervisor.ranks.values(), *supervisor.fleet.pool) if s.key not in members]
        self._look_at_idle(now, slots)
        if now - self._looked_around >= LOOK_AROUND_S:
            self._looked_around = now
            supervisor.fleet.oom_kills.look()
            if run is not None:
                run.look_for_stragglers()

    # --- members of the run

    def _members(self, run: ActiveRun | None) -> dict[int, Slot]:
        if run is None:
            return {}
        ranks = self._supervisor.ranks
        return {rank: ranks[rank] for rank in sorted(run.living) if rank in ranks and _can_be_judged(ranks[rank])}

    def _look_at_run(self, now: float, run: ActiveRun) -> None:
        signs = [self._sign(now, rank, slot, run) for rank, slot in self._members(run).items()]
        limits = watch.Limits(run.options.get("hang_timeout_s") or 30.0, run.pace.median_step_s)
        self._of_run, verdicts = watch.look(now, self._of_run, limits, signs)
        self._note_slow_first_steps(run, limits, signs)
        for verdict in verdicts:
            log.warning("%s", verdict)
            if isinstance(verdict, watch.Stuck):
                self._supervisor.spawn(self._explain(run, verdict))
            elif verdict.rank in run.living:
                self._condemn(run, verdict.rank, verdict.failure, verdict.reason, verdict.since_s, {"phi": verdict.phi})

    def _note_slow_first_steps(self, run: ActiveRun, limits: watch.Limits, signs: Iterable[watch.Sign]) -> None:
        """No verdict, since it may be compiling; but whoever looks at the run should know what it waits for."""
        for sign in signs:
            own_work = sign.place is not None and sign.place not in watch.WAITING | watch.EXEMPT
            mark = (sign.rank, sign.step)
            if mark in self._noted or not (sign.first and own_work and sign.place_s > limits.hang_timeout_s):
                continue
            self._noted.add(mark)
            run.say(
                f"Rank {sign.rank} has stood in {sign.place} of step {sign.step} for {sign.place_s:.0f} s. The first "
                f"step with so many samples is given {watch.FIRST_S:.0f} s (it may be compiling); %ft_stacks shows "
                "where it is."
            )

    def _condemn(
        self, run: ActiveRun, rank: int, failure: str, reason: str, since_s: float, fields: dict[str, Any]
    ) -> None:
        slot = self._supervisor.ranks[rank]
        fault_time = slot.fault_time or time.time() - since_s
        if isinstance(fields.get("phi"), float):
            fields["phi"] = round(fields["phi"], 1)
        run.condemn(rank, failure, reason, fault_time, {k: v for k, v in fields.items() if v is not None})

    async def _explain(self, run: ActiveRun, verdict: watch.Stuck) -> None:
        """The verdict, with where each rank stands; unless somebody has moved meanwhile."""
        ranks = self._supervisor.ranks
        asked = time.monotonic()
        before = {rank: _stand(ranks[rank]) for rank in run.living if rank in ranks}
        generation = run.generation
        answers = await self._supervisor.stacks.ask(sorted(run.living), STACKS_LIMIT_S)
        judged = verdict.ranks or tuple(before)
        stand_still = [
            rank for rank in judged
            if rank in run.living and rank in before and _stand(ranks[rank]) == before[rank]
            and ranks[rank].place_since < asked and not ranks[rank].is_elsewhere(answers.get(rank))
        ]  # fmt: skip
        if self._supervisor.going_run is not run or run.generation != generation:
            return
        since_s = verdict.since_s + time.monotonic() - asked
        fields = {"stands": stacks.grouped(answers)}
        if verdict.ranks:
            for rank in stand_still:
                reason = verdict.reason + stacks.line_of_cell(answers.get(rank))
                self._condemn(run, rank, verdict.failure, reason, since_s, dict(fields))
        elif len(stand_still) == len(judged):
            run.handle(protocol.NoProgress(verdict.waiting, verdict.reason, fields))

    # --- those that have nothing to do

    def _look_at_idle(self, now: float, slots: Iterable[Slot]) -> None:
        known = [slot for slot in slots if _can_be_judged(slot) and not self._is_awaited(slot, now)]
        # They have no ranks of their own: numbers that stay the same from look to look.
        by_number = {slot.number: slot for slot in known}
        signs = [self._sign(now, number, slot, None) for number, slot in by_number.items()]
        self._of_idle, verdicts = watch.look(now, self._of_idle, watch.Limits(float("inf")), signs)
        for verdict in verdicts:
            if isinstance(verdict, watch.Lost):
                self._supervisor.fleet.condemn(by_number[verdict.rank], verdict.reason)

    # --- what is known of one

    def _is_awaited(self, slot: Slot, now: float) -> bool:
        """Only a predecessor has heard of it, up to now. It is not judged, nor those that may wait for it."""
        return slot.agent is None and now - self._began <= FIRST_CONTACT_S

    def _sign(self, now: float, number: int, slot: Slot, run: ActiveRun | None) -> watch.Sign:
        links = self._supervisor.rank_socket.links
        linked, down_since = links.is_up(slot.agent), links.down_since(slot.agent)
        place, step = _place(number, slot, run), slot.place_step
        first = run is None or slot.phase != "training" or run.is_first(number, step)
        if linked is None and self._supervisor.recorded is not None and now - self._began > FIRST_CONTACT_S:
            # It was there in a predecessor's time. One whose interpreter lock is held connects again, and says nothing.
            linked, down_since = self._supervisor.is_connected(slot), self._began + FIRST_CONTACT_S
            if run is not None:
                if place is None:  # most likely in code of the user, in the step that is due
                    place, step = "forward", run.step + 1
                first = run.is_first(number, step)  # it trains; only has it not said so to this process
        stopped = proc.is_stopped(slot.process.pid) if linked is False and slot.process is not None else None
        heartbeats = slot.heartbeats
        return watch.Sign(
            number, None if self._is_awaited(slot, now) else heartbeats.phi(now), heartbeats.age_s(now) or 0.0, linked,
            0.0 if linked or down_since is None else max(0.0, now - down_since), stopped,
            place, step, slot.stood_s(now), first,
        )


def _can_be_judged(slot: Slot) -> bool:
    """It has been heard of (by this supervisor, or its predecessor), and is not being ended already."""
    return slot.usable and slot.heartbeats.last is not None


def _place(rank: int, slot: Slot, run: ActiveRun | None) -> str | None:
    if run is None:
        return None
    return "evaluate" if run.evaluates(rank) else slot.place


def _stand(slot: Slot) -> tuple[Any, ...]:
    return slot.key, slot.place, slot.place_step
