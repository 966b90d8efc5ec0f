"""%ft_stop: end the training; the cluster stays."""

from __future__ import annotations

from ftnb.client.options import Option
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_stop",
    "end the training; the cluster stays",
    (Option("no_save", bool, False, "do not save a checkpoint first (there are none yet)"),),
)


def run(line: str) -> None:
    parsed = parse(COMMAND, line)
    if parsed.help:
        return
    training = current.run()
    training.stop(save=not parsed.get("no_save"))
    current.settle_live()
    print(
        f"Run {training.name!r} has been stopped. Nothing was saved: checkpoints do not exist yet. The ranks "
        "keep the weights: run.state_dict()."
    )
