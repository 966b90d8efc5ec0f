"""Random fault schedules: drawn from a seed, acted out on a real cluster, and judged by the files of the run.

The judging shares no code with ftnb. It knows what was done to whom, and asks for each thing that was found whether
something had been done that explains it.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster_tools import (
    GLOBAL_BATCH,
    NUM_RANKS,
    NUM_SAMPLES,
    SAME_F64,
    Reference,
    batch_of,
    cell_with_trouble,
    indices_of,
    splitmix64,
    wait_until,
)
from comings import said_of

import ftnb
from ftnb.client.run import ENDED

HANG_S = 1.5
SHORTEST, LONGEST = 60, 150  # steps of a run
# How long a run may stand still, with nothing new in its files, until the test looks whether there is a reason.
STANDSTILL_S = 15.0
# Nothing may take longer than this: a stop has 5 s of patience, and a replacement may have to be started meanwhile.
STOP_LIMIT_S = 30.0
WHOLE_LIMIT_S = 150.0
RECOVERING_S = 1.5  # so long a recovery is waited for that is to be disturbed
STEPS_PER_EPOCH = 4  # of 50 samples, 16 in a step: within so many steps every size of a share has been there

# What is injected -> what a rank that is lost by it may be found to be.
FOUND = {
    "kill": {"kill"}, "exit": {"exit"}, "exception": {"exception"}, "hang": {"hang"}, "stall": {"stall"},
    "deadlock": {"deadlock"}, "gil": {"gil"}, "slow": {"straggler", "stall"}, "nan": set(), "bitflip": {"bitflip"},
    "oom": {"kill", "stall"}, "partition": {"partition"},
}  # fmt: skip  (memory grows for half a second, or for longer on a busy machine)
KINDS = tuple(FOUND)
LASTS = ("hang", "stall", "gil", "slow", "partition")  # they take a duration


@dataclass(frozen=True)
class Act:
    """Something that is done to the run: so long after the act before it, or as soon as it is recovering."""

    do: str  # "inject", "pause", "unpause", "resize", "stop"
    pause_s: float = 0.0
    recovering: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Story:
    seed: int
    spares: int
    steps: int
    pace_s: float
    options: dict[str, Any]
    acts: tuple[Act, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.steps} steps of {self.pace_s:g} s, {self.spares} spares, {self.options}"]
        for act in self.acts:
            when = f"+{self.pace(act)}"
            words = " ".join(f"{key}={value}" for key, value in act.arguments.items())
            lines.append(f"  {when} {act.do} {words}")
        return "\n".join(lines)

    @staticmethod
    def pace(act: Act) -> str:
        return f"{act.pause_s:.2f} s" + (", then when recovering:" if act.recovering else ":")

    @property
    def kinds(self) -> set[str]:
        return {act.arguments["kind"] for act in self.acts if act.do == "inject"}


def draw(seed: int) -> Story:
    dice = random.Random(f"story:{seed}")
    steps, pace_s = dice.randint(SHORTEST, LONGEST), dice.choice((0.005, 0.015, 0.03))
    options: dict[str, Any] = {
        "recovery": dice.choice(("replace", "replace", "shrink", "restart")),
        "check_replicas": dice.choice((None, 5, 7, 20)),
        "on_nan": dice.choice(("stop", "skip", "rollback", "rollback")),
        "evict_stragglers": dice.random() < 0.2,
    }
    acts: list[Act] = []
    storm = dice.random() < 0.4  # all of it within a moment
    for number in range(dice.randint(2 if storm else 1, 4)):
        together = number > 0 and dice.random() < (0.8 if storm else 0.3)
        pause_s = 0.0 if together else dice.uniform(0.0, 0.6)
        in_recovery = number > 0 and not together and dice.random() < 0.4
        acts.append(Act("inject", pause_s, in_recovery, _fault(dice, options, storm)))
    for act in _commands(dice):
        acts.insert(dice.randint(0, len(acts)), act)
    return Story(seed, seed % 2, steps, pace_s, options, tuple(_in_order(acts)))


def _fault(dice: random.Random, options: dict[str, Any], storm: bool) -> dict[str, Any]:
    kind = dice.choice(KINDS)
    if kind == "bitflip" and options["check_replicas"] is None:
        options["check_replicas"] = 6  # else nothing would find it, and nothing could be asked of the run
    arguments: dict[str, Any] = {"kind": kind, "rank": dice.randrange(NUM_RANKS)}
    when = dice.choice(("now", "steps_ahead", "steps_ahead", "after_s"))
    if when == "steps_ahead":  # of the one that it is in by then
        arguments["steps_ahead"] = dice.randint(1, 4 if storm else 40)
    elif when == "after_s":
        arguments["after_s"] = round(dice.uniform(0.0, 0.2 if storm else 1.0), 2)
    if kind in LASTS and dice.random() < 0.5:
        arguments["duration_s"] = dice.choice((0.1, 0.3, 0.7, 1.4, 2.0, 3.0))
    if kind == "slow":
        arguments["factor"] = dice.choice((1.5, 3.0, 8.0))
    if kind == "bitflip":
        arguments["seed"] = dice.randrange(1000)
    return arguments


def _commands(dice: random.Random) -> list[Act]:
    """What a user does meanwhile."""
    if dice.random() > 0.45:
        return []
    which = dice.choice(("pause", "resize", "resize twice", "stop", "pause and resize"))
    acts = []
    if which.startswith("pause"):
        acts.append(Act("pause", dice.uniform(0.0, 0.5)))
    if "resize" in which:
        acts.append(Act("resize", dice.uniform(0.0, 0.5), arguments={"num_ranks": dice.choice((2, 3, 5))}))
    if "twice" in which:
        acts.append(Act("resize", dice.uniform(0.0, 0.5), arguments={"num_ranks": dice.choice((1, 3, 4, 5))}))
    if which.startswith("pause"):
        acts.append(Act("unpause", dice.uniform(0.1, 0.8)))
    if which == "stop":
        acts.append(Act("stop", dice.uniform(0.2, 1.0), dice.random() < 0.4))
    return acts


def _in_order(acts: list[Act]) -> list[Act]:
    """A run that is paused goes on some time."""
    names = [act.do for act in acts]
    if "pause" in names and "unpause" in names and names.index("unpause") < names.index("pause"):
        first, second = names.index("unpause"), names.index("pause")
        acts[first], acts[second] = acts[second], acts[first]
    return acts


# --- acting it out


class Stage:
    """One story on a cluster; `play` returns when the run has ended."""

    def __init__(self, session: ftnb.Session, story: Story) -> None:
        self.session, self.story = session, story
        self.run: Any = None  # once it has begun
        self.refused: list[str] = []
        self.stopped_by_test = ""  # why
        self._threads: list[threading.Thread] = []
        self.strange: list[str] = []

    def play(self) -> ftnb.Run:
        story = self.story
        cell = cell_with_trouble(f"time.sleep({story.pace_s})")
        self.run = self.session.train(
            cell, steps=story.steps, global_batch=GLOBAL_BATCH, hang_timeout_s=HANG_S, names={}, show=_silent,
            name=f"story-{story.seed}", **story.options,
        )
        self._until = time.monotonic() + WHOLE_LIMIT_S
        with said_of(self.session, self.run):
            for act in story.acts:
                self._do(act)
            self._to_the_end()
            for thread in self._threads:
                thread.join(max(0.0, self._until - time.monotonic()))
                assert not thread.is_alive(), "a resize neither ends nor gives up"
        return self.run

    def _do(self, act: Act) -> None:
        time.sleep(act.pause_s)  # a part of the story, not a condition
        if act.recovering:
            deadline = time.monotonic() + RECOVERING_S
            while time.monotonic() < deadline and self.run.state not in (*ENDED, "recovering"):
                time.sleep(0.005)
        if act.do == "resize":  # returns when all is done; the faults go on meanwhile
            thread = threading.Thread(target=self._ask, args=(act,), daemon=True)
            thread.start()
            self._threads.append(thread)
        else:
            self._ask(act)

    def _ask(self, act: Act) -> None:
        arguments = dict(act.arguments)
        call: dict[str, Callable[..., Any]] = {
            "inject": self.run.inject, "pause": self.run.pause, "unpause": self.run.unpause, "stop": self.run.stop,
            "resize": self.session.resize,
        }  # fmt: skip
        try:
            if act.do == "inject":
                if ahead := arguments.pop("steps_ahead", None):
                    arguments["at_step"] = min(self.run.step + ahead, self.story.steps)
                call["inject"](arguments.pop("kind"), **arguments)
            elif act.do == "resize":
                call["resize"](**arguments, show=_silent)
            else:
                call[act.do]()
        except (ftnb.FtnbError, TimeoutError) as error:
            self.refused.append(f"{act.do} {act.arguments}: {type(error).__name__}: {error}")
        except Exception as error:  # in a thread it would be lost
            self.strange.append(f"{act.do} {act.arguments}: {type(error).__name__}: {error}")

    def _to_the_end(self) -> None:
        """The run ends by itself, or stands still for a reason that is known, and ends when it is stopped."""
        run, seen, since = self.run, None, time.monotonic()
        while (state := run.state) not in ENDED:
            now = time.monotonic()
            assert now < self._until, "it goes on and on"
            if (new := (run.step, len(run.events()))) != seen:
                seen, since = new, now
            if now - since > STANDSTILL_S:
                self.stopped_by_test = self._reason_to_stand(state)
                stuck = f"it stands still for {STANDSTILL_S:g} s without a reason, in step {seen[0] + 1}"
                assert self.stopped_by_test, f"{stuck}: {run.stacks()}"
                run.stop(save=False)
                wait_until(lambda: run.state in ENDED, "it ends when it is stopped", STOP_LIMIT_S)
            time.sleep(0.02)

    def _reason_to_stand(self, state: str) -> str:
        """The first step with a new size of the share may take five minutes: code may be compiling."""
        if state == "paused":
            return "it is paused"
        events = self.run.events()
        stands = {e["rank"]: e for e in events if e["kind"] == "fault_injected" and e["fault"] in ("stall", "gil")}
        for number, event in enumerate(events):
            if event["kind"] == "rank_failed" and event["rank"] in stands and stands[event["rank"]] in events[:number]:
                del stands[event["rank"]]
        starts = [1] + [event["step"] for event in events if event["kind"] == "regrouped"]
        joined = [event["step"] for event in events if event["kind"] == "rank_joined"]
        for rank, event in stands.items():
            step = event["step"] or 0
            if any(start <= step < start + STEPS_PER_EPOCH + 1 for start in starts + joined):
                return f"rank {rank} stands in a first step"
        return ""


def _silent(_text: str) -> None:
    """Nobody reads it."""


# --- judging


def judge(stage: Stage, reference: Reference) -> None:
    """One of the three endings, with a reason; the books are right; nobody innocent is blamed."""
    run, story = stage.run, stage.story
    report, events = run.report(), run.events()
    assert not stage.strange, stage.strange
    _check_events(events)
    _check_blame(events)
    if report.state == "failed":
        _check_failure(report, events)
        assert [problem for problem in report.problems if not problem.startswith("the run failed")] == []
    else:
        assert report.problems == [] and report.ok, str(report)
    assert report.samples_missed == report.samples_repeated == 0
    assert report.samples_used == report.samples_expected
    if report.state == "finished":
        assert report.steps == story.steps and report.weights_agree, str(report)
        assert report.weights_ranks == report.world_size_end
    if report.state == "stopped":
        asked = stage.stopped_by_test or any(act.do == "stop" for act in story.acts)
        assert asked or _has(events, "nan_detected"), report.reason
    assert report.reason
    _check_lines(run, report.steps)
    _check_losses(run, report.steps, events, reference)


def _has(events: list[dict[str, Any]], kind: str) -> bool:
    return any(event["kind"] == kind for event in events)


def _check_events(events: list[dict[str, Any]]) -> None:
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "run_started" and kinds[-1] in ("run_finished", "run_stopped", "run_failed"), kinds
    assert all(event.get("reason") for event in events)
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    numbers = [e["generation"] for e in events if e["kind"] not in ("rank_suspected", "rank_failed")]
    assert numbers == sorted(numbers), "generations only grow"
    unfenced: set[int] = set()
    for event in events:
        if event["kind"] == "rank_failed":
            unfenced.add(event["rank"])
        elif event["kind"] == "rank_fenced":
            unfenced.discard(event["rank"])
        elif event["kind"] == "regrouped":
            assert not unfenced & set(event["members"]), "nobody takes over before the lost rank is fenced"


def _check_blame(events: list[dict[str, Any]]) -> None:
    """Each verdict about a rank has its reason in what was done to that very process."""
    done: dict[int, list[str]] = defaultdict(list)
    flipped = False
    for event in events:
        rank = event.get("rank")
        if event["kind"] == "fault_injected":
            done[rank].append(event["fault"])
            if event["fault"] == "hang" and "duration_s" in event:  # continued just when it was looked at: not stopped
                done[rank].append("partition")
            flipped = flipped or event["fault"] == "bitflip"
        elif event["kind"] in ("rank_failed", "rank_suspected", "spare_lost"):
            may_be = set().union(*(FOUND[kind] for kind in done[rank]))
            if flipped:  # whoever got its state from one with a flipped bit differs as well
                may_be |= {"bitflip"}
            found = event.get("failure", "exception" if "raised" in event["reason"] else None)
            assert found in may_be, f"{event}\nto rank {rank} was done: {done[rank]}"
            if event["kind"] == "rank_failed":
                done[rank].clear()
        elif event["kind"] == "nan_detected":
            assert any("nan" in kinds for kinds in done.values()), event
        elif event["kind"] == "divergence_detected":
            assert flipped, event


def _check_failure(report: Any, events: list[dict[str, Any]]) -> None:
    """A run fails only with nobody left, by the same step twice, or because nothing but its own code is to blame."""
    injected = [event["fault"] for event in events if event["kind"] == "fault_injected"]
    reason = report.reason
    if "failed twice" in reason or "a bug in the training code" in reason or "raised an exception" in reason:
        assert "exception" in injected, reason
    elif "All ranks are lost" in reason:
        assert len(injected) >= 1, reason
    elif "to blame than the others" in reason:
        assert {"stall", "gil"} & set(injected), reason
    else:
        raise AssertionError(f"an ending that nobody has thought of: {reason}")


def _last_lines(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of each step the line that was written last: after going back, steps are there twice."""
    return {line["step"]: line for line in lines}


def _check_lines(run: ftnb.Run, steps: int) -> None:
    """Every step once, with the samples that belong to it, by a digest of our own."""
    ledger = {step: line for step, line in _last_lines(run.ledger()).items() if step <= steps}
    assert sorted(ledger) == list(range(1, steps + 1))
    for step, line in ledger.items():
        _, start, stop = batch_of(step, NUM_SAMPLES, GLOBAL_BATCH)
        assert sum(line["shares"].values()) == stop - start, f"step {step}: the global batch is constant"
        if line["shares_reported"] == f"{len(line['shares'])}/{len(line['shares'])}":
            digest = sum(map(splitmix64, indices_of(step, NUM_SAMPLES, GLOBAL_BATCH))) % 2**64
            assert line["digest"] == f"{digest:016x}", f"step {step}: other samples were fetched than belong to it"


def _check_losses(run: ftnb.Run, steps: int, events: list[dict[str, Any]], reference: Reference) -> None:
    """As in the undisturbed training, up to where an update was left out or a flipped bit was not undone."""
    sound = min(steps, _sound_through(events))
    for step, line in sorted(_last_lines(run.metrics()).items()):
        complete = line["loss_shares"] == f"{line['world_size']}/{line['world_size']}"
        if step <= sound and complete:
            wanted = reference.losses[step - 1]
            assert line["loss"] is not None, f"step {step} has no loss"
            assert abs(line["loss"] - wanted) <= SAME_F64 * max(abs(wanted), 1e-3), f"step {step}: {line}, not {wanted}"


def _sound_through(events: list[dict[str, Any]]) -> int:
    sound = 10**9
    for number, event in enumerate(events):
        if event["kind"] == "nan_detected" and event.get("skipped"):
            sound = min(sound, event["step"])
        elif event["kind"] == "fault_injected" and event["fault"] == "bitflip":
            later = [e["kind"] for e in events[number + 1 :] if e["kind"] in ("divergence_detected", "regroup_started")]
            if later[:1] != ["divergence_detected"]:  # its rank was lost, or gave its state away, before it was found
                sound = min(sound, (event["step"] or 1) - 1)
    return sound


def put_back(session: ftnb.Session) -> None:
    """The next story finds as many ranks as this one did."""
    with contextlib.suppress(TimeoutError):
        session.resize(NUM_RANKS, show=_silent)
