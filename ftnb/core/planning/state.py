"""The state of the planner, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ftnb.core.plain import from_plain, to_plain
from ftnb.core.protocol import End, Failure, HoldAnswered, RankFormed, RankReady, StepCommitted

# A failed collective is a symptom. Its cause (a death, an exception elsewhere) is nearly always known within
# milliseconds; only when none turns up for this long is the group formed again with everybody.
UNEXPLAINED_S = 1.0
# When one rank raises, the others get this long to leave the step by themselves (its closed connections bring
# them out of the collective): those that raise as well show that the code is at fault, not the rank. In the same way
# all get the time to say that their replicas differ, or that the gradient was not finite.
RAISE_GRACE_S = 0.15
# Regroups in a row without a single committed step before the run gives up.
MAX_FRUITLESS_REGROUPS = 4
# How long a stop waits for the ranks to reach a step boundary before it takes them out of the step.
STOP_PATIENCE_S = 5.0

# The clock is that of the wall. One that is put back by more than this is not waited for.
CLOCK_STEP_S = 1.0

# Causes of a failure that all members find at the same point of the same step.
VERDICTS = ("divergence", "nan")


@dataclass(frozen=True)
class Incident:
    """A failure from its first cause to the first step committed after it, with the time of each phase."""

    ranks: tuple[int, ...]
    broke: int  # the generation that it broke; commits of that one may still come in, and are no recovery
    fault_time: float
    detected: float
    fenced: float | None = None
    formed: float | None = None
    restored: float | None = None
    lost_steps: int = 0
    rolled_back_to: int | None = None  # the step whose state all went back to
    what: str = ""  # that happened, where no rank was lost


@dataclass(frozen=True)
class GoingBack:
    """All are to go back to the newest copy of an earlier state before they train again.

    It is over when a generation that was told so stands. Until then nobody knows who has done it, so all do it again
    with the next generation: the copies are kept.
    """

    why: str
    waits: bool = False  # until every slot has a rank (recovery "restart")
    verdict: tuple[str, int, int] | None = None  # (cause, step, generation) when the ranks themselves have found it
    sent: int | None = None  # the last generation that was told
    were_at: Mapping[int, int] = field(default_factory=dict)  # what each of these had committed when it was told


@dataclass(frozen=True)
class State:
    total_steps: int
    phase: str = "new"  # new, regrouping, forming, training, ended
    generation: int = 0
    alive: frozenset[int] = frozenset()  # ranks of this run that are neither lost nor left out
    left_out: frozenset[int] = frozenset()  # raised; fenced by the generation until the step worked without them
    # lost, but the kill of what they started is not confirmed; how many processes of each slot
    unfenced: Mapping[int, int] = field(default_factory=dict)
    silently: Mapping[int, int] = field(default_factory=dict)  # of these, how many have been told as fenced before
    wanted: int = 0  # the run shall have the slots 0 … wanted-1
    refill: bool = False  # slots of lost ranks are to be filled again ("replace", "restart")
    restart: bool = False  # after a loss all go back and wait for the full world
    on_nan: str = "stop"  # or "rollback" ("skip" is the ranks' own business)
    vacant: frozenset[int] = frozenset()  # slots that wait for a process
    spares: int = 0  # processes that are ready to take a slot
    joiners: frozenset[int] = frozenset()  # have got their slot; enter with the next generation
    newcomers: frozenset[int] = frozenset()  # entered with this one
    entered: Mapping[int, int] = field(default_factory=dict)  # with which generation each newcomer did
    leaving: frozenset[int] = frozenset()  # leave with the next generation that begins at a step boundary
    members: tuple[int, ...] = ()
    ready: Mapping[int, RankReady] = field(default_factory=dict)
    formed: Mapping[int, RankFormed] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    first_step: int = 1
    committed: int = 0  # last step known to be in the weights of the most advanced member
    trained: int = 0  # the generation that was told to train last
    raised: Mapping[int, Failure] = field(default_factory=dict)  # by user code in that generation, per rank
    verdicts: Mapping[int, Failure] = field(default_factory=dict)  # found in that generation and not acted upon yet
    failed_step: tuple[int, int, str] | None = None  # (step, generation, what broke it: exception or crash)
    last_verdict: tuple[str, int, int] | None = None  # (cause, step, the step all went back to; -1: not known yet)
    going_back: GoingBack | None = None
    unexplained_since: float | None = None
    raised_since: float | None = None  # also the first verdict
    left: frozenset[int] = frozenset()  # members that have left this generation's step by themselves
    fruitless: int = 0
    incident: Incident | None = None
    early_commits: tuple[StepCommitted, ...] = ()  # came before the last RankFormed of their generation
    # hold: pause or stop at a step boundary that all members agree on
    hold_why: str | None = None  # "pause", "stop", or "change" (somebody joins or leaves)
    hold_id: int = 0
    hold_after: int | None = None
    hold_tries: int = 0
    hold_answers: Mapping[int, HoldAnswered] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    paused_at: int | None = None  # the step after which it is paused, once that has been said
    stop_since: float | None = None
    end: End | None = None  # how the run has ended

    @property
    def paused(self) -> bool:
        return self.phase == "training" and self.hold_why == "pause" and self.held >= set(self.members)

    @property
    def has_run(self) -> frozenset[int]:
        """Slots whose process belongs to this run."""
        return self.alive | self.left_out | self.joiners

    @property
    def waits(self) -> bool:
        """Nothing is trained until every slot has a rank, and all have gone back."""
        return self.phase == "regrouping" and self.going_back is not None and self.going_back.waits

    @property
    def awaited(self) -> frozenset[int]:
        """The slots without which the run does not go on. If one of them cannot be filled, tell `NobodyComes`."""
        return frozenset(range(self.wanted)) - self.alive - self.joiners if self.waits else frozenset()


# All that a state may consist of.
_SAVED = {
    kind.__name__: kind
    for kind in (State, Incident, GoingBack, End, Failure, HoldAnswered, RankFormed, RankReady, StepCommitted)
}  # fmt: skip


def to_json(state: State) -> str:
    """For the next supervisor, should this one die."""
    return json.dumps(to_plain(state), allow_nan=False)


def from_json(text: str) -> State:
    """ValueError for what this version does not write."""
    state = from_plain(json.loads(text), _SAVED)
    if not isinstance(state, State):
        raise ValueError(f"Not the state of a run: {text[:100]}")
    return state
