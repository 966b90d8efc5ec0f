"""%ft_logs: what the ranks have printed."""

from __future__ import annotations

from ftnb.client.options import Option
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_logs",
    "the last lines that the ranks have printed",
    (
        Option("rank", int, None, "only this rank", minimum=0),
        Option("n", int, 100, "number of lines per rank", short="-n", minimum=1),
    ),
)


def run(line: str) -> None:
    parsed = parse(COMMAND, line)
    if parsed.help:
        return
    print(current.run().logs(**parsed.values) or "The ranks have printed nothing yet.")
