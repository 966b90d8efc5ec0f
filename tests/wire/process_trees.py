"""Small trees of real processes that belong to a made-up cluster, for tests of whoever ends them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftnb.wire import paths, proc, records


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 20.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s:g} s in vain: {what}"
        time.sleep(0.01)
    return value


class Trees:
    """Starts shells and what they start; knows every process by a number in its command line, whatever it does."""

    def __init__(self, directory: Path) -> None:
        self.directory = paths.make_private_dir(directory)
        self.token = secrets.token_hex(8)
        # `sleep` for about a day, a different one in each test.
        self.sleep = f"sleep {80_000 + secrets.randbelow(9_000)}.{secrets.randbelow(10**6):06d}"
        self.records = records.ProcessRecords(directory / records.FILE_NAME, self.token)
        self._started: list[subprocess.Popen] = []

    def start(self, script: str, what: str | None = records.RANK, *, token: str | None = None, count: int = 1) -> proc.ProcessId:
        """Run `script` (SLEEP stands for the sleep of this test) in a session of its own; recorded unless `what` is None.

        Returns once `count` more sleeping processes are there.
        """
        before = len(self.alive())
        popen = subprocess.Popen(
            ["sh", "-c", script.replace("SLEEP", self.sleep)], start_new_session=True, stdin=subprocess.DEVNULL,
            env={**os.environ, records.TOKEN_VARIABLE: self.token if token is None else token},
        )
        self._started.append(popen)
        process = proc.identify(popen.pid)
        assert process is not None
        if what is not None:
            self.records.note(what, process)
        wait_until(lambda: len(self.alive()) >= before + count, f"{count} processes of {script!r} have started")
        return process

    def alive(self) -> set[proc.ProcessId]:
        """Every living `sleep` of this test, by its command line."""
        wanted = self.sleep.replace(" ", "\0").encode() + b"\0"
        found = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cmdline").read_bytes() == wanted:
                    process = proc.identify(int(entry.name))
                    if process is not None and process.is_alive():
                        found.add(process)
        return found

    def end(self) -> None:
        for popen in self._started:
            with contextlib.suppress(ProcessLookupError):
                popen.send_signal(signal.SIGKILL)
            popen.wait()
        wait_until(self._killed, "the processes of the test have ended")

    def _killed(self) -> bool:
        for process in (left := self.alive()):
            process.signal(signal.SIGKILL)
        return not left
