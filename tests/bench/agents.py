"""The supervisor's own cost with many ranks: real sockets, real messages, agents without engines.

    python tests/bench/agents.py [--agents 1000] [--seconds 20] [--processes 2]

The supervisor runs in a process of its own, with slots that are filled by no engine; the agents live in other
processes and do what an agent thread does: ten heartbeats a second each, over a CurveZMQ connection each. Told are the
processor time of the supervisor (all its threads), how late its clock ticked, and whom it suspected.

Goals: 1,000 agents within one core, nobody suspected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import zmq

from ftnb.supervisor.ranks import Slot
from ftnb.supervisor.server import Supervisor
from ftnb.wire import messages, paths, proc, sockets

NAME = "agents"
FIRST_PID = 10_000_000  # no process has such a number
BEAT_S = 0.1
LIMIT_S = 60.0


class WithoutEngines(Supervisor):
    """A supervisor whose ranks are only agents."""

    beats = 0

    def _beat(self, *args: Any) -> None:
        self.beats += 1
        super()._beat(*args)

    async def _start_cluster(self) -> None:
        for rank in range(self.options["num_ranks"]):
            slot = Slot(f"engine{rank}", rank=rank, state="idle", started=time.monotonic())
            slot.process, slot.phase = proc.ProcessId(FIRST_PID + rank, "0"), "idle"
            self.fleet.ranks[rank] = slot
        self.state = "idle"
        self.spawn(self._tell())

    async def _tell(self) -> None:
        """Once all have been heard of: measure for so long, print one JSON object, stop."""
        slots = list(self.ranks.values())
        while not all(slot.agent and slot.heartbeats.last for slot in slots):
            await asyncio.sleep(0.1)
        print("all are here", flush=True)
        await asyncio.sleep(3.0)
        suspected: set[int] = set()
        highest, late_s = 0.0, 0.0
        began, used_s, beats = time.monotonic(), time.process_time(), self.beats
        while time.monotonic() - began < self.options["seconds"]:
            before = time.monotonic()
            await asyncio.sleep(0.1)
            late_s = max(late_s, time.monotonic() - before - 0.1)
            now = time.monotonic()
            highest = max([highest, *(slot.heartbeats.phi(now) or 0.0 for slot in slots[:: max(1, len(slots) // 100)])])
            suspected |= {entry["rank"] for entry in self.fleet.statuses() if entry["state"] != "idle"} \
                if int(now * 10) % 10 == 0 else set()
        passed_s = time.monotonic() - began
        print(json.dumps({
            "beats_per_s": (self.beats - beats) / passed_s,
            "cores": (time.process_time() - used_s) / passed_s, "late_s": late_s, "phi": highest,
            "suspected": sorted(suspected), "notes": [*self.fleet.notes],
        }), flush=True)
        self.stop("measured")


def serve(args: argparse.Namespace) -> int:
    options = {
        "num_ranks": args.agents, "num_spares": 0, "threads": 1, "backend": "gloo", "linger_s": 600.0, "keep": False,
        "profile": None, "seconds": args.seconds,
    }
    return asyncio.run(WithoutEngines(NAME, options).serve())


def be_agents(args: argparse.Namespace) -> int:
    """Agents `first` … `first + agents - 1`, each with a connection of its own."""
    connection = sockets.Connection.load(paths.cluster_dir(NAME) / "connection.json")
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * args.agents + 100)
    dice, started = random.Random(args.first), time.monotonic()
    agents: deque[list[Any]] = deque()  # in the order in which their next heartbeats are due
    for rank in range(args.first, args.first + args.agents):
        identity = f"agent-{FIRST_PID + rank}".encode()
        agents.append([0.0, sockets.peer_socket(
            context, zmq.DEALER, connection, connection.rank_port, identity), rank, 0, 0])
    poller = zmq.Poller()
    for _, sock, *_ in agents:
        poller.register(sock, zmq.POLLIN)
    for due, agent in zip(sorted(started + dice.random() * BEAT_S for _ in agents), agents):
        agent[0] = due
    by_socket = {agent[1]: agent for agent in agents}
    for agent in agents:
        agent[1].send_multipart(messages.encode({"op": "hello", "rank": agent[2], "host": "here", "key": "", "pid": 0}))
    looked = 0.0
    while os.getppid() == args.parent:
        now = time.monotonic()
        while now >= agents[0][0]:
            agent = agents[0]
            agents.rotate(-1)
            agent[0] = max(agent[0] + BEAT_S, now - BEAT_S)
            agent[3] += 1
            beat = {
                "op": "beat", "rank": agent[2], "phase": "idle", "step": None, "term": agent[4], "n": agent[3],
                "at": now, "place": "collective", "place_step": 41, "place_s": 0.0123, "rss_mb": 312.4,
            }
            agent[1].send_multipart(messages.encode(beat))
        if now - looked > 0.5:
            looked = now
            for sock, _ in poller.poll(0):
                with contextlib.suppress(zmq.Again):
                    while True:
                        message = messages.decode(sock.recv_multipart(zmq.NOBLOCK))
                        by_socket[sock][4] = message["term"]
        time.sleep(max(0.002, agents[0][0] - time.monotonic()))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--part", choices=["supervisor", "agents"], help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return serve(args) if args.part == "supervisor" else be_agents(args)
    told = measure(args.agents, args.seconds, args.processes)
    print(f"{args.agents} agents, {told['beats_per_s']:.0f} beats/s: the supervisor used {told['cores']:.2f} cores; "
          f"ticks up to {told['late_s'] * 1000:.0f} ms late; highest phi {told['phi']:.1f}; "
          f"suspected: {len(told['suspected']) or 'nobody'} {told['suspected'][:10] or ''} {told['notes'][:3] or ''}")
    return 0


def measure(num_agents: int, seconds: float, num_processes: int) -> dict[str, Any]:
    """Run it all, and end it."""
    with tempfile.TemporaryDirectory() as runtime_dir:
        environment = {**os.environ, "FTNB_RUNTIME_DIR": runtime_dir}
        me = [sys.executable, __file__, f"--seconds={seconds}", f"--parent={os.getpid()}"]
        processes = [subprocess.Popen(
            [*me, "--part=supervisor", f"--agents={num_agents}"], stdout=subprocess.PIPE, text=True, env=environment,
        )]
        try:
            deadline = time.monotonic() + LIMIT_S
            while not list(Path(runtime_dir).rglob("connection.json")):
                assert time.monotonic() < deadline and processes[0].poll() is None, "the supervisor did not start"
                time.sleep(0.05)
            share = -(-num_agents // num_processes)
            for first in range(0, num_agents, share):
                processes.append(subprocess.Popen(
                    [*me, "--part=agents", f"--agents={min(share, num_agents - first)}", f"--first={first}"],
                    env=environment,
                ))
            said = processes[0].stdout
            assert said is not None and said.readline(), "the supervisor ended before all agents had come"
            return json.loads(said.readline())
        finally:
            for process in processes[1:]:
                process.kill()
                process.wait()
            processes[0].send_signal(signal.SIGTERM)
            try:
                processes[0].wait(10)
            except subprocess.TimeoutExpired:
                processes[0].kill()
                processes[0].wait()


if __name__ == "__main__":
    sys.exit(main())
