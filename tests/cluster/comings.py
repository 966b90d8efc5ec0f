"""For tests in which ranks are lost and come back: a training that lasts as long as the test needs, and its audit."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster_tools import (
    CELL,
    DEADLINE_S,
    GLOBAL_BATCH,
    NUM_RANKS,
    PHASES,
    Reference,
    cell_with_trouble,
    wait_until,
)

import ftnb
from ftnb.wire import proc

STEPS = 400
PAUSE_S = 0.1  # per step until the gate opens: the shortest of these runs then lasts 40 s
JOIN_LIMIT_S = 120.0


class Gate:
    """Until it is opened, every step of a paced cell takes PAUSE_S: time for whatever the test does."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "gate"

    @property
    def statement(self) -> str:
        return f"os.path.exists({str(self.path)!r}) or time.sleep({PAUSE_S})"

    @property
    def cell(self) -> str:
        """`CELL`, paced: the same losses."""
        return cell_with_trouble(self.statement)

    def open(self) -> None:
        self.path.touch()


def paced(cell: str, gate: Gate) -> str:
    """A cell with `loss_fn`, its steps paced by the gate."""
    return cell + (
        "import os, time\n"
        "_plain_loss_fn = loss_fn\n"
        "def loss_fn(output, target):\n"
        f"    {gate.statement}\n"
        "    return _plain_loss_fn(output, target)\n"
    )


def start(session: ftnb.Session, cell: str, steps: int = STEPS, **options: Any) -> ftnb.Run:
    """A run that has committed its first steps."""
    options = {"global_batch": GLOBAL_BATCH, "names": {}, "show": lambda text: None, **options}
    run = session.train(cell, steps=steps, **options)
    wait_until(lambda: run.step >= 3, "three steps are done")
    return run


def entry_of(session: ftnb.Session, rank: int) -> dict[str, Any]:
    return next(entry for entry in session.status()["ranks"] if entry["rank"] == rank)


def process_of(session: ftnb.Session, rank: int) -> proc.ProcessId:
    process = proc.identify(entry_of(session, rank)["pid"])
    assert process is not None, f"rank {rank} has no process"
    return process


def kill(session: ftnb.Session, *ranks: int) -> list[proc.ProcessId]:
    """SIGKILL to these ranks, one right after the other."""
    victims = [process_of(session, rank) for rank in ranks]
    for victim in victims:
        assert victim.signal(signal.SIGKILL)
    return victims


def count(run: ftnb.Run, kind: str, rank: int | None = None) -> int:
    return sum(e["kind"] == kind and (rank is None or e.get("rank") == rank) for e in run.events())


def wait_joined(session: ftnb.Session, run: ftnb.Run, joined: int, world_size: int = NUM_RANKS) -> None:
    """So many ranks have joined since the run began, and all slots are filled by ranks that train."""

    def back() -> bool:
        if count(run, "rank_joined") < joined:
            return False
        status = session.status()
        states = [entry["state"] for entry in status["ranks"] if entry["rank"] is not None]
        return status["world_size"] == world_size and states == ["training"] * world_size

    with said_of(session, run):
        wait_until(back, f"{joined} have joined", JOIN_LIMIT_S, every_s=0.05)


@contextlib.contextmanager
def said_of(session: ftnb.Session, run: ftnb.Run) -> Iterator[None]:
    """A condition that does not come true is of no use without what there was instead."""
    try:
        yield
    except AssertionError as error:
        events = [(event["kind"], event.get("rank"), event.get("step")) for event in run.events()]
        status = {key: session.status()[key] for key in ("state", "world_size", "ranks", "notes")}
        raise AssertionError(f"{error}\nevents: {events}\nstatus: {status}") from None


def finish(run: ftnb.Run, gate: Gate) -> Any:
    """Open the gate; the report of the run when it has ended."""
    gate.open()
    return run.wait(timeout_s=2 * DEADLINE_S)


def check_changes(run: ftnb.Run, lost: Iterable[int], joined: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """The events of a run whose ranks came and went: complete, in order, and each group of those who were there.

    `lost` and `joined` name a rank as often as it happened. Returns the `recovered` events.
    """
    events, lost = run.events(), Counter(lost)
    joined = lost if joined is None else Counter(joined)
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "run_started" and kinds[-1] == "run_finished", kinds
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert all(event.get("reason") for event in events)
    for kind, wanted in (("rank_failed", lost), ("rank_fenced", lost), ("rank_joined", joined)):
        assert Counter(event["rank"] for event in events if event["kind"] == kind) == wanted, f"{kind}: {kinds}"
    recovered = [event for event in events if event["kind"] == "recovered"]
    assert Counter(rank for event in recovered for rank in event["ranks"]) == lost, "each loss is recovered from once"
    for event in recovered:
        assert all(event[phase] >= 0 for phase in PHASES), event
        assert abs(sum(event[phase] for phase in PHASES) - event["mttr_s"]) < 1e-4, event
        assert event["lost_steps"] in (0, 1), "at most the step in flight is done again"
    group, gone, unfenced = set(range(events[0]["world_size"])), set(), set()
    newcomers: set[int] = set()
    for event in events:
        rank = event.get("rank")
        if event["kind"] == "rank_failed":
            gone.add(rank)
            unfenced.add(rank)
        elif event["kind"] == "rank_fenced":
            assert rank in unfenced, "fenced after it had failed"
            unfenced.discard(rank)
        elif event["kind"] == "regrouped":
            members = set(event["members"])
            assert not members & unfenced, "nobody takes over before the dead rank is fenced"
            assert event["world_size"] == len(members)
            newcomers = members - (group - gone)
            group, gone = members, set()
        elif event["kind"] == "rank_joined":
            assert rank in newcomers, f"rank {rank} was there already, or is not in the group"
            newcomers.discard(rank)
    assert not newcomers and not unfenced
    generations = [e["generation"] for e in events if e["kind"] not in ("rank_suspected", "rank_failed")]
    assert generations == sorted(generations), "generations only grow"
    return recovered


def check_end(
    report: Any, lost: Iterable[int], *, world_size: int = NUM_RANKS, kinds: Iterable[str] = ("kill",),
    at_start: int = NUM_RANKS,
) -> None:
    """The report of a run that ended with `world_size` ranks, whose weights are equal bit by bit."""
    assert report.state == "finished", report
    assert report.problems == [] and report.ok, str(report)
    assert sorted(failure.rank for failure in report.failures) == sorted(lost)
    assert {failure.kind for failure in report.failures} <= set(kinds), report.failures
    assert all(failure.mttr_s is not None and failure.mttr_s > 0 for failure in report.failures)
    assert report.samples_used == report.samples_expected
    assert report.samples_missed == report.samples_repeated == 0
    assert report.weights_agree and report.weights_ranks == world_size
    assert (report.world_size_start, report.world_size_end) == (at_start, world_size)


def reference(steps: int = STEPS) -> Reference:
    return Reference(CELL, steps)
