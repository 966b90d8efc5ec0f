"""The run directory: whole lines appended, readable while the run goes on."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO


def new_run_directory(parent: Path, name: str) -> Path:
    """Create and return `parent/name`, or a numbered sibling (`name-2`, …) when that exists already."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _or_remember(method: Callable[..., None]) -> Callable[..., None]:
    """A full disk or a removed directory must not stop the supervisor: what went wrong first is remembered."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any) -> None:
        try:
            method(self, *args)
        except OSError as error:
            self.problem = self.problem or _in_words(error, self.directory)

    return guarded


def _in_words(error: OSError, directory: Path) -> str:
    return f"{error.strerror}: {error.filename or directory}"


class Kept(NamedTuple):
    """What the files hold when they are opened again."""

    events: list[dict[str, Any]]
    metrics: list[dict[str, Any]]


class Recorder:
    """Writes one run's files. Events go to the disk at once, metrics and ledger with the next `flush`.

    `problem`: why something could not be written, in words, or None.
    """

    def __init__(self, directory: Path, problem: str | None = None) -> None:
        self.directory = directory
        self.problem = problem
        self._logs: dict[int, TextIO] = {}
        if problem is not None:  # there is nothing to write to
            nowhere = Path(os.devnull)
            self._events = nowhere.open("ab", buffering=0)
            self._metrics, self._ledger = nowhere.open("a"), nowhere.open("a")
            return
        (directory / "logs").mkdir(exist_ok=True)
        self._events = (directory / "events.jsonl").open("ab", buffering=0)
        self._metrics = self._open("metrics.jsonl")
        self._ledger = self._open("ledger.jsonl")

    @classmethod
    def reopen(cls, directory: Path, events_size: int, pending: list[dict[str, Any]]) -> tuple[Recorder, Kept]:
        """Go on with files whose writer was killed in the middle of anything.

        `events_size` and `pending`: how long the events file was, and which events were about to be written. Half
        lines are cut off, and metrics and ledger to the same number of lines: the ranks keep what is missing.
        Files that are gone or that somebody has changed are a `problem` of this run, and must be nobody else's.
        """
        try:
            return cls._reopen(directory, events_size, pending)
        except OSError as error:
            return cls(directory, _in_words(error, directory)), Kept([], [])
        except ValueError as error:
            return cls(directory, f"{directory} holds lines that ftnb has not written: {error}"), Kept([], [])

    @classmethod
    def _reopen(cls, directory: Path, events_size: int, pending: list[dict[str, Any]]) -> tuple[Recorder, Kept]:
        events = _whole_lines(directory / "events.jsonl", events_size)
        metrics, ledger = (_whole_lines(directory / f"{name}.jsonl") for name in ("metrics", "ledger"))
        rows = min(len(metrics), len(ledger))
        for name, lines in (("metrics", metrics), ("ledger", ledger)):
            with contextlib.suppress(FileNotFoundError):
                os.truncate(directory / f"{name}.jsonl", sum(map(len, lines[:rows])))
        with contextlib.suppress(FileNotFoundError):
            os.truncate(directory / "events.jsonl", sum(map(len, events)))
        recorder = cls(directory)
        for event in pending:
            recorder.event(event)
        kept = Kept([*map(json.loads, events), *pending], [json.loads(line) for line in metrics[:rows]])
        return recorder, kept

    @property
    def events_size(self) -> int:
        """Bytes in the events file."""
        try:
            return os.fstat(self._events.fileno()).st_size
        except (OSError, ValueError):  # closed: the run is over, nothing is added any more
            return (self.directory / "events.jsonl").stat().st_size if self.directory.exists() else 0

    def _open(self, name: str) -> TextIO:
        return open(self.directory / name, "a", encoding="utf-8", errors="backslashreplace")

    @_or_remember
    def write_run(self, run: dict[str, Any]) -> None:
        temporary = self.directory / ".run.json"
        temporary.write_text(json.dumps(run, indent=1), encoding="utf-8")
        os.replace(temporary, self.directory / "run.json")

    @_or_remember
    def event(self, event: dict[str, Any]) -> None:
        self._events.write((json.dumps(_finite(event)) + "\n").encode())

    @_or_remember
    def step(self, metrics: dict[str, Any], ledger: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(metrics) + "\n")
        self._ledger.write(json.dumps(ledger) + "\n")

    @_or_remember
    def log(self, rank: int, when: float, text: str) -> None:
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = self._open(f"logs/rank-{rank}.log")
        stamp = time.strftime("%H:%M:%S", time.localtime(when))
        log.write(f"{stamp} {text}\n")

    @_or_remember
    def flush(self) -> None:
        self._metrics.flush()
        self._ledger.flush()
        for log in self._logs.values():
            log.flush()

    def close(self) -> None:
        self.flush()
        for file in (self._events, self._metrics, self._ledger, *self._logs.values()):
            with contextlib.suppress(OSError):
                file.close()


def _whole_lines(path: Path, limit_bytes: int | None = None) -> list[bytes]:
    try:
        data = path.read_bytes()[:limit_bytes]
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value
