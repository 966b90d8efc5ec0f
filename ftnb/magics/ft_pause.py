"""%ft_pause: hold the training."""

from __future__ import annotations

from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command("ft_pause", "hold the training after the step in flight")


def run(line: str) -> None:
    if parse(COMMAND, line).help:
        return
    training = current.run()
    training.pause()
    print(f"Run {training.name!r} is paused. Go on with %ft_unpause.")
