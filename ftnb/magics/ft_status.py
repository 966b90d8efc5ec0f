"""%ft_status: the run, or, before the first one, the cluster."""

from __future__ import annotations

from ftnb.display.status import cluster_status, run_status
from ftnb.display.table import Shown
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command("ft_status", "the state of the training and its ranks, once")


def run(line: str) -> Shown | None:
    if parse(COMMAND, line).help:
        return None
    session = current.session()
    last = session.run
    return cluster_status(session.status(), session.name) if last is None else run_status(last.info())
