"""The supervisor's half of the fork server: keeps `ftnb.rank.forkserver` running and asks it for engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftnb.wire import proc

log = logging.getLogger("ftnb.forkserver")

READY_TIMEOUT_S = 60.0  # importing torch from a cold disk
PATIENCE_S = 15.0  # for so long an engine waits for a server that is being started, and then does without
ANSWER_TIMEOUT_S = 2.0  # a fork takes 0.02 s, but on a busy machine it may wait for its turn
FIRST_PAUSE_S = 1.0  # before it is started again; doubled with each failure
MAX_FAILURES = 5  # in a row; from then on engines are started in the plain way
HEALTHY_S = 60.0  # a server that lived for so long does not count as a failure
_ROOM = "x" * 16_384  # see `show_as` in ftnb.rank.forkserver


class ForkServer:
    """One fork server process at a time, started again when it ends.

    `watch(process, on_exit)` is how the supervisor waits for its children.
    """

    def __init__(
        self, environment: dict[str, str], output: Path,
        watch: Callable[[proc.ProcessId, Callable[[int, int | None], None]], None],
    ) -> None:
        self._environment, self._output, self._watch = environment, output, watch
        self.process: proc.ProcessId | None = None
        self.pending = 0  # forks that are being made: the engine is there before its pid is known here
        self.given_up = False
        self._decided = asyncio.Event()  # ready to fork, or known not to be
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._keeper: asyncio.Task[None] | None = None

    def start(self, delay_s: float = 0.0) -> None:
        """Start it in the background."""
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._keep(delay_s))

    @property
    def ready(self) -> bool:
        return self._writer is not None

    async def fork(
        self, argv: list[str], environment: dict[str, str], cwd: str, output: Path
    ) -> proc.ProcessId | None:
        """A forked engine; None when there is no fork server, and the engine is to be started in another way.

        A server that is still importing is waited for: an engine of its own would be no quicker with the same imports.
        """
        if self._keeper is None:
            return None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._decided.wait(), PATIENCE_S)
        if self._writer is None:
            return None
        self._count += 1
        number = self._count
        request = {
            "id": number, "argv": argv, "environment": environment, "cwd": cwd, "output": str(output)
        }
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self.pending += 1
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            answer = await asyncio.wait_for(future, ANSWER_TIMEOUT_S)
        except TimeoutError:
            log.warning("the fork server (pid %s) does not answer: ended", self.process and self.process.pid)
            if self.process is not None:
                self.process.signal(signal.SIGKILL)  # works on a stopped one, too
            return None
        finally:
            self.pending -= 1
            self._answers.pop(number, None)
        if "pid" not in answer:
            log.warning("the fork server made no engine: %s", answer.get("error", "it has ended"))
            return None
        return proc.identify(answer["pid"])

    def close(self) -> None:
        """End it, for good."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self.process is not None:
            self.process.signal(signal.SIGKILL)

    async def _keep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        failures = 0
        while True:
            began = time.monotonic()
            try:
                words = await self._run_once()
            except OSError as error:
                words = f"it could not be started: {error}"
            finally:
                self._writer = self.process = None
                self._decided.set()
                for future in self._answers.values():
                    if not future.done():
                        future.set_result({})
            failures = 1 if time.monotonic() - began > HEALTHY_S else failures + 1
            if self.given_up or failures >= MAX_FAILURES:
                self.given_up = True
                log.error("no fork server (%s; failures: %d): engines are started without it", words, failures)
                return
            pause_s = FIRST_PAUSE_S * 2 ** (failures - 1)
            log.warning("the fork server has ended (%s); it is started again in %g s", words, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> str:
        """Start a server and hand its answers on until it ends; returns how it ended."""
        self._decided.clear()
        ours, theirs = socket.socketpair()
        try:
            with theirs, open(self._output, "ab") as output:
                child = subprocess.Popen(
                    # The last argument is room for the longer command line of an engine.
                    [sys.executable, "-P", "-m", "ftnb.rank.forkserver", str(theirs.fileno()), "-" * 200],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()],
                    env={**os.environ, **self._environment, "FTNB_ROOM": _ROOM, "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        self.process = proc.identify(child.pid)
        assert self.process is not None  # not waited for yet, so at least a zombie is there
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        def on_exit(pid: int, status: int | None) -> None:
            child.returncode = status if status is not None else 0
            if not ended.done():
                ended.set_result(status)

        self._watch(self.process, on_exit)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            problem = await self._hand_on(reader, writer)
        finally:
            writer.close()
            self._writer = None
            self.process.signal(signal.SIGKILL)
        words = proc.describe_exit(await ended)[1]
        return f"{problem}; {words}" if problem else words

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        try:
            first = await asyncio.wait_for(reader.readline(), READY_TIMEOUT_S)
        except TimeoutError:
            return f"it was not ready within {READY_TIMEOUT_S:g} s"
        if not first:
            return self._last_output()
        said = json.loads(first)
        if not said["ready"]:
            self.given_up = True  # trying again would not change it
            return said["problem"]
        self._writer = writer
        self._decided.set()
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                answer = json.loads(line)
                future = self._answers.get(answer["id"])
                if future is not None and not future.done():
                    future.set_result(answer)
                elif pid := answer.get("pid"):
                    log.warning("engine %d came too late: ended", pid)
                    if (process := proc.identify(pid)) is not None:
                        process.signal(signal.SIGKILL)
        return None

    def _last_output(self) -> str | None:
        with contextlib.suppress(OSError):
            lines = self._output.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else None
        return None
