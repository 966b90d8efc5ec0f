"""The checks of a wish for a fault, or for chaos, before the supervisor is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftnb.client.options import Option, refuse_unknown
from ftnb.core import chaos, faults
from ftnb.errors import UsageError

KIND_NAMES = tuple(faults.KINDS)


def check_probability(label: str, value: float) -> None:
    if value > 1:
        raise UsageError(f"{label} takes a number above 0 and up to 1, not {value:g}.")


FAULT_OPTIONS = (
    Option("rank", int, None, "the rank it happens to (one is picked when left out)", minimum=0),
    Option("at_step", int, None, "inside this step (steps count from 1)", minimum=1),
    Option("after_s", float, None, "after this many seconds", flag="--after", minimum=0),
    Option("probability", float, None, "once, in each step with this probability", above=0, check=check_probability),
    Option("duration_s", float, None, "for this many seconds (hang, stall, gil, slow, partition)", flag="--duration",
           above=0),
    Option("factor", float, None, "how many times as long a step takes (slow; 3 when left out)", above=1),
    Option("seed", int, None, "seed of --probability and of bitflip, to have the same again", minimum=0),
)  # fmt: skip

CHAOS_OPTIONS = (
    Option("mtbf_s", float, None, "one fault in so many seconds, on average", flag="--mtbf", above=0),
    Option("kinds", str, None, f"kinds, with commas between ({','.join(chaos.DEFAULT_KINDS)} when left out)"),
    Option("for_s", float, None, "end it after so many seconds", flag="--for", above=0),
    Option("seed", int, 0, "the same seed gives the same times, kinds and picks of ranks", minimum=0),
    Option("no_mercy", bool, False, "also what the run cannot survive"),
)


def check_fault(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an `inject` request."""
    faults.known_kind(kind)
    refuse_unknown("inject", [word for word in given if word not in faults.FLAGS], faults.FLAGS)
    fault = {option.keyword: option.checked(given.get(option.keyword)) for option in FAULT_OPTIONS}
    faults.check_options(kind, fault)
    return {"kind": kind, **fault}


def check_chaos(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `chaos` request. `kinds` may be a text with commas, or a list of names."""
    wish = dict(given)
    kinds = wish.pop("kinds", None)
    wish = {o.keyword: o.checked(wish.get(o.keyword, o.default)) for o in CHAOS_OPTIONS if o.keyword != "kinds"}
    if wish["mtbf_s"] is None:
        raise UsageError("How often? mtbf_s (--mtbf) is the mean time between two faults, in seconds: --mtbf 30.")
    if kinds is not None:
        if not isinstance(kinds, Iterable):
            raise UsageError(f"kinds (--kinds) takes names of faults such as 'kill,hang', not {kinds!r}.")
        kinds = kinds.replace(",", " ").split() if isinstance(kinds, str) else list(kinds)
        for kind in kinds:
            faults.known_kind(kind)
        if not kinds:
            raise UsageError("kinds (--kinds) needs at least one kind of fault: %ft_inject --list shows all.")
    return {**wish, "kinds": kinds}


def list_rows() -> list[tuple[str, str]]:
    """What `%ft_inject --list` shows: kind and its own options, what happens → how it is found."""
    rows = []
    for kind in faults.KINDS.values():
        more = " ".join(flag for word, flag in faults.FLAGS.items() if word in kind.takes)
        rows.append((f"{kind.name} {more}".strip(), f"{kind.what} → {kind.found}"))
    return rows + [(name, f"{words} (not available yet)") for name, words in faults.LATER_KINDS.items()]
