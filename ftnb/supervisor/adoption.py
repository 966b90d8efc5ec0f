"""Taking over the cluster of a supervisor that is gone: from the files it kept, and from what its ranks tell.

The ranks have gone on training meanwhile. What they reported and nobody wrote down is still in shared memory; what
they said and nobody heard does not matter, because each of them is asked where it stands. If all is as it is on
record, nothing happens to the training; else the ranks form the next generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftnb.core import protocol
from ftnb.supervisor.runs import ActiveRun
from ftnb.wire import paths, proc, reaper

if TYPE_CHECKING:
    from ftnb.supervisor.ranks import Slot
    from ftnb.supervisor.server import Supervisor

CLUSTER_FILE, JOB_FILE, RUN_FILE = "cluster.json", "run-job.json", "run-state.json"

# How long a rank may take to say where it stands; one that is stopped does not, and is taken as it was on record.
STANDING_TIMEOUT_S = 3.0
LOCK_LIMIT_S = 5.0


class CannotAdopt(Exception):
    """There is nothing to take over, or not in a state in which that is possible."""


class InCharge(Exception):
    """Another supervisor is."""


def take_office(directory: Path, lost: proc.ProcessId | None) -> dict[str, Any]:
    """Become the successor of `lost`: returns its cluster.json, with the lock held and the predecessor ended.

    Raises `InCharge` when another supervisor is at work or being started, `CannotAdopt` when there is nothing to adopt.
    """
    deadline = time.monotonic() + LOCK_LIMIT_S
    if lost is not None and _predecessor(directory) == lost:
        lost.signal(signal.SIGKILL)  # stopped or hung: it must not come back beside the new one
    while open_lock(directory) is None:
        # Held by another successor, or for a moment still by the one that was killed.
        if lost is None or _predecessor(directory) != lost or time.monotonic() > deadline:
            raise InCharge
        time.sleep(0.01)
    try:
        recorded = json.loads((directory / CLUSTER_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CannotAdopt(f"{CLUSTER_FILE} cannot be read: {error}") from None
    if recorded.get("engines") is None or recorded.get("state") != "idle":
        raise CannotAdopt("its start had not been completed")
    return recorded


def open_lock(directory: Path) -> int | None:
    """The cluster's lock, held until this process ends; None when somebody else holds it."""
    path = directory / reaper.LOCK_NAME
    while True:
        paths.make_private_dir(directory)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
        os.close(fd)  # whoever held it has removed it with the directory


def _predecessor(directory: Path) -> proc.ProcessId | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((directory / CLUSTER_FILE).read_text())["supervisor"]
        return proc.ProcessId(found["pid"], found["started"])
    return None


class Adoption:
    """From the first contact with the ranks until the run goes on under the new supervisor."""

    def __init__(self, supervisor: Supervisor, recorded: dict[str, Any]) -> None:
        self._supervisor, self._recorded = supervisor, recorded
        self._standing: dict[str, dict[str, Any]] = {}
        self._deferred: list[tuple[Slot, str, dict[str, Any]]] = []
        self._heard = asyncio.Event()

    def found(self, slot: Slot, message: dict[str, Any]) -> None:
        """A rank has said where it stands."""
        self._standing[slot.key] = message
        self._heard.set()

    def defer(self, slot: Slot, op: str, message: dict[str, Any]) -> None:
        """What a rank says about the run is heard when the run is there."""
        self._deferred.append((slot, op, message))

    async def carry_out(self) -> None:
        supervisor, fleet = self._supervisor, self._supervisor.fleet
        fleet.restore(self._recorded["fleet"])
        fleet.end_retired()
        await self._ask()
        fleet.discard_unborn()
        for slot in fleet.slots():
            if (standing := self._standing.get(slot.key)) is not None:
                slot.phase, slot.host = standing["phase"], standing["host"]
                slot.num_gpus = standing.get("num_gpus", slot.num_gpus)
                slot.torch = standing.get("torch", slot.torch)
        run = supervisor.run = self._restored_run()
        if supervisor.going_run is not None:
            fleet.num_ranks = run.num_ranks  # on record a moment before the fleet's, when it is resized
        for rank, slot in fleet.ranks.items():
            supervisor.tell(slot, "assign", rank=rank)  # again: the word may have been lost with the one before
        supervisor.state = "idle"
        supervisor.adoption = None
        if run is not None and not run.is_over:
            self._go_on(run)
        else:
            for slot in fleet.ranks.values():
                if slot.alive and slot.state != "starting":
                    slot.state = "idle"
                supervisor.tell(slot, "drop")
        for slot in fleet.slots():
            if slot.process is not None and slot not in fleet.retired:
                fleet.watch(slot)
        for slot in list(fleet.pool):
            has_run_cell = slot.loaded is not None or self._standing.get(slot.key, {}).get("run") is not None
            if not has_run_cell:
                continue
            if run is None or run.is_over or slot.loaded != run.name or slot.agent is None:
                # In the middle of running the cell, whose answer may be lost; or of a run that is over; or silent.
                slot.loaded = None
                fleet.kill_slot(slot)
            else:
                run.handle(protocol.SpareReady(slot.intended))
        for slot in list(fleet.pool) + list(fleet.ranks.values()):
            if slot.state == "starting" and self._standing.get(slot.key, {}).get("phase", "starting") != "starting":
                fleet.warm(slot)
        for slot, op, message in self._deferred:
            if supervisor.run is not None and slot.rank is not None:
                supervisor.hear(supervisor.run, slot, op, message)
        supervisor.office.save_cluster()
        if supervisor.going_run is not None:
            fleet.run_began()

    async def _ask(self) -> None:
        """Every living engine that has an agent is asked, by the answer to its next heartbeat."""
        fleet = self._supervisor.fleet
        deadline = time.monotonic() + STANDING_TIMEOUT_S
        while time.monotonic() < deadline:
            self._heard.clear()
            if all(
                slot.key in self._standing or slot.process is None or not slot.process.is_alive()
                for slot in (*fleet.ranks.values(), *fleet.pool)
            ):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), 0.02)

    def _restored_run(self) -> ActiveRun | None:
        directory = self._supervisor.directory
        try:
            job = json.loads((directory / JOB_FILE).read_text())
            record = json.loads((directory / RUN_FILE).read_text())
        except FileNotFoundError:
            return None  # there was none, or it was only being started
        if job["name"] != record["name"]:
            return None
        return ActiveRun(self._supervisor, job, None, record)

    def _go_on(self, run: ActiveRun) -> None:
        fleet = self._supervisor.fleet
        standing, digests = {}, {}
        for rank, slot in list(fleet.ranks.items()):
            if rank not in run.has_run:
                if rank >= fleet.num_ranks:
                    fleet.release((rank,))  # decided before, and perhaps not carried out
                elif slot.process is not None and slot.process.is_alive():
                    fleet.kill_slot(slot)
                continue
            message = self._standing.get(slot.key)
            if message is None or message.get("run") != run.options["name"]:
                continue
            if slot.process is None or not slot.process.is_alive():
                continue
            slot.state = "training" if slot.state == "idle" else slot.state
            standing[rank] = protocol.Standing(message["generation"], message["stage"], message["committed"])
            if message["digest"]:
                digests[rank] = message["digest"]
        before = self._recorded["supervisor"]["pid"]
        run.adopted(
            standing, digests,
            f"A new supervisor (pid {os.getpid()}, term {self._supervisor.term}) is in charge; the one before it "
            f"(pid {before}) is gone.",
        )
