"""%ft_status: the run, or, before the first one, the cluster."""

from __future__ import annotations

from ftnb.display.status import cluster_status, run_status
from ftnb.display.table import show
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command("ft_status", "the state of the training and its ranks, once")


def run(line: str) -> None:
    if parse(COMMAND, line).help:
        return
    session = current.session()
    last = session.run
    show(cluster_status(session.status(), session.name) if last is None else run_status(last.info()))
