"""What the planner hears (events) and what it asks for (actions): plain data.

`rank` is always a slot, 0 … n-1; `generation` is the one that the message is about, which may be over by now;
times are Unix seconds on the supervisor's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that has been verified just now.

    `step`: whose state it holds. None where it has weights only (a foreign file): then steps go on counting.
    """

    path: str
    step: int | None


# --- events: what has happened -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """Why a rank left a step.

    `cause`: "user" (their code raised), "collective" (a peer did not answer), "divergence" (the replicas differ;
    `error` has `digests` by rank, as text) or "nan" (the gradient or loss was not finite; `error` has `source`:
    whether this very rank brought it in, and `where`). The last two are found by all members at the same point of the
    same step.
    """

    cause: str
    step: int
    time: float
    error: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Started:
    members: tuple[int, ...]


@dataclass(frozen=True)
class SpareReady:
    """A process without a slot has run the cell and can take one. `rank`: the slot it was started for, if any."""

    rank: int | None = None


@dataclass(frozen=True)
class SpareLost:
    """One of the processes that were ready for a slot is gone."""


@dataclass(frozen=True)
class Resized:
    """The run shall have the slots 0 … num_ranks-1 from now on."""

    num_ranks: int


@dataclass(frozen=True)
class Standing:
    """Where a rank was found by a new supervisor."""

    generation: int
    stage: str  # "waiting", "ready", "training", "held", "finished"
    committed: int


@dataclass(frozen=True)
class Adopted:
    """A new supervisor is in charge, with the state that the one before had saved before it acted on it.

    `standing` has the slots of this run (`State.has_run`) whose process lives and was not released. Told next, in any
    order: `RankDied` for the other slots in `has_run`, `RankFenced` as often as `State.unfenced` says, `SpareReady`
    again for each process that is ready, `RankFinished` again for those that had finished. Processes in slots that
    are not in `has_run` are dropped and ended without a word: that was decided before, and perhaps not carried out.
    """

    standing: Mapping[int, Standing]


@dataclass(frozen=True)
class RankDied:
    rank: int
    failure: str  # "kill", "exit", "crash", "unknown"
    reason: str
    fault_time: float  # when it was injected, else the last sign of life


@dataclass(frozen=True)
class RankCondemned:
    """The rank lives, or may live, but the others cannot go on with it: it is lost to the run, and is to be killed.

    `failure` is what it was found to be: hang, partition, gil, stall, deadlock, straggler. `reason` follows "Rank 2 ".
    `fields` go into the event.
    """

    rank: int
    failure: str
    reason: str
    fault_time: float
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoProgress:
    """Nothing moves, and nobody is more to blame than others.

    `waiting`: all wait in the same collective (they can connect again); else each is stuck in its own code.
    """

    waiting: bool
    reason: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NobodyComes:
    """A slot that the run waits for cannot be filled."""

    reason: str


@dataclass(frozen=True)
class RankFenced:
    rank: int


@dataclass(frozen=True)
class StepFailed:
    rank: int
    generation: int
    failure: Failure


@dataclass(frozen=True)
class RankReady:
    rank: int
    generation: int
    committed: int  # -1: it holds no state of the training (it has just come, or a copy was broken off)
    in_flight: int | None = None  # the step it was in when it had to leave
    failure: Failure | None = None
    anchor: int | None = None  # the step after which it has kept a copy of the whole state (0: the initial one)


@dataclass(frozen=True)
class RankFormed:
    rank: int
    generation: int
    formed_at: float
    restored_at: float


@dataclass(frozen=True)
class StepCommitted:
    rank: int
    generation: int
    step: int
    time: float


@dataclass(frozen=True)
class RankFinished:
    rank: int
    generation: int


@dataclass(frozen=True)
class HoldWanted:
    """Pause or stop at the next step boundary. `max_step`: the highest step any rank is known to be in."""

    why: str  # "pause" or "stop"
    max_step: int
    save: bool = False  # a stop: once all stand at the boundary, a checkpoint is written first


@dataclass(frozen=True)
class SaveEnded:
    """The checkpoint that `SaveNow` asked for is complete, or there will be none. `reason`: why not."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class CheckpointsKnown:
    """The newest complete checkpoint of this history is that of step `newest`; None: there is none."""

    newest: int | None


@dataclass(frozen=True)
class CheckpointFound:
    """The newest checkpoint that could be verified, asked for by `State.looks_for_checkpoint`; None: there is none."""

    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class Restore:
    """Somebody wants all to go on from this checkpoint. `why` follows "because "."""

    checkpoint: Checkpoint
    why: str


@dataclass(frozen=True)
class HoldAnswered:
    rank: int
    hold_id: int
    accepted: bool
    step: int


@dataclass(frozen=True)
class RankHeld:
    rank: int
    generation: int
    step: int


@dataclass(frozen=True)
class Unpause:
    pass


@dataclass(frozen=True)
class GiveUp:
    """End the run now, whatever its ranks are doing."""

    outcome: str  # "stopped" or "failed"
    reason: str


@dataclass(frozen=True)
class Tick:
    pass


# --- actions: what to do -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    rank: int
    reason: str


@dataclass(frozen=True)
class TakeSpare:
    """Give this slot to one of the processes that are ready, before anything else is sent to it."""

    rank: int


@dataclass(frozen=True)
class SendRegroup:
    generation: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SendGo:
    generation: int
    members: tuple[int, ...]
    first_step: int
    source: int | None  # copies its state to those in `behind`
    behind: tuple[int, ...]
    hold_after: int | None
    restore: int | None = None  # everybody but those in `behind` first goes back to its copy of the state after this
    checkpoint: Checkpoint | None = None  # or reads it from here: all but one are then in `behind`


@dataclass(frozen=True)
class SaveNow:
    """All members stand after `step`, and will not go on before `SaveEnded` is told: let the first of them save."""

    step: int


@dataclass(frozen=True)
class SendHold:
    ranks: tuple[int, ...]
    hold_id: int
    after_step: int


@dataclass(frozen=True)
class SendRelease:
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SendDrop:
    """The run is over for these ranks (or goes on without them)."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """These slots are given up: the run has shrunk on purpose."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Emit:
    kind: str
    reason: str
    rank: int | None = None
    step: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CloseGeneration:
    """No report of `generation` counts any more beyond `last_committed`."""

    generation: int
    last_committed: int


@dataclass(frozen=True)
class OpenGeneration:
    generation: int
    members: tuple[int, ...]
    first_step: int


@dataclass(frozen=True)
class End:
    state: str  # "finished", "stopped", "failed"
    reason: str
    error: Mapping[str, Any] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones of the event that tells of it


Action = (
    Kill
    | TakeSpare
    | Release
    | SendRegroup
    | SendGo
    | SaveNow
    | SendHold
    | SendRelease
    | SendDrop
    | Emit
    | CloseGeneration
    | OpenGeneration
    | End
)
