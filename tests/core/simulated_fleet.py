"""A thousand ranks with clocks of their own, whose heartbeats get lost, come late and overtake each other.

`Fleet` plays everything around the pure core: the ranks (they train in step, and send ten heartbeats a second), the
network, the connections, and the supervisor that feeds what it hears to the real `Heartbeats`, `watch.look` and
`planner.step`. No processes, no waiting: time goes on in ticks of a tenth of a second, at the end of which the
supervisor looks, while everything in between happens at times of its own. All is drawn from one seed.

Real trouble: ranks die ("kill": their peers notice a broken connection; "loss": the host is gone), are stopped or cut
off. Innocent trouble: lost and late messages, an interpreter lock that is held for seconds, a slow first step, an
evaluation, and pauses of the whole machine after which some ranks go on later than the supervisor.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from ftnb.core import planner, watch
from ftnb.core.detector import Heartbeats
from ftnb.core.protocol import (
    Emit,
    End,
    Failure,
    Kill,
    RankCondemned,
    RankDied,
    RankFenced,
    RankFormed,
    RankReady,
    SendGo,
    SendRegroup,
    Started,
    StepCommitted,
    StepFailed,
    Tick,
)

TICK_S = 0.1
LINK_TIMEOUT_S = 0.5  # an I/O thread that gets no answer for so long calls the connection down
LIMITS = watch.Limits(hang_timeout_s=10.0)
SUM_S = 0.003  # of the gradients, once all have come
FAULTS = ("kill", "loss", "hang", "partition")
FOUND_TO_BE = {"kill": "partition", "loss": "partition", "hang": "hang", "partition": "partition", "gil": "gil"}


@dataclass(eq=False, slots=True)
class Rank:
    number: int
    phase_s: float  # when in a tick it sends
    clock_s: float  # its clock minus the supervisor's, at the start
    drift: float
    heartbeats: Heartbeats = field(default_factory=lambda: Heartbeats(TICK_S))
    num_sent: int = 0
    # what it does
    stage: str = "wait"  # "wait", "form", "training"
    entered: float = 0.0
    generation: int = 0
    begin: float = 0.0  # of its own work in the step in flight
    ready: float = 0.0  # when that is done, and it waits for the others
    evaluates_until: float = 0.0  # before its own work
    busy_until: float = 0.0  # holds the interpreter lock
    # what has happened to it
    fault: str | None = None
    fault_time: float = 0.0
    link_lost: float = math.inf  # when its connection ceased to answer
    # what its newest heartbeat has said: place, step, seconds in it
    said: tuple[str, int | None, float] = ("wait", None, 0.0)
    said_number: int = 0


@dataclass(frozen=True)
class Plan:
    """What shall happen, and how often: mean seconds between two of a kind in the whole fleet; 0: never."""

    loss: float = 0.0
    longest_delay_s: float = 0.0
    links_known: bool = True
    fault_every_s: float = 20.0
    busy_every_s: float = 3.0
    pause_every_s: float = 60.0
    evaluate_every_s: float = 100.0
    quiet_s: float = 10.0  # without new trouble: at the end, and half of it around pauses of the machine


class Fleet:
    """One run, with all that was found in it."""

    def __init__(self, num_ranks: int, seed: int, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(seed)
        rng = self.rng
        phases = sorted(rng.uniform(0.0, TICK_S) for _ in range(num_ranks))
        numbers = rng.sample(range(num_ranks), num_ranks)
        self.ranks = [
            Rank(number, phase, rng.uniform(-1e6, 1e6), rng.uniform(-1e-4, 1e-4))
            for number, phase in zip(numbers, phases)
        ]  # in the order in which they send
        self.numbered = {rank.number: rank for rank in self.ranks}
        self.tick, self.now = 0, 0.0
        self.on_the_way: dict[int, list[tuple]] = {}  # heartbeats, by the tick in which they arrive
        self.soon: list[tuple] = []  # (time, order, what to call, arguments): everything else
        self.num_later = 0
        self.step_s = rng.uniform(0.15, 0.6)
        self.group: list[Rank] = []  # who train with each other
        self.step, self.committed, self.first = 0, 0, True
        self.step_begin, self.step_end = 0.0, math.inf
        self.evaluation_due = False
        self.num_beats = self.num_busy = self.num_pauses = self.num_evaluations = 0
        self.false: list[tuple[float, watch.Lost | watch.Stuck]] = []
        self.found: list[tuple[str, str, float]] = []  # (fault, what it was found to be, seconds until then)
        self.events: list[Emit] = []
        self.end: End | None = None
        self.state = planner.new(10**9)
        self.watch = watch.new(0.0)
        self.handle(Started(tuple(range(num_ranks))))

    # --- the story

    def run(self, seconds: float) -> None:
        """Trouble at random times, and quiet at the end, so that what was begun can be finished."""
        plan, rng, end = self.plan, self.rng, self.now + seconds
        trouble = []
        for every_s, what in (
            (plan.fault_every_s, self.break_one), (plan.busy_every_s, self.hold_lock),
            (plan.pause_every_s, self.pause), (plan.evaluate_every_s, self.evaluate),
        ):  # fmt: skip
            at = self.now + 6.0  # by then the detector has seen enough of each
            while every_s and (at := at + rng.expovariate(1 / every_s)) < end - plan.quiet_s:
                trouble.append((at, what))
        for at, what in sorted(trouble, key=lambda item: item[0]):
            if what == self.pause:  # what was broken before is found by then, and the next comes when all is settled
                self.go_to(max(at, self.now) + plan.quiet_s / 2)
                self.pause()
                self.go_to(self.now + plan.quiet_s / 2)
            else:
                self.go_to(at)
                what()
        self.go_to(max(end, self.now + plan.quiet_s))

    def go_to(self, at: float) -> None:
        while self.now + TICK_S <= at:
            self.one_tick()

    def break_one(self) -> None:
        well = [rank for rank in self.ranks if rank.fault is None and rank.number in self.state.alive]
        if len(well) > 2:
            self.break_rank(self.rng.choice(well), self.rng.choice(FAULTS))

    def break_rank(self, rank: Rank, fault: str) -> None:
        """One of FAULTS, or "gil": it holds the interpreter lock for ever."""
        now = self.now
        rank.fault, rank.fault_time = fault, now
        if fault != "gil":
            rank.link_lost = now + LINK_TIMEOUT_S
        if rank not in self.group:
            return
        self.step_end = math.inf
        if rank.fault == "kill":
            rank.link_lost = now + 0.01
            failure = Failure("collective", self.step, now)
            for peer in self.group:  # a broken connection takes them all out of the step
                if peer.fault is None and peer.busy_until <= now:
                    peer.stage, peer.entered = "wait", now
                    if self.rng.random() < 0.05:
                        self.later(now + self.way_s(), self.hear, StepFailed(peer.number, peer.generation, failure))

    def hold_lock(self) -> None:
        rank, now, seconds = self.rng.choice(self.ranks), self.now, self.rng.uniform(0.3, 8.0)
        if rank.fault is not None or rank.busy_until > now:
            return
        self.num_busy += 1
        rank.busy_until = now + seconds
        if rank.stage == "training" and rank.ready > now and rank in self.group:
            rank.ready += seconds
            if self.step_end < math.inf:
                self.step_end = max(self.step_end, rank.ready + SUM_S)

    def evaluate(self) -> None:
        self.evaluation_due = True

    def pause(self) -> None:
        """All processes stand still, the supervisor as well; messages that are on their way arrive meanwhile."""
        self.num_pauses += 1
        skipped = self.rng.randint(20, 80)
        arrived = [m for tick in range(self.tick + 1, self.tick + skipped + 1) for m in self.on_the_way.pop(tick, ())]
        self.tick += skipped
        self.now = now = self.tick * TICK_S
        gap = skipped * TICK_S
        self.step_begin += gap
        self.step_end += gap
        for rank in self.ranks:
            late = self.rng.choice((0.0, self.rng.uniform(0.0, 0.5)))
            rank.busy_until = max(rank.busy_until + gap, now + late)
            rank.begin, rank.ready = rank.begin + gap + late, rank.ready + gap + late
            rank.evaluates_until += gap + late
            if rank in self.group:
                self.step_end = max(self.step_end, rank.ready + SUM_S)
            rank.heartbeats.excuse(gap, now)
            if rank.fault is None and self.rng.random() < 0.3:  # the supervisor's I/O thread was stopped as well
                rank.link_lost = now - gap / 2
                self.later(now + self.rng.uniform(0.0, 0.6), self.connect_again, rank)
        self.on_the_way.setdefault(self.tick + 1, []).extend((now, *message[1:]) for message in sorted(arrived))

    def connect_again(self, at: float, rank: Rank) -> None:
        if rank.fault is None:
            rank.link_lost = math.inf

    # --- time

    def one_tick(self) -> None:
        start, self.tick = self.now, self.tick + 1
        self.now = now = self.tick * TICK_S
        self.send_heartbeats(start)
        self.commit_until(now)
        arrived = self.on_the_way.pop(self.tick, [])
        arrived.sort()
        for arrival, number, sent, rank, said in arrived:
            rank.heartbeats.beat(arrival, number, sent)
            if number > rank.said_number:
                rank.said_number, rank.said = number, said
        while self.soon and self.soon[0][0] <= now:
            at, _, call, arguments = heapq.heappop(self.soon)
            call(at, *arguments)
        self.look()

    def later(self, at: float, call, *arguments) -> None:
        self.num_later += 1
        heapq.heappush(self.soon, (at, self.num_later, call, arguments))

    def way_s(self) -> float:
        """Of a message that is sent again until it has come."""
        return self.rng.uniform(0.0005, 0.003) + self.rng.uniform(0.0, self.plan.longest_delay_s)

    def send_heartbeats(self, start: float) -> None:
        chance, loss, longest_s = self.rng.random, self.plan.loss, self.plan.longest_delay_s
        on_the_way, place, num_beats = self.on_the_way, self.place, 0
        for rank in self.ranks:
            at = start + rank.phase_s
            if at >= self.step_end:
                self.commit_until(at)
            if rank.fault is not None or rank.busy_until > at:
                continue
            rank.num_sent += 1
            num_beats += 1
            if loss and chance() < loss:
                continue
            arrival = at + 0.0005 + 0.0025 * chance() + longest_s * chance()
            message = (arrival, rank.num_sent, rank.clock_s + at * (1 + rank.drift), rank, place(rank, at))
            tick = int(arrival / TICK_S) + 1
            if tick in on_the_way:
                on_the_way[tick].append(message)
            else:
                on_the_way[tick] = [message]
        self.num_beats += num_beats

    # --- training

    def place(self, rank: Rank, at: float) -> tuple[str, int | None, float]:
        if rank.stage != "training":
            return rank.stage, None, at - rank.entered
        if at >= rank.ready:
            return "collective", self.step, at - rank.ready
        if at < rank.begin:
            return "update", self.step - 1, at - self.step_begin
        if at < rank.evaluates_until:
            return "evaluate", self.step - 1, at - rank.begin
        work = max(rank.begin, rank.evaluates_until)
        half = (work + rank.ready) / 2
        return ("forward", self.step, at - work) if at < half else ("backward", self.step, at - half)

    def commit_until(self, at: float) -> None:
        while self.step_end <= at:
            self.committed, when = self.step, self.step_end
            for rank in self.rng.sample(self.group, min(3, len(self.group))):  # the planner needs one
                commit = StepCommitted(rank.number, rank.generation, self.step, when)
                self.later(when + self.way_s(), self.hear, commit)
            self.step, self.first = self.step + 1, False
            self.begin_step(when)

    def begin_step(self, at: float) -> None:
        chance, step_s, last = self.rng.random, self.step_s, 0.0
        self.step_begin = at
        for rank in self.group:
            rank.begin = max(at, rank.busy_until) + 0.02 * chance()
            rank.ready = rank.begin + step_s * (0.8 + 0.4 * chance())
        if self.first:  # somebody compiles
            self.rng.choice(self.group).ready += self.rng.expovariate(1.0)
        if self.evaluation_due:
            self.evaluation_due = False
            self.num_evaluations += 1
            rank = min(self.group, key=lambda rank: rank.number)
            rank.evaluates_until = rank.begin + 15.0
            rank.ready += 15.0
        last = max(rank.ready for rank in self.group)
        broken = any(rank.fault for rank in self.group)
        self.step_end = math.inf if broken else last + SUM_S

    # --- what the agents do

    def heed(self, at: float, rank: Rank, call, *arguments) -> bool:
        """False: it cannot now, and perhaps will later."""
        if rank.busy_until > at:
            self.later(rank.busy_until, call, *arguments)
        return rank.fault is None and rank.busy_until <= at

    def regroup(self, at: float, rank: Rank, generation: int) -> None:
        if not self.heed(at, rank, self.regroup, rank, generation) or generation <= rank.generation:
            return
        rank.generation, rank.stage, rank.entered, rank.evaluates_until = generation, "wait", at, 0.0
        self.step_end = math.inf  # nobody can do a step without it
        ready = RankReady(rank.number, generation, self.committed, self.step)
        self.later(at + self.rng.uniform(0.001, 0.02) + self.way_s(), self.hear, ready)

    def go(self, at: float, rank: Rank, go: SendGo) -> None:
        if not self.heed(at, rank, self.go, rank, go) or go.generation != rank.generation:
            return
        rank.stage, rank.entered = "form", at
        members = [self.numbered[number] for number in go.members]
        if all(member.stage == "form" and member.generation == go.generation for member in members):
            self.later(at + 0.03, self.begin_training, members, go)

    def begin_training(self, at: float, members: list[Rank], go: SendGo) -> None:
        if any(member.fault or member.generation != go.generation for member in members):
            return
        self.group, self.step, self.first = members, go.first_step, True
        for member in members:
            member.stage = "training"
            self.later(at + self.way_s(), self.hear, RankFormed(member.number, go.generation, at, at))
        self.begin_step(at)

    # --- the supervisor

    def hear(self, at: float, event) -> None:
        self.handle(event)

    def look(self) -> None:
        now, links_known, first = self.now, self.plan.links_known, self.first
        alive, signs = self.state.alive, []
        for rank in self.ranks:
            if rank.number not in alive:
                continue
            age_s = rank.heartbeats.age_s(now)
            if age_s is None:
                continue  # has not been heard of yet
            down_s = max(0.0, now - rank.link_lost)
            place, step, place_s = rank.said
            signs.append(
                watch.Sign(
                    rank.number, rank.heartbeats.phi(now), age_s, down_s == 0.0 if links_known else None, down_s,
                    rank.fault == "hang", place, step, place_s + age_s, first or place in ("wait", "form"),
                )
            )  # fmt: skip
        self.watch, verdicts = watch.look(now, self.watch, LIMITS, signs)
        self.handle(Tick())
        for verdict in verdicts:
            ranks = (verdict.rank,) if isinstance(verdict, watch.Lost) else verdict.ranks
            if isinstance(verdict, watch.Stuck) or self.numbered[verdict.rank].fault is None:
                self.false.append((now, verdict))
            for number in ranks:
                self.condemn(self.numbered[number], verdict)

    def condemn(self, rank: Rank, verdict: watch.Lost | watch.Stuck) -> None:
        if rank.fault is None:
            rank.fault, rank.fault_time = "condemned", self.now
        self.found.append((rank.fault, verdict.failure, self.now - rank.fault_time))
        if hasattr(planner, "RankCondemned"):
            event = RankCondemned(rank.number, verdict.failure, verdict.reason, self.now - verdict.since_s)
        else:
            event = RankDied(rank.number, "unknown", verdict.reason, self.now - verdict.since_s)
        self.handle(event)

    def handle(self, event) -> None:
        self.state, actions = planner.step(self.now, self.state, event)
        for action in actions:
            if isinstance(action, SendRegroup):
                for number in action.ranks:
                    rank = self.numbered[number]
                    self.later(self.now + self.way_s(), self.regroup, rank, action.generation)
            elif isinstance(action, SendGo):
                for number in action.members:
                    self.later(self.now + self.way_s(), self.go, self.numbered[number], action)
            elif isinstance(action, Kill):
                self.later(self.now + self.rng.uniform(0.005, 0.05), self.hear, RankFenced(action.rank))
            elif isinstance(action, Emit):
                self.events.append(action)
            elif isinstance(action, End):
                self.end = action

    # --- what must hold at the end

    @property
    def survivors(self) -> set[int]:
        return {rank.number for rank in self.ranks if rank.fault is None}

    @property
    def trains(self) -> bool:
        """All that are left are in one generation, which does its steps."""
        together = {rank.generation for rank in self.ranks if rank.fault is None} == {self.state.generation}
        members = set(self.state.members) == self.survivors == {rank.number for rank in self.group}
        return together and members and self.state.phase == "training" and self.step_end < math.inf
