"""Starting and ending the processes of one cluster: ipyparallel's controller, the fork server, and the engines.

Engines are children of the supervisor, which waits for them itself (by pidfd): so it knows of a death, with its exit
status, within milliseconds. Those of a supervisor that was killed are watched in the same way, without the status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftnb.supervisor import family
from ftnb.supervisor.controller import Controller
from ftnb.supervisor.forkserver import ForkServer
from ftnb.wire import proc

if TYPE_CHECKING:
    from ftnb.supervisor.profiles import Profile

log = logging.getLogger("ftnb.engines")

OnExit = Callable[[int, "int | None"], None]
OUTPUTS_KEPT = 50  # of engines that have ended
AFTER_DEATH_S = 0.1  # the recovery of the others comes first: it needs these milliseconds more
REMAINS_TIMEOUT_S = 2.0
# A process that cannot be killed must not keep its replacement from being started.
END_OF_FORMER_S = 3.0
# By default an engine ends 30 s after its controller. Here the agent decides that, by the supervisor's word.
_ENGINE_ARGS = ["--IPEngine.max_heartbeat_misses=0", "--IPEngine.timeout=30"]


@dataclass
class _Engine:
    """What is known of the engine that was started last for a key. `token` is in its environment, and its nanny's."""

    engine_id: int
    token: str
    pid: int | None = None
    started: str | None = None
    replaced: bool = False  # its id belongs to another one


class Engines:
    """The local processes of one cluster.

    With `recorded` (what `record` of an earlier supervisor has returned) its cluster is taken over; engines that live
    are then to be watched by `watch`.
    """

    def __init__(
        self, cluster_dir: Path, profile: str | None, environment: dict[str, str], *,
        recorded: dict[str, Any] | None = None,
    ) -> None:
        self._environment = environment
        self.cluster_id = recorded["cluster_id"] if recorded else f"ftnb-{os.getpid()}-{time.time_ns() // 1_000_000}"
        # Every process of the cluster has it in its environment.
        self._token = environment.get("FTNB_CLUSTER", self.cluster_id)
        self._mark = f"FTNB_CLUSTER={self._token}"
        self._private_dir = cluster_dir / "profile"
        self._log_dir = self._private_dir / "log"
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._profile: Profile | None = None
        if profile:
            from ftnb.supervisor.profiles import Profile

            self._profile = Profile(profile, self.cluster_id)
        self.on_controller_exit: Callable[[str], None] = lambda words: log.error("the controller has ended: %s", words)
        self._watched: dict[int, OnExit] = {}
        self._engines: dict[str, _Engine] = {}
        self._dead: deque[str] = deque()  # keys of engines that have ended
        self._sign_offs: dict[int, asyncio.Task[None]] = {}
        self._adopted = recorded is not None
        self._controller_changes = asyncio.Lock()
        self._controller = Controller(
            self.cluster_id, self._profile.directory if self._profile else self._private_dir, self._private_dir,
            {"FTNB_CLUSTER": self._token}, self.watch, lambda words: self.on_controller_exit(words),
            self._profile.controller_args if self._profile else ["--ip=127.0.0.1"],
        )
        self._forks = ForkServer({**environment, "FTNB_CLUSTER": self._token}, self._log_dir / "forkserver.log",
                                 self.watch)  # fmt: skip
        family.adopt_orphans()
        if recorded is not None:
            self._take_over(recorded)

    def _take_over(self, recorded: dict[str, Any]) -> None:
        self._engines = {key: _Engine(**fields) for key, fields in recorded["engines"].items()}
        if process := _process(recorded["fork_server"]):
            process.signal(signal.SIGKILL)  # it ends by itself when it can no longer be asked, unless it is stopped
        if process := _process(recorded["controller"]):
            self._controller.adopt(process)
        self._start_fork_server(delay_s=1.0)  # first things first: its imports take a core for two seconds

    def record(self) -> dict[str, Any]:
        """What a successor needs to take this cluster over, ready for JSON."""
        return {
            "cluster_id": self.cluster_id, "profile": self._profile.name if self._profile else None,
            "profile_dir": str(self._controller.profile_dir), "client_file": self.client_file,
            "controller": _fields(self._controller.process), "fork_server": _fields(self._forks.process),
            "engines": {key: asdict(engine) for key, engine in self._engines.items()},
        }

    def processes(self) -> list[tuple[str, proc.ProcessId]]:
        """What runs besides the engines: (what it is, which process)."""
        named = [("controller", self._controller.process), ("fork server", self._forks.process)]
        return [(name, process) for name, process in named if process is not None]

    # --- controller

    async def start_controller(self) -> None:
        """Start the controller (and, beside it, the fork server); raises `ClusterError`."""
        self._start_fork_server()
        await self._controller.start()

    async def restart_controller(self) -> None:
        """Start another controller in the place of the one that has ended; engines and clients come back to it."""
        async with self._controller_changes:
            await self._controller.restart()
            # It has not been told of those that died while it was dead itself.
            living = {e.engine_id for e in self._engines.values() if (p := _process(asdict(e))) is None or p.is_alive()}
            for engine_id in (await self._controller.engine_ids() or {}).keys() - living:
                await self._controller.sign_off(engine_id)

    @property
    def client_file(self) -> str:
        """ipyparallel's connection file for clients."""
        return str(self._controller.file("client"))

    @property
    def controller(self) -> proc.ProcessId | None:
        return self._controller.process

    def _start_fork_server(self, delay_s: float = 0.0) -> None:
        if not self.own_launcher and os.environ.get("FTNB_FORK_SERVER") != "0":
            self._forks.start(delay_s)

    # --- engines

    async def start_engine(
        self, key: str, engine_id: int, environment: dict[str, str], on_exit: OnExit
    ) -> proc.ProcessId | None:
        """Start an engine; `on_exit(pid, status)` is called when it ends.

        None when a profile's own launcher starts it: the engine's agent tells its pid, and `watch` is to be called. If
        the launcher's command ends, `on_exit(0, exit code)` is called.
        """
        await self._free(engine_id)
        token = uuid.uuid4().hex
        output = self._output_file(key)
        engine = self._engines[key] = _Engine(engine_id, token)
        whole = {
            **self._environment, **environment, "FTNB_CLUSTER": self._token, "FTNB_ENGINE": token,
            "IPP_CLUSTER_ID": self.cluster_id, "IPP_PROFILE_DIR": str(self._controller.profile_dir),
            "IPP_CONNECTION_INFO": self._controller.for_engines(),
        }
        args = [f"--IPEngine.id={engine_id}", *_ENGINE_ARGS]
        if self._profile is not None and self._profile.has_launcher:
            await self._profile.start_engine(key, args, whole, partial(on_exit, 0))
            return None
        argv = [sys.executable, "-P", "-m", "ftnb.rank.engine", *args]
        process = await self._forks.fork(argv, {**os.environ, **whole}, os.getcwd(), output)
        if process is None:
            with open(output, "ab") as stream:
                child = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env={**os.environ, **whole},
                    start_new_session=True,
                )
            process = proc.identify(child.pid)
            assert process is not None
            child.returncode = 0  # it is waited for by `watch`; Popen itself must not
        engine.pid, engine.started = process.pid, process.started
        self.watch(process, on_exit)
        return process

    @property
    def own_launcher(self) -> bool:
        """Whether a profile's launcher starts the engines, so that their pids are not known at first."""
        return self._profile is not None and self._profile.has_launcher

    def discard(self, key: str) -> None:
        """End an engine whose start was not completed by an earlier supervisor: nobody has noted its pid."""
        if (engine := self._engines.pop(key, None)) is not None:
            for process in self._marked(f"FTNB_ENGINE={engine.token}"):
                process.signal(signal.SIGKILL)

    def watch(self, process: proc.ProcessId, on_exit: OnExit, key: str | None = None) -> None:
        """Call `on_exit(pid, status)` when the process ends; status is None for one that is no child of ours.

        `key` says which engine it is, when `start_engine` could not tell the pid.
        """
        loop = asyncio.get_running_loop()
        if key is not None and (engine := self._engines.get(key)) is not None:
            engine.pid, engine.started = process.pid, process.started
        if process.pid in self._watched:
            return  # it said hello before the fork server's word of it had been read
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            loop.call_soon(self._gone, process.pid, None, on_exit)
            return
        if proc.start_time(process.pid) != process.started:  # another process by now
            os.close(fd)
            loop.call_soon(self._gone, process.pid, None, on_exit)
            return
        self._watched[process.pid] = on_exit

        def ended() -> None:
            loop.remove_reader(fd)
            status: int | None = None
            with contextlib.suppress(ChildProcessError):
                result = os.waitid(os.P_PIDFD, fd, os.WEXITED)
                if result is not None:
                    status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            os.close(fd)
            self._watched.pop(process.pid, None)
            self._gone(process.pid, status, on_exit)

        loop.add_reader(fd, ended)

    def _gone(self, pid: int, status: int | None, on_exit: OnExit) -> None:
        on_exit(pid, status)  # first of all: a recovery begins with it
        for engine in list(self._engines.values()):
            if engine.pid == pid:
                task = asyncio.ensure_future(self._sign_off(engine))
                self._sign_offs[engine.engine_id] = task
                task.add_done_callback(partial(self._signed_off, engine))

    async def _sign_off(self, engine: _Engine) -> None:
        """End what a dead engine has left, and tell the controller that it is gone.

        Its nanny would do that, too, unless it was killed or stopped. It is ended here, because a late word of it
        would sign off the replacement, to which the id belongs by then.
        """
        await asyncio.sleep(AFTER_DEATH_S)
        deadline = time.monotonic() + REMAINS_TIMEOUT_S
        while self._end_remains(engine) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if not engine.replaced:
            await self._controller.sign_off(engine.engine_id)

    def _end_remains(self, engine: _Engine) -> bool:
        told = False
        for process in self._marked(f"FTNB_ENGINE={engine.token}"):
            told = process.signal(signal.SIGKILL) or told
        if proc.start_time(engine.pid) is None:  # else the pid is another process's by now
            told = bool(proc.kill_session(engine.pid)) or told
        return told

    def _signed_off(self, engine: _Engine, task: asyncio.Task[None]) -> None:
        if self._sign_offs.get(engine.engine_id) is task:
            del self._sign_offs[engine.engine_id]
        if task.cancelled():
            return
        if error := task.exception():
            log.error("engine %d could not be signed off", engine.engine_id, exc_info=error)
        for key in [key for key, known in self._engines.items() if known is engine]:
            del self._engines[key]
            # Its last words can be read for a while; a cluster that lives long does not keep all of them.
            self._dead.append(key)
            while len(self._dead) > OUTPUTS_KEPT:
                old = self._dead.popleft()
                if old not in self._engines and old not in self._dead:
                    self._output_file(old).unlink(missing_ok=True)

    async def _free(self, engine_id: int) -> None:
        """Wait until the controller has forgotten an earlier engine of this id; else the new one would get another.

        A rank that was found to hang is replaced while it is being killed: before it has ended, and has been signed off
        with its nanny, a sign-off would hit the new engine.
        """
        former = [engine for engine in self._engines.values() if engine.engine_id == engine_id and engine.pid]
        deadline = time.monotonic() + END_OF_FORMER_S
        while any(engine in self._engines.values() for engine in former) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for engine in former:
            engine.replaced = True
        async with self._controller_changes:  # not in the middle of a restart, which has to forget the dead ones itself
            known = await self._controller.engine_ids()
            if known is not None and engine_id in known and not await self._controller.sign_off(engine_id):
                log.warning("the controller does not give engine id %d free; the engine will get another", engine_id)

    def output_of(self, key: str, chars: int = 2000) -> str:
        """The end of what the engine's process (or its launcher's command) wrote to its own stdout and stderr."""
        if self._profile is not None and self._profile.has_launcher:
            return self._profile.output_of(key, chars)
        with contextlib.suppress(OSError), open(self._output_file(key), "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - chars))
            return stream.read().decode(errors="replace")
        return ""

    def _output_file(self, key: str) -> Path:
        return self._log_dir / f"{key}.log"

    # --- what is left when a process dies

    def orphans(self, mark: str) -> list[proc.ProcessId]:
        """Processes without a parent of their own whose environment holds `mark`, other than engines and nannies.

        They have become children of the supervisor (of init, if an earlier supervisor had started their rank).
        """
        starting = {f"FTNB_ENGINE={e.token}".encode() for e in self._engines.values() if e.pid is None}
        return [p for p in self._marked(mark, starting) if p.pid not in self._watched and not family.is_nanny(p.pid)]

    def _marked(self, mark: str, but_not: Collection[bytes] = ()) -> list[proc.ProcessId]:
        """Processes without a parent of their own that have `mark` in their environment."""
        found = []
        for pid in family.all_pids() if self._adopted else family.children():
            entries = proc.environment_of(pid)
            if mark.encode() not in entries or any(entry in but_not for entry in entries):
                continue
            # After an adoption they are not our children: init's, or those of another process that collects orphans.
            if self._adopted and self._has_parent_in_cluster(pid):
                continue
            if (process := proc.identify(pid)) and process.is_alive():
                found.append(process)
        return found

    def _has_parent_in_cluster(self, pid: int) -> bool:
        parent = proc.parent(pid)
        return parent not in (None, os.getpid()) and self._mark.encode() in proc.environment_of(parent)

    def reap_orphans(self) -> None:
        """Collect adopted processes that have ended (a dead rank's nanny or workers); watched ones are left alone."""
        if self._forks.pending:
            return  # an engine that has just been forked, and has died already, may not be known yet
        not_ours = self._profile.waited_for() if self._profile else set()
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if result is None or result.si_pid in self._watched or result.si_pid in not_ours:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(result.si_pid, os.WNOHANG)

    async def end_all(
        self, polite_s: float = 0.5, limit_s: float = 5.0, known: Iterable[proc.ProcessId] = ()
    ) -> list[int]:
        """End every process of the cluster; returns the pids that are still there after `limit_s`.

        Those are: what descends from this process (orphans are adopted, see `family`), the processes of `known`
        with their sessions, and whatever carries the cluster's mark in its environment, since after an adoption what
        the ranks had started descends from init. The ranks have been asked to exit before.
        """
        began = time.monotonic()
        self._forks.close()
        for task in list(self._sign_offs.values()):
            task.cancel()
        recorded = [_process(asdict(engine)) for engine in self._engines.values()]
        engines = [process for process in [*recorded, *known] if process is not None]
        services = {process.pid for _, process in self.processes()}
        left: list[proc.ProcessId] = []
        while True:
            self.reap_orphans()
            left = self._left(engines)
            if not left and not self._watched:  # all have ended, and their exit statuses are collected
                break
            passed_s = time.monotonic() - began
            if passed_s >= limit_s:
                break
            if passed_s >= polite_s or not self._watched.keys() - services:
                for process in left:
                    process.signal(signal.SIGKILL)
            await asyncio.sleep(0.02)
        self._controller.close()
        self._controller.remove_files()
        shutil.rmtree(self._private_dir, ignore_errors=True)
        return [process.pid for process in left]

    def _left(self, engines: list[proc.ProcessId]) -> list[proc.ProcessId]:
        found: set[proc.ProcessId | None] = set(family.descendants())
        mark, me = self._mark.encode(), os.getpid()
        sessions = {engine.pid for engine in engines if proc.start_time(engine.pid) in (None, engine.started)}
        for pid in family.all_pids():
            with contextlib.suppress(OSError):
                if pid != me and (os.getsid(pid) in sessions or mark in proc.environment_of(pid)):
                    found.add(proc.identify(pid))
        found.update(engines)
        return [process for process in found if process is not None and process.is_alive()]


def _fields(process: proc.ProcessId | None) -> dict[str, Any] | None:
    return None if process is None else {"pid": process.pid, "started": process.started}


def _process(fields: dict[str, Any] | None) -> proc.ProcessId | None:
    return None if fields is None or fields["pid"] is None else proc.ProcessId(fields["pid"], fields["started"])
