"""Starting and ending the ipyparallel cluster: one controller, and one engine set per rank.

A set of its own makes every per-set call a per-rank call. Engines are children of the supervisor, which
waits for them itself (by pidfd): so it knows of a death, with its exit status, within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster.cluster import Cluster
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher

from ftnb.errors import ClusterError
from ftnb.wire import proc

log = logging.getLogger("ftnb.engines")

_PR_SET_CHILD_SUBREAPER = 36
# The hub lets an engine in on its heartbeat tick: a short period makes that quick. Deaths are reported by the
# engine's nanny, so the number of misses is generous: a busy machine must not cost an engine its registration.
_CONTROLLER_ARGS = [
    "--HeartMonitor.period=100", "--HeartMonitor.max_heartmonitor_misses=600", "--IPController.enable_curve=True",
]


class _Launcher(LocalEngineLauncher):
    """Starts an engine; who waits for its exit status is the supervisor, not a thread of ipyparallel."""

    def _start_waiting(self) -> None:
        pass


class _SetLauncher(LocalEngineSetLauncher):
    launcher_class = _Launcher


class Engines:
    """The local processes of one cluster."""

    def __init__(self, cluster_dir: Path, profile: str | None, environment: dict[str, str]) -> None:
        self._environment = environment
        self._profile_dir: Path | None = None
        kwargs: dict[str, Any] = {}
        if profile:
            kwargs["profile"] = profile
        else:
            self._profile_dir = cluster_dir / "profile"
            for folder in ("", "log", "security", "pid", "startup"):
                (self._profile_dir / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
            kwargs["profile_dir"] = str(self._profile_dir)
        self.cluster = Cluster(
            cluster_id=f"ftnb-{os.getpid()}-{time.time_ns() // 1_000_000}", controller_ip="127.0.0.1",
            engine_launcher_class=_SetLauncher, shutdown_atexit=False, cluster_file="",
            controller_args=_CONTROLLER_ARGS, log_level=logging.WARNING, **kwargs,
        )
        self._rank_pids: set[int] = set()
        _adopt_orphans()

    async def start_controller(self) -> None:
        await self.cluster.start_controller()
        try:
            await asyncio.wait_for(self.cluster.controller.get_connection_info(), 30)
        except (TimeoutError, RuntimeError) as error:
            output = self.cluster.controller.get_output()[-2000:]
            raise ClusterError(f"ipyparallel's controller did not start: {error}\n{output}") from None

    @property
    def client_file(self) -> str:
        """ipyparallel's connection file for clients."""
        return self.cluster.controller.connection_files["client"]

    @property
    def controller(self) -> proc.ProcessId | None:
        return proc.identify(self.cluster.controller.pid)

    async def start_rank(
        self, rank: int, environment: dict[str, str], on_exit: Callable[[int, int, int | None], None]
    ) -> int:
        """Start the engine of `rank` and return its pid; `on_exit(rank, pid, status)` is called when it ends."""
        engine_set = f"rank{rank}"
        self.cluster.engines.pop(engine_set, None)
        await self.cluster.start_engines(
            n=1, engine_set_id=engine_set, engine_cmd=[sys.executable, "-m", "ftnb.rank.engine"],
            engine_args=[f"--IPEngine.id={rank}"],
            environment={**self._environment, **environment},
        )
        launcher = self.cluster.engines[engine_set].launchers["0"]
        pid = launcher.pid
        self._rank_pids.add(pid)
        self._watch(rank, pid, on_exit, launcher)
        return pid

    def _watch(self, rank: int, pid: int, on_exit: Callable[[int, int, int | None], None], launcher: Any) -> None:
        fd = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(fd)
            status: int | None = None
            with contextlib.suppress(ChildProcessError):
                result = os.waitid(os.P_PIDFD, fd, os.WEXITED)
                if result is not None:
                    status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            os.close(fd)
            self._rank_pids.discard(pid)
            launcher._popen_process.returncode = status if status is not None else 0
            on_exit(rank, pid, status)

        loop.add_reader(fd, gone)

    def output_of(self, rank: int, chars: int = 2000) -> str:
        """The end of what the engine's process wrote to its own stdout and stderr."""
        engine_set = self.cluster.engines.get(f"rank{rank}")
        launcher = engine_set.launchers.get("0") if engine_set is not None else None
        if launcher is None:
            return ""
        with contextlib.suppress(OSError):
            return Path(launcher.output_file).read_text(errors="replace")[-chars:]
        return ""

    def orphans(self, mark: str) -> list[proc.ProcessId]:
        """Adopted processes (children that are neither ranks nor the controller) whose environment holds `mark`.

        Engines' nannies carry it as well; they are left alone, they tell the controller of the engine's death.
        """
        found = []
        own = self._rank_pids | {self.cluster.controller.pid}
        for pid in _children():
            with contextlib.suppress(OSError):
                if pid not in own and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    nanny = b"ipyparallel.engine.nanny" in Path(f"/proc/{pid}/cmdline").read_bytes()
                    if not nanny and (process := proc.identify(pid)) and process.is_alive():
                        found.append(process)
        return found

    def reap_orphans(self) -> None:
        """Collect adopted processes that have ended (a dead rank's nanny or workers); ranks are left alone."""
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if result is None or result.si_pid in self._rank_pids:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(result.si_pid, os.WNOHANG)

    async def end_all(self, polite_s: float = 0.5, limit_s: float = 5.0) -> list[int]:
        """End every process that descends from this one; returns the pids that are still there after `limit_s`.

        Orphans are adopted (see `_adopt_orphans`), so descendants are all that ftnb ever started here: engines,
        nannies, controller, DataLoader workers. The ranks have been asked to exit before.
        """
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            self.reap_orphans()
            left = _descendants()
            if not left and not self._rank_pids:  # all have ended, and their exit statuses are collected
                break
            if time.monotonic() - began >= polite_s or not any(p.pid in self._rank_pids for p in left):
                for process in left:
                    process.signal(signal.SIGKILL)
            await asyncio.sleep(0.02)
        if self._profile_dir is not None:
            shutil.rmtree(self._profile_dir, ignore_errors=True)
        return [p.pid for p in _descendants()]


def _children() -> list[int]:
    """Pids of this process's children, adopted ones included; cheap, since it is asked in every recovery."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids += map(int, (task / "children").read_text().split())
    return pids


def _descendants() -> list[proc.ProcessId]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and (process := proc.identify(child.pid)):
                found.append(process)
    return found


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (prctl PR_SET_CHILD_SUBREAPER, Linux).

    Without it, what a killed rank had started would move to init and out of sight.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        log.warning("this system cannot adopt orphans; what a killed rank had started is found by its session alone")
