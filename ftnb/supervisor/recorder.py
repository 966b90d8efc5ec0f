"""The run directory: whole lines appended, readable while the run goes on."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO


def new_run_directory(parent: Path, name: str) -> Path:
    """Create and return `parent/name`, or a numbered sibling (`name-2`, …) when that exists already."""
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1


class Recorder:
    """Writes one run's files. Events go to the disk at once, metrics and ledger with the next `flush`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "logs").mkdir(exist_ok=True)
        self._events = self._open("events.jsonl")
        self._metrics = self._open("metrics.jsonl")
        self._ledger = self._open("ledger.jsonl")
        self._logs: dict[int, TextIO] = {}

    def _open(self, name: str) -> TextIO:
        return open(self.directory / name, "a", encoding="utf-8", errors="backslashreplace")

    def write_run(self, run: dict[str, Any]) -> None:
        temporary = self.directory / ".run.json"
        temporary.write_text(json.dumps(run, indent=1), encoding="utf-8")
        os.replace(temporary, self.directory / "run.json")

    def event(self, event: dict[str, Any]) -> None:
        self._events.write(json.dumps(_finite(event)) + "\n")
        self._events.flush()

    def step(self, metrics: dict[str, Any], ledger: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(metrics) + "\n")
        self._ledger.write(json.dumps(ledger) + "\n")

    def log(self, rank: int, when: float, text: str) -> None:
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = self._open(f"logs/rank-{rank}.log")
        stamp = time.strftime("%H:%M:%S", time.localtime(when))
        log.write(f"{stamp} {text}\n")

    def flush(self) -> None:
        self._metrics.flush()
        self._ledger.flush()
        for log in self._logs.values():
            log.flush()

    def close(self) -> None:
        self.flush()
        for file in (self._events, self._metrics, self._ledger, *self._logs.values()):
            file.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value
