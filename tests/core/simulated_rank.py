"""One simulated rank: what its agent and its training thread do, one small step at a time (see simulated_ranks.py).

It follows ftnb/rank/loop.py and ftnb/rank/orders.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache

from ftnb.core import planner
from ftnb.core.protocol import Standing
from ftnb.core.sampler import batch_at, digest, split

DATASET_LEN, GLOBAL_BATCH = 7, 3  # three steps an epoch, the last one with a single sample


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
    processes: dict[int, Rank]  # who fills the slots: a slot may have another process in the next one
    entered: dict[object, set[int]] = field(default_factory=dict)  # who has called which collective
    gone: set[int] = field(default_factory=set)  # whose connections are closed
    # (giver, receiver) -> the giver's history, and its flip: its stripe of the state, on its way
    sent: dict[tuple[int, int], tuple[list, int]] = field(default_factory=dict)
    not_finite: dict[int, set[int]] = field(default_factory=dict)  # step -> whose gradient was not
    digests: dict[int, dict[str, str]] = field(default_factory=dict)  # step -> rank -> of its replica


class Rank:
    """One process: `agent` obeys the supervisor's next message, `train` is the next bit of the training loop.

    It starts without a slot (`number` None) and without state, unless the run starts with it.
    """

    def __init__(self, world, number: int | None, *, intended: int | None = None) -> None:
        self.world, self.number, self.intended = world, number, intended
        self.is_newcomer = number is None
        self.has_state = number is not None
        self.has_run_cell = number is not None
        self.said_ready = False  # and the supervisor has heard it
        self.released = False  # the supervisor has ended it: its slot is given up
        self.announced = False  # by a `rank_joined`
        self.inbox: deque = deque()
        self.up = {"agent": deque(), "work": deque(), "reports": deque()}
        self.num_reports = self.num_read = 0
        self.dead = False
        self.raised = False  # by the user's code, ever
        self.armed: str | None = None  # where its user code is going to raise next
        # the weights: which step was applied by which generation with which members
        self.history: list[tuple[int, int, tuple[int, ...]]] = []
        self.spoiled = False  # raised in the middle of an update: its weights are worth nothing
        self.flipped = 0  # the number of a flip: a bit of its weights is not what it should be, and nobody knows
        self.must_go_back = False  # it has said that its state is not to be trained on
        self.anchor: list[tuple[int, int, tuple[int, ...]]] | None = [] if world.keeps_anchors else None
        self.condemned = False  # the planner was told to go on without it
        self.hung = False  # stopped: nothing of it moves, and to the others it looks alive
        self.unheard_of = False  # a new supervisor has come while it was stopped
        self.went_back_in = 0  # the last generation with which it did
        self.in_flight: int | None = None
        self.last_commit: tuple[int, int, float] | None = None
        # ftnb/rank/orders.py
        self.wanted, self.go, self.dropped = 0, None, False
        self.hold: int | None = None
        self.step_entered = 0
        # ftnb/rank/loop.py
        self.at = "next"
        self.generation = self.finished_generation = 0
        self.failure: planner.Failure | None = None
        self.group: Group | None = None
        self.aborted = False
        self.step = 0

    @property
    def committed(self) -> int:
        return len(self.history) if self.has_state else -1

    def standing(self) -> Standing:
        """What it tells a new supervisor."""
        stages = {"wait_go": "ready", "form": "ready", "restore": "ready", "share": "ready", "held": "held"}
        if self.at == "next":
            stage = "finished" if self.finished_generation == self.generation > 0 else "waiting"
        else:
            stage = stages.get(self.at, "training")
        return Standing(self.generation, stage, self.committed)

    def get_ready(self) -> bool:
        """A spare or a replacement has started and run the cell."""
        if self.dead or self.has_run_cell:
            return False
        self.has_run_cell = True
        self.tell_ready()
        return True

    def tell_ready(self) -> None:
        self._tell(planner.SpareReady(self.intended))

    # --- the agent thread

    def agent(self) -> bool:
        if self.dead or self.hung or not self.inbox:
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
        if self.dead or self.hung or self.last_commit is None or len(self.up["agent"]) > 2:
            return False
        self.up["agent"].append((None, self.last_commit, 0))
        return True

    # --- the training thread

    def train(self) -> bool:
        """False when it has to wait for somebody else."""
        return not self.dead and not self.hung and self.number is not None and getattr(self, f"_{self.at}")()

    def _next(self) -> bool:
        if self.dropped:
            self.at = "gone"
            return True
        if self.wanted <= self.generation:
            return False
        self.generation = self.wanted
        anchor = None if self.anchor is None else len(self.anchor)
        self._tell(
            planner.RankReady(self.number, self.generation, self.committed, self.in_flight, self.failure, anchor)
        )
        self.at = "wait_go"
        return True

    def _wait_go(self) -> bool:
        if self._has_to_leave():
            return True
        if self.go is None or self.go.generation != self.generation:
            return False
        order, self.go, self.failure = self.go, None, None
        self.hold = order.hold_after
        self.step_entered = order.first_step - 1
        self.group, self.aborted = self.world.groups[order.generation], False
        assert self.group.processes[self.number] is self, "two processes of one slot in one generation"
        self.at = "form"
        return True

    def _form(self) -> bool:
        if self._has_to_leave():
            return True
        return self._collective("form", then="share" if self.group.order.restore is None else "restore")

    def _restore(self) -> bool:
        """Back to the copy of an earlier state."""
        order = self.group.order
        if self.number not in order.behind:
            assert len(self.anchor) == order.restore
            self.history, self.has_state = list(self.anchor), True
            self._is_well()
        self.at = "share"
        return True

    def _is_well(self) -> None:
        self.flipped, self.must_go_back = 0, False
        self.in_flight, self.went_back_in = None, self.generation

    def _share(self) -> bool:
        order, sent = self.group.order, self.group.sent
        givers = [rank for rank in order.members if rank not in order.behind]
        if self.number in order.behind:
            self.has_state = False  # from now on its own state is being overwritten
            if self.armed == "share":
                return self._fail("user")
            complete = all((giver, self.number) in sent for giver in givers)
            if complete and not (self._broken() and self.world.rng.random() < 0.5):
                self.history = list(sent[order.source, self.number][0])
                self.has_state = True
                self._is_well()
                self.flipped = max(sent[giver, self.number][1] for giver in givers)
                if order.restore is not None:
                    self.anchor = list(self.history)
                else:
                    self.world.check_histories()
            elif self._broken():
                return self._fail("collective")
            else:
                return False
        else:
            for receiver in order.behind:
                if (self.number, receiver) not in sent:
                    if self._broken() and self.world.rng.random() < 0.5:
                        return self._fail("collective")
                    sent[self.number, receiver] = (list(self.history), self.flipped)
                    return True
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
        if self.armed == "nan" or self.step == self.world.nan_step:
            self.group.not_finite.setdefault(self.step, set()).add(self.number)
            self.armed = None if self.armed == "nan" else self.armed
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
            sources = self.group.not_finite.get(self.step)
            if sources:
                return self._fail("nan", {"source": self.number in sources, "where": "loss"})
            self._update()
        return True

    def _check(self) -> bool:
        """Are all replicas the same?"""
        digest = f"flip {self.flipped}" if self.flipped else "right"
        digests = self.group.digests.setdefault(self.step, {})
        digests[str(self.number)] = digest
        if not self._collective(("check", self.step), then="checked"):
            return False
        if self.at == "checked":
            if len(set(digests.values())) > 1:
                return self._fail("divergence", {"digests": dict(digests)})
            self.anchor = list(self.history)
            self._go_to_next_step()
        return True

    def _update(self) -> None:
        if self.armed == "update":
            self.spoiled = True
            self._fail("user")
            return
        assert self.has_state and len(self.history) == self.step - 1
        assert not self.must_go_back, f"rank {self.number} trains on with a state that is not to be trained on"
        self.history.append((self.step, self.generation, self.group.order.members))
        self.in_flight = None
        self.last_commit = (self.generation, self.step, self.world.now)
        self.world.check_histories()
        every = self.world.check_replicas
        if every and self.step % every == 0:
            self.at = "check"
        else:
            self._go_to_next_step()

    def _go_to_next_step(self) -> None:
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
        self.tell_finished()
        self.finished_generation = self.generation
        self.group = None
        self.at = "next"
        return True

    def tell_finished(self) -> None:
        self._tell(planner.RankFinished(self.number, self.generation), self.last_commit)

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
        group = self.group
        # Where DataLoader workers hold copies of the sockets, a peer's end goes unnoticed.
        return self.world.notices_peers and any(
            peer in group.gone or process.dead for peer, process in group.processes.items()
        )

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

    def _fail(self, cause: str, error: dict | None = None) -> bool:
        step = self.in_flight if self.in_flight is not None else self.committed
        error = error or {}
        if cause in ("nan", "divergence"):
            self.must_go_back = True
            self.world.verdicts.append((cause, self.generation, step))
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
