"""%ft_wait: block until the training has ended."""

from __future__ import annotations

from ftnb.client.options import Option
from ftnb.client.run import Report
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_wait",
    "wait until the training has ended, and show its report (interrupting ends the waiting only)",
    (Option("timeout_s", float, None, "give up after this many seconds", flag="--timeout", minimum=0),),
)


def run(line: str) -> Report | None:
    parsed = parse(COMMAND, line)
    return None if parsed.help else current.run().wait(parsed.get("timeout_s"))
