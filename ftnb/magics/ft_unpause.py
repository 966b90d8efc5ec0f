"""%ft_unpause: let a paused training go on."""

from __future__ import annotations

from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command("ft_unpause", "let a paused training go on")


def run(line: str) -> None:
    if parse(COMMAND, line).help:
        return
    training = current.run()
    training.unpause()
    print(f"Run {training.name!r} goes on.")
