"""%ft_events: what happened, in order."""

from __future__ import annotations

from ftnb.display.events import events_table
from ftnb.display.table import show
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command("ft_events", "what happened in the run, in order")


def run(line: str) -> None:
    if not parse(COMMAND, line).help:
        show(events_table(current.run().events()))
