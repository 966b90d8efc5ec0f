"""A world of ranks that speak the planner's protocol, in plain Python: no processes, no torch, no waiting.

`World` plays the supervisor's part (it feeds `planner.step` and `StepAssembler` and carries out the actions)
and moves everything else one small step at a time, in an order that its random generator decides: the
training thread and the agent of each rank, the messages on each of a rank's three sockets, and the news of
deaths. What a rank does follows ftnb/rank/loop.py and ftnb/rank/orders.py.

The promises of the planner are asserted while the world moves, so a test only has to make trouble.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field
from functools import cache

from ftnb.core import planner
from ftnb.core.events import make_event
from ftnb.core.ledger import StepAssembler
from ftnb.core.sampler import batch_at, digest, digest_hex, split

DATASET_LEN, GLOBAL_BATCH = 7, 3  # three steps an epoch, the last one with a single sample

# What a rank says to the supervisor; each of these may be repeated at any time and must then do nothing.
FROM_RANKS = (
    planner.RankDied, planner.RankFenced, planner.StepFailed, planner.RankReady, planner.RankFormed,
    planner.StepCommitted, planner.RankFinished, planner.HoldAnswered, planner.RankHeld,
)  # fmt: skip


@cache
def share_of(step: int, torch_rank: int, world_size: int) -> tuple[int, int]:
    """(number of samples, digest) of one rank's share of `step`."""
    batch = batch_at(step, DATASET_LEN, GLOBAL_BATCH)
    start, stop = split(batch.start, batch.stop, world_size)[torch_rank]
    return stop - start, digest(range(start, stop))


@dataclass
class Group:
    """The process group of one generation."""

    order: planner.SendGo
    entered: dict[object, set[int]] = field(default_factory=dict)  # who has called which collective
    gone: set[int] = field(default_factory=set)  # whose connections are closed
    sent: dict[int, list] = field(default_factory=dict)  # state on its way to those who are behind


class Rank:
    """One rank: `agent` obeys the supervisor's next message, `train` is the next bit of the training loop."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.inbox: deque = deque()
        self.up = {"agent": deque(), "work": deque(), "reports": deque()}
        self.num_reports = 0  # sent
        self.dead = False
        self.raised = False  # by the user's code, ever
        self.armed: str | None = None  # where its user code is going to raise next
        # the weights: which step was applied by which generation with which members
        self.history: list[tuple[int, int, tuple[int, ...]]] = []
        self.spoiled = False  # raised in the middle of an update: its weights are worth nothing
        self.in_flight: int | None = None
        self.last_commit: tuple[int, int, float] | None = None
        # ftnb/rank/orders.py
        self.wanted, self.go, self.dropped = 0, None, False
        self.hold: int | None = None
        self.step_entered = 0
        # ftnb/rank/loop.py
        self.at = "next"
        self.generation = 0
        self.failure: planner.Failure | None = None
        self.group: Group | None = None
        self.aborted = False
        self.step = 0

    @property
    def committed(self) -> int:
        return len(self.history)

    # --- the agent thread

    def agent(self) -> bool:
        if self.dead or not self.inbox:
            return False
        order = self.inbox.popleft()
        if isinstance(order, planner.SendRegroup):
            self.wanted = max(self.wanted, order.generation)
            self.aborted = True
        elif isinstance(order, planner.SendGo):
            self.go = order
        elif isinstance(order, planner.SendHold):
            accepted = self.step_entered <= order.after_step
            if accepted:
                self.hold = order.after_step
            answer = planner.HoldAnswered(self.number, order.hold_id, accepted, self.step_entered)
            self.up["agent"].append((answer, None, 0))
        elif isinstance(order, planner.SendRelease):
            self.hold = None
        elif isinstance(order, planner.SendDrop):
            self.dropped = self.aborted = True
        return True

    def beat(self) -> bool:
        if self.dead or self.last_commit is None or len(self.up["agent"]) > 2:
            return False
        self.up["agent"].append((None, self.last_commit, 0))
        return True

    # --- the training thread

    def train(self) -> bool:
        """False when it has to wait for somebody else."""
        return not self.dead and getattr(self, f"_{self.at}")()

    def _next(self) -> bool:
        if self.dropped:
            self.at = "gone"
            return True
        if self.wanted <= self.generation:
            return False
        self.generation = self.wanted
        self._tell(planner.RankReady(self.number, self.generation, self.committed, self.in_flight, self.failure))
        self.failure = None
        self.at = "wait_go"
        return True

    def _wait_go(self) -> bool:
        if self._has_to_leave():
            return True
        if self.go is None or self.go.generation != self.generation:
            return False
        order, self.go = self.go, None
        self.hold = order.hold_after
        self.step_entered = order.first_step - 1
        self.group, self.aborted = self.world.groups[order.generation], False
        self.at = "form"
        return True

    def _form(self) -> bool:
        if self._has_to_leave():
            return True
        return self._collective("form", then="share")

    def _share(self) -> bool:
        order, sent = self.group.order, self.group.sent
        if self.number == order.source and len(sent) < len(order.behind):
            sent[order.behind[len(sent)]] = list(self.history)
            return True
        if self.number in order.behind:
            if self.number in sent and not (self._broken() and self.world.rng.random() < 0.5):
                self.history = sent[self.number]
                self.world.check_histories()
            elif self._broken():
                return self._fail("collective")
            else:
                return False
        self.in_flight = None
        self._tell(planner.RankFormed(self.number, self.generation, self.world.now, self.world.now))
        self.step = order.first_step
        self.at = "enter"
        return True

    def _enter(self) -> bool:
        if self._has_to_leave():
            return True
        if self.step > self.world.total_steps:
            self.at = "finish"
        elif self.hold is not None and self.step > self.hold:
            self._tell(planner.RankHeld(self.number, self.generation, self.hold), self.last_commit)
            self.at = "held"
        else:
            self.step_entered = self.step
            self.at = "forward"
        return True

    def _held(self) -> bool:
        if self._has_to_leave():
            return True
        if self.hold is not None and self.step > self.hold:
            return False
        self.at = "enter"
        return True

    def _forward(self) -> bool:
        self.in_flight = self.step
        if self.armed == "forward" or self.step == self.world.bad_step:
            return self._fail("user")
        members = self.group.order.members
        self.num_reports += 1
        fetched = (self.generation, self.step, self.number, members)
        self.up["reports"].append((fetched, self.last_commit, 0))
        self.at = "reduce"
        return True

    def _reduce(self) -> bool:
        if not self._collective(("step", self.step), then="update"):
            return False
        if self.at == "update":  # nothing interrupts the update
            self._update()
        return True

    def _update(self) -> None:
        if self.armed == "update":
            self.spoiled = True
            self._fail("user")
            return
        self.history.append((self.step, self.generation, self.group.order.members))
        self.in_flight = None
        self.last_commit = (self.generation, self.step, self.world.now)
        self.world.check_histories()
        self.step += 1
        self.at = "enter"
        if self.armed == "evaluate":
            self._fail("user")

    def _finish(self) -> bool:
        if self.world.has_buffers and self.at == "finish":
            if not self._collective("finish", then="finished"):
                return False
            if self.at != "finished":
                return True
        self._tell(planner.RankFinished(self.number, self.generation), self.last_commit)
        self.group = None
        self.at = "next"
        return True

    def _gone(self) -> bool:
        return False

    def _has_to_leave(self) -> bool:
        if self.dropped or self.wanted > self.generation:
            if self.group is not None:
                self.group.gone.add(self.number)
            self.group = None
            self.at = "gone" if self.dropped else "next"
            return True
        return False

    def _broken(self) -> bool:
        if self.aborted:
            return True
        ranks, group = self.world.ranks, self.group
        # Where DataLoader workers hold copies of the sockets, a peer's end goes unnoticed.
        return self.world.notices_peers and any(peer in group.gone or ranks[peer].dead for peer in group.order.members)

    def _collective(self, name: object, then: str) -> bool:
        """Done when every member has called it. In a broken group some may get the result, others not."""
        entered = self.group.entered.setdefault(name, set())
        entered.add(self.number)
        complete = entered >= set(self.group.order.members)
        if self._broken() and not (complete and self.world.rng.random() < 0.5):
            return self._fail("collective")
        if complete:
            self.at = then
        return complete

    def _fail(self, cause: str) -> bool:
        step = self.in_flight if self.in_flight is not None else self.committed
        error = {}
        if cause == "user":
            self.raised, self.armed = True, None
            self.world.raised_in.append((self.generation, step, self.number))
            error = {"etype": "ValueError", "evalue": f"on rank {self.number}"}
        self.failure = planner.Failure(cause, step, self.world.now, error)
        self._tell(planner.StepFailed(self.number, self.generation, self.failure))
        self.group.gone.add(self.number)
        self.group = None
        self.at = "next"
        return True

    def _tell(self, event: object, commit: object = None) -> None:
        self.up["work"].append((event, commit, self.num_reports))


class World:
    """All ranks of one run and the supervisor. Faults and commands are methods; `drain` ends every story."""

    def __init__(
        self,
        num_ranks: int,
        total_steps: int = 6,
        *,
        notices_peers: bool = True,
        has_buffers: bool = True,
        reports_first: bool = True,
        seed: int = 0,
    ) -> None:
        self.total_steps = total_steps
        self.notices_peers, self.has_buffers, self.reports_first = notices_peers, has_buffers, reports_first
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.ranks = [Rank(self, number) for number in range(num_ranks)]
        self.groups: dict[int, Group] = {}
        self.assembler = StepAssembler(DATASET_LEN, GLOBAL_BATCH)
        self.lines: list = []
        self.actions: list = []  # all that were ever taken
        self.delivered: list = []  # messages of ranks, to be repeated later
        self.num_read = [0] * num_ranks  # reports read, per rank
        self.max_step_seen = 0
        self.unheard_deaths: dict[int, planner.RankDied] = {}
        self.unfenced: set[int] = set()
        self.raised_in: list[tuple[int, int, int]] = []  # (generation, step, rank)
        self.crashes = 0
        self.bad_step: int | None = None  # whoever tries this step raises
        self.breaks = 0  # connections that broke for no reason
        self.stop_wanted = self.given_up = False
        self.end: planner.End | None = None
        self.state = planner.new(total_steps)
        self.handle(planner.Started(tuple(range(num_ranks))))

    # --- trouble and commands

    def die(self, number: int, how: str = "kill") -> None:
        rank = self.ranks[number]
        if rank.dead:
            return
        rank.dead = True
        rank.inbox.clear()
        for name, channel in rank.up.items():  # what had not left yet is lost
            for _ in range(self.rng.randint(0, len(channel))):
                channel.pop()
            rank.num_reports -= name == "reports" and rank.num_reports - self.num_read[number] - len(channel)
        self.crashes += how == "crash"
        self.unheard_deaths[number] = planner.RankDied(number, how, "it was killed (SIGKILL)", self.now)

    def raise_in(self, number: int, where: str = "forward") -> None:
        self.ranks[number].armed = where

    def break_connection(self, number: int) -> None:
        """A collective fails, and nobody will ever know why."""
        rank = self.ranks[number]
        if rank.group is not None and not rank.dead:
            rank.aborted = True
            self.breaks += 1

    def pause(self) -> None:
        if self.state.hold_why != "pause":  # as ActiveRun.pause
            self.handle(planner.HoldWanted("pause", self.max_step_seen))

    def unpause(self) -> None:
        self.handle(planner.Unpause())

    def stop(self) -> None:
        self.stop_wanted = True
        self.handle(planner.HoldWanted("stop", self.max_step_seen))

    def give_up(self) -> None:
        self.given_up = True
        self.handle(planner.GiveUp("stopped", "The cluster was stopped."))

    def tick(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.handle(planner.Tick())

    def repeat(self, index: int) -> None:
        """A message that was delivered before comes a second time."""
        if self.delivered:
            self.do_nothing(self.delivered[index % len(self.delivered)])

    def do_nothing(self, event: object) -> None:
        state, actions = planner.step(self.now, self.state, event)
        assert state is self.state, f"the repeated {event} changed the state"
        assert not actions, f"the repeated {event} led to {actions}"

    # --- moving on

    def hear_death(self, number: int) -> bool:
        event = self.unheard_deaths.pop(number, None)
        if event is None:
            return False
        if number in self.state.alive | self.state.left_out:  # as ActiveRun.rank_died
            self.lines += self.assembler.lost(number)
        self.handle(event)
        return True

    def fence(self, number: int) -> bool:
        if number not in self.unfenced or number in self.unheard_deaths:
            return False
        self.unfenced.discard(number)
        self.handle(planner.RankFenced(number))
        return True

    def deliver(self, number: int, name: str) -> bool:
        channel = self.ranks[number].up[name]
        if not channel:
            return False
        event, commit, num_reports = channel.popleft()
        if name == "reports":
            self.num_read[number] += 1
        elif self.reports_first:
            while self.num_read[number] < num_reports and self.deliver(number, "reports"):
                pass
        if commit is not None:
            generation, step, when = commit
            self.max_step_seen = max(self.max_step_seen, step)
            self.lines += self.assembler.committed(generation, step, number, when, 0.1, None, 0.01)
            self.handle(planner.StepCommitted(number, generation, step, when))
        if isinstance(event, tuple):
            generation, step, _, members = event
            self.max_step_seen = max(self.max_step_seen, step)
            samples, value = share_of(step, members.index(number), len(members))
            self.lines += self.assembler.fetched(generation, step, number, samples, value, 1.0, samples)
        elif event is not None:
            self.handle(event)
        return True

    def moves(self):
        for rank in self.ranks:
            n = rank.number
            yield rank.agent, ()
            yield rank.train, ()
            yield rank.train, ()
            yield rank.beat, ()
            yield self.deliver, (n, "agent")
            yield self.deliver, (n, "work")
            yield self.deliver, (n, "reports")
            yield self.hear_death, (n,)
            yield self.fence, (n,)

    def go_on(self, num_moves: int, seed: int) -> None:
        """Many small moves in any order; some ranks, sockets and threads are much slower than others."""
        self.rng.seed(seed)
        moves = list(self.moves())
        weights = [self.rng.choice((0.01, 0.2, 1.0, 1.0)) for _ in moves]
        for move, arguments in self.rng.choices(moves, weights, k=num_moves):
            self.now += 0.001
            move(*arguments)

    def round(self) -> None:
        """Everything moves on once, in a fair order; a tenth of a second passes."""
        for move, arguments in self.moves():
            move(*arguments)
        self.tick()

    def until(self, condition, max_rounds: int = 500) -> None:
        for _ in range(max_rounds):
            if condition():
                return
            self.round()
        raise AssertionError(f"stuck: {self.state}\nranks at {[rank.at for rank in self.ranks]}")

    def drain(self) -> planner.End:
        """No more faults: the run must come to an end by itself (a pause ends when it is lifted)."""

        def over() -> bool:
            if self.end is None and self.state.paused:
                self.unpause()
            return self.end is not None

        self.until(over, max_rounds=60 + 30 * self.total_steps + 10 * self.rng.randint(0, 1))
        # Even messages that come after the end do nothing.
        for _ in range(3):
            self.round()
        for event in self.delivered:
            self.do_nothing(event)
        return self.end

    # --- the supervisor's part, and what must hold

    def handle(self, event: object) -> None:
        before = self.state
        self.state, actions = planner.step(self.now, before, event)
        if isinstance(event, FROM_RANKS):
            if self._is_late(event, before):
                assert self.state is before and not actions, f"the late {event} had an effect: {actions}"
            self.delivered.append(event)
        if before.phase == "ended":
            assert self.state is before and not actions
        assert self.state.generation >= before.generation, "generations only grow"
        for action in actions:
            assert self.end is None, f"{action} after the end"
            self._carry_out(action, before)
        self.actions += actions

    def _carry_out(self, action: object, before: planner.State) -> None:
        if isinstance(action, planner.Emit):
            assert action.reason.strip() and action.reason[-1] in ".:", action
            reserved = {"rank": action.rank, "step": action.step, "reason": action.reason}
            json.dumps(make_event(action.kind, self.now, self.state.generation, **reserved, **action.fields))
            if action.kind == "rolled_back":  # the only way for a step to get a second line
                self.lines = [line for line in self.lines if line.ledger["step"] < action.step]
            if action.kind == "paused":
                self._check_held(action.step)
            if action.kind == "recovered":
                assert all(action.fields[name] >= 0 for name in action.fields if name.endswith("_s"))
        elif isinstance(action, planner.Kill):
            rank = self.ranks[action.rank]
            assert rank.dead or rank.raised, f"{action}, but it has done no harm"
            assert action.reason
            self.die(action.rank)
            self.unfenced.add(action.rank)
        elif isinstance(action, planner.SendRegroup):
            assert action.generation == before.generation + 1
            self._send(action.ranks, action)
        elif isinstance(action, planner.SendGo):
            self._check_go(action)
            self.groups[action.generation] = Group(action)
            self._send(action.members, action)
        elif isinstance(action, planner.SendHold | planner.SendRelease | planner.SendDrop):
            self._send(action.ranks, action)
        elif isinstance(action, planner.OpenGeneration):
            self.assembler.open_generation(action.generation, action.members, action.first_step)
        elif isinstance(action, planner.CloseGeneration):
            self.lines += self.assembler.close_generation(action.last_committed)
        elif isinstance(action, planner.End):
            self.end = action
            self._check_end(action, before)

    @staticmethod
    def _is_late(event: object, state: planner.State) -> bool:
        """From a rank that is known to be dead, or from a generation that is over."""
        if isinstance(event, planner.RankDied | planner.RankFenced):
            return False
        if event.rank not in state.alive | state.left_out:
            return True
        if isinstance(event, planner.StepFailed) and event.failure.cause == "user":
            return event.generation < state.trained  # until the next Go, it matters who raised
        return getattr(event, "generation", state.generation) < state.generation

    def _send(self, ranks: tuple[int, ...], order: object) -> None:
        for number in ranks:
            if not self.ranks[number].dead:
                self.ranks[number].inbox.append(order)

    def _living(self, numbers) -> list[Rank]:
        return [self.ranks[number] for number in numbers if not self.ranks[number].dead]

    def check_histories(self) -> None:
        """Ranks that may go on agree on the steps they have in common, and are at most one step apart."""
        histories = [r.history for r in self._living(self.state.alive) if not r.raised]
        if not histories:
            return
        longest = max(histories, key=len)
        for history in histories:
            assert len(longest) - len(history) <= 1, "more than one step apart"
            assert not history or history[-1] == longest[len(history) - 1], "two versions of one step"

    def _check_go(self, go: planner.SendGo) -> None:
        heard = {rank.number for rank in self.ranks if rank.dead} - set(self.unheard_deaths)
        assert go.generation == self.state.generation and go.generation not in self.groups
        assert not heard & set(go.members), "a dead rank is a member"
        known_dead = {event.rank for event in self.delivered if isinstance(event, planner.RankDied)}
        left_alone = {rank.number for rank in self.ranks if rank.raised}
        assert not (self.unfenced & known_dead) - left_alone, "takeover before the dead rank is fenced"
        for rank in self._living(go.members):
            assert not rank.raised and not rank.spoiled, f"rank {rank.number} raised and is a member again"
            assert rank.committed == go.first_step - 1 - (rank.number in go.behind)
        assert (go.source is None) == (not go.behind)
        assert go.source is None or go.source in set(go.members) - set(go.behind)

    def _check_held(self, step: int) -> None:
        for rank in self._living(self.state.members):
            assert rank.committed == step, f"rank {rank.number} is at {rank.committed}, not held at {step}"

    def _check_end(self, end: planner.End, before: planner.State) -> None:
        assert end.reason.strip()
        done = self._check_lines()
        state = self.state
        if end.state == "finished":
            assert done == self.total_steps
            if state.hold_why == "pause":
                assert state.hold_after is not None, "a pause was wanted, and nobody was told"
            self._check_same_history(state.members, done)
        elif end.state == "stopped":
            assert self.stop_wanted or self.given_up
            if "after step" in end.reason:
                assert end.reason.endswith(f"after step {done}.")
                self._check_same_history(state.members, done)
            elif not self.given_up and before.phase == "training":
                assert state.hold_after is not None, "a stop was wanted, and nobody was told"
        else:
            self._check_failed(end, done, before)

    def _check_failed(self, end: planner.End, done: int, before: planner.State) -> None:
        """The reason of a failed run is the truth, and nothing but a good reason fails a run."""
        broke_in = {generation for generation, _, _ in self.raised_in}
        if "failed twice" in end.reason:
            assert len(broke_in) + self.crashes >= 2
        elif "a bug in the training code" in end.reason:
            assert all(self.ranks[number].raised for number in self.state.alive)
            assert end.error and end.error["etype"] == "ValueError" and end.error["ranks"]
            have = max(self.ranks[number].committed for number in self.state.alive)
            # Or the last step's books were closed for a rank that died before it could copy it.
            assert done == have or done == have + 1 == before.first_step - 1
        elif "could not form" in end.reason:
            assert self.breaks + sum(rank.dead for rank in self.ranks) > planner.MAX_FRUITLESS_REGROUPS
        elif "All ranks are lost" in end.reason:
            assert all(rank.dead for rank in self.ranks)
        elif "No rank is left" in end.reason:
            assert all(rank.dead or rank.raised for rank in self.ranks)
        else:
            raise AssertionError(f"failed for no good reason: {end.reason}")

    def _check_lines(self) -> int:
        """Every step up to the last one has one line, and every sample is used exactly once."""
        for number, line in enumerate(self.lines, start=1):
            batch = batch_at(number, DATASET_LEN, GLOBAL_BATCH)
            ledger = line.ledger
            assert (ledger["step"], ledger["start"], ledger["stop"]) == (number, batch.start, batch.stop)
            assert sum(ledger["shares"].values()) == batch.stop - batch.start
            if "unreported" not in ledger:
                assert ledger["digest"] == digest_hex(digest(range(batch.start, batch.stop)))
        return len(self.lines)

    def _check_same_history(self, members: tuple[int, ...], done: int) -> None:
        """All ranks end with the same steps, and the ledger tells of just these."""
        histories = {tuple(self.ranks[number].history) for number in members}
        assert len(histories) == 1
        history = histories.pop()
        assert [step for step, _, _ in history] == list(range(1, done + 1))
        for (_, generation, group), line in zip(history, self.lines, strict=True):
            assert line.ledger["generation"] == generation
            assert sorted(line.ledger["shares"]) == sorted(map(str, group))

    # --- for readable tests

    def kinds(self) -> list[str]:
        return [action.kind for action in self.actions if isinstance(action, planner.Emit)]

    def emitted(self, kind: str) -> list[planner.Emit]:
        return [a for a in self.actions if isinstance(a, planner.Emit) and a.kind == kind]

    def all_of(self, kind: type) -> list:
        return [action for action in self.actions if isinstance(action, kind)]
