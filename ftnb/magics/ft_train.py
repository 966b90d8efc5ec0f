"""%%ft_train: run the cell on every rank and train what it defines; %ft_train runs the last cell again."""

from __future__ import annotations

from ftnb.client.options import LATER_TRAIN_KEYWORDS, TRAIN_OPTIONS, check_train_options, later_flags
from ftnb.client.run import failure
from ftnb.display.live import has_front_end
from ftnb.errors import UsageError
from ftnb.magics import current
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_train",
    "train the model that the cell defines (model, optimizer, dataset, loss_fn or training_step); %ft_train, as "
    "a line, trains the last cell once more, with the options of the line",
    TRAIN_OPTIONS,
    later_flags=later_flags(LATER_TRAIN_KEYWORDS),
    prefix="%%",
)
MAGIC_KIND = "line_cell"


def run(line: str, cell: str | None = None) -> None:
    parsed = parse(COMMAND, line)
    if parsed.help:
        return
    check_train_options(parsed.values)  # a wrong option is told before a missing cluster
    session = current.session()
    current.finish_live()  # before the cluster forgets the run that it follows
    if cell is None:
        source = current.last_cell
        if source is None:
            raise UsageError("%ft_train runs the last %%ft_train cell again, and there is none yet.")
    elif not cell.strip():
        raise UsageError("The cell is empty: below %%ft_train, define model, optimizer, dataset and loss_fn.")
    else:
        # The magic's own line counts as line 1, as in the notebook, so that errors name the line one sees.
        source = current.last_cell = "\n" + cell
    wait = parsed.values.pop("wait", False)
    training = session.train(source, **parsed.values)
    current.put_in_notebook("run", training)
    current.follow(training)
    if not has_front_end():
        print(f"Run {training.name!r} trains in the background: %ft_status, %ft_wait, %ft_stop.")
    if wait:
        report = training.wait()
        current.settle_live()
        if report.state == "failed":
            raise failure(training.info())
