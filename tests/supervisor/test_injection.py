"""Faults and chaos of a run in the supervisor: real processes get the signals; ranks and run are played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ftnb.errors import RunError, UsageError
from ftnb.supervisor.chaos import Chaos
from ftnb.supervisor.faults import Faults
from ftnb.supervisor.ranks import Slot
from ftnb.wire import proc

DEADLINE_S = 20.0


class Played:
    """The parts of a run and of its supervisor that faults touch. Four ranks; each is a process that sleeps."""

    def __init__(self, **options):
        self.name, self.total_steps, self.is_over, self.state = "run", 1000, False, "running"
        self.missing = frozenset()
        self.options = {"recovery": "replace", "hang_timeout_s": 30.0, "on_nan": "stop"} | options
        self.events, self.told, self.said, self.saved = [], [], [], 0
        self.ranks = {rank: Slot(f"engine{rank}", rank=rank, state="training", step=10) for rank in range(4)}
        self.fleet, self.answers = self, True
        self.tasks = []
        self.processes = []
        for slot in self.ranks.values():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            self.processes.append(child)
            slot.process = proc.identify(child.pid)
        self.faults = Faults(self, self)
        self.chaos = Chaos(self, self)

    # the run

    @property
    def living(self):
        return frozenset(rank for rank, slot in self.ranks.items() if slot.alive)

    @property
    def healthy(self):
        return self.living

    def max_step(self):
        return max(slot.step for slot in self.ranks.values())

    @property
    def step(self):
        return self.max_step()

    def emit(self, kind, reason, *, rank=None, step=None, **fields):
        slot = self.ranks[rank]
        self.events.append({"kind": kind, "reason": reason, "rank": rank, "step": step, **fields,
                            "then": psutil.Process(slot.process.pid).status()})  # fmt: skip

    def save(self):
        self.saved += 1

    def say(self, text):
        self.said.append(text)

    # the supervisor

    def tell_rank(self, rank, op, **fields):
        self.told.append((rank, op, fields))
        if op == "fault" and self.answers is not None:
            asyncio.get_running_loop().call_soon(self.faults.answer, fields["fault_id"], self.answers)

    def signal_rank(self, rank, signum=signal.SIGKILL):
        self.ranks[rank].process.signal(signum)

    def current_step(self, rank):
        return self.ranks[rank].step

    def spawn(self, work):
        self.tasks.append(asyncio.ensure_future(work))

    def by_pid(self, pid):
        return next((slot for slot in self.ranks.values() if slot.process.pid == pid), None)

    # for the tests

    def status(self, rank):
        return psutil.Process(self.ranks[rank].process.pid).status()

    def kinds(self):
        return [(event["kind"], event.get("fault"), event["rank"]) for event in self.events]


@contextlib.contextmanager
def playing(**options):
    played = Played(**options)
    try:
        yield played
    finally:
        for child in played.processes:
            child.kill()
            child.wait()


async def until(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.005)


@pytest.fixture
def run():
    with playing() as played:
        yield played


def test_kill_now_is_on_record_first(run):
    async def story():
        answer = await run.faults.inject("kill", None)
        assert answer["rank"] == 3 and "killed now" in answer["reason"]
        assert run.processes[3].wait(DEADLINE_S) == -signal.SIGKILL
        (event,) = run.events
        assert (event["kind"], event["fault"], event["rank"], event["step"]) == ("fault_injected", "kill", 3, 10)
        assert event["then"] in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING), "when it was recorded, the process still lived"
        assert run.ranks[3].fault == "kill" and run.ranks[3].fault_time is not None
        assert run.told == []

    asyncio.run(story())


def test_hang_now_for_a_time(run):
    async def story():
        answer = await run.faults.inject("hang", 1, duration_s=0.3)
        assert "stopped now (SIGSTOP) for 0.3 s" in answer["reason"] and "too short" in answer["reason"]
        await until(lambda: run.status(1) == psutil.STATUS_STOPPED, "stopped")
        began = run.ranks[1].fault_time
        record = json.loads(json.dumps(run.faults.record()))
        assert [entry["pid"] for entry in record["stopped"]] == [run.processes[1].pid]
        await until(lambda: run.status(1) == psutil.STATUS_SLEEPING, "continued")
        assert time.time() - began >= 0.3
        assert run.faults.record()["stopped"] == []
        assert run.events[0]["duration_s"] == 0.3
        run.faults.moved(1, began + 0.5)
        assert run.ranks[1].fault == "hang", "too soon to say that it has survived"
        run.faults.moved(1, began + 2.5)
        assert run.ranks[1].fault is run.ranks[1].fault_time is None

    asyncio.run(story())


def test_a_successor_continues_what_its_predecessor_stopped(run):
    async def story():
        await run.faults.inject("hang", 1, duration_s=3600)
        await until(lambda: run.status(1) == psutil.STATUS_STOPPED, "stopped")
        record = json.loads(json.dumps(run.faults.record()))
        record["stopped"][0]["until"] = time.time() - 1
        Faults(run, run).restore(record)
        await until(lambda: run.status(1) == psutil.STATUS_SLEEPING, "continued")

    asyncio.run(story())


def test_a_longer_stop_is_not_ended_by_the_end_of_a_shorter_one(run):
    async def story():
        await run.faults.inject("hang", 1, duration_s=0.05)
        await asyncio.sleep(0.02)
        await run.faults.inject("hang", 1)
        await asyncio.sleep(0.1)  # the first would have been continued by now
        assert run.status(1) == psutil.STATUS_STOPPED
        assert run.faults.record()["stopped"] == []

    asyncio.run(story())


def test_what_the_rank_does_itself_happens_when_it_is_on_record(run):
    async def story():
        answer = await run.faults.inject("slow", 2, at_step=40, duration_s=5.0)
        assert answer["reason"].startswith("Inside step 40, rank 2 will be slow by a factor of 3 for 5 s.")
        ((rank, op, fields),) = run.told
        assert (rank, op) == (2, "fault")
        assert fields == {
            "fault_id": 1, "kind": "slow", "at_step": 40, "duration_s": 5.0, "factor": 3.0, "seed": 0,
        }  # fmt: skip
        assert run.events == [] and run.saved
        run.faults.due(2, 1, 40)
        assert run.kinds() == [("fault_injected", "slow", 2)]
        assert (run.events[0]["step"], run.events[0]["factor"]) == (40, 3.0)
        assert run.told[-1] == (2, "fault_go", {"fault_id": 1})
        assert run.ranks[2].fault is None, "it does not end the rank"
        run.faults.due(2, 1, 40)  # said twice: done once
        assert len(run.told) == 2
        await run.faults.inject("stall", 2)
        assert run.told[-1][2]["at_step"] is None
        assert run.faults.outstanding() == "the stall of rank 2 has not begun yet"
        run.faults.due(2, 2, 41)
        assert run.ranks[2].fault == "stall" and run.faults.outstanding() == "the stall of rank 2 is not over yet"

    asyncio.run(story())


def test_a_hang_at_a_step_is_ended_from_here(run):
    async def story():
        await run.faults.inject("hang", 0, at_step=40, duration_s=0.2)
        run.faults.due(0, 1, 40)
        run.signal_rank(0, signal.SIGSTOP)  # as the rank does when it gets the word
        await until(lambda: run.status(0) == psutil.STATUS_STOPPED, "stopped")
        await until(lambda: run.status(0) == psutil.STATUS_SLEEPING, "continued")

    asyncio.run(story())


def test_steps_that_cannot_be_and_ranks_that_are_not_there(run):
    async def story():
        with pytest.raises(UsageError, match="Step 1001 will never come"):
            await run.faults.inject("kill", 1, at_step=1001)
        run.answers = False
        with pytest.raises(UsageError, match="Step 9 is past already"):
            await run.faults.inject("kill", 1, at_step=9)
        with pytest.raises(UsageError, match="takes no factor"):
            await run.faults.inject("kill", 1, factor=2.0)
        run.ranks[1].state = "failed"
        with pytest.raises(UsageError, match=r"Rank 1 takes no part.*living ranks: 0, 2, 3"):
            await run.faults.inject("kill", 1)
        assert run.events == [] and run.faults.record()["planned"] == {}

    asyncio.run(story())


def test_a_rank_that_does_not_answer(run, monkeypatch):
    monkeypatch.setattr("ftnb.supervisor.faults.ANSWER_TIMEOUT_S", 0.05)

    async def story():
        run.answers = None
        with pytest.raises(RunError, match=r"Rank 1 does not answer.*%ft_status"):
            await run.faults.inject("stall", 1)
        assert run.faults.record()["planned"] == {} and run.events == []
        waiting = asyncio.ensure_future(run.faults.inject("stall", 1))
        await asyncio.sleep(0)
        run.faults.lost(1)
        with pytest.raises(RunError, match="Rank 1 was lost before it could answer"):
            await waiting
        waiting = asyncio.ensure_future(run.faults.inject("stall", 1))
        await asyncio.sleep(0)
        run.faults.end()
        with pytest.raises(RunError, match="has ended meanwhile"):
            await waiting
        assert run.events == []

    asyncio.run(story())


def test_what_did_not_happen_is_told(run):
    async def story():
        await run.faults.inject("exit", 1)
        await run.faults.inject("exit", 1, at_step=500)
        await run.faults.inject("kill", 2, after_s=3600.0)
        run.faults.lost(1)
        (event,) = run.events
        assert event["kind"] == "fault_not_fired" and "lost before" in event["reason"], "only that of its next step"
        before = len(run.told)
        run.faults.rearm(1)
        assert [(rank, op, fields["at_step"]) for rank, op, fields in run.told[before:]] == [(1, "fault", 500)]
        run.faults.end()
        assert [event["reason"] for event in run.events[1:]] == [
            "The exit of rank 1 at step 500 did not happen.", "The kill of rank 2 after 3600 s did not happen.",
        ]  # fmt: skip
        assert run.faults.record()["planned"] == {}

    asyncio.run(story())


def test_after_a_time_and_under_a_successor(run):
    async def story():
        await run.faults.inject("kill", 2, after_s=3600.0)
        await run.faults.inject("exit", 1, after_s=3600.0)
        record = json.loads(json.dumps(run.faults.record()))
        for fault in record["planned"].values():
            fault["due"] = time.time() - 1
        run.faults = Faults(run, run)
        run.faults.restore(record)
        await asyncio.to_thread(run.processes[2].wait, DEADLINE_S)
        await until(lambda: run.told, "the rank is told")
        assert run.told[0][2]["fault_id"] == 3, "numbers are not used again"
        await until(lambda: run.faults.outstanding().startswith("the exit"), "it has answered")
        run.faults.due(1, 3, 12)
        assert run.kinds() == [("fault_injected", "kill", 2), ("fault_injected", "exit", 1)]

    asyncio.run(story())


def test_a_probability_is_one_draw_that_a_seed_repeats(run):
    async def story():
        steps = []
        for _ in range(2):
            await run.faults.inject("kill", 1, probability=0.01, seed=5)
            steps.append(run.told[-1][2]["at_step"])
        assert steps[0] == steps[1] > 10
        run.faults.due(1, 1, steps[0])
        assert run.events[-1]["probability"] == 0.01
        before = len(run.told)
        answer = await run.faults.inject("kill", 1, probability=1e-12)
        assert len(run.told) == before, "it does not come up in this run: nobody is told"
        assert "In each step with probability 1e-12, and only once, rank 1 will be killed" in answer["reason"]
        run.faults.rearm(1)
        assert [fields["fault_id"] for _, _, fields in run.told[before:]] == [2]
        run.faults.end()
        assert {event["kind"] for event in run.events[1:]} == {"fault_not_fired"}
        assert all("probability" in event["reason"] and event["step"] is None for event in run.events[1:])
        run.answers = False
        with pytest.raises(RunError, match="too quick"):
            await run.faults.inject("kill", 1, probability=1.0)

    asyncio.run(story())


# --- chaos


def revive(run):
    """Whoever was killed or stopped is replaced."""
    for rank, slot in run.ranks.items():
        if slot.fault_time is not None:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            run.processes.append(child)
            run.ranks[rank] = Slot(f"{slot.key}+", rank=rank, state="training", step=10,
                                   process=proc.identify(child.pid))  # fmt: skip


def test_chaos_spares_until_the_last_fault_is_over_and_ends_in_time(run):
    async def story():
        told = run.chaos.start(0.02, ["kill", "hang"], 1.5, 7, False)
        assert "one fault in 0.02 s on average, kill or hang, for 1.5 s, seed 7" in told["reason"]
        with pytest.raises(RunError, match="%ft_chaos stop"):
            run.chaos.start(1.0, None, None, 0, False)
        await until(lambda: len(run.events) > 5, "faults come")
        assert [event["kind"] for event in run.events] == ["fault_injected"] + ["fault_not_fired"] * (len(run.events) - 1)
        first = run.events[0]
        assert first["chaos"] == 1 and first["reason"].endswith("(chaos).")
        assert run.events[1]["reason"].endswith(f"is spared: the {first['fault']} of rank {first['rank']} is not over yet.")
        while run.chaos.info() is not None:
            revive(run)
            await asyncio.sleep(0.01)
        numbers = [event["chaos"] for event in run.events]
        assert numbers == list(range(1, len(run.events) + 1)), "each fault of the plan is told once"
        injected = sum(event["kind"] == "fault_injected" for event in run.events)
        assert 1 < injected < len(run.events)
        assert run.said[-1] == (
            f"Chaos is over (1.5 s have passed): {injected} faults were injected, {len(run.events) - injected} spared."
        )
        with pytest.raises(RunError, match="no chaos"):
            run.chaos.stop()

    asyncio.run(story())


def test_without_mercy(run):
    async def story():
        run.state = "recovering"
        run.chaos.start(0.02, ["kill"], None, 7, True)
        await until(lambda: len(run.events) > 5, "faults come")
        assert {event["kind"] for event in run.events} == {"fault_injected"}
        told = run.chaos.stop()
        assert "Chaos is over (it was stopped)" in told["reason"] and told["spared"] == 0
        count = len(run.events)
        await asyncio.sleep(0.2)
        assert len(run.events) == count

    asyncio.run(story())


def test_a_successor_goes_on_with_the_plan(run):
    async def story():
        run.state = "paused"  # so that all are spared, and nothing but the plan decides
        run.chaos.start(0.05, ["kill", "exit", "hang"], None, 11, False)
        await until(lambda: len(run.events) >= 5, "faults come")
        record = json.loads(json.dumps(run.chaos.record()))
        run.chaos.end()
        done = record["done"]
        assert [event["chaos"] for event in run.events] == list(range(1, done + 1))
        assert "done" not in (told := run.chaos.record() or {}) and told == {}
        run.chaos = Chaos(run, run)
        run.chaos.restore(record)
        assert run.chaos.info()["spared"] == done
        await until(lambda: len(run.events) >= done + 5, "faults come")
        run.chaos.end()
        found = [(event["fault"], event["rank"]) for event in run.events]
        with playing() as other:
            other.state = "paused"
            other.chaos.start(0.005, ["kill", "exit", "hang"], None, 11, False)
            await until(lambda: len(other.events) >= len(found), "faults come")
            other.chaos.end()
            assert [(event["fault"], event["rank"]) for event in other.events][: len(found)] == found

    asyncio.run(story())


def test_a_flipped_bit_is_outstanding_until_the_next_check():
    with playing(check_replicas=20) as run:

        async def story():
            run.chaos.start(0.02, ["bitflip"], None, 1, False)
            await until(lambda: run.told, "the rank is told")
            run.faults.due(run.told[0][0], 1, 11)
            before = len(run.events)
            await until(lambda: len(run.events) > before + 3, "more faults come")
            assert {event["reason"].split(": ")[1] for event in run.events[before:]} == {
                "a flipped bit has not been found yet."
            }
            for slot in run.ranks.values():
                slot.step = 21
            await until(lambda: len(run.told) > 2, "the check is past: the next one may come")
            assert run.told[-1][1] == "fault"
            run.chaos.end()
            run.faults.end()

        asyncio.run(story())


def test_wrong_wishes(run):
    async def story():
        with pytest.raises(UsageError, match="no fault 'kil'"):
            run.chaos.start(1.0, ["kil"], None, 0, False)
        with pytest.raises(UsageError, match="mtbf_s"):
            run.chaos.start(0, None, None, 0, False)
        assert run.chaos.info() is None

    asyncio.run(story())
