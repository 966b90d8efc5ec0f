"""Cells that nobody means to write, and moments that nobody plans: each ends with a reason, and the next run works."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_tools import CELL, DATA, MODEL, NUM_RANKS, cell_with_trouble, pids_of, wait_until

import ftnb
from ftnb.errors import CellError, CheckError, ClusterError, RunError


def trains(session: ftnb.Session, cell: str = CELL, **options) -> ftnb.Run:
    run = session.train(cell, **{"steps": 10, "global_batch": 16, "names": {}, **options})
    report = run.wait(timeout_s=60)
    assert report.state == "finished" and report.ok, str(report)
    return run


def test_a_rank_that_dies_when_it_has_run_the_cell_while_others_still_do(session: ftnb.Session, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    cell = CELL + f"""
import os, time
open({str(tmp_path)!r} + "/ran-" + os.environ["FTNB_RANK"], "w").close()
while os.environ["FTNB_RANK"] == "0" and not os.path.exists({str(gate)!r}):
    time.sleep(0.01)
"""
    pids = pids_of(session)

    def kill_rank_3() -> None:
        wait_until(lambda: len(list(tmp_path.glob("ran-*"))) == NUM_RANKS, "all ranks run the cell")
        os.kill(pids[3], signal.SIGKILL)
        wait_until(lambda: session.status()["ranks"][3]["state"] == "failed", "the death is known")
        gate.touch()

    helper = threading.Thread(target=kill_rank_3)
    helper.start()
    with pytest.raises(ClusterError, match="Rank 3 ended while the cell was run"):
        session.train(cell, steps=10, global_batch=16, names={})
    helper.join()
    trains(session)


@pytest.mark.parametrize("what", ["asyncio.CancelledError('x')", "GeneratorExit('x')", "SystemExit(3)", "KeyboardInterrupt()"])
def test_whatever_the_cell_raises_is_an_error_of_the_cell(session: ftnb.Session, what: str) -> None:
    with pytest.raises(CellError, match=what.split("(")[0].removeprefix("asyncio.")):
        session.train(f"import asyncio\nraise {what}", steps=10, names={})
    trains(session)


def test_an_exception_that_cannot_be_shown_is_the_users_all_the_same(session: ftnb.Session) -> None:
    pids = pids_of(session)
    cell = "class Mute(Exception):\n    def __str__(self): raise ValueError('no')\n" + cell_with_trouble("raise Mute()")
    with pytest.raises(CellError, match="Every rank raised Mute"):
        session.train(cell, steps=10, global_batch=16, names={})
    assert pids_of(session) == pids  # nobody was killed


def test_odd_prints_reach_the_log(session: ftnb.Session) -> None:
    run = trains(session, cell_with_trouble("print('odd \\udcff name'); print('x' * 3_000_000); print('no end', end='')"))
    log = run.logs(rank=1, n=10_000)
    assert "odd \\udcff name" in log and "characters cut" in log and "no end" in log


def test_several_ask_for_the_weights_at_once(session: ftnb.Session) -> None:
    run = trains(session)
    with ThreadPoolExecutor(3) as pool:
        states = list(pool.map(lambda _: run.state_dict(), range(3)))
    assert all(state.keys() == states[0].keys() and len(state) == 4 for state in states)


def test_buffers_that_forward_replaces_are_shared_as_well(session: ftnb.Session) -> None:
    """An exponential average kept as `self.ema = …`: each rank sees other samples, all end with the same buffer."""
    cell = DATA + """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1).double()
        self.register_buffer("ema", torch.zeros(1, dtype=torch.float64))
    def forward(self, x):
        y = self.layer(x)
        self.ema = 0.9 * self.ema + 0.1 * y.detach().mean(0)
        return y
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_fn = torch.nn.functional.mse_loss
"""
    run = session.train(cell, steps=60, global_batch=16, names={})
    report = run.wait(timeout_s=60)
    assert report.ok and report.weights_agree, str(report)


def test_a_state_dict_with_more_than_tensors(session: ftnb.Session) -> None:
    cell = CELL + """
class Extra(torch.nn.Sequential):
    def get_extra_state(self): return {"version": 1}
    def set_extra_state(self, state): pass
model = Extra(*model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
    assert len(trains(session, cell).state_dict()) == 4


def test_settings_of_one_cell_do_not_hold_in_the_next(session: ftnb.Session) -> None:
    with pytest.raises(CheckError):
        session.train("import torch\ntorch.set_grad_enabled(False); torch.set_default_dtype(torch.float64)\n"
                      "torch.set_default_device('meta')\nx = 1", steps=10, names={})  # fmt: skip
    trains(session, CELL + "assert torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == 'cpu'\n")


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("loss_fn = torch.nn.MSELoss\n", "the class MSELoss"),
        ("loss_fn = lambda output: output\n", r"must take \(output, target\)"),
        ("model.add_module('e', torch.nn.Embedding(3, 2, sparse=True))\n", "sparse"),
    ],
)
def test_mistakes_that_are_known_have_their_own_words(session: ftnb.Session, addition: str, message: str) -> None:
    with pytest.raises(CheckError, match=message):
        session.train(CELL + addition, steps=10, global_batch=16, names={})


def test_a_parameter_frozen_in_the_middle_is_named(session: ftnb.Session) -> None:
    run = session.train(
        cell_with_trouble("calls == 5 and model.module[0].weight.requires_grad_(False)"), steps=400, global_batch=16, names={}
    )
    assert "0.weight was frozen" in run.wait(timeout_s=60).reason


def test_evaluate_without_its_option_is_mentioned(session: ftnb.Session) -> None:
    said: list[str] = []
    session.train(CELL + "def evaluate(model): return {}\n", steps=3, global_batch=16, names={}, show=said.append).wait()
    assert any("--evaluate-every" in line for line in said)


def test_a_rank_lost_while_another_is_started_again(session: ftnb.Session) -> None:
    pids = pids_of(session)
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: session.status()["ranks"][0]["state"] == "failed", "the first death is known")

    def kill_rank_1() -> None:
        wait_until(lambda: session.status()["ranks"][0]["state"] == "starting", "rank 0 is started again")
        os.kill(pids[1], signal.SIGKILL)

    helper = threading.Thread(target=kill_rank_1)
    helper.start()
    trains(session)
    helper.join()


def test_a_run_directory_that_cannot_be_made(session: ftnb.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ftnb_runs").symlink_to("/nonexistent/scratch")  # a disk that is not mounted
    with pytest.raises(RunError, match="run directory cannot be made"):
        session.train(CELL, steps=10, global_batch=16, names={})
    (tmp_path / "ftnb_runs").unlink()
    trains(session, DATA + MODEL + "loss_fn = torch.nn.functional.mse_loss\n")


def test_parameters_outside_the_optimizer_do_not_gather_gradients(session: ftnb.Session) -> None:
    """Only the head is trained; the norm that is clipped is that of one step's gradients, whatever came before."""
    cell = DATA + MODEL + "optimizer = torch.optim.SGD(model[2].parameters(), lr=0.0)\nloss_fn = torch.nn.functional.mse_loss\n"
    norms = {m["step"]: m["grad_norm"] for m in trains(session, cell, steps=8, clip_norm=1.0).metrics()}
    whole = CELL.replace("lr=0.05", "lr=0.0")
    reference = {m["step"]: m["grad_norm"] for m in trains(session, whole, steps=8, clip_norm=1.0).metrics()}
    assert norms == pytest.approx(reference, rel=1e-9)
