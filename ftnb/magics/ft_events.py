"""%ft_events: what happened, in order."""

from __future__ import annotations

from ftnb.display.events import events_table
from ftnb.display.table import Shown
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command("ft_events", "what happened in the run, in order")


def run(line: str) -> Shown | None:
    return None if parse(COMMAND, line).help else events_table(current.run().events())
