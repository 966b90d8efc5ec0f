"""A supervisor that answers from a script, for tests of the client side that need no cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from ftnb.errors import ClusterError, RunError


class FakeConnection:
    """Stands in for `ClientConnection`: `answers[op]` is a result, an exception, or a function."""

    def __init__(self, name: str = "default", num_ranks: int = 4, **answers: Any) -> None:
        self.connection = SimpleNamespace(name=name)
        self.supervisor_pid = 4242
        self.token = "of no real cluster"
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.alive = True
        self.lock = threading.Lock()
        ranks = [
            {"rank": k, "engine": k, "pid": 100 + k, "host": "box", "state": "idle", "step": None,
             "heartbeat_age_s": 0.05, "phi": 0.0}
            for k in range(num_ranks)
        ]  # fmt: skip
        status = {"supervisor_pid": 4242, "state": "idle", "generation": 0, "world_size": num_ranks,
                  "run": None, "ranks": ranks}  # fmt: skip
        self.answers = {
            "hello": {"name": name, "num_ranks": num_ranks, "ipp_file": "nowhere.json", "state": "idle"},
            "status": status,
            "run_info": RunError("no run yet"),
            "stop_cluster": self._end,
        } | answers

    def request(self, op: str, timeout_s: float | None = 30.0, **args: Any) -> dict[str, Any]:
        with self.lock:
            self.asked.append((op, args))
        if not self.alive:
            raise ClusterError("The supervisor is gone.")
        answer = self.answers[op]
        if isinstance(answer, BaseException):
            raise answer
        return answer(**args) if callable(answer) else answer

    def ops(self) -> list[str]:
        return [op for op, _ in self.asked]

    def sent(self, op: str) -> dict[str, Any]:
        return next(args for name, args in reversed(self.asked) if name == op)

    def supervisor_alive(self) -> bool:
        return self.alive

    @property
    def usable(self) -> bool:
        return self.alive

    def expect_end(self) -> None:
        pass

    def kill_supervisor(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _end(self) -> dict[str, Any]:
        self.alive = False
        return {}


def run_info(
    state: str = "running", name: str = "run", directory: str = "ftnb_runs/run", **more: Any
) -> dict:
    return {
        "run": name, "directory": directory, "state": state, "step": 50, "total_steps": 200, "epoch": 2,
        "loss": 0.25, "steps_per_s": 100.0, "generation": 1, "world_size": 4, "num_ranks": 4,
        "global_batch": 32, "samples": 1600, "failures": 0, "elapsed_s": 0.5, "eta_s": 1.5, "goodput": 0.97,
        "ranks": [], "recent": [], "error": None, "reason": "",
    } | more  # fmt: skip
