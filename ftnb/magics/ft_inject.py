"""%ft_inject: make a fault happen."""

from __future__ import annotations

from ftnb.client.faults import FAULT_OPTIONS, FAULTS, LATER_FAULT_KEYWORDS, LATER_FAULTS
from ftnb.client.options import Option, later_flags
from ftnb.display.table import text_table
from ftnb.errors import UsageError
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_inject",
    "make a fault happen, now or later",
    (*FAULT_OPTIONS, Option("list", bool, False, "the kinds of faults")),
    positional="KIND",
    later_flags=later_flags(LATER_FAULT_KEYWORDS),
)


def run(line: str) -> None:
    parsed = parse(COMMAND, line)
    if parsed.help:
        return
    if parsed.get("list"):
        later = [(kind, f"{words} (not available yet)") for kind, words in LATER_FAULTS.items()]
        print("\n".join(text_table(("kind", "what happens"), [*FAULTS.items(), *later])))
        return
    if not parsed.words:
        raise UsageError(f"%ft_inject needs a kind of fault: {', '.join(FAULTS)}. All: %ft_inject --list")
    parsed.values.pop("list", None)
    print(current.run().inject(parsed.words[0], **parsed.values)["reason"])
