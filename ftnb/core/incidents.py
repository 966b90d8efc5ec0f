"""What went wrong in a run, what had been injected, and what each recovery cost: from the events alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ftnb.core.sampler import samples_through
from ftnb.core.words import count

PHASES = ("detect_s", "fence_s", "regroup_s", "restore_s", "first_step_s", "mttr_s")

# What an injected fault may be found to be. Whatever ends the process, or silences it, can look like a kill: a fault
# that is fenced in the middle is ended by SIGKILL.
_FOUND_AS = {"slow": ("straggler",), "nan": ("nan",), "bitflip": ("bitflip",)}
_NOT_FOUND_AS = ("straggler", "nan", "bitflip", "connection")
# A fault that lasts for a time may still be found so long after its end.
_AFTER_S = 2.0


@dataclass(frozen=True)
class Failure:
    """A lost rank, or something that all ranks had to recover from together (`rank` None).

    The times are None where no recovery followed; ranks lost together share theirs.
    """

    kind: str  # what it was found to be
    rank: int | None
    step: int | None
    reason: str
    detect_s: float | None = None
    fence_s: float | None = None
    regroup_s: float | None = None
    restore_s: float | None = None
    first_step_s: float | None = None
    mttr_s: float | None = None
    lost_steps: int | None = None  # steps that were done again
    lost_samples: int | None = None  # the samples of these
    rejoined_s: float | None = None  # from the failure to a process in its place; None: nobody took it
    injected: str | None = None  # the fault that was injected; None: it came by itself


@dataclass(frozen=True)
class Fault:
    """A fault that was injected, or planned, and what came of it."""

    kind: str
    rank: int | None
    step: int | None
    fired: bool
    outcome: str


def failures_of(run: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[Failure]:
    """All failures in the order in which they were found."""
    failures, matches = [], _matches(events)
    for place, event in enumerate(events):
        if event["kind"] == "rank_failed":
            failures.append(_lost_rank(run, events, place, matches))
        elif event["kind"] == "recovered" and not event.get("ranks", (0,)):
            failures.append(_of_all(run, events, place, matches))
    return failures


def faults_of(events: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """All injected faults with their outcome, and those that did not happen."""
    found = {fault: event for event, fault in _matches(events).items()}
    faults = []
    for place, event in enumerate(events):
        if event["kind"] not in ("fault_injected", "fault_not_fired"):
            continue
        fired = event["kind"] == "fault_injected"
        outcome = _outcome(events, place, found.get(place)) if fired else _one_reason(event)
        faults.append(Fault(event.get("fault") or "?", event.get("rank"), event.get("step"), fired, outcome))
    return faults


def by_kind(failures: Sequence[Failure]) -> list[tuple[str, int, float | None]]:
    """(kind, how many, median time to recovery in seconds) of all kinds that occurred."""
    kinds = dict.fromkeys(failure.kind for failure in failures)
    rows = []
    for kind in kinds:
        times = [f.mttr_s for f in failures if f.kind == kind and f.mttr_s is not None]
        rows.append((kind, sum(f.kind == kind for f in failures), median(times) if times else None))
    return rows


def lost_work(run: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Steps that were done again after failures, and their samples (ranks lost together count once)."""
    steps = samples = 0
    for event in events:
        if event["kind"] == "recovered":
            steps += event.get("lost_steps") or 0
            samples += _samples_again(run, event) or 0
    return steps, samples


def _samples_again(run: Mapping[str, Any], recovered: Mapping[str, Any]) -> int | None:
    """The samples of the steps from the first one after the recovery on that had been done, or begun, before."""
    steps, first = recovered.get("lost_steps"), recovered.get("step")
    dataset_len, global_batch = run.get("dataset_len"), (run.get("options") or {}).get("global_batch")
    if steps is None or not dataset_len or not global_batch or not isinstance(first, int) or first < 1:
        return None
    through = samples_through(first + steps - 1, dataset_len, global_batch)
    return through - samples_through(first - 1, dataset_len, global_batch)


def _lost_rank(
    run: Mapping[str, Any], events: Sequence[Mapping[str, Any]], place: int, matches: Mapping[int, int]
) -> Failure:
    event = events[place]
    rank = event.get("rank")
    later = (e for e in events[place + 1 :] if e["kind"] == "recovered")
    recovered = next((e for e in later if rank in e.get("ranks", (rank,))), {})
    step = event.get("step") or recovered.get("step")  # lost between two steps: the one it was missed in
    fault = matches.get(place)
    return Failure(
        event.get("failure") or "unknown", rank, step, event.get("reason") or "", **_figures(run, recovered),
        rejoined_s=_rejoined_s(events[place + 1 :], rank, event["time"], recovered),
        injected=events[fault].get("fault") if fault is not None else None,
    )


def _of_all(
    run: Mapping[str, Any], events: Sequence[Mapping[str, Any]], place: int, matches: Mapping[int, int]
) -> Failure:
    """No rank was lost, yet all had to begin again: NaN, replicas that differ, a broken connection."""
    cause, reason, at = "connection", "A collective failed, yet no rank died or raised.", place
    for before in range(place - 1, -1, -1):
        event = events[before]
        if event["kind"] == "recovered":
            break
        kinds = {"nan_detected": "nan", "divergence_detected": "bitflip", "regroup_started": "connection"}
        if event["kind"] in kinds and (cause == "connection" or kinds[event["kind"]] != "connection"):
            cause, reason, at = kinds[event["kind"]], event.get("reason") or reason, before
    recovered = events[place]
    fault = matches.get(at)
    step = events[at].get("step") or recovered.get("step")
    injected = events[fault].get("fault") if fault is not None else None
    return Failure(cause, None, step, reason, **_figures(run, recovered), injected=injected)


def _figures(run: Mapping[str, Any], recovered: Mapping[str, Any]) -> dict[str, Any]:
    figures = {name: recovered.get(name) for name in (*PHASES, "lost_steps")}
    return figures | {"lost_samples": _samples_again(run, recovered)}


def _matches(events: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Which injected fault explains which finding: place of the event -> place of its fault."""
    matches: dict[int, int] = {}
    open_faults: list[int] = []
    for place, event in enumerate(events):
        kind = event["kind"]
        if kind == "fault_injected":
            open_faults.append(place)
            continue
        found = {"rank_failed": event.get("failure"), "nan_detected": "nan", "divergence_detected": "bitflip",
                 "straggler_detected": "straggler"}.get(kind)  # fmt: skip
        if found is None:
            continue
        ranks = set(event.get("ranks") or ()) | ({event["rank"]} if event.get("rank") is not None else set())
        # Of several on one rank, the one that looks like what was found; else the latest.
        alike = ("kill", "oom") if found == "kill" else (found,)
        for fault in sorted(open_faults, key=lambda number: (events[number].get("fault") not in alike, -number)):
            what, rank = events[fault].get("fault"), events[fault].get("rank")
            if event["time"] > events[fault]["time"] + events[fault].get("duration_s", math.inf) + _AFTER_S:
                continue  # it was over without harm; this is something else
            fits = found in _FOUND_AS[what] if what in _FOUND_AS else found not in _NOT_FOUND_AS
            if fits and (rank in ranks or not ranks):
                matches[place] = fault
                # The loss of a straggler or of a corrupted replica is told right after it was found out.
                if kind == "rank_failed" or what not in ("slow", "bitflip"):
                    open_faults.remove(fault)
                break
        if kind == "rank_failed":  # whatever else was going on in that process is over
            open_faults = [f for f in open_faults if events[f].get("rank") != event.get("rank")]
    return matches


def _outcome(events: Sequence[Mapping[str, Any]], place: int, found: int | None) -> str:
    if found is None:
        later = [e["kind"] for e in events[place + 1 :]]
        if events[place].get("fault") == "bitflip":
            return "not noticed while it trained (--check-replicas K compares the replicas)"
        if "run_failed" in later:
            return "the run ended"
        if "run_finished" in later:
            return "the run went on as if nothing had happened"
        return "no rank was lost"
    event = events[found]
    after_s = max(0.0, event["time"] - events[place]["time"])
    what = event.get("failure") or event["kind"].removesuffix("_detected")
    return f"found after {after_s:.2f} s ({what})"


def _one_reason(event: Mapping[str, Any]) -> str:
    return " ".join(str(event.get("reason") or "did not happen").split())


def _rejoined_s(
    later: Sequence[Mapping[str, Any]], rank: Any, failed: float, recovered: Mapping[str, Any]
) -> float | None:
    """How long the slot was empty: from the fault itself, where that is known, else from its detection."""
    for event in later:
        if event.get("rank") == rank and event["kind"] == "rank_failed":
            return None
        if event.get("rank") == rank and event["kind"] == "rank_joined":
            return max(0.0, event["time"] - failed + (recovered.get("detect_s") or 0.0))
    return None


def summary_of(faults: Sequence[Fault]) -> str:
    """Such as "12 injected, 10 of them found; 1 planned one did not happen"."""
    fired = [fault for fault in faults if fault.fired]
    found = sum(fault.outcome.startswith("found") for fault in fired)
    text = f"{len(fired)} injected, {found} of them found" if fired else "none injected"
    if missed := len(faults) - len(fired):
        text += f"; {count(missed, 'planned one')} did not happen"
    return text
