"""What people report of other tools in public, each as a test: names, ids, modules, weights, output, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cluster_tools import (
    CELL,
    DATA,
    GLOBAL_BATCH,
    LOSS,
    MODEL,
    NUM_SAMPLES,
    SAME_F64,
    Reference,
    assert_same,
    cell_with_trouble,
    check_books,
    check_report,
    digest_of_model,
    losses_of,
    meeting,
    pids_of,
    wait_until,
)
from shared_cluster import SharedCluster

import ftnb

STEPS = 40
OPTIONS = {"steps": STEPS, "global_batch": GLOBAL_BATCH}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(CELL, 200)


def test_a_dead_engine_leaves_the_views_and_comes_back(cluster: SharedCluster, reference: Reference) -> None:
    cluster.stop()  # in a fresh cluster, engines have the numbers of their ranks
    session = cluster.session()
    run = session.train(CELL, steps=160, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    assert sorted(session.client.ids) == [0, 1, 2, 3]
    run.inject("kill", rank=2, at_step=150)
    check_report(run.wait(timeout_s=60), [2])
    wait_until(lambda: sorted(session.client.ids) == [0, 1, 3], "the dead engine's id leaves the views")
    ranks = session.client[:].apply_sync(lambda: __import__("os").environ["FTNB_RANK"])
    assert ranks == ["0", "1", "3"], "engines are asked by their rank, and the dead one is not waited for"
    check_report(session.train(CELL, **OPTIONS, names={}).wait(timeout_s=60), [])
    wait_until(lambda: sorted(session.client.ids) == [0, 1, 2, 3], "the new engine has the old id")
    pids = session.client[:].apply_sync(os.getpid)
    assert dict(enumerate(pids)) == pids_of(session)


def test_a_module_next_to_the_notebook_is_imported(session: ftnb.Session, reference: Reference) -> None:
    body = "\n".join("    " + line for line in MODEL.strip().splitlines())
    Path("beside_the_notebook.py").write_text(f"import torch\n\ndef make():\n{body}\n    return model, optimizer\n")
    cell = DATA + "import beside_the_notebook\nmodel, optimizer = beside_the_notebook.make()\n" + LOSS
    run = session.train(cell, **OPTIONS, names={})
    check_report(run.wait(timeout_s=60), [])
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)
    directories = session.client[:].apply_sync(os.getcwd)
    assert directories == [os.getcwd()] * 4


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1)).double()

    def forward(self, x):
        return activated(self.body(x))

def activated(x):
    return x * FACTOR

FACTOR = 1.0
"""


def test_a_model_class_defined_in_the_notebook_is_found(session: ftnb.Session, reference: Reference) -> None:
    """The class, the function it calls and the number that one uses, all defined in another cell."""
    notebook: dict = {"__name__": "__main__"}
    exec(NET, notebook)
    cell = DATA + MODEL.replace(MODEL.splitlines()[1], "model = Net()") + LOSS
    run = session.train(cell, **OPTIONS, names=notebook)
    check_report(run.wait(timeout_s=60), [])
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)
    # By value: a changed definition is what the next run takes.
    exec(NET.replace("FACTOR = 1.0", "FACTOR = 0.5"), notebook)
    again = session.train(cell, **OPTIONS, names=notebook)
    again.wait(timeout_s=60)
    assert losses_of(again)[0] != losses_of(run)[0]


def digest_on_rank() -> str:
    """Runs on a rank: what its model hashes to, by the definition in the documentation."""
    import hashlib

    from IPython import get_ipython

    model = get_ipython().user_ns["model"]
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def digests_on_ranks(session: ftnb.Session) -> dict[int, str]:
    view = session.client[:]
    return dict(zip(view.targets, view.apply_sync(digest_on_rank)))


def digest_of(weights: dict, cell: str) -> str:
    model = Reference(cell, 0).model
    model.load_state_dict(weights)
    return digest_of_model(model)


def test_weights_are_visible_in_the_notebook(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=200, global_batch=GLOBAL_BATCH, names={})
    during = run.state_dict()
    assert set(during) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    run.pause()
    step = run.step
    paused = run.state_dict()
    on_ranks = digests_on_ranks(session)
    assert set(on_ranks.values()) == {digest_of(paused, CELL)} and len(on_ranks) == 4
    expected = Reference(CELL, step).model.state_dict()
    for name, tensor in expected.items():
        assert_same(paused[name].flatten().tolist(), tensor.flatten().tolist(), SAME_F64)
    run.unpause()
    report = run.wait(timeout_s=60)
    after = run.state_dict()
    assert digest_of(after, CELL) == report.weights_digest
    assert set(digests_on_ranks(session).values()) == {report.weights_digest}
    check_books(run, 200)
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_weights_after_rank_0_was_lost(session: ftnb.Session) -> None:
    run = session.train(CELL, steps=160, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    run.inject("kill", rank=0, at_step=150)
    report = run.wait(timeout_s=60)
    assert digest_of(run.state_dict(), CELL) == report.weights_digest


def test_buffers_are_equal_on_all_ranks_at_the_end(session: ftnb.Session) -> None:
    cell = CELL.replace("torch.nn.Tanh()", "torch.nn.BatchNorm1d(12), torch.nn.Tanh()")
    run = session.train(cell, **OPTIONS, names={})
    report = run.wait(timeout_s=60)
    check_report(report, [])
    assert set(digests_on_ranks(session).values()) == {report.weights_digest}
    assert digest_of(run.state_dict(), cell) == report.weights_digest


def test_running_the_cell_again_works(session: ftnb.Session, reference: Reference) -> None:
    """No address in use, no group initialised twice: the same cell, the same result, a directory of its own."""
    runs = [session.train(CELL, **OPTIONS, names={}, name="again") for _ in range(3) if _finish(session)]
    runs[-1].wait(timeout_s=60)
    assert len({run.directory for run in runs}) == 3
    assert all(re.fullmatch(r"again(-\d+)?", run.name) for run in runs)
    for run in runs:
        check_report(run.report(), [])
        check_books(run, STEPS)
        assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)
    assert len({run.report().weights_digest for run in runs}) == 1


def _finish(session: ftnb.Session) -> bool:
    if session.run is not None:
        session.run.wait(timeout_s=60)
    return True


@pytest.mark.parametrize("global_batch", [7, 49])
def test_uneven_shares_do_not_hang_and_the_batch_stays_what_it_is(session: ftnb.Session, global_batch: int) -> None:
    """Last batches of one sample, for four ranks and for three after a loss."""
    run = session.train(CELL, steps=60, global_batch=global_batch, recovery="shrink", names={})
    run.inject("kill", rank=1, at_step=50)
    check_report(run.wait(timeout_s=60), [1])
    check_books(run, 60, global_batch=global_batch)  # constant global batch, whatever the world size
    assert_same(losses_of(run), Reference(CELL, 60, global_batch=global_batch).losses, SAME_F64)
    assert {sum(line["shares"].values()) for line in run.ledger()} == ({global_batch, NUM_SAMPLES % global_batch} - {0})


def test_the_same_print_of_four_ranks_is_shown_once(session: ftnb.Session) -> None:
    shown: list[str] = []
    cell = CELL + "print('loading the data')\nprint('ready')\n"
    run = session.train(cell, **OPTIONS, names={}, show=shown.append)
    assert [line for line in shown if not line.startswith("Note:")] == [
        "[all ranks] loading the data", "[all ranks] ready",
    ]  # fmt: skip
    run.wait(timeout_s=60)
    for rank in range(4):
        log = (run.directory / "logs" / f"rank-{rank}.log").read_text()
        assert log.count("loading the data") == log.count("ready") == 1


def test_different_prints_are_shown_once_each(session: ftnb.Session) -> None:
    shown: list[str] = []
    trouble = "print(f'step {calls} on rank {rank}') if calls <= 2 else None"
    cell = cell_with_trouble(trouble) + "print('I am rank', rank)\nprint('a warning', file=sys.stderr)\n"
    run = session.train(cell, **OPTIONS, names={}, show=shown.append)
    for rank in range(4):
        assert shown.count(f"[rank {rank}] I am rank {rank}") == 1, shown
    run.wait(timeout_s=60)
    for rank in range(4):
        lines = (run.directory / "logs" / f"rank-{rank}.log").read_text().splitlines()
        said = [line.split(" ", 1)[1] for line in lines]
        assert said == [f"I am rank {rank}", "a warning", f"step 1 on rank {rank}", f"step 2 on rank {rank}"]
    assert run.logs(rank=3, n=1).endswith("step 2 on rank 3")
    assert not [line for line in shown if "step" in line], "what the training prints does not flood the cell"


def test_idle_ranks_hold_no_process_group(session: ftnb.Session) -> None:
    session.train(CELL, **OPTIONS, names={}).wait(timeout_s=60)

    def has_group() -> bool:
        import torch.distributed as dist

        return dist.is_initialized()

    wait_until(lambda: session.client[:].apply_sync(has_group) == [False] * 4, "the group is taken down")


def test_px_works_while_training(session: ftnb.Session) -> None:
    run = session.train(CELL, steps=20_000, global_batch=GLOBAL_BATCH, names={})
    seen = session.client[:].apply_sync(lambda: __import__("threading").current_thread().name)
    assert seen == ["MainThread"] * 4
    session.client[:].push({"told": 5}, block=True)
    assert session.client[:].pull("told", block=True) == [5] * 4
    assert run.state == "running"
    run.stop(save=False)


SCRIPT = """
import signal
import ftnb

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background

if __name__ == "__main__":
    session = ftnb.Session.start(2, name="script")
    try:
        run = session.train({cell!r}, steps=1_000_000, global_batch={global_batch}, names={{}})
        print("TRAINS", flush=True)
        run.wait()
    except KeyboardInterrupt as interrupt:
        print("INTERRUPTED", interrupt, flush=True)
        print("GOES ON", run.state, flush=True)
    finally:
        session.stop()
        print("STOPPED", flush=True)
"""


@pytest.mark.parametrize("whom", ["process", "group"])
def test_ctrl_c_leaves_no_process_behind(cluster: SharedCluster, whom: str) -> None:
    """A script that trains and cleans up after itself; a terminal's Ctrl-C goes to its whole process group."""
    before = cluster.census.take()
    script = Path("script.py")
    script.write_text(textwrap.dedent(SCRIPT).format(cell=CELL, global_batch=GLOBAL_BATCH))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.strip() == "TRAINS":
                cluster.census.take()
                if whom == "process":
                    process.send_signal(signal.SIGINT)
                else:
                    os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0, lines
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    told = [line for line in lines if line.split(" ")[0].isupper()]
    assert [line.split(" ")[0] for line in told] == ["TRAINS", "INTERRUPTED", "GOES", "STOPPED"], lines
    assert told[2] == "GOES ON running"  # the interrupt may come just before the waiting begins, or in it
    assert cluster.census.take() <= before, cluster.census.left()


MAGICS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ftnb")
shell.run_line_magic("ft_cluster", "attach shared")
try:
    shell.run_cell_magic("ft_train", "--steps 60 --global-batch 16 --wait", {cell!r})
except Exception as error:
    print("RAISED", type(error).__name__, error.details["lineno"], error.details["ranks"], error.details["step"])
    print("\\n".join(error._render_traceback_()))
shell.run_cell_magic("px", "", "print('px answers', 6 * 7)")
shell.run_cell_magic("ft_train", "--steps 8 --global-batch 16 --wait", {good!r})
print("STATE", shell.user_ns["run"].state)
"""


def test_magics_attached_from_elsewhere_show_the_error_once(session: ftnb.Session) -> None:
    cell = cell_with_trouble(f"if calls == 30: {meeting('magics')}; raise ValueError('deliberate')")
    # In the notebook, the magic's own line is line 1.
    line = next(n for n, text in enumerate(cell.splitlines(), start=2) if "deliberate" in text)
    ran = subprocess.run(
        [sys.executable, "-c", MAGICS.format(cell=cell, good=CELL)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"RAISED CellError {line} [0, 1, 2, 3] 30" in ran.stdout, ran.stdout + ran.stderr
    after = ran.stdout.split("RAISED", 1)[1]
    assert after.count("Traceback (most recent call last)") == 1
    assert after.count("px answers 42") == 4
    assert "STATE finished" in ran.stdout
