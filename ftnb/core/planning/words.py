"""Words for events and reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ftnb.core.protocol import Failure


def ranks(numbers: Iterable[int]) -> str:
    names = [str(number) for number in sorted(numbers)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def count(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def steps(first: int, last: int) -> str:
    """Subject and verb: "step 5 is", "steps 5 to 9 are"."""
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def joins(numbers: Iterable[int]) -> str:
    return "join" if len(list(numbers)) > 1 else "joins"


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", ":")) else text + "."


def state_after(step: int) -> str:
    return f"the state after step {step}" if step else "the initial state"


def step_of(failure: Failure) -> int | None:
    return failure.step if failure.step >= 0 else None  # it has no state yet, so it was in no step


def when(failure: Failure) -> str:
    return f"in step {failure.step}" if failure.step >= 0 else "while it took over the state of the training"


def place(failure: Failure) -> str:
    line = failure.error.get("lineno")
    return f"step {failure.step}" + (f" (line {line} of the cell)" if line else "")


def short(error: Mapping[str, Any]) -> str:
    text = f"{error.get('etype', 'an exception')}: {error.get('evalue', '')}".rstrip(": ")
    return text if len(text) <= 200 else text[:197] + "..."
