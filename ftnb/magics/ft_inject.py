"""%ft_inject: make a fault happen."""

from __future__ import annotations

from ftnb.client.faults import FAULT_OPTIONS, KIND_NAMES, check_fault, list_rows
from ftnb.client.options import Option
from ftnb.display.table import text_table
from ftnb.errors import UsageError
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_inject",
    "make a fault happen, now or later",
    (*FAULT_OPTIONS, Option("list", bool, False, "the kinds of faults, how each is found and what the run does")),
    positional="KIND",
)


def run(line: str) -> None:
    parsed = parse(COMMAND, line)
    if parsed.help:
        return
    if parsed.values.pop("list", None):
        header = ("kind", "what happens → how it is found → what the run does", "also")
        print("\n".join(text_table(header, list_rows())))
        print("All of them take --rank R and one of --at-step S, --after SECONDS, --probability P [--seed N].")
        return
    if not parsed.words:
        raise UsageError(f"%ft_inject needs a kind of fault: {', '.join(KIND_NAMES)}. More: %ft_inject --list")
    check_fault(parsed.words[0], parsed.values)  # a wrong wish is told before a missing cluster
    print(current.run().inject(parsed.words[0], **parsed.values)["reason"])
