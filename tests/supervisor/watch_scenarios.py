"""What test_watching.py runs: a real supervisor whose ranks are agents without engines, in processes of their own.

    python watch_scenarios.py SCENARIO

prints JSON objects, one a line: first the pids of supervisor and agents, at last what has come out.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftnb.supervisor.ranks import Slot
from ftnb.supervisor.runs import ActiveRun
from ftnb.supervisor.server import Supervisor
from ftnb.wire import proc

DEADLINE_S = 20.0
AGENT = Path(__file__).with_name("fake_agent.py")


class WithAgents(Supervisor):
    """Rank 0 … n-1, and one spare, are agents without engines."""

    def __init__(self, num_ranks: int, scenario: Callable[[WithAgents], Any]) -> None:
        super().__init__("watched", {
            "num_ranks": num_ranks, "num_spares": 1, "threads": 1, "backend": "gloo", "linger_s": 600.0, "keep": False,
            "profile": None,
        })
        self.scenario = scenario
        self.children: list[subprocess.Popen] = []
        self.killed: dict[str, float] = {}

    async def _start_cluster(self) -> None:
        for number in range(self.options["num_ranks"] + 1):
            await self.add(number if number < self.options["num_ranks"] else None)
        self.state = "idle"
        self.spawn(self._carry_out())

    async def add(self, rank: int | None) -> Slot:
        child = subprocess.Popen([sys.executable, str(AGENT), str(self.connection_file)])
        self.children.append(child)
        slot = Slot(f"engine{len(self.children)}", rank=rank, state="idle" if rank is not None else "spare")
        slot.started, slot.process = time.monotonic(), proc.identify(child.pid)
        if rank is not None:
            self.fleet.ranks[rank] = slot
        else:
            self.fleet.pool.append(slot)
        return slot

    async def _carry_out(self) -> None:
        told: dict[str, Any] = {}
        try:
            await until(lambda: all(self.linked(slot) for slot in self.watched()), "all have connected")
            print(json.dumps({"pids": [os.getpid(), *(child.pid for child in self.children)]}), flush=True)
            told = await self.scenario(self)
        except BaseException as error:
            told = {"error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            told["notes"] = [*self.fleet.notes]
            # Not by `poll`: of a process that is killed, some threads may still be on their way out.
            told["ended"] = [c.pid for c in self.children if (p := proc.identify(c.pid)) is None or not p.is_alive()]
            print(json.dumps(told), flush=True)
            self.stop("the scenario is over")

    def watched(self) -> list[Slot]:
        return [*self.ranks.values(), *self.fleet.pool]

    def linked(self, slot: Slot) -> bool | None:
        return self.rank_socket.links.is_up(slot.agent)


async def until(condition: Callable[[], Any], what: str, limit_s: float = DEADLINE_S) -> float:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"waited {limit_s:g} s in vain: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def stopped(supervisor: WithAgents) -> dict[str, Any]:
    """A rank is stopped; so is the spare."""
    told = {}
    await asyncio.sleep(6.0)  # before some heartbeats are known of a process, any delay may be usual for it
    for name, slot in (("rank", supervisor.ranks[1]), ("spare", supervisor.fleet.pool[0])):
        slot.process.signal(signal.SIGSTOP)
        told[f"{name}_down_s"] = await until(lambda: supervisor.linked(slot) is False, "the link is down")  # noqa: B023
        told[f"{name}_shown"] = slot.status(time.monotonic(), supervisor.rank_socket.links)["state"]
        told[f"{name}_ended_s"] = await until(lambda: not slot.process.is_alive(), "it is ended")  # noqa: B023
        told[f"{name}_state"] = slot.state
    # Its main thread is gone a moment before all of it is.
    await until(lambda: sum(child.poll() is not None for child in supervisor.children) == 2, "their status is known")
    return told


async def interpreter_lock(supervisor: WithAgents) -> dict[str, Any]:
    """A rank is silent for 3 s, but its connection answers."""
    slot = supervisor.ranks[1]
    slot.process.signal(signal.SIGUSR1)
    await until(lambda: (slot.heartbeats.age_s(time.monotonic()) or 0) > 2.5, "it is silent")
    told = {"linked": supervisor.linked(slot), "phi": slot.heartbeats.phi(time.monotonic())}
    told["shown"] = slot.status(time.monotonic(), supervisor.rank_socket.links)["state"]
    await until(lambda: slot.heartbeats.age_s(time.monotonic()) < 0.3, "it is heard again")
    await asyncio.sleep(1.0)
    return {**told, "alive": slot.process.is_alive()}


async def everybody(supervisor: WithAgents) -> dict[str, Any]:
    """All processes are stopped and continued (from outside); then there is peace for a while."""
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 8.0, "the pause is over", limit_s=30.0)
    return {"alive": [slot.process.is_alive() for slot in supervisor.watched()]}


async def reconnect(supervisor: WithAgents) -> dict[str, Any]:
    """Ranks go and others come, whose connections get the numbers of those before."""
    links = supervisor.rank_socket.links
    used, told = set(), {"reused": False}
    for _ in range(3):
        old = supervisor.ranks[1]
        used.add(links._links[old.agent])
        old.process.signal(signal.SIGKILL)
        await until(lambda: links.is_up(old.agent) is False, "its connection is gone")  # noqa: B023
        old.state = "failed"
        new = await supervisor.add(1)
        await until(lambda: supervisor.linked(new), "the new one is linked")  # noqa: B023
        told["reused"] = told["reused"] or links._links[new.agent] in used
        assert links.is_up(old.agent) is False, "the old one stays down"
    new.process.signal(signal.SIGSTOP)
    told["down_s"] = await until(lambda: supervisor.linked(new) is False, "the link is down")
    told["others"] = [supervisor.linked(slot) for slot in supervisor.watched() if slot is not new]
    return told


async def stacks(supervisor: WithAgents) -> dict[str, Any]:
    """One does not answer."""
    supervisor.ranks[1].process.signal(signal.SIGUSR1)
    await asyncio.sleep(0.2)
    answers = await supervisor.stacks.ask([0, 1, 2], 0.5)
    return {"answers": {str(rank): answer for rank, answer in answers.items()}}


async def unkillable(supervisor: WithAgents) -> dict[str, Any]:
    """A process that SIGKILL does not end: the rest goes on without it."""
    slot = supervisor.ranks[1]
    kill_session, send = proc.kill_session, proc.ProcessId.signal
    proc.kill_session = lambda session: 1
    proc.ProcessId.signal = lambda process, signum: process == slot.process or send(process, signum)
    try:
        fenced = asyncio.Event()
        began = time.monotonic()
        supervisor.fleet.fence(slot, fenced.set)
        await asyncio.wait_for(fenced.wait(), DEADLINE_S)
        took_s = time.monotonic() - began
        heard = slot.last_sign
        await asyncio.sleep(0.5)
        return {"took_s": took_s, "heard": slot.last_sign != heard, "cut_off": slot.cut_off}
    finally:
        proc.kill_session, proc.ProcessId.signal = kill_session, send


async def books(supervisor: WithAgents) -> dict[str, Any]:
    """A run whose reports are read twice, the second time by a successor; and words that come late."""
    options = {
        "name": "run", "recovery": "shrink", "global_batch": 6, "evaluate_every": None, "on_nan": "skip",
        "hang_timeout_s": 30.0,
    }  # fmt: skip
    job = {
        "name": "run", "directory": str(supervisor.directory / "run"), "options": options, "cell": "", "cwd": "",
        "sys_path": [], "backend": "gloo", "num_ranks": 3, "dataset_len": 20, "total_steps": 9,
        "started": time.time(), "versions": {}, "signature": {},
    }  # fmt: skip
    Path(job["directory"]).mkdir()
    run = supervisor.run = ActiveRun(supervisor, job, b"")
    await until(lambda: run.healthy == {0, 1, 2}, "the agents have formed a group")
    reports = [["nan", 1, 2, rank, "loss", rank == 1] for rank in range(3)]
    for step in (1, 2):
        for rank in range(3):
            run.fetched(["fetched", 1, step, rank, 2, 0, 0.5, 2.0, None])
            run.committed(["committed", 1, step, rank, time.time(), 0.1, None, 40.0, 0.1], f"engine{rank + 1}")
        if step == 2:
            for report in reports:
                run.update_skipped(report)
    told: dict[str, Any] = {"limit_s": run.pace.median_step_s, "first": [run.is_first(1, 3), run.is_first(1, 4)]}
    run.committed(["committed", 1, 4, 1, time.time(), 0.1, None, 40.0, 0.1], "engine99")
    told["first"].append(run.is_first(1, 4))  # a smaller share, and the process before had done it
    run.finished(1, 0, "of another generation")
    run.finished(7, 1, "of no member")
    run.flush()
    successor = supervisor.run = ActiveRun(supervisor, job, b"names", json.loads(json.dumps(run.record())))
    for report in reports:
        successor.update_skipped(report)
    told["limit_s_then"] = successor.pace.median_step_s
    told["first_then"] = [successor.is_first(1, 3), successor.is_first(1, 4)]
    successor.save()
    events = [json.loads(line) for line in (successor.directory / "events.jsonl").read_text().splitlines()]
    told["nan"] = [event["reason"] for event in events if event["kind"] == "nan_detected"]
    told["names"] = [len(successor.names or b"")]
    successor.give_up("stopped", "The test is over.")
    told["names"].append(len(successor.names or b""))
    told["digests"] = json.loads((successor.directory / "run.json").read_text())["weights_digests"]
    return told


def main() -> int:
    scenario = globals()[sys.argv[1]]
    supervisor = WithAgents(3, scenario)
    try:
        return asyncio.run(supervisor.serve())
    finally:
        for child in supervisor.children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
