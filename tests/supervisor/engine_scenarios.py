"""What test_engines.py runs, each in a process of its own: `Engines` is made to own all children of its process.

    python engine_scenarios.py SCENARIO DIRECTORY

prints one JSON object. Engines are real; no supervisor answers their agents, which does not keep them from registering
with the controller, where they are asked over ipyparallel.
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

import zmq

from ftnb.errors import ClusterError
from ftnb.supervisor.engines import Engines
from ftnb.wire import paths, proc, sockets

DEADLINE_S = 30.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "IPP_NONINTERACTIVE": "1", "FTNB_LINGER_S": "120"}


async def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s in vain: {what}"
        await asyncio.sleep(0.01)
    return value


class Cluster:
    """`Engines` with what the supervisor adds: environments of ranks, and a memory of what has ended."""

    def __init__(self, directory: Path, profile: str | None = None, recorded: dict[str, Any] | None = None) -> None:
        self.directory = directory
        self.connection_file = directory / "connection.json"
        if not self.connection_file.exists():
            public, _ = zmq.curve_keypair()
            mine, secret = zmq.curve_keypair()
            connection = sockets.Connection(
                "test", os.getpid(), "0", "127.0.0.1", 1, 1, public.decode(), mine.decode(), secret.decode(), "0"
            )
            paths.write_private(self.connection_file, connection.to_json())
        self.engines = Engines(directory, profile, ENVIRONMENT, recorded=recorded)
        self.exits: dict[int, int | None] = {}
        self.controller_exits: list[str] = []
        self.engines.on_controller_exit = self.controller_exits.append

    def mark(self, rank: int) -> str:
        return f"FTNB_RING={self.directory / f'rank-{rank}.ring'}"

    async def start(self, rank: int, on_exit: Callable[[int, int | None], None] | None = None) -> proc.ProcessId | None:
        environment = dict([self.mark(rank).split("=", 1)])
        environment |= {"FTNB_RANK": str(rank), "FTNB_CONNECTION": str(self.connection_file)}
        return await self.engines.start_engine(f"rank{rank}", rank, environment, on_exit or self.exits.__setitem__)

    async def client(self, num_engines: int) -> Any:
        """An ipyparallel client that sees so many engines."""
        import ipyparallel

        client = await asyncio.to_thread(ipyparallel.Client, self.engines.client_file)
        await wait_until(lambda: len(client.ids) == num_engines, f"{num_engines} engines have registered")
        return client


async def call(view: Any, function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(view.apply_sync, function, *args), DEADLINE_S)


def about_engine() -> dict[str, Any]:
    """Runs in an engine."""
    import os
    import random
    from pathlib import Path

    import numpy
    import torch

    return {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "cwd": os.getcwd(),
        "random": [random.random(), numpy.random.rand(), torch.rand(1).item()],
        "cmdline": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "rank": os.environ["FTNB_RANK"], "room": "FTNB_ROOM" in os.environ,
        "shown": Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0"),
    }  # fmt: skip


def leave_session() -> int:
    """Runs in an engine: a child that leaves the session and executes nothing else. Returns its pid."""
    import os
    import time

    if pid := os.fork():
        return pid
    os.setsid()
    time.sleep(600)
    os._exit(0)


async def forked(directory: Path) -> dict[str, Any]:
    """Engines out of the fork server; what they leave behind; a fork server that dies, or does not answer."""
    cluster = Cluster(directory)
    engines = cluster.engines
    try:
        await engines.start_controller()
        orphans = []

        def first_ended(pid: int, status: int | None) -> None:
            orphans.extend(p.pid for p in engines.orphans(cluster.mark(0)))
            cluster.exits[pid] = status

        first, second = await cluster.start(0, first_ended), await cluster.start(1)
        server = dict(engines.processes())["fork server"]
        told: dict[str, Any] = {
            "me": os.getpid(), "pids": [first.pid, second.pid], "mark": cluster.mark(0),
            "server_threads": len(os.listdir(f"/proc/{server.pid}/task")),
        }
        client = await cluster.client(2)
        told["engines"] = await call(client[:], about_engine)
        stray = await call(client[0], leave_session)
        first.signal(signal.SIGKILL)
        await wait_until(lambda: first.pid in cluster.exits, "the death is known")
        told["orphans"], told["stray"] = orphans, stray
        # It ends with its engine, even if nobody asks for orphans.
        await wait_until(lambda: proc.start_time(stray) is None or not proc.identify(stray).is_alive(), "stray ended")
        again = await cluster.start(0)
        client = await cluster.client(2)
        told["replaced"] = await call(client[0], os.getpid) == again.pid
        server.signal(signal.SIGSTOP)  # does not answer, and is ended for it
        stopped = await cluster.start(2)
        client = await cluster.client(3)
        told["without_server"] = await call(client[2], os.getpid) == stopped.pid
        told["server_ended"] = not server.is_alive()
        another = await wait_until(lambda: dict(engines.processes()).get("fork server"), "another fork server")
        told["another_server"] = another != server
        told["exits"] = dict(cluster.exits)
        second.signal(signal.SIGKILL)
        await wait_until(lambda: second.pid in cluster.exits, "the death is known")
        return told
    finally:
        told["left"] = await engines.end_all()


async def ids(directory: Path) -> dict[str, Any]:
    """A replacement gets its engine id although the nanny that would have freed it is dead, or stopped."""
    os.environ["FTNB_FORK_SERVER"] = "0"
    cluster = Cluster(directory)
    told: dict[str, Any] = {"ids": []}
    try:
        await cluster.engines.start_controller()
        processes = [await cluster.start(0), await cluster.start(1)]
        client = await cluster.client(2)
        for rank, signum in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
            nanny = _nanny_of(processes[rank].pid)
            os.kill(nanny, signum)
            processes[rank].signal(signal.SIGKILL)
            await wait_until(lambda: processes[rank].pid in cluster.exits, "the death is known")  # noqa: B023
            new = await cluster.start(rank)
            await wait_until(lambda: _pid_at(client, rank) == new.pid, "the replacement has the id")  # noqa: B023
        told["ids"] = client.ids
        return told
    finally:
        told["left"] = await cluster.engines.end_all()


def _pid_at(client: Any, engine_id: int) -> int | None:
    try:
        return client[engine_id].apply_async(os.getpid).get(5) if engine_id in client.ids else None
    except Exception:  # the old engine was asked
        return None


def _nanny_of(pid: int) -> int:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if b"nanny" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    raise AssertionError(f"engine {pid} has no nanny")


async def predecessor(directory: Path) -> dict[str, Any]:
    """Starts two engines, prints what a successor needs, and waits to be killed."""
    cluster = Cluster(directory)
    await cluster.engines.start_controller()
    processes = [await cluster.start(0), await cluster.start(1)]
    await cluster.client(2)
    print(json.dumps({"record": cluster.engines.record(), "pids": [p.pid for p in processes]}), flush=True)
    await asyncio.sleep(600)
    return {}


async def adoption(directory: Path) -> dict[str, Any]:
    """A successor goes on with the engines and the controller of a supervisor that was killed."""
    child = subprocess.Popen([sys.executable, __file__, "predecessor", str(directory)], stdout=subprocess.PIPE, text=True)
    told: dict[str, Any] = {}
    cluster = None
    known: list[proc.ProcessId] = []
    try:
        said = json.loads(await asyncio.to_thread(child.stdout.readline))
        old_server = proc.identify(said["record"]["fork_server"]["pid"])
        known = [proc.identify(pid) for pid in said["pids"]]
        child.kill()
        child.wait()
        await wait_until(lambda: not old_server.is_alive(), "the fork server ends with its supervisor")
        cluster = Cluster(directory, recorded=said["record"])
        engines = cluster.engines
        for process in known:
            engines.watch(process, cluster.exits.__setitem__)
        client = await cluster.client(2)
        told["same_engines"] = await call(client[:], os.getpid) == said["pids"]
        stray = await call(client[1], leave_session)
        # One of the old engines, and the old controller, die.
        engines.controller.signal(signal.SIGKILL)
        await wait_until(lambda: cluster.controller_exits, "the controller's death is known")
        known[1].signal(signal.SIGKILL)
        await wait_until(lambda: known[1].pid in cluster.exits, "the engine's death is known")
        told["status"] = cluster.exits[known[1].pid]
        await engines.restart_controller()
        new = await cluster.start(1)
        await wait_until(lambda: _pid_at(client, 1) == new.pid, "the old client sees the new engine")
        told["pids"] = await call(client[:], os.getpid) == [said["pids"][0], new.pid]
        told["new_client"] = await call((await cluster.client(2))[:], os.getpid) == [said["pids"][0], new.pid]
        told["stray_ended"] = not (process := proc.identify(stray)) or not process.is_alive()
        told["new_server"] = dict(engines.processes()).get("fork server") is not None
        return told
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        told["left"] = await cluster.engines.end_all(known=known) if cluster else None


async def profile(directory: Path) -> dict[str, Any]:
    """Profiles: one that does not exist, one whose launcher starts nothing, and one whose launcher works."""
    told: dict[str, Any] = {}
    try:
        Cluster(directory, "nowhere")
    except ClusterError as error:
        told["nowhere"] = str(error)
    for name in ("nothing", "own"):
        cluster = Cluster(directory, name)
        try:
            await cluster.engines.start_controller()
            told[name] = {"process": await cluster.start(0), "servers": len(cluster.engines.processes())}
            if name == "nothing":
                await wait_until(lambda: 0 in cluster.exits, "the launcher's end is known")  # noqa: B023
                told[name] |= {"exit": cluster.exits[0], "output": cluster.engines.output_of("rank0")}
            else:
                client = await cluster.client(1)
                pid = await call(client[0], os.getpid)
                cluster.engines.watch(proc.identify(pid), cluster.exits.__setitem__, "rank0")
                os.kill(pid, signal.SIGKILL)
                await wait_until(lambda: pid in cluster.exits, "the engine's death is known")  # noqa: B023
        finally:
            told[f"{name}_left"] = await cluster.engines.end_all()
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(globals()[sys.argv[1]](Path(sys.argv[2])))))
