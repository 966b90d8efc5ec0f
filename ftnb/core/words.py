"""Numbers in words, for reports."""

from __future__ import annotations

from collections.abc import Iterable


def steps_text(steps: Iterable[int], limit: int = 6) -> str:
    """Step numbers in words, runs joined: "steps 3, 7-9"."""
    runs: list[list[int]] = []
    for step in sorted(set(steps)):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:limit]]
    more = sum(last - first + 1 for first, last in runs[limit:])
    plural = len(runs) > 1 or runs[0][0] != runs[0][1]
    return f"step{'s' * plural} {', '.join(texts)}" + (f" and {more} more" if more else "")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    return " ".join(text.split())
