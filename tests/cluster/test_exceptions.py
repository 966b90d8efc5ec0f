"""The user's code raises, exits or crashes: the first cause is shown and names the right rank."""

from __future__ import annotations

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
    cell_with_trouble,
    check_books,
    check_recoveries,
    check_report,
    losses_of,
    meeting,
    pids_of,
    position,
    processes_of,
    says,
    wait_until,
)

import ftnb
from ftnb.errors import CellError, CheckError, ClusterError

STEPS = 60
AT_CALL = 40


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(CELL, STEPS)


def check_still_works(session: ftnb.Session, reference: Reference, pids: dict[int, int] | None = None) -> None:
    """The same engines answer to %%px, and a mended cell trains on all of them."""
    if pids is not None:
        assert pids_of(session) == pids, "nobody was killed"
    living = sorted(pids_of(session))

    def numbers() -> list[int]:
        """Of the engines in the slots; one that has replaced another may have a number of its own."""
        return sorted(e["engine"] for e in session.status()["ranks"] if e["rank"] in living)

    wait_until(lambda: sorted(session.client.ids) == numbers(), "the views hold the living")
    assert session.client[:].apply_sync(lambda: 40 + 2) == [42] * len(living)
    run = session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={})
    check_report(run.wait(timeout_s=60), [])
    check_books(run, 8)
    assert_same(losses_of(run), reference.losses[:8], SAME_F64)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("ValueError('bad luck here')", "ValueError: bad luck here"),
        # Words that torch also uses for broken connections must not hide the user's own error.
        ("RuntimeError('socket of my data base: connection reset')", "RuntimeError: socket of my data base"),
        ("SystemExit(4)", "SystemExit: 4"),
    ],
    ids=["ValueError", "RuntimeError", "SystemExit"],
)
def test_one_rank_raises(session: ftnb.Session, reference: Reference, error: str, text: str) -> None:
    cell = cell_with_trouble(f"if rank == 2 and calls == {AT_CALL}: raise {error}")
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    report = run.wait(timeout_s=60)
    check_report(report, [2], kind="exception")
    check_books(run, STEPS)
    check_recoveries(run, [2], injected=[])
    assert_same(losses_of(run), reference.losses, SAME_F64)
    events = run.events()
    failed = events[position(events, "rank_failed", 2)]
    assert (failed["failure"], failed["step"]) == ("exception", AT_CALL)
    assert text in failed["reason"]
    blamed = [event["rank"] for event in events if event["kind"] in ("rank_suspected", "rank_failed")]
    assert set(blamed) == {2}, "the others only waited in the collective"
    assert report.failures[0].rank == 2 and text in report.failures[0].reason
    # It had its chance: fenced for good once the step was committed without it.
    wait_until(lambda: 2 not in processes_of(session), "rank 2 is gone")
    check_still_works(session, reference)


def test_two_ranks_raise_in_the_same_step(session: ftnb.Session, reference: Reference) -> None:
    """Both are named; the first to raise is the cause of the trouble, however late the second one is."""
    cell = cell_with_trouble(f"""if rank in (1, 3) and calls == {AT_CALL}:
        time.sleep(0.02 * rank)
        raise ValueError(f"rank {{rank}} is out of luck")""")
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    report = run.wait(timeout_s=60)
    check_report(report, [1, 3], kind="exception")
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses, SAME_F64)
    for failure in report.failures:
        assert f"rank {failure.rank} is out of luck" in failure.reason


@pytest.mark.parametrize(
    ("trouble", "etype"),
    [
        ("raise KeyError('nowhere')", "KeyError"),
        ("time.sleep(0.03 * rank)\n        raise RuntimeError('no gloo here')", "RuntimeError"),
        ("time.sleep(0.03 * rank)\n        model(x[:, :3])", "RuntimeError"),  # raised inside torch
    ],
    ids=["at once", "one after the other", "wrong shapes"],
)
def test_all_ranks_raise_later(
    session: ftnb.Session, reference: Reference, trouble: str, etype: str, request: pytest.FixtureRequest
) -> None:
    session.train(CELL, steps=2, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60)
    pids = pids_of(session)
    met = meeting(request.node.name.replace(" ", "-"))
    cell = cell_with_trouble(f"if calls == {AT_CALL}:\n        {met}\n        {trouble}")
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    report = run.wait(timeout_s=60)
    assert report.state == "failed" and not report.ok
    assert "Every rank raised" in report.reason and etype in report.reason, report.reason
    assert "%%px" in report.reason
    kinds = [event["kind"] for event in run.events()]
    assert "rank_failed" not in kinds and kinds[-1] == "run_failed", kinds
    error = run.info()["error"]
    assert (error["etype"], error["step"], error["ranks"]) == (etype, AT_CALL, [0, 1, 2, 3])
    assert error["rank"] == 0 or trouble.startswith("raise"), "the first to raise"
    assert error["lineno"] is not None and error["traceback"].count("Traceback") == 1
    check_books(run, AT_CALL - 1)
    assert_same(losses_of(run), reference.losses[: AT_CALL - 1], SAME_F64)
    check_still_works(session, reference, pids)


def test_all_ranks_raise_but_not_all_got_there(session: ftnb.Session, reference: Reference) -> None:
    """Ranks that have not begun the step when the first one raises are told to leave it, and raise on the second
    try: the run stops all the same, and nobody is killed."""
    session.train(CELL, steps=2, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60)
    pids = pids_of(session)
    cell = cell_with_trouble(f"if calls >= {AT_CALL}: raise ZeroDivisionError('everywhere')")
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    report = run.wait(timeout_s=60)
    assert report.state == "failed"
    assert "ZeroDivisionError: everywhere" in report.reason
    error = run.info()["error"]
    assert (error["etype"], error["step"]) == ("ZeroDivisionError", AT_CALL)
    check_books(run, AT_CALL - 1)
    check_still_works(session, reference, pids)


def test_all_ranks_raise_in_the_first_step(session: ftnb.Session, reference: Reference) -> None:
    """The commonest mistake: `train` itself raises, once, with the line of the cell."""
    session.train(CELL, steps=2, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60)
    pids = pids_of(session)
    cell = cell_with_trouble("x = x @ torch.zeros(5, 5)")
    line = cell.splitlines().index("    x = x @ torch.zeros(5, 5)") + 1
    with pytest.raises(CellError) as caught:
        session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    details = caught.value.details
    assert details["lineno"] == line
    assert details["step"] == 1
    assert details["ranks"] == [0, 1, 2, 3]
    shown = "\n".join(caught.value._render_traceback_())
    assert shown.count("Traceback") == 1
    assert "x = x @ torch.zeros(5, 5)" in shown, "the user's line"
    assert "ftnb/rank" not in shown, "none of ftnb's own frames"
    assert session.run.state == "failed"
    check_still_works(session, reference, pids)


# The sample whose input begins with this number breaks whoever gets it.
POISON = DATA.replace("dataset =", "inputs[17, 0] = 777.0\ndataset =")


def test_same_step_fails_twice(session: ftnb.Session, reference: Reference) -> None:
    session.train(CELL, steps=2, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60)
    pids = pids_of(session)
    cell = cell_with_trouble("if (x[:, 0] == 777).any(): raise ValueError('poisoned sample')").replace(DATA, POISON)
    with_poison = Reference(POISON + MODEL + LOSS, 4)
    run = None
    try:
        run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    except CellError as error:  # the step may come within the first ones that `train` waits for
        says(error, "failed twice")
    run = run or session.run
    report = run.wait(timeout_s=60)
    assert report.state == "failed"
    says(
        ValueError(report.reason),
        "failed twice",
        "poisoned sample",
        "when it was tried again",
        "data or the code",
    )
    events = run.events()
    raised = [event["rank"] for event in events if event["kind"] == "rank_suspected"]
    assert len(raised) == 2 and len(set(raised)) == 2, "two ranks have met the sample"
    broken = run.info()["error"]
    assert broken["rank"] == raised[1] and broken["evalue"] == "poisoned sample"
    assert broken["step"] <= 4, "epoch 1"
    check_books(run, broken["step"] - 1)
    assert_same(losses_of(run), with_poison.losses[: broken["step"] - 1], SAME_F64)
    check_still_works(session, reference, pids)


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        ("os._exit(3)", "exit", "exited with code 3"),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            "crash",
            "crashed in native code .SIGSEGV: invalid memory access",
        ),
    ],
    ids=["exit 3", "SIGSEGV"],
)
def test_a_rank_ends_by_itself(
    session: ftnb.Session, reference: Reference, trouble: str, kind: str, words: str
) -> None:
    cell = cell_with_trouble(f"if rank == 1 and calls == {AT_CALL}: {trouble}; time.sleep(60)")
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    report = run.wait(timeout_s=60)
    check_report(report, [1], kind=kind)
    says(ValueError(report.failures[0].reason), "Rank 1 is gone", words)
    check_books(run, STEPS)
    check_recoveries(run, [1], injected=[])
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_a_crash_that_comes_back_stops_the_run(session: ftnb.Session, reference: Reference) -> None:
    """Native code that crashes on one sample must not take one rank after the other."""
    cell = cell_with_trouble("if (x[:, 0] == 777).any(): os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)").replace(
        DATA, POISON
    )
    try:
        run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    except ftnb.FtnbError as error:
        says(error, "failed twice")
        run = session.run
    report = run.wait(timeout_s=60)
    assert report.state == "failed"
    says(ValueError(report.reason), "failed twice", "SIGSEGV")
    assert len([event for event in run.events() if event["kind"] == "rank_failed"]) == 2
    assert len(pids_of(session)) == 2, "the other two are left"
    check_still_works(session, reference)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_dataset_raises_on_one_rank(session: ftnb.Session, reference: Reference, workers: int) -> None:
    cell = (
        DATA
        + MODEL
        + LOSS
        + """
import os
class Flaky(torch.utils.data.Dataset):
    count = 0
    def __len__(self):
        return len(inputs)
    def __getitem__(self, index):
        self.count += 1
        if os.environ["FTNB_RANK"] == "3" and self.count == 100:
            raise OSError("the disk of rank 3")
        return inputs[index], targets[index]
dataset = Flaky()
"""
    )
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, workers=workers, recovery="shrink", names={})
    report = run.wait(timeout_s=60)
    check_report(report, [3], kind="exception")
    assert "OSError" in report.failures[0].reason and "the disk of rank 3" in report.failures[0].reason
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_a_rank_ends_while_it_runs_the_cell(session: ftnb.Session, reference: Reference) -> None:
    with pytest.raises(ClusterError) as caught:
        session.train(
            CELL + "import os\nif os.environ['FTNB_RANK'] == '1': os._exit(5)\n", steps=STEPS,
            global_batch=GLOBAL_BATCH, names={},
        )  # fmt: skip
    says(caught.value, "Rank 1", "exited with code 5", "next %%ft_train starts it again")
    assert sorted(pids_of(session)) == [0, 2, 3]
    check_still_works(session, reference)


def test_parameters_without_a_gradient(session: ftnb.Session, reference: Reference) -> None:
    session.train(CELL, steps=2, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60)
    pids = pids_of(session)
    cell = CELL.replace("optimizer =", "model.unused = torch.nn.Linear(2, 2).double()\nmodel.forward = lambda x: "
                        "model[2](torch.tanh(model[0](x)))\noptimizer =")  # fmt: skip
    with pytest.raises(CheckError) as caught:
        session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    says(caught.value, "2 parameters got no gradient", "unused.weight", "unused.bias", "requires_grad_")
    check_still_works(session, reference, pids)
