"""%ft_report: what happened, what it cost, and whether the promises held."""

from __future__ import annotations

from ftnb.display.table import show
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_report", "what happened in the run, what it cost, and whether each sample was used once"
)


def run(line: str) -> None:
    if not parse(COMMAND, line).help:
        show(current.run().report())
