"""A world of ranks that speak the planner's protocol, in plain Python: no processes, no torch, no waiting.

`World` plays the supervisor's part (it feeds `planner.step` and `StepAssembler`, carries out the actions, and starts
what `keeper` says) and moves everything else one small step at a time, in an order that its random generator decides:
the training thread and the agent of each rank, the messages on each of a rank's three sockets, the news of deaths, the
starts of processes. The supervisor itself may die at any moment, in the middle of carrying something out, and
another goes on with the state that was saved.

The promises of the planner are asserted while the world moves, so a test only has to make trouble.
"""

from __future__ import annotations

import json
import random
from collections import Counter

from simulated_rank import DATASET_LEN, GLOBAL_BATCH, Group, Rank, share_of

from ftnb.core import keeper, planner
from ftnb.core.events import make_event
from ftnb.core.ledger import StepAssembler
from ftnb.core.sampler import batch_at, digest, digest_hex

# What a rank says to the supervisor; each of these may be repeated at any time and must then do nothing.
FROM_RANKS = (
    planner.RankDied, planner.StepFailed, planner.RankReady, planner.RankFormed,
    planner.StepCommitted, planner.RankFinished, planner.HoldAnswered, planner.RankHeld,
)  # fmt: skip
# What is written to files. How that is made safe against the supervisor's death is not the planner's business, so
# here it is never lost.
BOOKS = (planner.Emit, planner.OpenGeneration, planner.CloseGeneration)


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
        refill: bool = False,
        num_spares: int = 0,
        seed: int = 0,
        restart: bool = False,
        on_nan: str = "stop",
        check_replicas: int | None = None,
    ) -> None:
        self.restart, self.on_nan, self.check_replicas = restart, on_nan, check_replicas
        self.keeps_anchors = restart or on_nan == "rollback" or check_replicas is not None
        self.total_steps = total_steps
        self.notices_peers, self.has_buffers, self.reports_first = notices_peers, has_buffers, reports_first
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.ranks = [Rank(self, number) for number in range(num_ranks)]  # per slot, who fills it or was the last to
        self.former: list[Rank] = []  # had a slot that another process has now
        self.pool: list[Rank] = []  # have no slot
        self.num_spares, self.keeper = num_spares, keeper.State()
        self.refill = refill or restart
        self.keeps = self.refill or num_spares > 0  # somebody starts processes
        self.groups: dict[int, Group] = {}
        self.assembler = StepAssembler(DATASET_LEN, GLOBAL_BATCH)
        self.lines: list = []
        self.actions: list = []  # all that were ever taken
        self.delivered: list = []  # (process, message), to be repeated later
        self.max_step_seen = 0
        self.unheard_deaths: dict[Rank, planner.RankDied] = {}
        self.unfenced: list[int] = []  # slots; once for each process whose end is not confirmed
        self.down = False  # the supervisor is dead
        self.dies_after: int | None = None  # it dies when it has carried out so many of the next actions
        self.num_adoptions = 0
        self.num_failed: Counter[int] = Counter()  # per slot, how many have failed and are not fenced yet
        self.last_actions: list = []
        self.planned_generation = 0  # the last one that was begun on purpose
        self.raised_in: list[tuple[int, int, int]] = []  # (generation, step, rank)
        self.crashes = 0
        self.bad_step: int | None = None  # whoever tries this step raises
        self.breaks = 0  # connections that broke for no reason
        self.nan_step: int | None = None  # whose gradient is not finite, whoever tries it
        self.verdicts: list[tuple[str, int, int]] = []  # (cause, generation, step), once for each rank
        self.num_condemned = self.flips = 0
        self.restored_generation = 0  # the last one that was told to go back
        self.lost = False  # with recovery "restart": a rank, and the others have not gone back yet
        self.nobody_comes = ""
        self.stop_wanted = self.given_up = False
        self.end: planner.End | None = None
        self.state = planner.new(total_steps, refill, restart, on_nan)
        self.handle(planner.Started(tuple(range(num_ranks))))

    # --- trouble and commands

    def die(self, number: int, how: str = "kill") -> None:
        self.lose(self.ranks[number], how)

    def lose(self, rank: Rank, how: str = "kill") -> None:
        if rank.dead:
            return
        rank.dead = True
        rank.inbox.clear()
        for name, channel in rank.up.items():  # what had not left yet is lost
            for _ in range(self.rng.randint(0, len(channel))):
                channel.pop()
            rank.num_reports -= name == "reports" and rank.num_reports - rank.num_read - len(channel)
        self.crashes += how == "crash"
        number = -1 if rank.number is None else rank.number
        if not rank.released:
            self.unheard_deaths[rank] = planner.RankDied(number, how, "it was killed (SIGKILL)", self.now)

    def hang(self, number: int) -> None:
        """Stopped, until somebody kills it or continues it (`resume`)."""
        if not self.ranks[number].dead:
            self.ranks[number].hung = True

    def resume(self, number: int) -> None:
        rank = self.ranks[number]
        rank.hung = False
        state = self.state
        if self.down or not rank.unheard_of:
            return
        rank.unheard_of = False  # as ActiveRun.came_late
        if state.phase == "regrouping" and number in state.alive | state.left_out and number not in state.ready:
            rank.inbox.append(planner.SendRegroup(state.generation, (number,)))
        elif state.phase == "training" and state.hold_why and number in state.members:
            rank.inbox.append(planner.SendHold((number,), state.hold_id, state.hold_after))

    def condemn(self, number: int, failure: str = "stall") -> bool:
        """It is found to be in the way, whether it is or not."""
        if self.down or self.end is not None:
            return False
        if number in self.state.has_run:
            self.num_condemned += 1
            self._process_at(number).condemned = True
        if number in self.state.alive | self.state.left_out:
            self.lines += self.assembler.lost(number)
        fields = {"phi": 9.0, "stands": ["here"]}
        self.handle(planner.RankCondemned(number, failure, "does not go on", self.now, fields))
        return True

    def notice_hung(self, rank: Rank) -> bool:
        mine = rank.number is not None and rank is self.ranks[rank.number] and not rank.released
        if not rank.hung or rank.dead or not mine or rank.number not in self.state.has_run:
            return False
        return self.condemn(rank.number, "hang")

    def flip(self, number: int) -> None:
        """A bit of its weights changes."""
        rank = self.ranks[number]
        if rank.has_state and not rank.dead and self.check_replicas is not None:
            self.flips += 1
            rank.flipped = self.flips

    def no_progress(self, waiting: bool = True) -> None:
        if not self.down:
            self.breaks += 1
            self.handle(planner.NoProgress(waiting, "all ranks stand still"))

    def say_nobody_comes(self) -> bool:
        awaited = frozenset() if self.down else self.state.awaited
        if not awaited or not (self.nobody_comes or awaited & self.keeper.given_up):
            return False
        self.handle(planner.NobodyComes(self.nobody_comes or "too many have failed"))
        return True

    def lose_pooled(self, index: int) -> None:
        """One of the processes without a slot dies; it may be starting, or ready."""
        if self.pool:
            self.lose(self.pool[index % len(self.pool)])

    def kill_supervisor(self, after: int | None = None) -> None:
        """Now, or when it has carried out `after` of the actions it decides on next."""
        if after is None:
            self._supervisor_is_gone()
        elif not self.down:
            self.dies_after = after

    def _supervisor_is_gone(self) -> None:
        self.down, self.dies_after = True, None
        self.saved = planner.to_json(self.state)
        for rank in self.ranks:  # of what it had sent, the last may not have left
            for _ in range(self.rng.choice((0, 0, 1, 2))):
                if rank.inbox:
                    rank.inbox.pop()
        for rank in [*self.ranks, *self.pool]:  # and what it was sent has been for nothing
            for name in ("agent", "work"):
                for _ in range(self.rng.randint(0, len(rank.up[name]))):
                    rank.up[name].popleft()

    def adopt(self) -> bool:
        """A new supervisor takes over. What it does besides telling the planner is the supervisor's duty."""
        if not self.down:
            return False
        self.down = False
        self.num_adoptions += 1
        saved, self.state = self.state, planner.from_json(self.saved)
        assert self.state == saved
        for number, rank in enumerate(self.ranks):
            # Its end was decided, but not carried out (or it was told so, and never heard it).
            if self.end is not None or number not in self.state.has_run:
                rank.inbox.append(planner.SendDrop((number,)))
                if self.end is None:
                    self._release(rank)
        if self.end is not None:
            return True
        if self.rng.random() < 0.3:  # what the one before sent last is sent once more
            for action in self.last_actions:
                if isinstance(action, planner.SendRegroup | planner.SendHold | planner.SendRelease):
                    self._send(action.ranks, action)
                elif isinstance(action, planner.SendGo) and action.generation in self.groups:
                    self._send(action.members, action)
        for rank in self.pool:
            rank.said_ready = False
            rank.up["work"].clear()
            if rank.has_run_cell and not rank.dead:
                rank.tell_ready()
        self.unfenced = [number for number, times in self.state.unfenced.items() for _ in range(times)]
        there = {n: self._process_at(n) for n in self.state.has_run if not self._process_at(n).released}
        for rank in there.values():
            rank.unheard_of = rank.hung
        for number in sorted(self.state.has_run):
            rank = self._process_at(number)
            if rank.dead or rank.released:
                self.unheard_deaths[rank] = planner.RankDied(number, "unknown", "it is not there any more", self.now)
        answer = {n: rank for n, rank in there.items() if not rank.dead and not rank.hung}
        self.handle(planner.Adopted({n: rank.standing() for n, rank in answer.items()}))
        for rank in answer.values():
            if not rank.dead and rank.standing().stage == "finished":
                rank.tell_finished()
        return True

    def resize(self, num_ranks: int) -> None:
        if not self.down:
            self.keeps = True
            self.keeper = keeper.forgive(self.keeper)
            self.handle(planner.Resized(num_ranks))

    def can_spare(self, number: int) -> bool:
        """Without this one, another that is well would be left with the most advanced state."""
        alive = [self.ranks[n] for n in self.state.alive if n < len(self.ranks)]
        well = [r for r in alive if r.has_state and not (r.dead or r.raised or r.armed or r.hung or r.flipped)]
        well = [rank for rank in well if rank.number not in self.state.leaving]
        most = max((rank.committed for rank in well), default=0)
        return any(rank.committed == most for rank in well if rank.number != number)

    def raise_in(self, number: int, where: str = "forward") -> None:
        self.ranks[number].armed = where

    def break_connection(self, number: int) -> None:
        """A collective fails, and nobody will ever know why."""
        rank = self.ranks[number]
        if rank.group is not None and not rank.dead:
            rank.aborted = True
            self.breaks += 1

    def pause(self) -> None:
        if not self.down and self.state.hold_why != "pause":  # as ActiveRun.pause
            self.handle(planner.HoldWanted("pause", self.max_step_seen))

    def unpause(self) -> None:
        if not self.down:
            self.handle(planner.Unpause())

    def stop(self) -> None:
        if not self.down:
            self.stop_wanted = True
            self.handle(planner.HoldWanted("stop", self.max_step_seen))

    def give_up(self) -> None:
        if not self.down:
            self.given_up = True
            self.handle(planner.GiveUp("stopped", "The cluster was stopped."))

    def tick(self, seconds: float = 0.1) -> None:
        self.now += seconds
        if not self.down:
            self.handle(planner.Tick())

    def repeat_all(self) -> None:
        """Every message that was delivered comes a second time (of processes that still have their slot)."""
        for rank, event in self.delivered:
            told = isinstance(event, planner.RankDied) and event.rank in self.state.has_run
            if not self.down and rank is self.ranks[event.rank] and not told:
                self.do_nothing(event)

    def do_nothing(self, event: object) -> None:
        state, actions = planner.step(self.now, self.state, event)
        assert state is self.state, f"the repeated {event} changed the state"
        assert not actions, f"the repeated {event} led to {actions}"

    # --- moving on

    def hear_death(self, rank: Rank) -> bool:
        if self.down or rank not in self.unheard_deaths:
            return False
        event = self.unheard_deaths.pop(rank)
        if rank in self.pool:
            self.pool.remove(rank)
            self.keeper = keeper.failed(self.now, self.keeper, rank.intended, event.reason)
            if rank.said_ready:
                self.handle(planner.SpareLost())
        elif rank is self.ranks[rank.number]:
            event = planner.RankDied(rank.number, event.failure, event.reason, event.fault_time)
            if rank.number in self.state.alive | self.state.left_out:  # as ActiveRun.rank_died
                self.lines += self.assembler.lost(rank.number)
            self.handle(event, rank)
        return True

    def fence(self, index: int) -> bool:
        if self.down or not self.unfenced:
            return False
        self.handle(planner.RankFenced(self.unfenced.pop(index % len(self.unfenced))))
        return True

    def deliver(self, rank: Rank, name: str) -> bool:
        channel = rank.up[name]
        if self.down or not channel:
            return False
        event, commit, num_reports = channel.popleft()
        if name == "reports":
            rank.num_read += 1
        elif self.reports_first:
            while rank.num_read < num_reports and self.deliver(rank, "reports"):
                pass
        if self.down:
            return True
        if isinstance(event, planner.SpareReady):
            if rank in self.pool:
                rank.said_ready = True
                self.handle(event)
            return True
        has_slot = rank.number is not None and rank is self.ranks[rank.number] and not rank.released
        if name != "reports" and not has_slot:
            return True  # the supervisor knows processes by their pid
        if commit is not None and has_slot:
            generation, step, when = commit
            self.max_step_seen = max(self.max_step_seen, step)
            self.lines += self.assembler.committed(generation, step, rank.number, when, 0.1, None, 0.01)
            self.handle(planner.StepCommitted(rank.number, generation, step, when), rank)
        if isinstance(event, tuple):
            generation, step, number, members = event
            self.max_step_seen = max(self.max_step_seen, step)
            samples, value = share_of(step, members.index(number), len(members))
            self.lines += self.assembler.fetched(generation, step, number, samples, value, 1.0, samples)
        elif event is not None and not self.down:
            self.handle(event, rank)
        return True

    def keep(self) -> bool:
        """Start what is missing, as the keeper says."""
        if self.down or not self.keeps or self.end is not None or self.nobody_comes:
            return False
        pool = tuple(keeper.Pooled(str(id(rank)), rank.intended, rank.said_ready) for rank in self.pool)
        need = keeper.Need(self.state.vacant, self.num_spares, pool)
        self.keeper, decisions = keeper.decide(self.now, self.keeper, need)
        starts = [decision for decision in decisions if isinstance(decision, keeper.Start)]
        self.pool += [Rank(self, None, intended=start.intended) for start in starts]
        return bool(starts)

    def moves(self):
        """(key, move, arguments), all that can go on."""
        for rank in [*self.ranks, *self.former, *self.pool]:
            for name, move, arguments in (
                ("agent", rank.agent, ()), ("train", rank.train, ()), ("train", rank.train, ()),
                ("beat", rank.beat, ()), ("up", self.deliver, (rank, "agent")), ("work", self.deliver, (rank, "work")),
                ("reports", self.deliver, (rank, "reports")), ("death", self.hear_death, (rank,)),
                ("hung", self.notice_hung, (rank,)),
            ):  # fmt: skip
                yield (rank, name), move, arguments
            if not rank.has_run_cell:
                yield (rank, "start"), rank.get_ready, ()
        for index in range(len(self.unfenced)):
            yield ("fence", index), self.fence, (index,)
        yield "keep", self.keep, ()
        yield "nobody", self.say_nobody_comes, ()
        if self.down:
            yield "adopt", self.adopt, ()

    def go_on(self, num_moves: int, seed: int) -> None:
        """Many small moves in any order; some ranks, sockets and threads are much slower than others."""
        self.rng.seed(seed)
        speed: dict[object, float] = {}
        for done in range(0, num_moves, 40):
            moves = list(self.moves())
            weights = []
            for key, _, _ in moves:
                if key not in speed:
                    speed[key] = self.rng.choice((0.01, 0.2, 1.0, 1.0))
                weights.append(speed[key])
            for _, move, arguments in self.rng.choices(moves, weights, k=min(40, num_moves - done)):
                self.now += 0.001
                move(*arguments)

    def round(self) -> None:
        """Everything moves on once, in a fair order; a tenth of a second passes."""
        for _, move, arguments in list(self.moves()):
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
            if self.end is None and not self.down and self.state.paused:
                self.unpause()
            return self.end is not None and not self.down

        self.until(over, max_rounds=200 + 30 * min(self.total_steps, 100))
        for rank in self.ranks:
            rank.hung = False
        # Even messages that come after the end do nothing.
        for _ in range(3):
            self.round()
        self.repeat_all()
        for _ in range(max(len(rank.inbox) for rank in self.ranks) + 3):
            self.round()
        for rank in self.ranks:
            assert rank.dead or rank.released or rank.at == "gone", f"nobody told rank {rank.number} that it is over"
        return self.end

    def settle(self) -> None:
        """No more faults: the run gets to the size that is wanted, and goes on training."""
        self.keeper = keeper.forgive(self.keeper)

        def settled() -> bool:
            assert self.end is None, f"it ended meanwhile: {self.end}"
            if self.down:
                return False
            if self.state.paused:
                self.unpause()
            state = self.state
            is_full = set(range(state.wanted)) <= state.alive | state.joiners | state.vacant
            if not self.refill and state.phase == "training" and not is_full:  # one more is lost
                self.resize(state.wanted)
            state = self.state
            return state.phase == "training" and state.members == tuple(range(state.wanted)) and state.hold_why is None

        self.until(settled, max_rounds=600)
        for rank in self.ranks[self.state.wanted :]:
            assert rank.dead or rank.released, f"rank {rank.number} should have left"
        for rank in self.ranks[: self.state.wanted]:
            assert rank.announced or not rank.is_newcomer, f"nobody was told that rank {rank.number} has joined"
        step = self.state.committed
        self.until(lambda: settled() and self.state.committed > step + 2)

    # --- the supervisor's part, and what must hold

    def handle(self, event: object, rank: Rank | None = None) -> None:
        assert not self.down
        before = self.state
        self.state, actions = planner.step(self.now, before, event)
        if isinstance(event, FROM_RANKS):
            if self._is_late(event, before):
                assert self.state is before and not actions, f"the late {event} had an effect: {actions}"
            self.delivered.append((rank, event))
        if before.phase == "ended" and not isinstance(event, planner.Adopted):
            assert self.state is before and not actions
        assert self.state.generation >= before.generation, "generations only grow"
        if self.state.phase != "ended":
            taken = sum(isinstance(action, planner.TakeSpare) for action in actions)
            assert self.state.spares + taken == sum(rank.said_ready for rank in self.pool)
        if self.state.going_back is None and not any(getattr(a, "kind", "") == "rank_failed" for a in actions):
            self.lost = False
        self._check_order(actions)
        self.last_actions = actions
        for action in actions:
            assert self.end is None, f"{action} after the end"
            if isinstance(action, BOOKS) or self.dies_after is None:
                self._carry_out(action, before)
            elif self.dies_after > 0:
                self._carry_out(action, before)
                self.dies_after -= 1
        self.actions += actions
        if self.dies_after is not None and actions:
            self._supervisor_is_gone()

    def _carry_out(self, action: object, before: planner.State) -> None:
        if isinstance(action, planner.Emit):
            assert action.reason.strip() and action.reason[-1] in ".:", action
            reserved = {"rank": action.rank, "step": action.step, "reason": action.reason}
            json.dumps(make_event(action.kind, self.now, self.state.generation, **reserved, **action.fields))
            if action.kind == "rolled_back":  # the only way for a step to get a second line
                assert action.step == action.fields["first_step"] <= action.fields["last_step"]
                self.lines = [line for line in self.lines if line.ledger["step"] < action.step]
            if action.kind == "paused":
                self._check_held(action.step)
            if action.kind == "rank_joined":
                self._check_joined(action)
            if action.kind == "rank_failed" and action.fields["failure"] == "bitflip":
                self._process_at(action.rank).condemned = True
            if action.kind == "rank_failed" and self.restart:
                self.lost = True
                assert self.state.going_back is not None or self.state.phase == "ended"
            if action.kind == "regroup_started" and ("join" in action.reason or "leave" in action.reason):
                self.planned_generation = self.state.generation
            if action.kind == "recovered":
                assert all(action.fields[name] >= 0 for name in action.fields if name.endswith("_s"))
        elif isinstance(action, planner.Kill):
            rank = self._process_at(action.rank)
            harmless = not (rank.dead or rank.raised or rank.released or rank.condemned or rank.hung)
            assert not harmless or "replica differs" in action.reason, f"{action}, but it has done no harm"
            assert action.reason
            self.die(action.rank)
            self.unfenced.append(action.rank)
        elif isinstance(action, planner.TakeSpare):
            self._take_spare(action.rank)
        elif isinstance(action, planner.Release):
            for number in action.ranks:
                self._release(self._process_at(number))
        elif isinstance(action, planner.SendRegroup):
            assert action.generation == before.generation + 1
            self._send(action.ranks, action)
        elif isinstance(action, planner.SendGo):
            self._check_go(action)
            self.groups[action.generation] = Group(action, {n: self.ranks[n] for n in action.members})
            self._send(action.members, action)
        elif isinstance(action, planner.SendHold | planner.SendRelease | planner.SendDrop):
            self._send(action.ranks, action)
        elif isinstance(action, planner.OpenGeneration):
            if len(self.lines) >= action.first_step:
                # Lines that were written when the planner had lost sight of the generation they come from.
                back, now_back = before.going_back, self.state.going_back
                again = back is not None and back.sent is not None
                assert again or (now_back and not now_back.were_at), "steps are done again without a word"
                self.lines = self.lines[: action.first_step - 1]
            self.assembler.open_generation(action.generation, action.members, action.first_step)
        elif isinstance(action, planner.CloseGeneration):
            self.lines += self.assembler.close_generation(action.last_committed)
        elif isinstance(action, planner.End):
            self.end = action
            self._check_end(action, before)

    def _process_at(self, number: int) -> Rank:
        while len(self.ranks) <= number:  # the slot is new, nobody has been there yet
            nobody = Rank(self, None)
            nobody.number, nobody.dead, nobody.has_run_cell = len(self.ranks), True, True
            self.ranks.append(nobody)
        return self.ranks[number]

    def _take_spare(self, number: int) -> None:
        ready = [rank for rank in self.pool if rank.said_ready]
        assert ready, "no process is there to take the slot"
        rank = next((rank for rank in ready if rank.intended == number), self.rng.choice(ready))
        before = self._process_at(number)
        assert before.dead or before.released, "the slot is taken"
        self.pool.remove(rank)
        self.former.append(before)
        self.ranks[number], rank.number = rank, number

    def _release(self, rank: Rank) -> None:
        """The supervisor ends the process; its death is no news."""
        rank.released = True
        self.unheard_deaths.pop(rank, None)
        if not rank.dead and self.dies_after is None:
            assert any(isinstance(order, planner.SendDrop) for order in rank.inbox), "not told that it is over"

    @staticmethod
    def _is_late(event: object, state: planner.State) -> bool:
        """From a rank that is known to be dead, or from a generation that is over."""
        if isinstance(event, planner.RankDied):
            return event.rank not in state.has_run
        if event.rank not in state.alive | state.left_out:
            return True
        if isinstance(event, planner.StepFailed) and event.failure.cause != "collective":
            return event.generation < state.trained  # until the next Go, it matters who raised
        return getattr(event, "generation", state.generation) < state.generation

    def _send(self, ranks: tuple[int, ...], order: object) -> None:
        for number in ranks:
            rank = self._process_at(number)
            if self.dies_after == 1 and self.rng.random() < 0.3:
                continue  # it dies in the middle of this action
            if not rank.dead:
                rank.inbox.append(order)

    def _living(self, numbers) -> list[Rank]:
        there = [self.ranks[number] for number in numbers if number < len(self.ranks)]
        return [rank for rank in there if not rank.dead]

    def check_histories(self) -> None:
        """Ranks that may go on agree on the steps they have in common, and are at most one step apart."""
        histories = [r.history for r in self._living(self.state.alive) if r.has_state and not r.raised]
        if not histories:
            return
        longest = max(histories, key=len)
        for history in histories:
            assert len(longest) - len(history) <= 1, "more than one step apart"
            assert not history or history[-1] == longest[len(history) - 1], "two versions of one step"

    def _check_go(self, go: planner.SendGo) -> None:
        heard = {rank.number for rank in self.ranks if rank.dead and rank not in self.unheard_deaths}
        assert go.generation == self.state.generation and go.generation not in self.groups
        assert not heard & set(go.members), "a dead rank is a member"
        assert not self.unfenced, "takeover before the dead rank is fenced"
        assert not self.state.unfenced
        if go.restore is None:
            all_ranks = [*self.ranks, *self.former]
            ever = max(rank.committed for rank in all_ranks if rank.went_back_in >= self.restored_generation)
            assert ever <= go.first_step, f"steps {go.first_step} to {ever} are all done again"
            assert not self.lost, "a rank is lost, and the others do not go back"
        else:
            assert go.restore == go.first_step - 1
            assert self.lost or self.verdicts, "all go back for no reason"
            self.restored_generation, self.max_step_seen = go.generation, go.restore
        assert not self.lost or set(range(self.state.wanted)) <= set(go.members), "not all are there"
        planned = go.generation == self.planned_generation
        for rank in self._living(go.members):
            assert not rank.raised and not rank.spoiled, f"rank {rank.number} raised and is a member again"
            assert not rank.released
            if go.restore is not None:
                has_it = rank.anchor is not None and len(rank.anchor) == go.restore
                assert has_it == (rank.number not in go.behind)
            elif rank.number in go.behind:
                assert rank.committed < go.first_step - 1
            else:
                assert rank.has_state and rank.committed == go.first_step - 1
            assert not planned or rank.in_flight is None, "a step is done again, although nothing has failed"
        assert (go.source is None) == (not go.behind)
        assert go.source is None or go.source in set(go.members) - set(go.behind)

    def _check_order(self, actions: list) -> None:
        """A rank fails before it is fenced, and joins when the generation stands."""
        kinds = [action.kind for action in actions if isinstance(action, planner.Emit)]
        if "rank_joined" in kinds:
            assert "regrouped" in kinds[: kinds.index("rank_joined")]
        for action in actions:
            if isinstance(action, planner.Emit) and action.kind in ("rank_failed", "spare_lost"):
                self.num_failed[action.rank] += 1
            elif isinstance(action, planner.Emit) and action.kind == "rank_fenced":
                self.num_failed[action.rank] -= 1
                assert self.num_failed[action.rank] >= 0, f"rank {action.rank} is fenced, but it has not failed"

    def _check_joined(self, event: planner.Emit) -> None:
        rank = self.ranks[event.rank]
        assert rank.is_newcomer and not rank.announced, f"rank {event.rank} has joined twice"
        assert event.rank in self.state.members
        rank.announced = True

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
            assert self.stop_wanted or self.given_up or "not finite" in end.reason
            if "not finite" in end.reason:
                self._check_not_finite(end, done)
            elif "after step" in end.reason:
                assert end.reason.endswith(f"after step {done}.")
                self._check_same_history(state.members, done)
            elif not self.given_up and before.phase == "training":
                assert state.hold_after is not None, "a stop was wanted, and nobody was told"
        else:
            self._check_failed(end, done, before)

    def _check_not_finite(self, end: planner.End, done: int) -> None:
        told = {(generation, step) for cause, generation, step in self.verdicts if cause == "nan"}
        assert done + 1 in {step for _, step in told}
        again = "had gone back once" in end.reason
        assert again == (self.on_nan == "rollback")
        assert not again or len([step for _, step in told if step == done + 1]) > 1
        for rank in self._living(self.state.alive):
            assert rank.committed in (done, -1), f"rank {rank.number} is at {rank.committed}, the books are at {done}"

    def _check_failed(self, end: planner.End, done: int, before: planner.State) -> None:
        """The reason of a failed run is the truth, and nothing but a good reason fails a run."""
        broke_in = {generation for generation, _, _ in self.raised_in}
        if "failed twice" in end.reason:
            assert len(broke_in) + self.crashes >= 2
        elif "a bug in the training code" in end.reason:
            assert all(rank.raised or not rank.has_state for rank in self._living(self.state.alive))
            assert end.error and end.error["etype"] == "ValueError" and end.error["ranks"]
            have = max(0, *(self.ranks[number].committed for number in self.state.alive))
            # Or the last step's books were closed for a rank that died before it could copy it.
            is_known = before.going_back is None or before.going_back.sent is None
            assert done == have or done == have + 1 == before.first_step - 1 or not is_known
        elif "could not form" in end.reason:
            deaths = sum(rank.dead for rank in [*self.ranks, *self.former])
            assert self.breaks + deaths + self.num_adoptions > planner.MAX_FRUITLESS_REGROUPS
        elif "All ranks are lost" in end.reason:
            assert all(rank.dead or rank.released or rank.condemned or not rank.has_state for rank in self.ranks)
        elif "No rank is left" in end.reason:
            gone = [rank.dead or rank.released or rank.raised or rank.condemned for rank in self.ranks]
            assert all(is_gone or not rank.has_state for rank, is_gone in zip(self.ranks, gone, strict=True))
        elif "All ranks that held the state" in end.reason:
            assert not any(rank.has_state and not rank.raised for rank in self._living(self.state.alive))
        elif "differ again" in end.reason:
            told = Counter(step for _, step in {v[1:] for v in self.verdicts if v[0] == "divergence"})
            assert max(told.values()) > 1
        elif "cannot be replaced" in end.reason:
            assert self.restart and (self.nobody_comes or self.keeper.given_up)
        elif "No rank is more to blame" in end.reason:
            assert self.breaks
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
