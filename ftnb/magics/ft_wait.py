"""%ft_wait: block until the training has ended."""

from __future__ import annotations

from ftnb.client.options import Option
from ftnb.display.table import show
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_wait",
    "wait until the training has ended, and show its report (interrupting ends the waiting only)",
    (Option("timeout_s", float, None, "give up after this many seconds", flag="--timeout", minimum=0),),
)


def run(line: str) -> None:
    parsed = parse(COMMAND, line)
    if not parsed.help:
        report = current.run().wait(parsed.get("timeout_s"))
        current.settle_live()
        show(report)
