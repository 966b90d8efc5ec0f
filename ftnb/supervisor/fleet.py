"""All engine processes of the cluster: who fills which slot, who is in the pool, who has to be started or ended.

A slot (rank) is filled by one process at a time. Processes without a slot are in the *pool*: warm spares, and
replacements that are being started for a certain slot. Which to start, and how often, is decided by `core/keeper`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftnb.core import keeper, protocol
from ftnb.errors import ClusterError
from ftnb.supervisor import joining, lastwords
from ftnb.supervisor.ranks import Slot
from ftnb.wire import proc
from ftnb.wire.records import RANK, SPARE
from ftnb.wire.ring import RingReader

if TYPE_CHECKING:
    from ftnb.supervisor.engines import Engines
    from ftnb.supervisor.server import Supervisor

log = logging.getLogger("ftnb.fleet")

START_TIMEOUT_S = 120.0
# For `joined_step`, until a process that has got a slot does its first step.
NOT_ENTERED = 1 << 60
# A replacement is started when the survivors have recovered, or have tried for so long.
RECOVERY_FIRST_S = 0.3
# A process that is still there so long after SIGKILL hangs in the kernel; nobody waits for it any longer.
FENCE_LIMIT_S = 5.0


class Fleet:
    """The table of processes, and what is done to them. The planner of a run decides who enters and who leaves it."""

    def __init__(self, supervisor: Supervisor, num_ranks: int, num_spares: int) -> None:
        self._supervisor = supervisor
        self.num_ranks, self.num_spares = num_ranks, num_spares
        self.ranks: dict[int, Slot] = {}
        self.pool: list[Slot] = []
        self.retired: list[Slot] = []  # gone, or on their way out; their last reports may have to be written yet
        self.vacant: set[int] = set()  # while no run goes on: slots that are to be filled
        self.given_up: dict[int | None, str] = {}  # slots that will not be filled any more, and why
        self.notes: deque[str] = deque(maxlen=20)
        self.changed = asyncio.Event()
        self.engines: Engines | None = None
        self._keeper = keeper.State()
        self._by_pid: dict[int, Slot] = {}
        self.oom_kills = lastwords.OomKills()
        self._next_number = 1
        self._lost_at = 0.0

    # --- start

    async def begin(self, engines: Engines) -> None:
        """Start the controller and all ranks; spares follow. Raises `ClusterError`."""
        self.engines = engines
        self.ranks = {rank: self._new_slot(rank=rank) for rank in range(self.num_ranks)}
        await engines.start_controller()
        self._supervisor.office.save_cluster()
        for slot in self.ranks.values():
            await self._launch(slot)
        deadline = time.monotonic() + START_TIMEOUT_S
        while waiting := [s for s in self.ranks.values() if s.state == "starting"]:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Rank {waiting[0].rank} did not get ready within {START_TIMEOUT_S:.0f} s. "
                    f"{self._last_words(waiting[0])}"
                )
            await self.wait_changed(1.0)
        for slot in self.ranks.values():
            if slot.state != "idle":
                raise ClusterError(f"Rank {slot.rank} could not start: {slot.problem} {self._last_words(slot)}")

    def _new_slot(self, *, rank: int | None = None, intended: int | None = None) -> Slot:
        slot = Slot(f"engine{self._next_number}", rank=rank, intended=intended, started=time.monotonic())
        slot.engine_id = self._engine_id(rank if rank is not None else intended)
        self._next_number += 1
        return slot

    def _engine_id(self, wanted: int | None) -> int:
        """ipyparallel's number for a new engine: that of its slot, unless a spare that took another one has it."""
        used = {s.engine_id for s in (*self.ranks.values(), *self.pool) if s.alive and s.engine_id is not None}
        if wanted is not None and wanted not in used:
            return wanted
        return max([self.num_ranks - 1, *used]) + 1

    async def _launch(self, slot: Slot) -> None:
        assert self.engines is not None
        supervisor = self._supervisor
        slot.ring = RingReader(supervisor.directory / f"{slot.key}.ring")
        rank = slot.rank if slot.rank is not None else slot.intended
        environment = {
            "FTNB_RANK": str(-1 if rank is None else rank), "FTNB_KEY": slot.key, "FTNB_RING": str(slot.ring.path),
            "FTNB_CONNECTION": str(supervisor.connection_file),
        }
        slot.process = await self.engines.start_engine(
            slot.key, slot.engine_id, environment, lambda pid, status: self._exited(slot, pid, status)
        )
        self.note_process(slot)

    def note_process(self, slot: Slot) -> None:
        """On record before anything can happen to it."""
        if slot.process is not None:
            rank = slot.rank if slot.rank is not None else slot.intended
            self._supervisor.office.records.note(SPARE if rank is None else RANK, slot.process, rank)
        self._supervisor.office.save_cluster()

    def watch(self, slot: Slot) -> None:
        """A process that the engines' launcher did not tell, or that an earlier supervisor has started."""
        assert self.engines is not None and slot.process is not None
        self.engines.watch(slot.process, lambda pid, status: self._exited(slot, pid, status), slot.key)

    def _last_words(self, slot: Slot) -> str:
        output = self.engines.output_of(slot.key) if self.engines else ""
        return f"The end of its output:\n{output}" if output else "It wrote no output."

    async def wait_changed(self, limit_s: float) -> None:
        event = self.changed
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), limit_s)

    def notify(self) -> None:
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    # --- for a successor

    def record(self) -> dict[str, Any]:
        places = (("rank", self.ranks.values()), ("pool", self.pool), ("retired", self.retired))
        return {
            "slots": [{"place": place, **slot.record()} for place, slots in places for slot in slots],
            "next_number": self._next_number, "vacant": sorted(self.vacant),
        }

    def restore(self, record: dict[str, Any]) -> None:
        """The table as an earlier supervisor had it. Who has died since is found out by `watch`."""
        self._next_number, self.vacant = record["next_number"], set(record["vacant"])
        for entry in record["slots"]:
            slot = Slot.restored(entry, self._supervisor.directory)
            if entry["place"] == "rank":
                self.ranks[slot.rank] = slot
            elif entry["place"] == "pool" and slot.process is not None:
                self.pool.append(slot)
            else:  # one that was just being started: nobody knows whether it will ever come
                self.retired.append(slot)

    def end_retired(self) -> None:
        """An earlier supervisor has died before it could see to their end."""
        for slot in self.retired:
            if slot.process is not None and slot.process.is_alive():
                self._supervisor.spawn(self._end_all_of(slot))

    # --- who is there

    def slots(self) -> list[Slot]:
        return [*self.ranks.values(), *self.pool, *self.retired]

    def by_pid(self, pid: int) -> Slot | None:
        """Who has this pid and belongs to the cluster still: asked for each message, so what was found is kept."""
        slot = self._by_pid.get(pid)
        if slot is None or slot.process is None or slot.process.pid != pid or not self._belongs(slot):
            places = (*self.ranks.values(), *self.pool)
            slot = next((s for s in places if s.process is not None and s.process.pid == pid), None)
            if slot is None:
                self._by_pid.pop(pid, None)
                return None
            self._by_pid[pid] = slot
        return None if slot.cut_off else slot

    def _belongs(self, slot: Slot) -> bool:
        return self._fills_slot(slot) or slot in self.pool

    def by_key(self, key: str) -> Slot | None:
        return next((slot for slot in self.slots() if slot.key == key), None)

    def statuses(self) -> list[dict[str, Any]]:
        """One entry per slot, whoever fills it (or is to fill it), then the spares."""
        now = time.monotonic()
        entries, shown = [], set()
        for rank in sorted({*range(self.num_ranks), *self.ranks}):
            slot = self.ranks.get(rank)
            if slot is None or not slot.alive:
                coming = next((s for s in self.pool if s.intended == rank and s.alive), None)
                if coming is not None:
                    shown.add(coming.key)
                    state = "starting" if coming.state == "starting" else "joining"
                    entries.append(self._status(coming, now) | {"rank": rank, "state": state})
                    continue
            empty = {"engine": None, "pid": None, "host": None, "state": "failed", "step": None}
            entries.append(
                self._status(slot, now) if slot is not None
                else {"rank": rank, **empty, **dict.fromkeys(("heartbeat_age_s", "phi", "place", "step_s")),
                      "problem": self.given_up.get(rank)}
            )
        return entries + [self._status(slot, now) for slot in self.pool if slot.key not in shown]

    def _status(self, slot: Slot, now: float) -> dict[str, Any]:
        run = self._supervisor.going_run
        step_s = run.typical_step_s(slot.rank) if run is not None and slot.rank is not None else None
        return slot.status(now, self._supervisor.rank_socket.links, step_s)

    # --- the pool

    def tick(self) -> None:
        """Start what is missing, within limits; end what is too late or too much."""
        supervisor = self._supervisor
        if self.engines is None or supervisor.state in ("starting", "failed") or supervisor.is_stopping:
            return
        now = time.monotonic()
        self._prove()
        self._retire_surplus()
        for slot in [s for s in self.pool if s.state == "starting" and now - s.started > START_TIMEOUT_S]:
            slot.problem = f"It did not get ready within {START_TIMEOUT_S:.0f} s."
            if slot.process is not None:
                self.kill_slot(slot)
            else:  # a launcher's engine that has never come: nothing will tell of its end
                slot.state = "failed"
                self._pool_lost(slot, "starting", slot.problem)
        run = self._supervisor.going_run
        if run is not None and run.state == "recovering" and now - self._lost_at < RECOVERY_FIRST_S:
            return
        vacant = frozenset(self._vacancies())
        pool = tuple(keeper.Pooled(s.key, s.intended, s.state == "spare") for s in self.pool if s.alive)
        need = keeper.Need(vacant, self.num_spares, pool)
        self._keeper, actions = keeper.decide(now, self._keeper, need)
        for action in actions:
            if isinstance(action, keeper.Start):
                slot = self._new_slot(intended=action.intended)
                self.pool.append(slot)
                self._supervisor.spawn(self._start_pooled(slot))
            else:
                self._give_up(action.intended, action.reason)
        for slot in [s for s in self.pool if s.state == "spare"]:
            self.offer(slot)
        self._trim()
        for slot in [s for s in self.retired if s.process is None or not s.process.is_alive()]:
            self._supervisor.drain(slot)  # its last words
            if self._supervisor.going_run is None:
                slot.free_reports(None)
            if slot.ring is None or not slot.unfreed:
                self._forget(slot)

    def _vacancies(self) -> set[int]:
        run = self._supervisor.going_run
        if run is None:
            return self.vacant
        return set() if run.no_joining else set(run.vacant)

    def not_replaced(self) -> list[int]:
        """Slots that stay empty until somebody asks for them: lost ranks of a run with recovery "shrink", say."""
        if (run := self._supervisor.going_run) is not None:
            return sorted(set(range(self.num_ranks)) - run.has_run - run.vacant)
        living = {rank for rank, slot in self.ranks.items() if slot.alive}
        return sorted(set(range(self.num_ranks)) - living - self.vacant)

    def discard_unborn(self) -> None:
        """Processes that an earlier supervisor was about to start when it died: they are started anew."""
        assert self.engines is not None
        for slot in [s for s in self.pool if s.process is None and not self.engines.own_launcher]:
            self.pool.remove(slot)
            self.engines.discard(slot.key)
            if slot.ring is not None:
                slot.ring.close()

    async def _start_pooled(self, slot: Slot) -> None:
        try:
            await self._launch(slot)
            if slot.rank is None and slot not in self.pool:
                self.kill_slot(slot)  # meanwhile it was given up, or is not wanted any more
        except Exception as error:
            log.exception("an engine could not be started")
            slot.state, slot.problem = "failed", f"{type(error).__name__}: {error}"
            if slot in self.pool:
                self._pool_lost(slot, "starting", slot.problem)
        if slot.rank is None and slot not in self.pool:  # given up meanwhile
            self.kill_slot(slot)

    def warm(self, slot: Slot) -> None:
        """Its libraries are loaded: it can be used."""
        if slot.rank is not None:
            slot.state = "idle"
        else:
            slot.state = "spare"
            self.offer(slot)
        self.notify()
        self._supervisor.office.save_cluster()

    def offer(self, slot: Slot) -> None:
        """Somebody in the pool is ready: a run that goes on lets it run its cell, else it can fill a slot."""
        run = self._supervisor.going_run
        if run is not None and not run.no_joining and slot.loaded is None and slot.agent is not None:
            if run.backend == "nccl" and slot.intended is None and run.vacant:
                slot.intended = min(run.vacant)
            # On GPUs it has to be known whose GPU it gets, so spares there wait until somebody is lost.
            if run.vacant or (slot.intended is None and run.backend != "nccl"):
                if slot.intended in self.ranks:
                    slot.gpu = self.ranks[slot.intended].gpu
                joining.load(self._supervisor, run, slot)
        self._hand_out()

    def _hand_out(self) -> None:
        """No run goes on: fill vacant slots with what is ready; what is too much is ended."""
        if self._supervisor.going_run is not None:
            return
        for slot in [s for s in self.pool if s.state == "spare" and s.agent is not None and not _is_stopped(s)]:
            if slot.intended in self.vacant or self.vacant:
                rank = slot.intended if slot.intended in self.vacant else min(self.vacant)
                self._put(slot, rank)
                slot.state = "idle"
                self._succeeded(rank)
                self.notify()
                self._supervisor.office.save_cluster()
            elif slot.intended is not None and self.num_spares < sum(s.alive for s in self.pool):
                self._dismiss(slot)
            else:
                slot.intended = None

    def _trim(self) -> None:
        """In a run: who was started for a slot that needs nobody any more is a spare, or one too many."""
        run = self._supervisor.going_run
        if run is None:
            return
        for slot in [s for s in self.pool if s.intended is not None and s.intended not in run.vacant]:
            slot.intended = None
        surplus = sum(s.alive for s in self.pool) - self.num_spares - len(run.vacant)
        nobodys = [s for s in reversed(self.pool) if s.alive and s.intended is None and s.process is not None]
        for slot in nobodys[: max(0, surplus)]:
            ready = slot.loaded == run.name
            self._dismiss(slot)
            if ready:
                run.handle(protocol.SpareLost())

    def _put(self, slot: Slot, rank: int) -> None:
        """`slot` fills `rank` from now on."""
        if slot in self.pool:
            self.pool.remove(slot)
        if (old := self.ranks.get(rank)) is not None:
            self.retired.append(old)
        slot.rank, slot.intended = rank, None
        self.ranks[rank] = slot
        self.vacant.discard(rank)
        self.tell(slot, "assign", rank=rank)
        if slot.process is not None:
            self._supervisor.office.records.note(RANK, slot.process, rank)

    def take_spare(self, rank: int, run_name: str) -> None:
        """The planner gives `rank` to somebody who has run the cell."""
        ready = [s for s in self.pool if s.loaded == run_name and s.agent is not None]
        slot = min(ready, key=lambda s: (_is_stopped(s), s.intended != rank, s.intended is not None))
        self._put(slot, rank)
        # Which step it enters with is known when it does.
        slot.state, slot.joined_step, slot.joined_run = "joining", NOT_ENTERED, run_name
        if _is_stopped(slot):  # not found by the watcher yet; as a member it would keep all others waiting
            slot.problem, slot.state = "it had been stopped (SIGSTOP) while it was a spare", "failed"
            self.kill_slot(slot)
        self._supervisor.office.save_cluster()

    def release(self, ranks: tuple[int, ...]) -> None:
        """The cluster has shrunk on purpose: these processes end."""
        for rank in ranks:
            if (slot := self.ranks.pop(rank, None)) is not None:
                self._dismiss(slot)
        self._supervisor.office.save_cluster()

    def _dismiss(self, slot: Slot) -> None:
        if slot in self.pool:
            self.pool.remove(slot)
        slot.state = "leaving"
        self.retired.append(slot)
        self.tell(slot, "exit")
        self._supervisor.spawn(self._end_soon(slot))

    async def _end_soon(self, slot: Slot) -> None:
        await asyncio.sleep(1.0)
        while self.kill_all_of(slot):
            await asyncio.sleep(0.05)

    def resize(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.forgive()
        if (run := self._supervisor.going_run) is not None:
            run.resize(num_ranks)
        else:
            self.vacant = {r for r in range(num_ranks) if r not in self.ranks or not self.ranks[r].usable}
            self.release(tuple(r for r in sorted(self.ranks) if r >= num_ranks))
        self._retire_surplus()
        self._supervisor.office.save_cluster()
        self.tick()

    def _retire_surplus(self) -> None:
        """Slots beyond the number that is wanted go when their process is gone, and the run has no use for them."""
        run = self._supervisor.going_run
        needed = run.has_run | run.unfenced if run is not None else frozenset()
        for rank in [r for r in self.ranks if r >= self.num_ranks and r not in needed and not self.is_alive(r)]:
            self.retired.append(self.ranks.pop(rank))

    async def complete(self) -> list[int]:
        """Fill every slot, for a new run; returns the ranks that had to be started again. Raises `ClusterError`."""
        missing = [r for r in range(self.num_ranks) if r not in self.ranks or not self.ranks[r].usable]
        self.forgive()
        deadline = time.monotonic() + START_TIMEOUT_S
        while lacking := [r for r in range(self.num_ranks) if r not in self.ranks or not self.ranks[r].usable]:
            self.vacant.update(lacking)
            self.tick()
            if refused := [r for r in lacking if r in self.given_up]:
                self.vacant.difference_update(lacking)
                raise ClusterError(
                    f"Rank {refused[0]} was lost and could not be started again: {self.given_up[refused[0]]}"
                )
            if time.monotonic() > deadline:
                raise ClusterError(f"Rank {lacking[0]} was lost and could not be started again within "
                                   f"{START_TIMEOUT_S:.0f} s; see {self._supervisor.directory / 'supervisor.log'}.")
            await self.wait_changed(0.1)
            self._supervisor.check_called_off()
            missing += [r for r in lacking if r not in missing]
        return missing

    def forgive(self) -> None:
        self._keeper = keeper.forgive(self._keeper)
        self.given_up.clear()

    def _give_up(self, intended: int | None, reason: str) -> None:
        what = "Spares are" if intended is None else f"Rank {intended} is"
        text = f"{what} not started again: {reason}"
        self.given_up[intended] = reason
        self.note(text)
        if (run := self._supervisor.going_run) is not None:
            run.emit("spare_lost", text, rank=intended)

    def note(self, text: str) -> None:
        log.info("%s", text)
        self.notes.append(text)

    # --- how replacements fare

    def failed(self, intended: int | None, reason: str) -> None:
        self._keeper = keeper.failed(time.monotonic(), self._keeper, intended, reason)

    def _succeeded(self, rank: int) -> None:
        self._keeper = keeper.succeeded(self._keeper, rank)
        self.given_up.pop(rank, None)

    def _prove(self) -> None:
        """A replacement that has done some steps counts as a success."""
        run = self._supervisor.going_run
        for slot in self.ranks.values():
            if slot.joined_step is not None and (
                run is None or slot.joined_run != run.name or run.step >= slot.joined_step + keeper.MIN_STEPS
            ):
                slot.joined_step = None
                self._succeeded(slot.rank)

    # --- the end of a process

    def _exited(self, slot: Slot, pid: int, status: int | None) -> None:
        """The event loop calls this, and would do no more about an error than to log it."""
        try:
            self._gone(slot, pid, status)
        except Exception as error:
            log.exception("internal error at the end of %s", slot.key)
            if self._fills_slot(slot):  # the run would wait for it for ever
                self._supervisor.own_fault(error)

    def _fills_slot(self, slot: Slot) -> bool:
        return slot.rank is not None and self.ranks.get(slot.rank) is slot

    def _gone(self, slot: Slot, pid: int, status: int | None) -> None:
        # Pid 0: the command of a profile's launcher has ended. That matters only if no engine has come from it.
        if pid != (slot.process.pid if slot.process is not None else 0):
            return
        if slot not in self.pool and not self._fills_slot(slot):
            return  # retired
        failure, words = lastwords.describe(status, slot.memory, self.oom_kills.rise())
        if pid == 0:
            words = f"the command of the profile's launcher ended before an engine came from it: {words}"
        was, slot.state, slot.agent = slot.state, "failed", None
        if was == "failed" and slot.problem:
            words = slot.problem.rstrip(".")  # it said itself why it had to be ended
        slot.problem = slot.problem or f"{words[0].upper()}{words[1:]}."
        if slot.fault_time is not None:
            if status in (-signal.SIGKILL, None):
                words = "it was killed (SIGKILL, injected)"
                if slot.fault == "oom" and (grown := lastwords.growth(slot.memory)):
                    words += f"; its memory had grown from {grown[0]:.0f} to {grown[1]:.0f} MB"
            failure = "kill" if status is None else failure
        log.info("%s (rank %s, pid %d) is gone, it was %s: %s", slot.key, slot.rank, pid, was, words)
        self._supervisor.drain(slot)
        if slot.fault_time is None and self.engines is not None:
            printed = list(slot.printed)
            slot.last_output = printed + lastwords.last_lines(self.engines.output_of(slot.key), but_not=printed)
        if slot in self.pool:
            self._pool_lost(slot, was, words)
        else:
            self._supervisor.rank_lost(slot, failure, words)
            if slot.joined_step is not None:
                slot.joined_step = None
                self.failed(slot.rank, words)
        self.notify()
        self._lost_at = time.monotonic()
        # The survivors come first: they need this process, and the cores, to get going again.
        asyncio.get_running_loop().call_later(0.02, self._supervisor.office.save_cluster)

    def _pool_lost(self, slot: Slot, was: str, words: str) -> None:
        run = self._supervisor.going_run
        self.pool.remove(slot)
        self.retired.append(slot)
        self._supervisor.spawn(self._end_all_of(slot))
        for_whom = "spare" if slot.intended is None else f"replacement of rank {slot.intended}"
        pid = slot.process.pid if slot.process else "none"
        if (was == "spare" and slot.loaded is None) or (run is not None and slot.loaded == run.name):
            text = f"A {for_whom} (pid {pid}) is lost while idle: {words.rstrip('.')}. Another one is started."
        else:
            text = f"A {for_whom} (pid {pid}) is lost before it was ready: {words.rstrip('.')}."
            self.failed(slot.intended, words)
        self.note(text)
        if run is not None:
            run.emit("spare_lost", text, rank=slot.intended)
            if slot.loaded == run.name:
                run.handle(protocol.SpareLost())

    def condemn(self, slot: Slot, reason: str) -> None:
        """It does not answer while it has nothing to do (or is not in the run that goes on): it is ended."""
        was, slot.problem, slot.state = slot.state, f"It {reason}.", "failed"
        self.kill_slot(slot)
        if slot in self.pool:
            self._pool_lost(slot, was, f"it {reason}")
        else:
            self.note(f"Rank {slot.rank} {reason}. It is ended.")

    def kill_slot(self, slot: Slot, signum: int = signal.SIGKILL) -> None:
        if slot.process is not None:
            slot.process.signal(signum)

    def is_alive(self, rank: int) -> bool:
        """Whether a living process fills the slot."""
        slot = self.ranks.get(rank)
        return slot is not None and slot.process is not None and slot.process.is_alive()

    def fence_former(self, rank: int, fenced: Callable[[int], None]) -> None:
        """See to it that nothing is left of processes that had filled the slot, where an earlier supervisor did not."""
        former = [slot for slot in self.retired if slot.rank == rank]
        if rank in self.ranks and not self.is_alive(rank):
            former.append(self.ranks[rank])
        self._supervisor.spawn(self._fence(former, lambda: fenced(rank)))

    def fence(self, slot: Slot | None, fenced: Callable[[], None]) -> None:
        """Kill the process and all it had started; call `fenced()` once nothing of it is left."""
        if slot is None or slot.process is None:
            asyncio.get_running_loop().call_soon(fenced)
            return
        slot.state = "failed"
        if self.kill_all_of(slot):
            self._supervisor.spawn(self._fence([slot], fenced))
        else:
            asyncio.get_running_loop().call_soon(fenced)

    def kill_all_of(self, slot: Slot) -> bool:
        """SIGKILL to the process and to whatever it had started; False when nothing of it is left."""
        process = slot.process
        if process is None:
            return False
        told = process.is_alive() and process.signal(signal.SIGKILL)
        if proc.start_time(process.pid) in (None, process.started):  # else the pid is another process's by now
            told = bool(proc.kill_session(process.pid)) or told
        # What left the rank's session is found by its environment, once the rank's death made it an orphan.
        ring = f"FTNB_RING={self._supervisor.directory / f'{slot.key}.ring'}"
        for orphan in self.engines.orphans(ring) if self.engines else []:
            told = orphan.signal(signal.SIGKILL) or told
        return told

    async def _fence(self, slots: list[Slot], fenced: Callable[[], None]) -> None:
        try:
            for slot in slots:
                await self._end_all_of(slot)
            fenced()
        except Exception as error:  # the others would wait for it for ever
            log.exception("internal error while a rank was fenced")
            self._supervisor.own_fault(error)

    async def _end_all_of(self, slot: Slot) -> None:
        deadline = time.monotonic() + FENCE_LIMIT_S
        while self.kill_all_of(slot):
            if time.monotonic() > deadline:
                self._cut_off(slot)
                return
            await asyncio.sleep(0.003)

    def _cut_off(self, slot: Slot) -> None:
        """SIGKILL will end it when the kernel lets it go (a dead disk or NFS server, say), and before it can do
        anything more. Nobody waits for that: what it may have said is not heard, and the store refuses its generation.
        """
        slot.cut_off = True
        who = f"Rank {slot.rank}" if slot.rank is not None else "A process without a slot"
        pid = slot.process.pid if slot.process is not None else "none"
        self.note(f"{who} (pid {pid}) has not ended {FENCE_LIMIT_S:g} s after SIGKILL: the kernel does not let it go "
                  "(state D in ps). It is cut off, and will end by itself.")

    def _forget(self, slot: Slot) -> None:
        if slot in self.retired:
            self.retired.remove(slot)
        if slot.ring is not None:
            slot.ring.close()
            slot.ring = None
        if slot.process is not None:
            self._by_pid.pop(slot.process.pid, None)
            self._supervisor.rank_socket.links.forget(f"agent-{slot.process.pid}".encode())
        self._supervisor.office.records.compact()

    def close(self) -> None:
        for slot in self.slots():
            if slot.ring is not None:
                slot.ring.close()
                slot.ring = None

    # --- runs

    def run_began(self) -> None:
        """Warm spares run the cell as well, so that they can step in at once."""
        for slot in list(self.pool):
            if slot.state == "spare":
                self.offer(slot)

    def run_ended(self, vacant: frozenset[int], members: frozenset[int]) -> None:
        self._let_leave(members)
        for slot in self.ranks.values():
            slot.fault = slot.fault_time = slot.joined_step = None
        for slot in self.pool:
            if slot.loaded is not None:
                slot.loaded = None
                self.tell(slot, "drop")
        self.vacant = {r for r in vacant if r not in self.ranks or not self.ranks[r].usable}
        self.tick()

    def _let_leave(self, members: frozenset[int]) -> None:
        """The run is over before it came to a step boundary at which those could leave that are too many.

        If nobody else holds the trained weights (all who stay came too late), one of them takes a slot that stays.
        """
        leaving = [rank for rank in sorted(self.ranks) if rank >= self.num_ranks]
        holders = [rank for rank in sorted(members) if rank in self.ranks and self.ranks[rank].usable]
        if holders and holders[0] in leaving:
            slot = self.ranks.pop(holders[0])
            leaving.remove(holders[0])
            free = [r for r in range(self.num_ranks) if r not in self.ranks or not self.ranks[r].usable]
            place = free[0] if free else 0
            if not free:
                self.release((place,))
            self._put(slot, place)
        self.release(tuple(leaving))
        self.notify()

    def tell(self, slot: Slot, op: str, **fields: Any) -> None:
        self._supervisor.tell(slot, op, **fields)


def _is_stopped(slot: Slot) -> bool:
    return slot.process is not None and proc.is_stopped(slot.process.pid) is True
