"""The kinds of faults that can be injected: what each does, what it takes, and the sentences that tell of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftnb.errors import UsageError

# Pauses shorter than the first are not taken for a loss, those longer than the second are (measured: bench/detect). A
# cut connection takes a while to come back after it has healed, so less is tolerated there.
PAUSES_S = {"hang": (0.5, 0.9), "partition": (0.2, 0.6)}


@dataclass(frozen=True)
class Kind:
    """One kind of fault. `what → found` is its line in the list."""

    name: str
    what: str  # what happens, really
    found: str  # how it is found
    will: str  # "Rank 2 will …": "be killed (SIGKILL)"
    event: str  # how the event says it; {rank} is filled in
    now: str = ""  # "Rank 2 …", of those that happen at once, without waiting for a step
    ends: bool = True  # the process ends, or stands still until it is ended
    takes: frozenset[str] = frozenset()  # options beyond those that every kind takes
    default_factor: float | None = None


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "kill", "SIGKILL: the process is gone at once", "its end is seen at once",
            "be killed (SIGKILL)", "SIGKILL to rank {rank}.", "is killed now (SIGKILL)",
        ),
        Kind(
            "exit", "the process ends by itself, with exit code 0", "its end is seen at once",
            "exit with code 0", "Rank {rank} exits with code 0.",
        ),
        Kind(
            "exception", "an exception is raised inside the step", "the rank reports it",
            "raise an exception", "An exception is raised in rank {rank}.",
        ),
        Kind(
            "hang", "SIGSTOP: the whole process stands still", "its connection stops answering, in 0.5 to 0.8 s",
            "be stopped (SIGSTOP)", "SIGSTOP to rank {rank}.", "is stopped now (SIGSTOP)",
            takes=frozenset({"duration_s"}),
        ),
        Kind(
            "stall", "the training thread waits for ever, heartbeats go on", "no progress for --hang-timeout",
            "stop moving while its heartbeats go on", "The training thread of rank {rank} stands still.",
            takes=frozenset({"duration_s"}),
        ),
        Kind(
            "deadlock", "it skips the all-reduce of a step and waits in the next one",
            "by where the ranks stand: in different steps",
            "skip the all-reduce", "Rank {rank} skips the all-reduce.",
        ),
        Kind(
            "gil", "a native call holds the interpreter lock, no Python runs",
            "its connection answers, no heartbeats for --hang-timeout",
            "hold its interpreter lock in a native call", "A native call in rank {rank} holds the interpreter lock.",
            takes=frozenset({"duration_s"}),
        ),
        Kind(
            "slow", "its own part of every step takes FACTOR times as long",
            "by its times against those of the others",
            "be slow", "Rank {rank} becomes slow.",
            ends=False, takes=frozenset({"duration_s", "factor"}), default_factor=3.0,
        ),
        Kind(
            "nan", "its gradients of one step become NaN", "looked at before each update",
            "bring NaN gradients", "The gradients of rank {rank} become NaN.",
            ends=False,
        ),
        Kind(
            "bitflip", "one bit of one parameter flips, after the update",
            "--check-replicas K: replicas that differ",
            "have one bit of a parameter flipped", "A bit of a parameter of rank {rank} flips.",
            ends=False, takes=frozenset({"seed"}),
        ),
        Kind(
            "oom", "its memory grows until it is killed (bounded)",
            "its end is seen at once",
            "use more and more memory until it is killed", "The memory of rank {rank} grows until it is killed.",
        ),
        Kind(
            "partition", "its network is cut, the process lives", "its connection stops answering, in 0.5 to 0.8 s",
            "be cut off from the network", "The network of rank {rank} is cut.", "is cut off from the network now",
            takes=frozenset({"duration_s"}),
        ),
    )
}  # fmt: skip

# Designed, but not built yet: said so, instead of "unknown kind".
LATER_KINDS = {
    "kill-in-checkpoint": "SIGKILL while a checkpoint is written",
    "corrupt-checkpoint": "a damaged checkpoint",
    "disk-full": "no space left for a checkpoint",
}

# Every kind takes these; `seed` belongs to `probability` (and to the kinds that name it).
_COMMON = ("rank", "at_step", "after_s", "probability")
FLAGS = {
    "rank": "--rank", "at_step": "--at-step", "after_s": "--after", "probability": "--probability", "seed": "--seed",
    "duration_s": "--duration", "factor": "--factor",
}  # fmt: skip
# What the supervisor does itself, with a signal, when it is to happen at once.
BY_SIGNAL = ("kill", "hang")


def known_kind(name: Any) -> Kind:
    """The kind of that name; `UsageError` with a hint for any other."""
    if name in KINDS:
        return KINDS[name]
    if name in LATER_KINDS:
        raise UsageError(f"The fault {name!r} is not available yet. Available: {', '.join(KINDS)}.")
    near = difflib.get_close_matches(str(name), [*KINDS, *LATER_KINDS], n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UsageError(f"There is no fault {name!r}.{hint} Available: {', '.join(KINDS)}.")


def check_options(name: Any, given: Mapping[str, Any]) -> None:
    """Refuse options that this kind has no use for, by name; None is the same as not given."""
    kind = known_kind(name)
    wanted = {keyword for keyword, value in given.items() if value is not None}
    for keyword in sorted(wanted - {*_COMMON, "seed"} - kind.takes):
        takes = [word for word in FLAGS if word in (*_COMMON, *kind.takes)]
        raise UsageError(
            f"The fault {name!r} takes no {keyword} ({FLAGS.get(keyword, keyword)}). It takes: {', '.join(takes)}."
        )
    if "seed" in wanted and "probability" not in wanted and "seed" not in kind.takes:
        raise UsageError(f"The fault {name!r} takes a seed (--seed) only together with probability (--probability).")
    if len(wanted & {"at_step", "after_s", "probability"}) > 1:
        raise UsageError(
            "Give at_step or after_s or probability (--at-step, --after, --probability), not several of them."
        )


def steps_until(probability: float, draw: float) -> int:
    """In how many steps from now, at least 1, something happens that has this chance in each step.

    `draw` is uniform in [0, 1). Drawing the step once, from the geometric distribution, is the same as rolling a die
    in every step, and can be planned: the rank has nothing to do until then.
    """
    if probability >= 1.0:
        return 1
    return 1 + math.floor(math.log1p(-draw) / math.log1p(-probability))


# --- words


def when_words(fault: Mapping[str, Any]) -> str:
    """When a planned fault is to happen: "at step 40", "after 2 s", "in each step with probability 0.01"."""
    if fault.get("probability") is not None:
        return f"in each step with probability {fault['probability']:g}"
    if fault.get("at_step") is not None:
        return f"at step {fault['at_step']}"
    if fault.get("after_s") is not None:
        return f"after {fault['after_s']:g} s"
    return "in the next step"


def event_words(fault: Mapping[str, Any]) -> str:
    """The event's sentence."""
    text = KINDS[fault["kind"]].event.format(rank=fault["rank"])
    if extent := _extent(fault):
        text = f"{text[:-1]}{extent}."
    return f"{text[:-1]} (chaos)." if fault.get("chaos") else text


def not_fired_words(fault: Mapping[str, Any], why: str = "") -> str:
    """The sentence about a fault that never happened."""
    what = f"The {fault['kind']} of rank {fault['rank']}"
    if fault.get("chaos"):
        return f"{what} (chaos) did not happen: {why.rstrip('.')}." if why else f"{what} (chaos) did not happen."
    return f"{what} {when_words(fault)} did not happen{f': {why}' if why else ''}".rstrip(".") + "."


def spared_words(fault: Mapping[str, Any], why: str) -> str:
    return f"The {fault['kind']} of rank {fault['rank']} (chaos) is spared: {why}."


def reply(fault: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What will happen, and what to expect of a run with these options."""
    kind, rank, extent = KINDS[fault["kind"]], fault["rank"], _extent(fault)
    will = f"rank {rank} will {kind.will}{extent}."
    if fault.get("probability") is not None:
        first = f"In each step with probability {fault['probability']:g}, and only once, {will}"
    elif fault.get("at_step") is not None:
        first = f"Inside step {fault['at_step']}, {will}"
    elif fault.get("after_s") is not None:
        first = f"In {fault['after_s']:g} s, {will}"
    elif kind.now:
        first = f"Rank {rank} {kind.now}{extent}."
    else:
        first = f"In its next step, {will}"
    return f"{first} {_expect(fault, options)}"


def _extent(fault: Mapping[str, Any]) -> str:
    words = f" by a factor of {fault['factor']:g}" if fault.get("factor") is not None else ""
    return words + (f" for {fault['duration_s']:g} s" if fault.get("duration_s") is not None else "")


def _expect(fault: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What follows, as far as it can be known beforehand."""
    name, duration_s = fault["kind"], fault.get("duration_s")
    patience_s = options.get("hang_timeout_s", 30.0)
    loss = {
        "replace": "expect the others to go on, and another process to take its place",
        "restart": "expect all to go back to the last state that they keep, and to wait for another process",
    }.get(options.get("recovery", ""), "expect the others to go on without it")
    if name in ("hang", "partition"):
        short_s, long_s = PAUSES_S[name]
        if duration_s is not None and duration_s < short_s:
            return "That is too short to be taken for a failure: expect a pause and nothing else."
        if duration_s is not None and duration_s < long_s:
            return f"That is about as long as is tolerated: it may cost its place, or nothing. If it does, {loss}."
        return f"Its connection stops answering: within a second, {loss}."
    if name in ("stall", "gil"):
        if duration_s is not None and duration_s < patience_s:
            return (
                f"That is less than --hang-timeout ({patience_s:g} s): expect the others to wait, and no failure."
            )
        sign = "its heartbeats go on" if name == "stall" else "its connection answers, its Python does not"
        return f"{sign[0].upper()}{sign[1:]}, so it is given {patience_s:g} s (--hang-timeout) or longer; then {loss}."
    if name == "deadlock":
        return f"The others stand in the step before it, which is seen at once: {loss}."
    if name == "slow":
        evicted = "; it is evicted then" if options.get("evict_stragglers") else "; it is not evicted"
        return f"Expect straggler_detected after some steps{evicted}."
    if name == "nan":
        return {
            "skip": "Expect the update of that step to be skipped.",
            "rollback": "Expect all to go back to the last state that they keep.",
        }.get(options.get("on_nan", "stop"), "Expect the run to stop before that update (--on-nan stop).")
    if name == "bitflip":
        if every := options.get("check_replicas"):
            return f"Expect it to be found at the next check (--check-replicas {every}), and all to go back."
        return "Nothing in this run will find it: its replicas are not compared (--check-replicas K)."
    if name == "exception":
        return "Expect that step to be done again without it."
    return f"{loss[0].upper()}{loss[1:]}."
