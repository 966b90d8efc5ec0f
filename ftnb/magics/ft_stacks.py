"""%ft_stacks: where every rank stands."""

from __future__ import annotations

from ftnb.display.stacks import stacks
from ftnb.display.table import show
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command("ft_stacks", "where the training thread of every rank stands: its Python stack, equal ones together")


def run(line: str) -> None:
    if not parse(COMMAND, line).help:
        show(stacks(current.run().stacks()))
