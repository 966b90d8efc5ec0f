"""The supervisor's office: what it keeps on record for a successor, its sign of life, and who else is kept alive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ftnb
from ftnb.errors import ClusterError
from ftnb.supervisor import guardian
from ftnb.supervisor.adoption import CLUSTER_FILE, JOB_FILE, RUN_FILE
from ftnb.wire import paths, proc, records
from ftnb.wire.reaper import BEAT_NAME

if TYPE_CHECKING:
    from ftnb.supervisor.runs import ActiveRun
    from ftnb.supervisor.server import Supervisor

log = logging.getLogger("ftnb.office")

BEAT_EVERY_S = 1.0
# How much longer than the linger time a supervisor may be silent (stopped, or replaced) before the guardian ends all.
GUARDIAN_EXTRA_S = 15.0
# Pauses before each try to start a lost controller again. One that is lost again soon does not begin with the first.
CONTROLLER_PAUSES_S = (0.0, 1.0, 5.0, 20.0)
SOON_S = 60.0


class Office:
    """Files and helpers of one supervisor in its cluster's directory."""

    def __init__(self, supervisor: Supervisor, directory: Path, token: str) -> None:
        self._supervisor, self.directory, self.token = supervisor, directory, token
        self.records = records.ProcessRecords(directory / records.FILE_NAME, token)
        self.me = proc.identify(os.getpid())
        self.controller_problem = ""
        self._controller_restarts: list[float] = []  # when it was started again (monotonic), within the last SOON_S
        self._restarting = False
        self._noted: set[proc.ProcessId] = set()
        self._guardian: subprocess.Popen | None = None
        self._beat_at = 0.0

    def open(self) -> None:
        """From now on this process is found, and its silence would be noticed."""
        assert self.me is not None
        self.records.note(records.SUPERVISOR, self.me)
        guardian.renew_beat(self.directory)

    def close_to_successors(self) -> None:
        """The cluster is being stopped: from here on nobody shall find it or take it over."""
        for name in ("connection.json", CLUSTER_FILE, BEAT_NAME):
            (self.directory / name).unlink(missing_ok=True)

    def known(self) -> list[proc.ProcessId]:
        """Every process that was ever recorded, but this one."""
        found = [recorded.process for recorded in records.read(self.directory / records.FILE_NAME)]
        return [process for process in found if process != self.me]

    def clear(self) -> None:
        """All is gone: what remains is the log."""
        for name in (RUN_FILE, JOB_FILE, records.FILE_NAME, guardian.OFFICE_NAME):
            (self.directory / name).unlink(missing_ok=True)

    # --- on record

    def save_cluster(self) -> None:
        """Everything that a successor needs, but for the run."""
        supervisor = self._supervisor
        engines, fleet = supervisor.engines, supervisor.fleet
        if supervisor.is_stopping:
            return
        in_charge = {"term": supervisor.term, "supervisor": {"pid": self.me.pid, "started": self.me.started}}
        if supervisor.recorded is not None and (engines is None or supervisor.adoption is not None):
            # Nothing is taken over yet: what the predecessor wrote still holds, except for who it is.
            self._write(CLUSTER_FILE, {**supervisor.recorded, **in_charge, "ports": supervisor.ports})
            return
        for what, process in engines.processes() if engines else []:
            if process not in self._noted:
                self._noted.add(process)
                self.records.note(what, process)
        cluster = {
            "version": ftnb.__version__, "name": supervisor.name, "token": self.token, "state": supervisor.state,
            **in_charge,
            "options": {**supervisor.options, "num_ranks": fleet.num_ranks, "num_spares": fleet.num_spares},
            "keys": supervisor.keys, "ports": supervisor.ports,
            "engines": engines.record() if engines else None, "fleet": fleet.record(),
        }
        self._write(CLUSTER_FILE, cluster)

    def save_job(self, job: dict[str, Any]) -> None:
        """What does not change in a run."""
        (self.directory / RUN_FILE).unlink(missing_ok=True)
        self._write(JOB_FILE, job)

    def save_run(self, run: ActiveRun) -> None:
        """What a successor needs to go on with it."""
        latest = self._supervisor.run
        if run is latest or latest is None or latest.is_over:
            self._write(RUN_FILE, {"name": run.name, **run.record()})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        try:
            paths.write_private(self.directory / name, json.dumps(content))
        except OSError as error:  # a full disk must not stop the training; only adoption would suffer
            log.error("%s cannot be written: %s", name, error)

    # --- who else is kept alive

    def sign_of_life(self) -> None:
        """Once a second: for the guardian, which ends everything when nobody is in charge any more."""
        now = time.monotonic()
        if now - self._beat_at < BEAT_EVERY_S or self._supervisor.is_stopping:
            return
        self._beat_at = now
        with contextlib.suppress(OSError):
            guardian.renew_beat(self.directory)
        if self._guardian is None or self._guardian.poll() is not None:
            if self._guardian is not None:
                log.warning("the guardian is gone (exit status %s); another one is started", self._guardian.returncode)
            environment = {**os.environ, **self._supervisor.environment()}
            self._guardian = guardian.start(self.directory, self._supervisor.linger_s + GUARDIAN_EXTRA_S, environment)
            if (process := proc.identify(self._guardian.pid)) is not None:
                self.records.note(records.GUARDIAN, process)

    def controller_ended(self, words: str) -> None:
        if self._supervisor.is_stopping:
            return
        log.warning("ipyparallel's controller is gone: %s", words)
        if self._restarting:
            return  # one that was just being started; it is tried again anyway
        self.controller_problem = f"ipyparallel's controller is gone ({words}); it is started again."
        self._supervisor.fleet.note(self.controller_problem)
        self._restarting = True
        self._supervisor.spawn(self._restart_controller())

    async def _restart_controller(self) -> None:
        now = time.monotonic()
        self._controller_restarts = [then for then in self._controller_restarts if now - then < SOON_S]
        try:
            await self._try_controllers(min(len(self._controller_restarts), len(CONTROLLER_PAUSES_S) - 1))
        finally:
            self._restarting = False

    async def _try_controllers(self, first: int) -> None:
        engines = self._supervisor.engines
        assert engines is not None
        for pause_s in CONTROLLER_PAUSES_S[first:]:
            await asyncio.sleep(pause_s)
            self._controller_restarts.append(time.monotonic())
            try:
                await engines.restart_controller()
                if engines.controller is None or not engines.controller.is_alive():
                    raise ClusterError("it ended as soon as it had been started")
            except Exception as error:
                log.exception("the controller could not be started again")
                self.controller_problem = (
                    f"ipyparallel's controller is gone and could not be started again ({error}): the training goes on, "
                    "%%px and run.state_dict() do not work."
                )
            else:
                self.controller_problem = ""
                self.save_cluster()
                return
        self._supervisor.fleet.note(self.controller_problem)
