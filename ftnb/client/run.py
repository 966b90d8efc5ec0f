"""One training: watch it, wait for it, disturb it, read its files, fetch its weights."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Generator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftnb.client.faults import check_chaos, check_fault
from ftnb.client.options import refuse_unknown
from ftnb.core.report import Report, build_report
from ftnb.errors import (
    CellError,
    CheckError,
    ClusterError,
    FtnbError,
    NoClusterError,
    RunError,
    UsageError,
)

if TYPE_CHECKING:
    from ftnb.client.session import Session

ENDED = frozenset({"finished", "stopped", "failed"})
# The cluster has ended, or has gone on to another run: what an ended run did still lies on the disk.
_UNKNOWN_THERE = (NoClusterError, ClusterError, RunError)
_REGISTERED_S = 10.0  # how long ipyparallel may take to know a rank that has just joined
_WAIT_SLICE_S = 0.5  # how long the supervisor may hold one `wait` request


class _OnlyTheWaiting:
    """Ctrl-C while waiting has stopped the waiting. Shown in a notebook as one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


class WaitInterrupted(_OnlyTheWaiting, KeyboardInterrupt):
    """The waiting of `run.wait()`."""


class WaitCancelled(_OnlyTheWaiting, asyncio.CancelledError):
    """The waiting of `await run`, which the kernel's event loop cancels."""


class WaitTimeout(TimeoutError):
    """The time of `run.wait(timeout_s=…)` is over, the training is not."""

    def _render_traceback_(self) -> list[str]:
        return [f"TimeoutError: {self}"]

_PULLING = threading.Lock()


class Run:
    """A training on a cluster. Comes from `session.train(...)` or `session.run`."""

    def __init__(self, session: Session, name: str, directory: str | Path) -> None:
        self.session = session
        self.name = name
        self.directory = Path(directory)

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    def _repr_html_(self) -> str:
        return (
            f"<b>Run {escape(self.name)}</b> &middot; <code>run.state</code>, <code>run.wait()</code>, "
            "<code>run.report()</code>, <code>run.state_dict()</code>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a Run belongs to the notebook and cannot be sent elsewhere")

    # What it is doing

    def info(self) -> dict[str, Any]:
        """State, step, loss, speed, ranks and recent events, as a plain dict.

        Of a run that the cluster knows no more (it has ended, or has gone on to another run): what its
        directory tells, without ranks.
        """
        try:
            return self.session.request("run_info", run=self.name)
        except _UNKNOWN_THERE:
            if (last := self._info_of_ended()) is None:
                raise
            return last

    def _info_of_ended(self) -> dict[str, Any] | None:
        try:
            record = self._record()
        except (RunError, OSError, ValueError):  # its directory was moved, say
            return None
        if record.get("state") not in ENDED:
            return None
        report = build_report(record, self.events(), self.metrics(), self.ledger())
        return {
            "run": self.name, "directory": str(self.directory), "state": report.state,
            "reason": report.reason, "step": report.steps, "total_steps": report.total_steps,
            "loss": report.final_loss, "generation": report.generations,
            "world_size": report.world_size_end, "num_ranks": record.get("num_ranks"),
            "global_batch": (record.get("options") or {}).get("global_batch"),
            "failures": len(report.failures), "elapsed_s": report.wall_s, "goodput": report.goodput,
            "ranks": [], "recent": [], "error": record.get("error"),
        }  # fmt: skip

    @property
    def state(self) -> str:
        """starting, running, recovering, paused, finished, stopped or failed."""
        return self._looked_up("state")

    @property
    def step(self) -> int:
        """The last committed step (they count from 1)."""
        return self._looked_up("step")

    def _looked_up(self, key: str) -> Any:
        try:
            return self.session.request("run_info", run=self.name)[key]
        except _UNKNOWN_THERE:
            record = self._record()
            if record.get("state") not in ENDED:
                raise
            return record["state"] if key == "state" else self._last_step()

    def _last_step(self) -> int:
        metrics = self.metrics()
        return metrics[-1]["step"] if metrics else 0

    # Waiting

    def wait(self, timeout_s: float | None = None, **others: Any) -> Report:
        """Block until the training has ended, however it ended, and return its report.

        Raises `TimeoutError` after `timeout_s`. Interrupting (Ctrl-C) ends the waiting, never the training.
        """
        refuse_unknown("run.wait", others, ("timeout_s",))
        deadline = _deadline(timeout_s)
        try:
            while not self._wait_slice(deadline):
                pass
        except KeyboardInterrupt:
            raise WaitInterrupted(self._goes_on()) from None
        return self.report()

    def __await__(self) -> Generator[Any, None, Report]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Report:
        # The waiting is done in a thread, so that the kernel's event loop stays free for widgets.
        try:
            while not await asyncio.to_thread(self._wait_slice, None):
                pass
            return await asyncio.to_thread(self.report)
        except asyncio.CancelledError:
            raise WaitCancelled(self._goes_on()) from None

    def _goes_on(self) -> str:
        return (
            f"stopped waiting for run {self.name!r}; the training goes on. Wait again with %ft_wait "
            "(in Python: run.wait()), end it with %ft_stop (run.stop())."
        )

    def _wait_slice(self, deadline: float | None) -> bool:
        """Wait a little; whether the run has ended."""
        left = _WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
        try:
            info = self.session.request("wait", run=self.name, hold_s=max(0.0, min(_WAIT_SLICE_S, left)))
        except _UNKNOWN_THERE:
            if self._record().get("state") in ENDED:
                return True
            raise
        if info["state"] in ENDED:
            return True
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout(
                f"Run {self.name!r} is still {info['state']} (step {info['step']} of {info['total_steps']}) "
                "and goes on. Wait longer, or end it with %ft_stop (in Python: run.stop())."
            )
        return False

    # Steering

    def pause(self) -> None:
        """Hold the training after the step in flight."""
        self.session.request("pause", run=self.name)

    def unpause(self) -> None:
        self.session.request("unpause", run=self.name)

    def resize(self, num_ranks: int, **others: Any) -> None:
        """Go on with more ranks or fewer from a step boundary on: those of the cluster. See `Session.resize`."""
        refuse_unknown("run.resize", (word for word in others if word not in ("progress", "show")), ("num_ranks",))
        if (state := self.state) in ENDED:
            raise RunError(
                f"Run {self.name!r} is over ({state}), so it needs no ranks any more. Those of the cluster: "
                "%ft_cluster resize -n N (in Python: session.resize(N))."
            )
        self.session.resize(num_ranks, **others)

    def stop(self, save: bool = True) -> None:
        """End the training now and wait until its files are complete.

        Checkpoints do not exist yet, so nothing is saved, whatever `save` says; the ranks keep the model.
        """
        self.session.request("stop_run", timeout_s=60, run=self.name, save=bool(save))

    def inject(
        self,
        kind: str,
        rank: int | None = None,
        at_step: int | None = None,
        after_s: float | None = None,
        duration_s: float | None = None,
        factor: float | None = None,
        probability: float | None = None,
        seed: int | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Make a fault happen: `run.inject("kill", rank=2, at_step=50)`. Without `rank` one is picked.

        At once, or inside a step, or after a time, or once with a probability per step. `%ft_inject --list` has the
        kinds. The answer's `reason` says what will happen.
        """
        given = {
            "rank": rank, "at_step": at_step, "after_s": after_s, "duration_s": duration_s, "factor": factor,
            "probability": probability, "seed": seed,
        }  # fmt: skip
        return self._disturb("inject", check_fault(kind, given | others))

    def chaos(
        self,
        mtbf_s: float | None = None,
        kinds: str | Sequence[str] | None = None,
        for_s: float | None = None,
        seed: int = 0,
        no_mercy: bool = False,
    ) -> dict[str, Any]:
        """Random faults, one in `mtbf_s` seconds on average, for `for_s` seconds or until the run's end.

        The same seed gives the same times, kinds and picks. What the run could not survive is left out, unless
        `no_mercy`. The supervisor does it, so it goes on while the notebook is busy; `chaos_stop` ends it.
        """
        given = {"mtbf_s": mtbf_s, "kinds": kinds, "for_s": for_s, "seed": seed, "no_mercy": no_mercy}
        return self._disturb("chaos", check_chaos(given))

    def chaos_stop(self) -> dict[str, Any]:
        """No more random faults; the answer tells how many there were."""
        return self._disturb("chaos_stop", {})

    def _disturb(self, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            # A rank may take some seconds to answer, and is given up after five.
            return self.session.request(op, run=self.name, **arguments)
        except _UNKNOWN_THERE as error:
            if (last := self._info_of_ended()) is None:
                raise
            raise RunError(
                f"Run {self.name!r} is over ({last['state']} after {last['step']} steps in "
                f"{last['elapsed_s']:.1f} s), so nothing can happen to it any more. Start one that "
                "lasts longer (%%ft_train --steps N; in Python: steps=N), and inject while it trains."
            ) from error

    def stacks(self) -> dict[int, dict[str, Any]]:
        """Where each living rank's training thread stands: `place`, `step` and `stack` (lines, innermost last).

        A rank that cannot tell has `problem` instead.
        """
        found = self.session.request("stacks", run=self.name)["ranks"]
        return {int(rank): entry for rank, entry in sorted(found.items(), key=lambda item: int(item[0]))}

    # What it has written

    def events(self) -> list[dict[str, Any]]:
        """What happened, in order."""
        return read_lines(self.directory / "events.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        """One dict per committed step: loss, learning rate, world size, ..."""
        return read_lines(self.directory / "metrics.jsonl")

    def ledger(self) -> list[dict[str, Any]]:
        """One dict per committed step: which samples were used, by whom."""
        return read_lines(self.directory / "ledger.jsonl")

    def report(self) -> Report:
        """What happened, what it cost, and whether every sample was used exactly once (so far)."""
        return build_report(self._record(), self.events(), self.metrics(), self.ledger())

    def logs(self, rank: int | None = None, n: int = 100) -> str:
        """The last `n` lines that a rank printed, or, without `rank`, that each of them did."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise UsageError(f"n takes a whole number of at least 1, not {n!r}.")
        found = self.directory.glob("logs/rank-*.log")
        files = {int(path.stem.removeprefix("rank-")): path for path in found}
        if rank is not None:
            if rank not in files:
                known = ", ".join(map(str, sorted(files))) or "none yet"
                raise UsageError(f"There is no log of rank {rank!r} in run {self.name!r}. Ranks: {known}.")
            return "\n".join(_tail(files[rank], n))
        return "\n".join(f"[rank {slot}] {line}" for slot in sorted(files) for line in _tail(files[slot], n))

    @property
    def cell(self) -> str | None:
        """The source that is being trained, as it was sent to the ranks."""
        try:
            return self._record().get("cell")
        except (RunError, OSError, ValueError):
            return None

    def _record(self) -> dict[str, Any]:
        path = self.directory / "run.json"
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            raise RunError(
                f"Run {self.name!r} has no {path} (any more); was its directory moved or removed?"
            ) from None

    # Its weights

    def state_dict(self) -> dict[str, Any]:
        """The model's current weights and buffers, pulled from a rank: `model.load_state_dict(...)`."""
        ready = self.session.request("prepare_weights", timeout_s=120, run=self.name)
        view = self._view_of(ready["engine"])
        # By text, so that neither side has to be able to import the other's modules for this.
        take = "__import__('ftnb.rank.export', fromlist=['take_weights']).take_weights()"
        with _PULLING:  # ipyparallel's client is not made for several threads
            pulled = view.apply_sync(eval, take)
        return {name: _tensor(*packed) for name, *packed in pulled}

    def _view_of(self, engine: int) -> Any:
        """ipyparallel's view of one engine. Its number is nobody's for a moment when a rank has just been replaced."""
        deadline = time.monotonic() + _REGISTERED_S
        while True:
            try:
                return self.session.client[engine]
            except IndexError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"ipyparallel does not know engine {engine}, which holds the weights of run {self.name!r}. "
                        "%ft_cluster status shows the ranks; try again."
                    ) from None
                time.sleep(0.05)


def failure(info: dict[str, Any]) -> FtnbError:
    """What ended a failed run, as the exception to raise: the user's own error, if it was one."""
    error = info.get("error")
    if not error:
        return RunError(info["reason"])
    if error.get("check"):
        return CheckError(error["evalue"])
    known = ("ranks", "etype", "evalue", "lineno", "step", "traceback")
    return CellError(info["reason"], **{key: error.get(key) for key in known})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that may be growing: a last line still being written is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def _tail(path: Path, n: int) -> list[str]:
    block = 1 << 16
    with path.open("rb") as stream:
        end = stream.seek(0, 2)
        data = b""
        while end > 0 and data.count(b"\n") <= n:
            start = max(0, end - block)
            stream.seek(start)
            data = stream.read(end - start) + data
            end = start
    return data.decode(errors="replace").splitlines()[-n:]


def _deadline(timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        raise UsageError(f"timeout_s takes a number of seconds, not {timeout_s!r}.")
    return time.monotonic() + timeout_s


def _tensor(dtype: str, shape: list[int], data: bytes) -> Any:
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    if not data:  # frombuffer refuses empty ones
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
