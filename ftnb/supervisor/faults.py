"""Injected faults of one run: planned, recorded before they take effect, and reported when they never did.

A fault is plain data (`kind`, `rank`, when, how much), so that a successor can go on with it. SIGKILL and SIGSTOP "now"
are sent from here, and SIGCONT always is; all else is done by the rank itself: it is told (`fault`), says when the time
has come (`fault_due`), and does it when that is on record (`fault_go`).
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import TYPE_CHECKING, Any

from ftnb.core import faults
from ftnb.errors import FtnbError, RunError, UsageError
from ftnb.wire import proc

if TYPE_CHECKING:
    from ftnb.supervisor.runs import ActiveRun
    from ftnb.supervisor.server import Supervisor

ANSWER_TIMEOUT_S = 5.0
# A rank that still makes progress so long after a fault that was to end it has survived it.
SURVIVED_S = 2.0
# A rank that stops itself does so a moment after the word for it. SIGCONT must not come first: it is sent again.
CONTINUE_AGAIN_S = (0.2, 1.0)
# A step that is drawn may be past when the rank hears of it.
DRAWS = 5


class Faults:
    """The faults that are planned for a run, and those whose effect has an end that is seen to here."""

    def __init__(self, supervisor: Supervisor, run: ActiveRun) -> None:
        self._supervisor, self._run = supervisor, run
        self._planned: dict[int, dict[str, Any]] = {}
        self._stopped: list[dict[str, Any]] = []  # processes that are to be continued: pid, started, until
        self._answers: dict[int, asyncio.Future[bool | str]] = {}  # a text: why there will be none
        self._next_id = 1

    # --- for a successor

    def record(self) -> dict[str, Any]:
        return {
            "planned": {str(number): fault for number, fault in self._planned.items()}, "stopped": self._stopped,
            "next_id": self._next_id,
        }

    def restore(self, record: dict[str, Any]) -> None:
        """Those planned for a step wait on their ranks; those planned for a time get a new timer."""
        self._planned = {int(number): fault for number, fault in record["planned"].items()}
        self._stopped, self._next_id = record["stopped"], record["next_id"]
        for number, fault in self._planned.items():
            if "due" in fault:
                self._later(max(0.0, fault["due"] - time.time()), self._time_has_come, number)
        for entry in self._stopped:
            self._later(max(0.0, entry["until"] - time.time()), self._continue, entry)

    # --- planning

    async def inject(self, kind: str, rank: int | None, **given: Any) -> dict[str, Any]:
        """Plan a fault, or let it happen now; refuses what cannot happen. `given`: as in `core.faults.FLAGS`."""
        run = self._run
        faults.check_options(kind, {"rank": rank, **given})
        living = sorted(run.living)
        if rank is None:
            busy = {fault["rank"] for fault in self._planned.values()} | {
                number for number, slot in self._supervisor.ranks.items() if slot.fault is not None
            }  # fmt: skip
            rank = next((r for r in reversed(living) if r not in busy), living[-1] if living else 0)
        if rank not in living:
            if rank in run.missing:
                raise UsageError(
                    f"Rank {rank} has been lost, and another process is on its way to take its place. Try again when "
                    "%ft_status shows it training."
                )
            raise UsageError(
                f"Rank {rank} takes no part in run {run.name!r} (living ranks: {', '.join(map(str, living))}). "
                "%ft_status shows all ranks."
            )
        fault = {"kind": kind, "rank": rank, **{key: value for key, value in given.items() if value is not None}}
        if fault.get("factor") is None and faults.KINDS[kind].default_factor is not None:
            fault["factor"] = faults.KINDS[kind].default_factor
        if fault.get("seed") is None and "seed" in faults.KINDS[kind].takes:
            fault["seed"] = random.getrandbits(32)
        answer = {"rank": rank, "reason": faults.reply(fault, run.options)}
        if "probability" in fault:
            await self._at_some_step(fault)
        elif "at_step" in fault:
            if fault["at_step"] > run.total_steps:
                raise UsageError(
                    f"Step {fault['at_step']} will never come: run {run.name!r} has {run.total_steps} steps."
                )
            if not await self._tell_rank(fault):
                raise UsageError(
                    f"Step {fault['at_step']} is past already: run {run.name!r} is at step {run.max_step()}. "
                    "Choose a later one."
                )
        elif "after_s" in fault:
            fault["due"] = time.time() + fault["after_s"]
            self._later(fault["after_s"], self._time_has_come, self._plan(fault))
            run.save()
        else:
            await self.strike(fault)
        return answer

    async def strike(self, fault: dict[str, Any]) -> None:
        """Now, or in the step in flight or the next one where the rank has to do it. Raises when that cannot be."""
        if fault["kind"] in faults.BY_SIGNAL:
            self._signal(fault)
        elif not await self._tell_rank(fault):
            raise RunError(f"Rank {fault['rank']} refuses the fault {fault['kind']!r}; see supervisor.log.")

    async def _at_some_step(self, fault: dict[str, Any]) -> None:
        """Roll the dice for all steps to come at once; where it does not come up in this run, nothing is planned."""
        generator = random.Random(fault.get("seed"))
        for attempt in range(DRAWS):
            steps = faults.steps_until(fault["probability"], generator.random())
            self._supervisor.current_step(fault["rank"])  # reads its latest reports
            fault["at_step"] = self._run.max_step() + steps + attempt
            if fault["at_step"] > self._run.total_steps:
                self._plan(fault)
                self._run.save()
                return
            if await self._tell_rank(fault):
                return
        raise RunError(f"The steps of run {self._run.name!r} are too quick for that: each one drawn was past already.")

    def _plan(self, fault: dict[str, Any]) -> int:
        number, self._next_id = self._next_id, self._next_id + 1
        self._planned[number] = fault
        return number

    async def _tell_rank(self, fault: dict[str, Any]) -> bool:
        """Ask the rank to do it; False when its step is past. It stays planned until the rank says that it is due."""
        rank = fault["rank"]
        number = self._plan(fault)
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        self._run.save()  # first: a successor must not give the same number to another fault
        self._send(number, fault)
        answer: bool | str = f"Rank {rank} does not answer, so no fault can be planned on it. See %ft_status."
        try:
            answer = await asyncio.wait_for(answered, ANSWER_TIMEOUT_S)
        except TimeoutError:
            pass
        finally:
            self._answers.pop(number, None)
            if answer is not True:
                self._planned.pop(number, None)
        if isinstance(answer, str):
            raise RunError(answer)
        self._run.save()
        return answer

    def _send(self, number: int, fault: dict[str, Any]) -> None:
        self._supervisor.tell_rank(
            fault["rank"], "fault", fault_id=number, kind=fault["kind"], at_step=fault.get("at_step"),
            duration_s=fault.get("duration_s"), factor=fault.get("factor"), seed=fault.get("seed", 0),
        )

    # --- what is heard

    def answer(self, fault_id: int, accepted: bool) -> None:
        if (future := self._answers.get(fault_id)) and not future.done():
            future.set_result(accepted)

    def due(self, rank: int, fault_id: int, step: int | None) -> None:
        """The rank has come to its fault: on record first, then it may happen."""
        fault = self._planned.pop(fault_id, None)
        if fault is None or self._run.is_over:
            return
        if (future := self._answers.get(fault_id)) and not future.done():
            future.set_result(True)  # it was quicker than its own answer
        self._record(fault, step)
        self._supervisor.tell_rank(rank, "fault_go", fault_id=fault_id)

    def rearm(self, rank: int) -> None:
        """Another process fills the slot: what was planned for a step of it is planned on that one."""
        for fault_id, fault in self._planned.items():
            if fault["rank"] == rank and fault.get("at_step", self._run.total_steps + 1) <= self._run.total_steps:
                self._send(fault_id, fault)

    def lost(self, rank: int) -> None:
        """The slot's process is gone: what was to happen in its next step never will."""
        for number, fault in list(self._planned.items()):
            if fault["rank"] != rank:
                continue
            if number in self._answers:
                self._refuse(number, f"Rank {rank} was lost before it could answer.")
            elif not {"at_step", "due"} & fault.keys():
                del self._planned[number]
                self.not_fired(fault, "the rank was lost before")

    def moved(self, rank: int, when: float) -> None:
        """The rank has committed a step at `when`: whatever was to end it some time before that did not."""
        slot = self._supervisor.ranks.get(rank)
        if slot is not None and slot.fault_time is not None and when > slot.fault_time + SURVIVED_S:
            slot.fault = slot.fault_time = None

    def end(self) -> None:
        for number in list(self._answers):
            self._refuse(number, f"Run {self._run.name!r} has ended meanwhile.")
        for fault in self._planned.values():
            self.not_fired(fault)
        self._planned.clear()

    def _refuse(self, number: int, why: str) -> None:
        """Somebody waits for the answer of a rank that will not come."""
        self._planned.pop(number, None)
        if not (future := self._answers[number]).done():
            future.set_result(why)

    def outstanding(self) -> str:
        """Which fault has not been dealt with yet, as "the hang of rank 2 is not over"; empty when there is none."""
        for fault in self._planned.values():
            if not {"at_step", "due"} & fault.keys():
                return f"the {fault['kind']} of rank {fault['rank']} has not begun yet"
        for rank in sorted(self._run.living):
            if (slot := self._supervisor.ranks.get(rank)) is not None and slot.fault_time is not None:
                return f"the {slot.fault} of rank {rank} is not over yet"
        return ""

    # --- effects

    def _time_has_come(self, number: int) -> None:
        fault = self._planned.pop(number, None)
        if fault is None or self._run.is_over:
            return
        if fault["rank"] not in self._run.living:
            self.not_fired(fault)
            return
        self._supervisor.spawn(self._strike_later({key: value for key, value in fault.items() if key != "due"}))

    async def _strike_later(self, fault: dict[str, Any]) -> None:
        try:
            await self.strike(fault)
        except FtnbError as error:
            if not self._run.is_over:
                self.not_fired(fault, str(error))

    def _signal(self, fault: dict[str, Any]) -> None:
        rank = fault["rank"]
        self._record(fault, self._supervisor.current_step(rank))
        self._supervisor.signal_rank(rank, signal.SIGKILL if fault["kind"] == "kill" else signal.SIGSTOP)

    def _record(self, fault: dict[str, Any], step: int | None) -> None:
        """On record before it takes effect, together with what has to be undone later."""
        kind, slot = faults.KINDS[fault["kind"]], self._supervisor.ranks[fault["rank"]]
        now, duration_s = time.time(), fault.get("duration_s")
        if kind.ends:
            slot.fault, slot.fault_time = kind.name, now
            if duration_s is not None:
                self._later(duration_s + SURVIVED_S, self._forget, slot, now)
        if kind.name == "hang" and duration_s is not None and slot.process is not None:
            process = slot.process
            entry = {"pid": process.pid, "started": process.started, "at": now, "until": now + duration_s}
            self._stopped.append(entry)
            self._later(duration_s, self._continue, entry)
        told = {key: fault[key] for key in ("duration_s", "factor", "seed", "probability", "chaos") if key in fault}
        self._run.emit(
            "fault_injected", faults.event_words(fault), rank=fault["rank"], step=step, fault=kind.name, **told
        )

    def _continue(self, entry: dict[str, Any]) -> None:
        """SIGCONT to that very process, whatever it is by now: a stopped one that was lost meanwhile is dead."""
        slot = self._supervisor.fleet.by_pid(entry["pid"])
        if slot is not None and slot.fault_time not in (None, entry["at"]):
            self._stopped = [other for other in self._stopped if other is not entry]
            return  # something else has been done to it since, a longer stop perhaps
        proc.ProcessId(entry["pid"], entry["started"]).signal(signal.SIGCONT)
        if entry in self._stopped:
            self._stopped.remove(entry)
            for pause_s in CONTINUE_AGAIN_S:
                self._later(pause_s, self._continue, entry)

    def _forget(self, slot: Any, fault_time: float) -> None:
        """Its effect is over: a later death has another cause."""
        if slot.fault_time == fault_time:
            slot.fault = slot.fault_time = None

    def not_fired(self, fault: dict[str, Any], why: str = "") -> None:
        at_step = None if "probability" in fault else fault.get("at_step")
        reason = faults.not_fired_words(fault, why)
        told = {"chaos": fault["chaos"]} if "chaos" in fault else {}
        self._run.emit("fault_not_fired", reason, rank=fault["rank"], step=at_step, fault=fault["kind"], **told)

    def spared(self, fault: dict[str, Any], why: str) -> None:
        """Chaos leaves a fault out."""
        self._run.emit(
            "fault_not_fired", faults.spared_words(fault, why), rank=fault["rank"], fault=fault["kind"],
            chaos=fault["chaos"],
        )

    def _later(self, pause_s: float, call: Any, *arguments: Any) -> None:
        asyncio.get_running_loop().call_later(pause_s, call, *arguments)
