"""Which processes to start, when: a pure state machine like the planner, with the time passed in.

A *slot* is a rank 0 … n-1 of the run. A process without a slot is in the *pool*: a warm spare, or a replacement that
was started for a certain slot. Every vacant slot shall get a process, and beyond these the pool shall hold some spares.

Overload must not turn into a storm of starts, and a cell that no newcomer can run must not be tried for ever. So a slot
whose newcomers are lost before they are of any use waits longer each time, and is given up in the end; and over
everything there is a limit of starts per minute. Ranks that did some work before they were lost are no reason to wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# A newcomer that is lost before it has committed this many steps was of no use (`failed`); with this many: `succeeded`.
MIN_STEPS = 3
MAX_STARTING = 4
# Failures of a slot in a row: how long to wait after the first, and at most; after how many it is given up.
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
MAX_FAILURES = 3
# All starts together.
MAX_STARTS, STORM_WINDOW_S = 40, 60.0


@dataclass(frozen=True)
class Pooled:
    """A living process without a slot. `ready`: it has run the cell, or waits for one; else it is starting."""

    key: str
    intended: int | None
    ready: bool


@dataclass(frozen=True)
class Need:
    """What there is now, and what there shall be."""

    vacant: frozenset[int] = frozenset()
    num_spares: int = 0
    pool: tuple[Pooled, ...] = ()


@dataclass(frozen=True)
class Trouble:
    """Failures in a row of one slot, or of the spares."""

    failures: int
    last_s: float
    reason: str


@dataclass(frozen=True)
class State:
    trouble: Mapping[int | None, Trouble] = field(default_factory=dict)  # per slot; None: the spares
    starts_s: tuple[float, ...] = ()  # of the last minute
    given_up: frozenset[int | None] = frozenset()  # and this has been said


@dataclass(frozen=True)
class Start:
    """Start a process, for this slot or (None) as a spare."""

    intended: int | None


@dataclass(frozen=True)
class GiveUp:
    """No more processes are started for this slot (None: as spares); said once."""

    intended: int | None
    reason: str


def decide(now_s: float, state: State, need: Need) -> tuple[State, list[Start | GiveUp]]:
    """What to do now; to be asked again whenever something has changed, and once in a while."""
    # Should the clock be set back, what happened "later" counts as just happened, or the wait would have no end.
    starts_s = tuple(min(then_s, now_s) for then_s in state.starts_s if now_s - then_s < STORM_WINDOW_S)
    trouble = {slot: replace(past, last_s=min(past.last_s, now_s)) for slot, past in state.trouble.items()}
    state = replace(state, starts_s=starts_s, trouble=trouble)
    starting = sum(not process.ready for process in need.pool)
    room = max(0, min(MAX_STARTING - starting, MAX_STARTS - len(starts_s)))

    uncovered, free = _uncovered(need)
    decisions: list[Start | GiveUp] = []
    blocked = False
    for slot in uncovered:
        state, given_up = _maybe_give_up(state, slot)
        decisions += given_up
        if not _may_start(now_s, state, slot):
            blocked = True
        elif room:
            decisions.append(Start(slot))
            room -= 1
    # Whoever is ready first takes a slot that is vacant. As long as one may not be tried (again), a new spare
    # would be nothing but another try.
    missing = need.num_spares - free
    if missing > 0 and not blocked:
        state, given_up = _maybe_give_up(state, None)
        decisions += given_up
        if _may_start(now_s, state, None):
            decisions += [Start(None)] * min(missing, room)
    num_starts = sum(isinstance(decision, Start) for decision in decisions)
    return replace(state, starts_s=starts_s + (now_s,) * num_starts), decisions


def failed(now_s: float, state: State, intended: int | None, reason: str) -> State:
    """A process was lost before it was of use.

    It did not start, could not run the cell, or was lost within MIN_STEPS committed steps in its slot (which is then
    `intended`, whatever it was started for).
    """
    before = state.trouble.get(intended)
    trouble = Trouble(before.failures + 1 if before else 1, now_s, reason)
    return replace(state, trouble={**state.trouble, intended: trouble})


def succeeded(state: State, intended: int | None) -> State:
    """A process for this slot is of use (a spare: it is ready); failures before do not count any more."""
    trouble = {slot: trouble for slot, trouble in state.trouble.items() if slot != intended}
    return replace(state, trouble=trouble, given_up=state.given_up - {intended})


def forgive(state: State) -> State:
    """A new run, or the user asks for it: every slot may be tried anew. The limit of starts per minute stays."""
    return State(starts_s=state.starts_s)


def _uncovered(need: Need) -> tuple[list[int], int]:
    """The vacant slots for which no process is there or starting, and how many processes are left as spares.

    A process belongs to the slot that it was started for. All others are nobody's and take what is vacant first.
    """
    intended = {process.intended for process in need.pool}
    without_own = sorted(need.vacant - intended)
    nobodys = len(need.pool) - len(need.vacant & intended)
    return without_own[nobodys:], max(0, nobodys - len(without_own))


def _may_start(now_s: float, state: State, slot: int | None) -> bool:
    trouble = state.trouble.get(slot)
    if trouble is None:
        return True
    if trouble.failures >= MAX_FAILURES:
        return False
    wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (trouble.failures - 1))
    return now_s - trouble.last_s >= wait_s


def _maybe_give_up(state: State, slot: int | None) -> tuple[State, list[GiveUp]]:
    trouble = state.trouble.get(slot)
    if trouble is None or trouble.failures < MAX_FAILURES or slot in state.given_up:
        return state, []
    return replace(state, given_up=state.given_up | {slot}), [GiveUp(slot, trouble.reason)]
