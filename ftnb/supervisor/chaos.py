"""Chaos in a run: random faults from a plan, done here so that they go on while the notebook is busy.

On record is what the plan is made from, when it began and how far it has come; a successor goes on from there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ftnb.core import chaos, faults
from ftnb.errors import FtnbError, RunError, UsageError

if TYPE_CHECKING:
    from ftnb.supervisor.runs import ActiveRun
    from ftnb.supervisor.server import Supervisor


class Chaos:
    """At most one per run at a time. `_on` has its parameters and counts while it goes on."""

    def __init__(self, supervisor: Supervisor, run: ActiveRun) -> None:
        self._supervisor, self._run = supervisor, run
        self._on: dict[str, Any] | None = None
        self._plan: Iterator[chaos.Stroke] = iter(())
        self._timer: asyncio.TimerHandle | None = None
        self._flipped: tuple[str, int] | None = None  # the process and the step of a flipped bit that nobody has found

    # --- for a successor

    def record(self) -> dict[str, Any] | None:
        return self._on

    def restore(self, record: dict[str, Any] | None) -> None:
        self._on = record
        if record is not None:
            self._plan = chaos.plan(record["seed"], record["mtbf_s"], record["kinds"])
            for _ in range(record["done"]):
                next(self._plan)
            self._next()

    # --- commands

    def start(
        self, mtbf_s: float, kinds: list[str] | None, for_s: float | None, seed: int, no_mercy: bool
    ) -> dict[str, Any]:
        kinds = list(kinds or chaos.DEFAULT_KINDS)
        for kind in kinds:
            faults.known_kind(kind)
        if not (isinstance(mtbf_s, (int, float)) and math.isfinite(mtbf_s) and mtbf_s > 0):
            raise UsageError(f"mtbf_s (--mtbf) takes a number of seconds above 0, not {mtbf_s!r}.")
        if self._on is not None:
            raise RunError(
                f"Chaos goes on in run {self._run.name!r} already ({self._words()}). End it first: %ft_chaos stop "
                "(in Python: run.chaos_stop())."
            )
        self._flipped = None
        self._on = {
            "mtbf_s": float(mtbf_s), "kinds": kinds, "for_s": for_s, "seed": int(seed), "no_mercy": bool(no_mercy),
            "started": time.time(), "done": 0, "injected": 0, "spared": 0,
        }
        self._plan = chaos.plan(self._on["seed"], self._on["mtbf_s"], kinds)
        self._next()
        self._run.say(f"Chaos begins: {self._words()}.")
        return self.info() | {"reason": self._promise()}

    def stop(self) -> dict[str, Any]:
        if self._on is None:
            raise RunError(f"There is no chaos in run {self._run.name!r}. Begin with %ft_chaos --mtbf 30 "
                           "(in Python: run.chaos(mtbf_s=30)).")  # fmt: skip
        return self._over("it was stopped")

    def end(self) -> None:
        """The run is over."""
        if self._on is not None:
            self._over("the run has ended")

    def _over(self, why: str) -> dict[str, Any]:
        assert self._on is not None
        told = self.info() | {"reason": f"Chaos is over ({why}): {self._counts()}."}
        self._on = None
        if self._timer is not None:
            self._timer.cancel()
        self._run.say(told["reason"])
        return told

    def info(self) -> dict[str, Any] | None:
        """For status: how it goes, without the next fault."""
        if self._on is None:
            return None
        hidden = ("started", "done")
        return {key: value for key, value in self._on.items() if key not in hidden} | {
            "elapsed_s": max(0.0, time.time() - self._on["started"])
        }

    # --- its course

    def _next(self) -> None:
        """Wait for the next fault of the plan, or for the end of the chaos."""
        on = self._on
        assert on is not None
        stroke = next(self._plan)
        last = on["for_s"] is not None and stroke.at_s > on["for_s"]
        wait_s = max(0.0, on["started"] + (on["for_s"] if last else stroke.at_s) - time.time())
        loop = asyncio.get_running_loop()
        if last:
            self._timer = loop.call_later(wait_s, self._time_is_up, on)
        else:
            self._timer = loop.call_later(wait_s, self._strike, on, stroke)

    def _time_is_up(self, on: dict[str, Any]) -> None:
        if self._on is on:
            self._over(f"{on['for_s']:g} s have passed")

    def _strike(self, on: dict[str, Any], stroke: chaos.Stroke) -> None:
        if self._on is on and not self._run.is_over:
            self._supervisor.spawn(self._do(on, stroke))

    async def _do(self, on: dict[str, Any], stroke: chaos.Stroke) -> None:
        if self._on is not on:
            return  # it was ended in this very moment
        on["done"] += 1  # on record with the event of this fault: it is not done twice
        self._next()
        run = self._run
        healthy = run.healthy
        moment = chaos.Moment(run.state, len(healthy), run.faults.outstanding() or self._flip(), run.options)
        living = sorted(healthy or run.living)
        if not living:
            return
        fault: dict[str, Any] = {"kind": stroke.kind, "rank": chaos.choose(stroke.pick, living), "chaos": stroke.number}
        kind = faults.KINDS[stroke.kind]
        if stroke.duration_s is not None:
            fault["duration_s"] = stroke.duration_s
        if kind.default_factor is not None:
            fault["factor"] = kind.default_factor
        if "seed" in kind.takes:
            fault["seed"] = stroke.seed
        if not on["no_mercy"] and (why := chaos.spare(stroke.kind, moment)):
            on["spared"] += 1
            run.faults.spared(fault, why)
            return
        on["injected"] += 1
        try:
            if stroke.kind == "bitflip":
                self._flipped = (self._supervisor.ranks[fault["rank"]].key, run.max_step() + 1)
            await run.faults.strike(fault)
        except FtnbError as error:
            on["injected"] -= 1
            if not run.is_over:
                run.faults.not_fired(fault, str(error))

    def _flip(self) -> str:
        """Whether a flipped bit is still to be found: by the next check after it, on a process that is still there."""
        every = self._run.options.get("check_replicas")
        if self._flipped is None or not every:
            return ""
        key, step = self._flipped
        check = -(-step // every) * every
        fills_slot = any(slot.key == key for rank, slot in self._supervisor.ranks.items() if rank in self._run.living)
        if not fills_slot or self._run.step > check:
            self._flipped = None
            return ""
        return "a flipped bit has not been found yet"

    # --- words

    def _words(self) -> str:
        on = self._on
        assert on is not None
        length = "" if on["for_s"] is None else f", for {on['for_s']:g} s"
        return (
            f"one fault in {on['mtbf_s']:g} s on average, {' or '.join(dict.fromkeys(on['kinds']))}{length}, "
            f"seed {on['seed']}"
        )

    def _promise(self) -> str:
        on = self._on
        assert on is not None
        mercy = (
            "Also faults that the run cannot survive (--no-mercy)." if on["no_mercy"]
            else "Those that the run could not survive are left out, and said to be spared."
        )
        return f"Chaos goes on from now on: {self._words()}. {mercy} End it with %ft_chaos stop."

    def _counts(self) -> str:
        on = self._on
        assert on is not None
        one = on["injected"] == 1
        return f"{on['injected']} {'fault was' if one else 'faults were'} injected, {on['spared']} spared"
