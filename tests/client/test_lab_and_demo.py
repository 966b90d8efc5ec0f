"""`ftnb lab` copies without overwriting; `ftnb demo` succeeds for the right reason only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ftnb import cli, demo, demo_cell, lab
from ftnb.client import container
from ftnb.client.names import check_syntax, names_read
from ftnb.errors import FtnbError, UsageError


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "pictures").mkdir(parents=True)
    (folder / "00_quickstart.ipynb").write_text("{}")
    (folder / "pictures/a.svg").write_text("<svg/>")
    (folder / ".hidden").write_text("")
    return folder


def test_tutorials_are_copied(source, tmp_path):
    target = tmp_path / "deep/target"
    assert lab.copy_tutorials(source, target) == [f"Copied 2 files to {target}."]
    assert sorted(p.name for p in target.rglob("*") if p.is_file()) == ["00_quickstart.ipynb", "a.svg"]
    assert lab.copy_tutorials(source, target) == []


def test_a_changed_file_is_kept_and_named(source, tmp_path):
    target = tmp_path / "target"
    lab.copy_tutorials(source, target)
    mine = target / "00_quickstart.ipynb"
    mine.write_text("mine")
    assert f"Kept your changed {mine}" in lab.copy_tutorials(source, target)[0]
    assert mine.read_text() == "mine"


def test_a_file_in_the_way_is_an_error(source, tmp_path):
    (tmp_path / "target").write_text("")
    with pytest.raises(FtnbError, match="not a directory"):
        lab.copy_tutorials(source, tmp_path / "target")


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["here", "--", "--no-browser"], "here"), (["here", "--no-browser"], "here"),
        (["--no-browser"], "ftnb-tutorials"), (["--", "--no-browser"], "ftnb-tutorials"),
        (["--port", "8890", "--no-browser"], "ftnb-tutorials"), (["here", "--port", "8890"], "here"),
    ],
)  # fmt: skip
def test_lab_opens_the_quickstart(arguments, folder, source, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(lab, "tutorials", lambda: source)
    monkeypatch.setattr(lab.os, "execv", lambda program, arguments: started.append(arguments[1:]))
    monkeypatch.chdir(tmp_path)
    cli.main(["lab", *arguments])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path != source] == [folder]
    options = [word for word in arguments if word not in ("here", "--")]
    assert started == [["-m", "jupyterlab", "00_quickstart.ipynb", *options]]


def test_other_commands_take_no_options_of_jupyterlab(capsys):
    for arguments in (["demo", "--no-browser"], ["lab", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
    captured = capsys.readouterr()
    assert "unrecognized arguments: --no-browser" in captured.err and "--allow-root" in captured.out


def test_lab_without_jupyterlab_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["lab"]) == 1
    assert 'pip install "ftnb[lab]"' in capsys.readouterr().err


def test_the_demo_cell_stands_on_its_own():
    check_syntax(demo_cell.SOURCE)
    assert names_read(demo_cell.SOURCE) == set()


def report(state="finished", lost=1, recovered=1, ok=True):
    failures = [SimpleNamespace(mttr_s=0.05 if k < recovered else None) for k in range(lost)]
    return SimpleNamespace(
        state=state, reason="why", failures=failures, ok=ok, problems=[] if ok else ["bad sum"]
    )


def test_the_demo_succeeds_only_if_one_rank_was_lost_and_everything_holds():
    assert demo.verdict(report()) == ""
    assert "stopped" in demo.verdict(report(state="stopped"))
    assert "0 were lost" in demo.verdict(report(lost=0, recovered=0))
    assert "2 were lost" in demo.verdict(report(lost=2, recovered=2))
    assert demo.verdict(report(recovered=0))
    assert demo.verdict(report(ok=False)) == "bad sum"


@pytest.mark.parametrize(
    "arguments", [["demo", "-n", "1"], ["demo", "--steps", "3"], ["demo", "-n", "100000"]]
)
def test_a_demo_that_cannot_be_is_refused_at_once(arguments, monkeypatch, capsys):
    monkeypatch.setattr(demo.Session, "start", lambda *_, **__: pytest.fail("started"))
    if "100000" in arguments:
        monkeypatch.undo()
    assert cli.main(arguments) == 1
    assert "UsageError" in capsys.readouterr().err


def test_few_steps_are_slowed_down_so_that_the_fault_comes_in_time():
    assert demo.cell(4000) == demo_cell.SOURCE
    assert "time.sleep(0.400)" in demo.cell(20)
    check_syntax(demo.cell(20))
    assert names_read(demo.cell(20)) == set()


class RunAt:
    """Refuses faults in steps that are past, and gets further with every question."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.planned = None

    @property
    def step(self):
        return self.steps[0]

    def inject(self, kind, rank, at_step):
        self.steps[1:] and self.steps.pop(0)
        if at_step <= self.step:
            raise UsageError(f"Step {at_step} is past already")
        self.planned = at_step


@pytest.mark.parametrize(("steps", "planned"), [([0, 3], 10), ([0, 10], 15), ([0, 12, 16, 17], 18), ([0, 18, 19], 20)])
def test_the_demos_kill_is_planned_in_a_step_that_is_still_to_come(steps, planned):
    run, said = RunAt(*steps), []
    demo._plan_kill(run, 20, SimpleNamespace(say=said.append))
    assert run.planned == planned
    assert len(said) == (planned != 10)


def test_a_demo_that_is_over_before_its_kill_is_an_error():
    with pytest.raises(UsageError):
        demo._plan_kill(RunAt(0, 20), 20, SimpleNamespace(say=print))


def test_a_small_container_gets_a_small_demo(monkeypatch, capsys):
    monkeypatch.setattr(container, "look", lambda: container.Container(8, 10**9, 10**8))
    assert cli.main(["demo"]) == 1
    assert "needs at least 2 ranks" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ftnb ")
