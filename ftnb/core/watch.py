"""Who is to blame when nothing moves? Verdicts on the ranks of a generation, as a pure function of what is known.

`look(now, state, limits, signs)` is called ten times a second. Three things are told apart:

* *stopped or cut off*: no heartbeat comes, and the connection does not answer either (ZeroMQ's I/O thread answers for
  a process whose Python is busy, but not for one that is stopped);
* *busy*: the connection answers, Python does not; somebody sorts millions of strings, or native code keeps the
  interpreter lock for ever, so only the time tells;
* *stuck*: Python answers, but the training thread does not move, or stands in another step than the others.

The cause is named, not its victims. Ranks that wait in a collective accuse nobody: while one is silent nobody else is
judged, and of those that answer only who is in its own work, or in the wrong step, can be to blame. Where the watcher
has been stopped itself (a laptop that slept, all processes stopped at once), that time counts for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# φ that condemns a rank whose connection is down; and one of whose connection nothing can be known.
PHI_LINK_DOWN, PHI_LINK_UNKNOWN = 8.0, 12.0
# Connections that break come back within this time.
LINK_DOWN_S = 0.2
# Silent for longer, and not only for messages that are slow on their way: no verdict on anybody else meanwhile.
SILENT_S, PHI_SILENT = 0.5, 3.0
# Two groups that have stood in different steps for this long (or a typical step, if that is longer): whoever was only a
# bit later out of the collective has moved on by then.
MISMATCH_S = 0.5
# The first step of a generation (torch.compile, caches, the first touch of the data), and copying the state.
FIRST_S = 300.0
SLOW_STEPS = 10
# Leaving a group: whatever Gloo still has in hand may be waited for.
LEAVE_S = 10.0
# A gap between two looks above which the watcher had been stopped; how much later the ranks may have been continued,
# and how long after it nobody is judged.
PAUSE_S, CONTINUED_S, SETTLE_S = 0.5, 0.5, 1.0
NUM_PAUSES = 64

WAITING = frozenset(("wait", "form", "share", "collective", "held", "finished"))
EXEMPT = frozenset(("evaluate", "save", "held", "finished"))
TOGETHER = frozenset(("form", "share", "collective"))  # ends only with the others
BEFORE_SUM = frozenset(("fetch", "forward", "backward", "collective"))  # of the step, has not got the sum of it
REGROUPING = frozenset(("wait", "form", "share", "leave"))
# With nothing to do: no place to be stuck in, but others may come to wait for who is there.
AT_REST = frozenset(("held", "finished"))

_WORDS = {"collective": "the all-reduce", "form": "forming the group", "share": "sharing the state",
          "fetch": "fetching the data", "finish": "its last work", "update": "the update",
          "leave": "leaving the group"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sign:
    """What is known of one rank right now."""

    rank: int
    phi: float | None
    silent_s: float  # age of its newest heartbeat
    linked: bool | None  # its connection answers; None: cannot be known
    link_down_s: float  # for how long not
    stopped: bool | None  # the operating system says it is stopped; None: cannot be known
    place: str | None  # of its training thread, as told by the newest heartbeat
    step: int | None
    place_s: float  # as told, plus the age of that heartbeat
    first: bool  # in the first step of a generation or of a new size of its share, or not in training yet


@dataclass(frozen=True)
class Limits:
    hang_timeout_s: float = 30.0
    median_step_s: float | None = None


@dataclass(frozen=True)
class Lost:
    """This rank does not answer. `reason` follows "Rank 2 "."""

    rank: int
    failure: str  # "hang", "partition" or "gil"
    reason: str
    phi: float | None
    since_s: float  # how long ago it fell silent


@dataclass(frozen=True)
class Stuck:
    """All answer, and these do not move. `reason` follows "Rank 2 " for each of them; without ranks it stands alone."""

    failure: str  # "stall" or "deadlock"
    ranks: tuple[int, ...]  # to blame; (): nobody more than others
    waiting: bool  # all wait for each other (see protocol.NoProgress)
    reason: str
    since_s: float


@dataclass(frozen=True)
class State:
    looked: float
    pauses: tuple[tuple[float, float], ...] = ()  # when the watcher, and perhaps everybody, was stopped
    settled: float = float("-inf")  # nobody is judged before
    members: tuple[int, ...] = ()
    changed: float = float("-inf")  # since when they are these
    told: frozenset[tuple[Any, str]] = frozenset()  # (rank, failure): verdicts that still hold


def new(now: float) -> State:
    return State(now)


def gap_s(now: float, state: State) -> float:
    """How long the watcher was stopped before this look, or 0.0; to be told to `Heartbeats.excuse` of all ranks."""
    gap = now - state.looked
    return gap if gap > PAUSE_S else 0.0


def limit_s(sign: Sign, limits: Limits) -> float | None:
    """How long this rank may stay where it is; None: as long as it likes."""
    if sign.place in EXEMPT:
        return None
    limit = max(limits.hang_timeout_s, SLOW_STEPS * (limits.median_step_s or 0.0))
    if sign.place == "leave":
        return max(limit, LEAVE_S)
    return max(limit, FIRST_S) if sign.first or sign.place in ("share", None) else limit


def look(now: float, state: State, limits: Limits, signs: Iterable[Sign]) -> tuple[State, list[Lost | Stuck]]:
    """New verdicts. Each is given once, until what it says is over."""
    signs = sorted(signs, key=_rank)
    members = tuple([sign.rank for sign in signs])
    changed = state.changed if members == state.members else now
    pauses, settled = state.pauses, state.settled
    if gap_s(now, state):
        pauses, settled = _and(pauses, state.looked, now + CONTINUED_S), now + SETTLE_S
    present = {*members, "all"}
    told = frozenset(key for key in state.told if key[0] in present)
    if now < settled:
        return State(now, pauses, settled, members, changed, told), []
    view = _View(now, pauses, limits, changed)
    found: dict[tuple[Any, str], Lost | Stuck] = {}
    silent = [sign for sign in signs if sign.silent_s > SILENT_S and view.unanswered(sign)]
    if silent:
        # The others may wait for these, in a collective or in their own code; what was said of them still holds.
        for sign in silent:
            lost = view.lost(sign, signs)
            if lost is not None:
                found[sign.rank, "gil" if lost.failure == "gil" else "silent"] = lost
        unheard = {sign.rank for sign in silent}
        told = frozenset(key for key in told if key[0] in unheard or key[1] not in ("silent", "gil"))
    else:
        found.update(view.mismatch(signs) or view.overdue(signs))
        told = frozenset(key for key in told if key in found)
    verdicts = [verdict for key, verdict in found.items() if key not in told]
    return State(now, pauses, settled, members, changed, told | found.keys()), _joined(verdicts)


def _and(pauses: tuple[tuple[float, float], ...], begin: float, end: float) -> tuple[tuple[float, float], ...]:
    """One more pause, after those that there were."""
    if pauses and pauses[-1][1] >= begin:
        begin = pauses[-1][0]
        pauses = pauses[:-1]
    return (*pauses[-NUM_PAUSES + 1 :], (begin, end))


def _rank(sign: Sign) -> int:
    return sign.rank


def _joined(verdicts: list[Lost | Stuck]) -> list[Lost | Stuck]:
    """Ranks that stand in the same place of the same step, in one verdict."""
    joined: dict[Any, Lost | Stuck] = {}
    for verdict in verdicts:
        same = (verdict.rank,) if isinstance(verdict, Lost) else (verdict.failure, verdict.waiting, verdict.reason)
        before = joined.get(same)
        if isinstance(before, Stuck) and isinstance(verdict, Stuck):
            ranks, since = (*before.ranks, *verdict.ranks), max(before.since_s, verdict.since_s)
            verdict = Stuck(verdict.failure, ranks, verdict.waiting, verdict.reason, since)
        joined[same] = verdict
    return list(joined.values())


class _View:
    """One look: the signs of single ranks, without the time in which the watcher was stopped."""

    def __init__(
        self, now: float, pauses: tuple[tuple[float, float], ...], limits: Limits, changed: float
    ) -> None:
        self.now, self.pauses, self.limits, self.changed = now, pauses, limits, changed

    def counted_s(self, age_s: float) -> float:
        """Of the last `age_s` seconds, those outside the watcher's pauses."""
        start = self.now - age_s
        return age_s - sum(max(0.0, min(end, self.now) - max(begin, start)) for begin, end in self.pauses)

    def known_s(self, sign: Sign) -> float:
        """How long it is sure to have been in its place: until its newest heartbeat."""
        return self.counted_s(sign.place_s) - self.counted_s(sign.silent_s)

    # --- no heartbeats

    def unanswered(self, sign: Sign) -> bool:
        if sign.silent_s <= SILENT_S or self.counted_s(sign.silent_s) <= SILENT_S:
            return False
        return sign.linked is False or sign.phi is None or sign.phi >= PHI_SILENT

    def lost(self, sign: Sign, signs: list[Sign]) -> Lost | None:
        silent_s, phi = self.counted_s(sign.silent_s), sign.phi
        if sign.linked:
            limit, missed_s = limit_s(sign, self.limits), silent_s
            if sign.place in AT_REST:  # there is a limit from when somebody waits for it
                limit = self.limits.hang_timeout_s
                waits = [self.known_s(s) for s in signs if s.place in TOGETHER or s.place == "wait"]
                missed_s = min(silent_s, max(waits, default=0.0))
            if limit is None or missed_s < limit:
                return None
            reason = (
                f"holds Python's interpreter lock: its connection answers, but no heartbeat for {_s(silent_s)} "
                f"({self._limit(sign, limit)})"
            )
            return Lost(sign.rank, "gil", reason, phi, sign.silent_s)
        down = sign.linked is not None and self.counted_s(sign.link_down_s) >= LINK_DOWN_S
        if phi is None or phi < (PHI_LINK_DOWN if down else PHI_LINK_UNKNOWN):
            return None
        if sign.linked is not None and not down:
            return None
        answers = "its connection does not answer" if down else "whether its connection answers cannot be known"
        what = "has been stopped (SIGSTOP)" if sign.stopped else "is cut off"
        reason = f"{what}: no heartbeat for {_s(silent_s)}, {answers}, φ {phi:.0f}"
        return Lost(sign.rank, "hang" if sign.stopped else "partition", reason, phi, sign.silent_s)

    # --- heartbeats, but no progress

    def mismatch(self, signs: list[Sign]) -> dict[tuple[Any, str], Stuck]:
        """Some wait for the sum of one step while others are in another: no time will help."""
        # The first test is for speed: nearly always all are in the same step.
        if len({sign.step for sign in signs}) < 2 and not any(sign.place == "finished" for sign in signs):
            return {}
        if not all(s.place is not None and s.step is not None and s.place not in REGROUPING for s in signs):
            return {}
        if any(sign.place in ("evaluate", "save") for sign in signs):
            return {}
        # All were where they are during the time from the last that came there to the oldest news of anybody.
        newest = min(self.counted_s(sign.place_s) for sign in signs)
        together = newest - max(self.counted_s(sign.silent_s) for sign in signs)
        if together < max(MISMATCH_S, self.limits.median_step_s or 0.0):
            return {}
        sums = Counter(sign.step for sign in signs if sign.place in BEFORE_SUM)
        sums.update(_position(sign) for sign in signs if sign.place == "finished")
        sizes = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
        if not sizes:
            return {}
        right = sizes[0][0]  # the largest group; of equal ones that which is not ahead
        there = [sign.rank for sign in signs if sign.place in BEFORE_SUM and sign.step == right]
        waiting = [sign.rank for sign in signs if sign.place == "collective" and sign.step == right]
        found = {}
        for sign in signs:
            if _fits(sign, right) or not (waiting or _position(sign) > right):
                continue  # while nobody waits, one who is behind may just be late out of the sum before
            where = "has finished" if sign.place == "finished" else f"is in {_place(sign)}"
            others = f"{_ranks(there)} {'are' if len(there) > 1 else 'is'} in step {right}"
            if waiting:
                others = f"{_ranks(waiting)} {_verb(waiting, 'wait')} in {_name('collective', right)}"
            found[sign.rank, "deadlock"] = Stuck("deadlock", (sign.rank,), False, f"{where} while {others}", newest)
        return found

    def overdue(self, signs: list[Sign]) -> dict[tuple[Any, str], Stuck]:
        """Somebody has been where it is for longer than it may."""
        shortest = self.limits.hang_timeout_s
        if not any(sign.place_s >= shortest and sign.place not in EXEMPT for sign in signs):
            return {}  # for speed: no limit is below this one
        over = [sign for sign in signs if sign.place not in EXEMPT and self._is_over(sign)]
        stalled = [sign for sign in over if sign.place not in WAITING]
        waiting = [sign.rank for sign in signs if sign.place in WAITING]
        if stalled and len(stalled) == len(signs):
            return self._nobody(stalled, "stall", False, "is stuck in its own code")
        if stalled and waiting:
            return self._blame(stalled, waiting)
        if len(waiting) < len(signs) or not all(self._is_over(sign) for sign in signs):
            return {}  # somebody works, or came only just now
        in_sum = [sign for sign in signs if sign.place == "collective"]
        left = [sign.rank for sign in signs if sign.place == "wait"]
        if in_sum and left:
            return self._blame(in_sum, left)  # they were told to leave that group, as the others have
        together = [sign for sign in signs if sign.place in TOGETHER]
        return self._nobody(together, "deadlock", True, "waits for the others") if together else {}

    def _is_over(self, sign: Sign) -> bool:
        limit = limit_s(sign, self.limits) or self.limits.hang_timeout_s
        known = self.known_s(sign)
        if sign.place in WAITING:  # until then they may have waited for one who is no member any more
            known = min(known, self.counted_s(self.now - self.changed))
        return known >= limit

    def _blame(self, over: list[Sign], waiting: list[int]) -> dict[tuple[Any, str], Stuck]:
        since: dict[tuple[str | None, int | None, bool], float] = {}
        for sign in over:  # of those in the same place of the same step, the one that came last
            here = (sign.place, sign.step, sign.first)
            since[here] = min(since.get(here, float("inf")), self.known_s(sign))
        found = {}
        for sign in over:
            limit = limit_s(sign, self.limits)
            stood = since[sign.place, sign.step, sign.first]
            reason = (
                f"has stood in {_place(sign)} for {_s(stood)} while {_ranks(waiting)} {_verb(waiting, 'wait')} for it "
                f"({self._limit(sign, limit)})"
            )
            found[sign.rank, "stall"] = Stuck("stall", (sign.rank,), False, reason, sign.place_s)
        return found

    def _nobody(self, over: list[Sign], failure: str, waiting: bool, what: str) -> dict[tuple[Any, str], Stuck]:
        stood = min(self.known_s(sign) for sign in over)
        places: dict[str, list[int]] = {}
        for sign in over:
            places.setdefault(_place(sign), []).append(sign.rank)
        where = ", ".join(f"{_ranks(ranks)} in {place}" for place, ranks in places.items())
        longest = max(over, key=lambda sign: limit_s(sign, self.limits) or 0.0)
        limit = self._limit(longest, limit_s(longest, self.limits))
        reason = f"no rank has moved for {_s(stood)}, and each {what}: {where} ({limit})"
        return {("all", failure): Stuck(failure, (), waiting, reason, max(sign.place_s for sign in over))}

    def _limit(self, sign: Sign, limit: float | None) -> str:
        """Where the limit comes from, in words."""
        if limit is None:
            return "no limit"
        if limit == self.limits.hang_timeout_s:
            why = "--hang-timeout"
        elif limit == SLOW_STEPS * (self.limits.median_step_s or 0.0):
            why = f"{SLOW_STEPS} typical steps"
        elif sign.place == "leave":
            why = "for leaving a group"
        else:
            why = "while the state is shared" if sign.place == "share" else "for a first step"
        return f"limit {limit:.4g} s, {why}"


def _fits(sign: Sign, right: int) -> bool:
    """It can be where it is while others wait for the sum of step `right`."""
    # Who has the sum of its step may be slow to come to the next.
    behind = 0 if sign.place in BEFORE_SUM or sign.place == "finished" else 1
    return _position(sign) - behind <= right <= _position(sign)


def _position(sign: Sign) -> int:
    """The step whose sum it comes to next."""
    assert sign.step is not None
    return sign.step if sign.place in BEFORE_SUM else sign.step + 1


def _place(sign: Sign) -> str:
    return _name(sign.place, sign.step)


def _name(place: str | None, step: int | None) -> str:
    words = _WORDS.get(place or "", place or "getting ready")
    return words if step is None or place in REGROUPING else f"{words} of step {step}"


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


_NUM_NAMED = 8


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NUM_NAMED:
        named = ", ".join(str(rank) for rank in ranks[:_NUM_NAMED])
        return f"ranks {named} and {len(ranks) - _NUM_NAMED} more"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def _verb(ranks: list[int], verb: str) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"
