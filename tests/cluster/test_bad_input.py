"""Bad input: one clear message that names the cause and what to type; the cluster stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_tools import (
    CELL,
    DATA,
    GLOBAL_BATCH,
    LOSS,
    MODEL,
    SAME_F64,
    Reference,
    assert_same,
    check_books,
    check_report,
    losses_of,
    pids_of,
    says,
)
from shared_cluster import SharedCluster

import ftnb
from ftnb.errors import CellError, CheckError, NoClusterError, RunError, UsageError

OPTIONS = {"steps": 4, "global_batch": GLOBAL_BATCH, "names": {}}

# What is wrong -> (cell, error, what the message says)
CELLS = {
    "no model": (DATA + LOSS, CheckError, ["does not define `model` and `optimizer`", "run the cell again"]),
    "no optimizer": (DATA + MODEL.split("optimizer")[0] + LOSS, CheckError, ["does not define `optimizer`"]),
    "no dataset": (DATA.replace("dataset =", "data =") + MODEL + LOSS, CheckError, ["does not define `dataset`"]),
    "no loss": (DATA + MODEL, CheckError, ["neither `loss_fn", "nor `training_step", "Add, for example, `loss_fn ="]),
    "two losses": (CELL + "training_step = lambda model, batch: 0\n", CheckError, ["both `loss_fn` and `training_step`"]),
    "a model that is none": (
        CELL.replace("optimizer =", "model_, model = model, [1]\noptimizer =").replace("model.par", "model_.par"),
        CheckError, ["`model` is a list, not a torch.nn.Module"],
    ),
    "an optimizer of another model": (
        CELL.replace("model.parameters()", "torch.nn.Linear(7, 5).parameters()"),
        CheckError, ["`optimizer` holds 2 parameters that `model` does not have", r"\[5, 7\]", r"model\.parameters\(\)"],
    ),
    "an optimizer with a closure": (
        CELL.replace("torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)", "torch.optim.LBFGS(model.parameters())"),
        CheckError, ["LBFGS needs a closure", "SGD, Adam"],
    ),
    "an iterable dataset": (
        CELL + "class Stream(torch.utils.data.IterableDataset):\n    __iter__ = None\ndataset = Stream()\n",
        CheckError, ["IterableDataset", "map-style"],
    ),
    "a DataLoader": (
        CELL + "dataset = torch.utils.data.DataLoader(dataset)\n", CheckError, ["is a DataLoader", "give the dataset itself"],
    ),
    "an empty dataset": (CELL + "dataset = []\n", CheckError, [r"`dataset` is empty"]),
    "a loss that is no function": (CELL + "loss_fn = 3\n", CheckError, ["`loss_fn` is a int, not a function", "def loss_fn"]),
    "another start on one rank": (
        CELL + "import os\nif os.environ['FTNB_RANK'] == '3':\n    model[0].bias.data += 1\n",
        CheckError, ["initial values of parameter `0.bias` on rank 3", "seeds"],
    ),
    "another shape on one rank": (
        "import os\n" + CELL.replace("12", "(13 if os.environ['FTNB_RANK'] == '1' else 12)"),
        CheckError, ["`0.weight`", r"\[13, 6\] on rank 1", r"\[12, 6\] on rank 0"],
    ),
    "another dataset on one rank": (
        CELL + "import os\nif os.environ['FTNB_RANK'] == '2':\n    dataset = torch.utils.data.Subset(dataset, range(20))\n",
        CheckError, ["dataset length differs: 20 on rank 2, 50 on rank 0"],
    ),
    "a syntax error": (
        CELL + "model = = 3\n", CellError, [f"line {len(CELL.splitlines()) + 1} of the cell", "Nothing was sent to the ranks"],
    ),
    "an exception": (
        CELL + "dataset[1000]\n", CellError,
        ["IndexError", f"line {len(CELL.splitlines()) + 1} of the cell", "on all ranks", "engines are unharmed", "%%px"],
    ),
    "an exception on one rank": (
        CELL + "import os\nif os.environ['FTNB_RANK'] == '2': raise ValueError('only here')\n", CellError,
        ["ValueError: only here", f"line {len(CELL.splitlines()) + 2} of the cell", "on rank 2"],
    ),
    "an exit": (CELL + "import sys\nsys.exit(2)\n", CellError, ["SystemExit: 2", "on all ranks"]),
    "an empty cell": ("  \n", UsageError, ["The cell is empty", "model, optimizer, dataset"]),
}  # fmt: skip

# What is wrong -> (options, what the message says)
OPTION_MISTAKES = {
    "unknown option": ({"step": 4}, ["no option 'step'", "Did you mean steps"]),
    "option of a later version": ({"exact": True}, ["exact is not available yet"]),
    "wrong type": ({"steps": "many"}, ["steps takes a whole number of at least 1, not 'many'"]),
    "zero steps": ({"steps": 0}, ["steps takes a whole number of at least 1, not 0"]),
    "steps and epochs": ({"steps": 3, "epochs": 2}, ["either steps or epochs"]),
    "negative norm": ({"clip_norm": -1.0}, ["clip_norm takes a number above 0, not -1"]),
    "unknown mode": ({"mode": "dpp"}, ["mode takes ddp, not 'dpp'", "Did you mean ddp"]),
    "mode of a later version": ({"mode": "fsdp"}, ["not available yet", "Use ddp"]),
    "bad name": ({"name": "../up"}, ["'../up' cannot be the name of a run", "use letters"]),
    "batch smaller than the ranks": (
        {"global_batch": 3},
        ["3 is smaller than the number of ranks", "at least 4"],
    ),
    "batch larger than the dataset": (
        {"global_batch": 51},
        [r"\(51\) is larger than the dataset \(50", "50 or less"],
    ),
    "nothing to evaluate": ({"evaluate_every": 2}, ["does not define `evaluate"]),
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(CELL, 400)


class Watch:
    """The cluster before and after: same processes, same runs on the disk, idle."""

    def __init__(self, session: ftnb.Session) -> None:
        self.session = session
        status = session.status()
        if not all(entry["state"] == "idle" for entry in status["ranks"]):
            session.train(CELL, **OPTIONS).wait(timeout_s=60)  # starts what an earlier test has lost
        self.before = self.now()

    def now(self) -> tuple:
        status = self.session.status()
        return pids_of(self.session), runs_on_disk(), status["state"], [e["state"] for e in status["ranks"]]

    def check(self) -> None:
        assert self.now() == self.before


def runs_on_disk() -> list[str]:
    return sorted(path.name for path in Path("ftnb_runs").glob("*"))


@pytest.mark.parametrize("what", CELLS)
def test_bad_cell(session: ftnb.Session, what: str) -> None:
    watch = Watch(session)
    cell, kind, parts = CELLS[what]
    with pytest.raises(ftnb.FtnbError) as caught:
        session.train(cell, **OPTIONS)
    assert type(caught.value) is kind
    says(caught.value, *parts)
    shown = "\n".join(caught.value._render_traceback_())
    assert shown.count("Traceback (most recent call last)") <= 1, "once, not four times"
    assert "ftnb/rank" not in shown and "ftnb/client" not in shown
    watch.check()
    assert session.client[:].apply_sync(lambda: 6 * 7) == [42] * 4


@pytest.mark.parametrize("what", OPTION_MISTAKES)
def test_bad_option(session: ftnb.Session, what: str) -> None:
    watch = Watch(session)
    options, parts = OPTION_MISTAKES[what]
    with pytest.raises(ValueError) as caught:
        session.train(CELL, **({"names": {}, "global_batch": GLOBAL_BATCH} | options))
    assert isinstance(caught.value, (UsageError, CheckError))
    says(caught.value, *parts)
    watch.check()


def test_the_cluster_trains_after_all_that(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={})
    check_report(run.wait(timeout_s=60), [])
    check_books(run, 8)
    assert_same(losses_of(run), reference.losses[:8], SAME_F64)


def test_an_old_model_is_not_trained_by_a_cell_that_forgets_it(session: ftnb.Session) -> None:
    session.train(CELL, **OPTIONS).wait(timeout_s=60)
    with pytest.raises(CheckError) as caught:
        session.train("pass", **OPTIONS)
    says(caught.value, "`model` and `optimizer` and `dataset`")


def test_what_a_cell_has_defined_before_it_raised_is_gone(session: ftnb.Session) -> None:
    with pytest.raises(CellError):
        session.train(CELL.replace("loss_fn", "training_step") + "dataset[1000]\n", **OPTIONS)
    check_report(session.train(CELL, **OPTIONS).wait(timeout_s=60), [])  # not "both loss_fn and training_step"
    with pytest.raises(CellError):
        session.train(CELL + "dataset[1000]\n", **OPTIONS)
    with pytest.raises(CheckError) as caught:
        session.train("pass", **OPTIONS)
    says(caught.value, "`model` and `optimizer` and `dataset`")


def test_a_running_training_is_not_disturbed(session: ftnb.Session, reference: Reference) -> None:
    """Every mistake that can be made while a training goes on, and then its result is what it should be."""
    session.train(CELL, **OPTIONS).wait(timeout_s=60)
    run = session.train(CELL, steps=400, global_batch=GLOBAL_BATCH, names={}, name="long")
    run.pause()  # so that it surely goes on while all of this happens
    pids, runs = pids_of(session), runs_on_disk()

    def refused(kind: type[Exception], parts: list[str], do) -> None:
        with pytest.raises(kind) as caught:
            do()
        says(caught.value, *parts)
        assert session.run.name == run.name and run.state == "paused"

    refused(RunError, ["'long'", "paused", "%ft_wait", "%ft_stop"], lambda: session.train(CELL, **OPTIONS))
    refused(CellError, ["line 1 of the cell"], lambda: session.train("a b", **OPTIONS))
    refused(UsageError, ["no option 'steqs'"], lambda: session.train(CELL, steqs=3, names={}))
    refused(UsageError, ["no rank 7", "ranks 0 to 3"], lambda: run.inject("kill", rank=7))
    refused(UsageError, ["no fault 'kil'", "Did you mean kill"], lambda: run.inject("kil", rank=1))
    refused(UsageError, ["'disk-full' is not available yet"], lambda: run.inject("disk-full", rank=1))
    refused(UsageError, ["'kill' takes no factor", "--factor"], lambda: run.inject("kill", rank=1, factor=2))
    refused(UsageError, ["mtbf_s"], run.chaos)
    refused(RunError, ["no chaos in run 'long'", "%ft_chaos --mtbf"], run.chaos_stop)
    refused(UsageError, ["Step 401 will never come", "400 steps"], lambda: run.inject("kill", rank=1, at_step=401))
    refused(UsageError, ["Step 1 is past already"], lambda: run.inject("kill", rank=1, at_step=1))
    refused(UsageError, ["at_step or after_s"], lambda: run.inject("kill", rank=1, at_step=399, after_s=1))
    refused(UsageError, ["at_step takes a whole number"], lambda: run.inject("kill", rank=1, at_step=0))
    refused(UsageError, ["num_ranks takes a whole number of at least 1, not 0"], lambda: ftnb.Session.start(0))
    refused(UsageError, ["10000 ranks need about", "Start at most"],
            lambda: ftnb.Session.start(10_000, name="huge"))  # fmt: skip
    refused(UsageError, ["cannot be the name of a cluster"], lambda: ftnb.Session.start(2, name="a/b"))
    refused(
        NoClusterError,
        ["No cluster named 'nobody'", "%ft_cluster start"],
        lambda: ftnb.Session.attach("nobody"),
    )
    shown: list[str] = []
    assert ftnb.Session.start(2, name="shared", show=shown.append) is session, "starting twice is harmless"
    assert "runs already, with 4 ranks" in shown[0] and "%ft_cluster stop" in shown[0]
    assert ftnb.Session.attach("shared") is session

    run.unpause()
    check_report(run.wait(timeout_s=60), [])
    assert pids_of(session) == pids and runs_on_disk() == runs
    check_books(run, 400)
    assert [event["kind"] for event in run.events()] == ["run_started", "paused", "unpaused", "run_finished"]
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_commands_to_a_run_that_is_over(session: ftnb.Session) -> None:
    run = session.train(CELL, **OPTIONS)
    run.wait(timeout_s=60)
    for command in (run.pause, run.unpause, run.stop, lambda: run.inject("kill", rank=1)):
        with pytest.raises(RunError) as caught:
            command()
        says(caught.value, "is over", "finished", "%%ft_train")


def test_the_run_directory_cannot_be_made(session: ftnb.Session, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ftnb_runs").write_text("a file where the directory should be")
    with pytest.raises(RunError) as caught:
        session.train(CELL, **OPTIONS)
    says(caught.value, "run directory cannot be made", "ftnb_runs")
    assert session.status()["state"] == "idle"


def test_no_cluster(cluster: SharedCluster) -> None:
    """After a stop the old session says so, and nothing is started by accident."""
    session = cluster.session()
    cluster.stop()
    for command in (lambda: session.train(CELL, **OPTIONS), session.status, lambda: session.client):
        with pytest.raises(NoClusterError) as caught:
            command()
        says(caught.value, "'shared' has been stopped", "%ft_cluster start")
    with pytest.raises(NoClusterError) as caught:
        ftnb.Session.attach("shared")
    says(caught.value, "No cluster named 'shared' is running", "%ft_cluster start")
    assert cluster.census.left() == []
