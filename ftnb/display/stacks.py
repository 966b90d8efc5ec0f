"""Where the ranks stand: their Python stacks, equal ones together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ftnb.display.table import Shown

# Places of the training thread, in words; {step} is the step it is in.
_PLACES = {
    "wait": "waiting for the next generation",
    "leave": "leaving the group of step {step}",
    "form": "forming the group, next step {step}",
    "share": "sharing the state of the training, next step {step}",
    "fetch": "fetching the batch of step {step}",
    "forward": "forward and loss of step {step}",
    "backward": "backward of step {step}",
    "collective": "all-reduce of step {step}",
    "update": "update of step {step}",
    "evaluate": "evaluate() after step {step}",
    "save": "saving after step {step}",
    "held": "held before step {step}",
    "finish": "finishing, after the last step",
    "finished": "finished",
}


def stacks(ranks: Mapping[int, Mapping[str, Any]]) -> Shown:
    """`ranks`: what `run.stacks()` returns."""
    groups = grouped(ranks)
    if not groups:
        return Shown("No rank is there.", "<div>No rank is there.</div>")
    texts, parts = [], []
    for members, entry in groups:
        title = f"{ranks_words(members)}, {place_words(entry)}"
        lines = [str(line) for line in entry.get("stack") or []]
        texts.append("\n".join([f"{title}{':' if lines else '.'}", *(f"  {line}" for line in lines)]))
        body = f"<pre style='margin:2px 0 8px 16px'>{escape(chr(10).join(lines))}</pre>" if lines else ""
        parts.append(f"<div><b>{escape(title)}</b></div>{body}")
    return Shown("\n".join(texts), f"<div style='font-size:var(--jp-ui-font-size1, 13px)'>{''.join(parts)}</div>")


def grouped(ranks: Mapping[int, Mapping[str, Any]]) -> list[tuple[list[int], Mapping[str, Any]]]:
    """Ranks that stand at the same place with the same stack, in the order of the first rank of each group."""
    found: dict[tuple[Any, ...], tuple[list[int], Mapping[str, Any]]] = {}
    for rank in sorted(ranks):
        entry = ranks[rank]
        key = (entry.get("problem"), entry.get("place"), entry.get("step"), tuple(entry.get("stack") or ()))
        found.setdefault(key, ([], entry))[0].append(rank)
    return list(found.values())


def ranks_words(ranks: Sequence[int]) -> str:
    """rank 2 · ranks 0 and 1 · ranks 0, 1 and 3"""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def place_words(entry: Mapping[str, Any]) -> str:
    if problem := entry.get("problem"):
        return str(problem).rstrip(".")
    place, step = entry.get("place"), entry.get("step")
    if place is None:
        return "not in a training"
    words = _PLACES.get(place, f"{place} (step {{step}})")
    return words.format(step="?" if step is None else step)
