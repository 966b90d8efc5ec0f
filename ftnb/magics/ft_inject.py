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
    (*FAULT_OPTIONS, Option("list", bool, False, "the kinds of faults, and how each is found")),
    positional="KIND",
)


def run(line: str) -> None:
    parsed = parse(COMMAND, line)
    if parsed.help:
        return
    if parsed.values.pop("list", None):
        header = ("kind", "what happens → how it is found")
        print("\n".join(text_table(header, list_rows())))
        print(
            "\nWho is lost is fenced and replaced (--recovery replace, the default). Slow ranks stay, unless\n"
            "--evict-stragglers is given; NaN is dealt with as --on-nan says; after a flipped bit all go back to\n"
            "where they agreed."
        )
        print("All kinds take --rank R and one of --at-step S, --after SECONDS, --probability P [--seed N].")
        return
    if not parsed.words:
        raise UsageError(f"%ft_inject needs a kind of fault: {', '.join(KIND_NAMES)}. More: %ft_inject --list")
    check_fault(parsed.words[0], parsed.values)  # a wrong wish is told before a missing cluster
    print(current.run().inject(parsed.words[0], **parsed.values)["reason"])
