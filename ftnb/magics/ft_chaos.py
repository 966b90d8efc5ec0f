"""%ft_chaos: random faults, reproducible from a seed."""

from __future__ import annotations

from ftnb.client.faults import CHAOS_OPTIONS, check_chaos
from ftnb.client.options import did_you_mean
from ftnb.errors import UsageError
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_chaos",
    "random faults in the run, never more than it can survive; %ft_chaos stop ends them",
    CHAOS_OPTIONS,
    positional="[stop]",
)


def run(line: str) -> None:
    parsed = parse(COMMAND, line)
    if parsed.help:
        return
    if parsed.words:
        if parsed.words != ["stop"]:
            hint = did_you_mean(parsed.words[0], ("stop",))
            raise UsageError(f"%ft_chaos knows no {parsed.words[0]!r}.{hint} Try %ft_chaos --mtbf S or %ft_chaos stop.")
        if parsed.values:
            raise UsageError("%ft_chaos stop takes no options.")
        print(current.run().chaos_stop()["reason"])
        return
    check_chaos(parsed.values)  # a wrong wish is told before a missing cluster
    print(current.run().chaos(**parsed.values)["reason"])
