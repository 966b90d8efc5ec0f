"""What the scripts of all peers share: the job (a cell that ftnb trains, too) and a line per committed step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

GLOBAL_BATCH = 64
SEED = 0


def build(cell: str) -> dict[str, Any]:
    """The names that the cell defines: model, optimizer, loss_fn, dataset."""
    import torch

    torch.manual_seed(SEED)
    names: dict[str, Any] = {}
    exec(Path(cell).read_text(), names)
    return names


class Log:
    """One line per committed step, written at once, so that nothing of it is lost when the process is killed."""

    def __init__(self, directory: str, rank: int) -> None:
        self._file = open(Path(directory) / f"rank-{rank}.jsonl", "ab", buffering=0)  # noqa: SIM115  (until the end)
        self._pid = os.getpid()

    def committed(self, step: int, world_size: int) -> None:
        line = {"time": time.time(), "step": step, "world_size": world_size, "pid": self._pid}
        self._file.write((json.dumps(line) + "\n").encode())
