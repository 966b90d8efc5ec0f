"""The magics in a real IPython shell, on a scripted supervisor."""

from __future__ import annotations

import json

import pytest
from client_fakes import FakeConnection, run_info
from IPython.core.interactiveshell import InteractiveShell

from ftnb.client import ending, launch
from ftnb.client import session as session_module
from ftnb.client.run import Run
from ftnb.client.session import Session
from ftnb.errors import CellError
from ftnb.magics import COMMANDS, current, register

STARTED = {"run": "run", "directory": "ftnb_runs/run", "total_steps": 200, "dataset_len": 10, "notes": [],
           "output": []}  # fmt: skip


@pytest.fixture
def shell(monkeypatch):
    monkeypatch.setattr(session_module, "_sessions", {})
    monkeypatch.setattr(current, "_session", None)
    monkeypatch.setattr(current, "_live", None)
    monkeypatch.setattr(current, "last_cell", None)
    monkeypatch.setattr(current, "activate_px", lambda session: None)
    shell = InteractiveShell.instance()
    shell.user_ns.clear()
    shell.init_user_ns()
    register(shell)
    yield shell
    current.forget(current.session_or_none())
    InteractiveShell.clear_instance()


@pytest.fixture
def connection():
    connection = FakeConnection(train=STARTED)
    current.bind(Session(connection))
    return connection


def failing(shell, cell):
    """The error of `cell`."""
    result = shell.run_cell(cell)
    error = result.error_before_exec or result.error_in_exec
    assert error is not None, "the cell was to fail"
    return error


def running(connection, state="running", **more):
    def train(**_):
        connection.answers["run_info"] = run_info(state, **more)
        return STARTED

    connection.answers["train"] = train


def test_train_binds_run_and_counts_lines_as_the_notebook_does(shell, connection):
    running(connection, "finished")
    shell.user_ns["width"] = 3
    assert shell.run_cell("%%ft_train --steps 20 --global-batch 64\nmodel = width\n").success
    assert isinstance(shell.user_ns["run"], Run)
    sent = connection.sent("train")
    assert sent["cell"] == "\nmodel = width\n"
    assert (sent["options"]["steps"], sent["options"]["global_batch"]) == (20, 64)
    assert sent["names"]


def test_the_line_magic_runs_the_last_cell_again(shell, connection):
    assert "there is none yet" in str(failing(shell, "%ft_train"))
    running(connection, "finished")
    shell.run_cell("%%ft_train\nmodel = 1\n")
    assert shell.run_cell("%ft_train --steps 7").success
    assert connection.sent("train")["cell"] == "\nmodel = 1\n"
    assert connection.sent("train")["options"]["steps"] == 7


def test_a_syntax_error_names_the_line_that_the_notebook_shows(shell, connection, capsys):
    error = failing(shell, "%%ft_train\nx = 1\ny = = 2\n")
    assert error.details["lineno"] == 3
    assert "train" not in connection.ops()
    shown = capsys.readouterr().out
    assert shown.count("y = = 2") == 1


def test_wait_blocks_to_the_end_and_a_failed_run_fails_the_cell(shell, connection, tmp_path):
    lost = {"etype": "ValueError", "evalue": "no", "lineno": 2, "traceback": "ValueError: no"}
    (tmp_path / "run.json").write_text(json.dumps(
        {"name": "run", "state": "failed", "options": {"global_batch": 32, "seed": 0}, "total_steps": 200,
         "dataset_len": 10, "num_ranks": 4, "started": 1.0, "ended": 2.0}))  # fmt: skip
    running(connection, "failed", error=lost, reason="Every rank raised ValueError.")
    connection.answers["wait"] = run_info("failed")
    start = connection.answers["train"]
    connection.answers["train"] = lambda **args: start(**args) | {"directory": str(tmp_path)}
    error = failing(shell, "%%ft_train --wait\nmodel = 1\n")
    assert isinstance(error, CellError)
    assert str(error) == "Every rank raised ValueError."
    assert error.details["lineno"] == 2
    assert "run" in shell.user_ns


@pytest.mark.parametrize("module", COMMANDS)
def test_every_magic_has_help_and_refuses_what_it_does_not_know(shell, module, capsys):
    name = module.COMMAND.name
    assert shell.run_cell(f"%{name} --help").success
    assert name in capsys.readouterr().out
    line = f"%{name} status --bogus" if name == "ft_cluster" else f"%{name} --bogus"
    assert "has no option --bogus" in str(failing(shell, line))


@pytest.mark.parametrize("module", COMMANDS)
def test_without_a_cluster_every_magic_says_what_to_type(shell, module):
    name = module.COMMAND.name
    lines = {"ft_cluster": "%ft_cluster status", "ft_inject": "%ft_inject kill", "ft_chaos": "%ft_chaos --mtbf 5"}
    line = lines.get(name, f"%{name}")
    assert "%ft_cluster start" in str(failing(shell, line))


def test_a_wrong_option_is_told_before_the_missing_cluster(shell):
    assert "--stps" in str(failing(shell, "%%ft_train --stps 3\nmodel = 1"))


def test_an_error_is_shown_without_frames_of_ftnb(shell, capsys):
    failing(shell, "%ft_status")
    shown = capsys.readouterr().out.strip().splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("NoClusterError: ")


def test_start_twice_is_harmless_and_says_so(shell, monkeypatch, capsys):
    started = []

    def start(plan, progress):
        started.append(plan)
        return FakeConnection(plan.name, plan.num_ranks), None

    monkeypatch.setattr(launch, "running", lambda name: False)
    monkeypatch.setattr(launch, "start", start)
    assert shell.run_cell("%ft_cluster start -n 2 --threads 1").success
    assert shell.run_cell("%ft_cluster start -n 2").success
    assert len(started) == 1
    assert "runs already" in capsys.readouterr().out
    assert shell.run_cell("%ft_cluster stop").success
    assert "has been stopped" in capsys.readouterr().out
    assert "%ft_cluster start" in str(failing(shell, "%ft_status"))


def test_unknown_actions_get_a_suggestion(shell):
    assert "Did you mean status?" in str(failing(shell, "%ft_cluster statu"))


def test_spares_are_asked_for_at_the_start(shell, monkeypatch):
    started = []

    def start(plan, progress):
        started.append(plan)
        return FakeConnection(plan.name, plan.num_ranks), None

    monkeypatch.setattr(launch, "running", lambda name: False)
    monkeypatch.setattr(launch, "start", start)
    assert shell.run_cell("%ft_cluster start -n 1 --threads 1 --spares 1").success
    command = started[0].command()
    assert command[command.index("--spares") + 1] == "1"
    assert "--spares takes a whole number of at least 0" in str(failing(shell, "%ft_cluster start --spares -1"))


def test_resize_asks_the_supervisor_and_waits(shell, connection, capsys):
    connection.answers["resize"] = {"num_ranks": 3, "was": 4}
    before = connection.answers["status"]

    def status():
        if "resize" not in connection.ops():
            return before | {"num_ranks": 4}
        return before | {"num_ranks": 3, "world_size": 3, "ranks": before["ranks"][:3]}

    connection.answers["status"] = status
    assert shell.run_cell("%ft_cluster resize -n 3").success
    assert connection.sent("resize") == {"num_ranks": 3}
    assert "3 ranks, after" in capsys.readouterr().out
    assert "at least 1, not 0" in str(failing(shell, "%ft_cluster resize -n 0"))
    assert "%ft_cluster resize -n 4" in str(failing(shell, "%ft_cluster resize"))


def test_attach_binds_the_run_that_goes_on(shell, monkeypatch):
    connection = FakeConnection(run_info=run_info("finished"))
    monkeypatch.setattr(launch, "attach", lambda name, show: connection)
    assert shell.run_cell("%ft_cluster attach").success
    assert repr(shell.user_ns["run"]) == "Run('run')"


def test_steering_asks_the_supervisor(shell, connection, capsys):
    connection.answers |= {
        "run_info": run_info(), "pause": {}, "unpause": {}, "stop_run": {},
        "inject": {"rank": 2, "reason": "rank 2 will be killed in step 90"},
    }  # fmt: skip
    for line in ("%ft_inject kill --rank 2 --at-step 90", "%ft_pause", "%ft_unpause", "%ft_stop --no-save"):
        assert shell.run_cell(line).success
    assert connection.sent("inject")["at_step"] == 90
    assert connection.sent("stop_run") == {"run": "run", "save": False}
    shown = capsys.readouterr().out
    assert "rank 2 will be killed in step 90" in shown
    assert "Nothing was saved" in shown


@pytest.mark.parametrize(
    "kind, message",
    [("disk-full", "not available yet"), ("kil", "Did you mean kill"), ("", "needs a kind"),
     ("kill --factor 2", r"takes no factor (--factor)"), ("kill --seed 3", "only together with probability"),
     ("hang --at-step 3 --after 1", "not several"), ("kill --probability 2", "up to 1")],
)
def test_other_faults_are_refused(shell, connection, kind, message):
    connection.answers["run_info"] = run_info()
    assert message in str(failing(shell, f"%ft_inject {kind}"))


def test_fault_kinds_are_listed_without_a_cluster(shell, capsys):
    assert shell.run_cell("%ft_inject --list").success
    shown = capsys.readouterr().out.splitlines()
    hang = next(line for line in shown if line.startswith("hang "))
    assert "SIGSTOP" in hang and hang.count(" → ") == 1 and hang.split()[1] == "--duration"
    assert next(line for line in shown if line.startswith("disk-full ")).endswith("(not available yet)")
    assert "--probability" in shown[-1]


def test_chaos_is_begun_and_ended(shell, connection, capsys):
    connection.answers |= {
        "run_info": run_info(), "chaos": {"reason": "Chaos goes on."}, "chaos_stop": {"reason": "Chaos is over."},
    }  # fmt: skip
    assert shell.run_cell("%ft_chaos --mtbf 30 --kinds kill,hang --for 60 --seed 3 --no-mercy").success
    assert connection.sent("chaos") == {
        "run": "run", "mtbf_s": 30.0, "kinds": ["kill", "hang"], "for_s": 60.0, "seed": 3, "no_mercy": True,
    }  # fmt: skip
    assert shell.run_cell("%ft_chaos stop").success
    assert capsys.readouterr().out == "Chaos goes on.\nChaos is over.\n"
    for line, words in (("", "--mtbf 30"), ("stp", "Did you mean stop?"), ("stop --seed 3", "no options"),
                        ("--mtbf 5 --kinds kil", "Did you mean kill?")):  # fmt: skip
        assert words in str(failing(shell, f"%ft_chaos {line}"))


def test_stacks_are_shown_by_groups(shell, connection, capsys):
    stack = {"place": "collective", "step": 41, "stack": ["line 7 of the cell"]}
    connection.answers |= {
        "run_info": run_info(), "stacks": {"ranks": {"0": stack, "1": stack, "3": stack, "2": {"problem": "it is stopped"}}},
    }  # fmt: skip
    assert shell.run_cell("%ft_stacks").success
    assert "ranks 0, 1 and 3, all-reduce of step 41:\n  line 7 of the cell\nrank 2, it is stopped.\n" in capsys.readouterr().out


def test_status_is_of_the_run_or_before_it_of_the_cluster(shell, connection, capsys):
    assert shell.run_cell("%ft_status").result is None
    assert capsys.readouterr().out.startswith("Cluster default: idle")
    connection.answers["run_info"] = run_info()
    assert shell.run_cell("%ft_status").result is None
    assert capsys.readouterr().out.startswith("Run run: running")
    assert shell.run_cell("%ft_cluster status").success
    assert capsys.readouterr().out.startswith("Cluster default: idle")


@pytest.mark.parametrize("line", ["%ft_wait", "%ft_report", "%ft_status", "%ft_events"])
def test_results_are_shown_whole_wherever_in_the_cell_they_come(shell, connection, tmp_path, capsys, line):
    connection.answers |= {"run_info": run_info("finished", directory=str(tmp_path)), "wait": run_info("finished")}
    (tmp_path / "run.json").write_text('{"name": "run", "state": "finished"}')
    (tmp_path / "events.jsonl").write_text('{"time": 5.0, "kind": "run_started", "generation": 1}\n')
    first = {"%ft_status": "Run run: finished\n", "%ft_events": "time "}.get(line, "run: finished, 0 of 0 steps")
    assert shell.run_cell(f"{line}\nx = 1").success
    assert capsys.readouterr().out.count(first) == 1
    assert shell.run_cell(line).result is None
    assert capsys.readouterr().out.count(first) == 1


def test_the_end_of_waiting_is_one_line(shell, connection, capsys):
    connection.answers |= {"run_info": run_info(), "wait": run_info()}
    assert isinstance(failing(shell, "%ft_wait --timeout 0"), TimeoutError)
    shown = capsys.readouterr().out.strip().splitlines()
    assert len(shown) == 1 and shown[0].startswith("TimeoutError: Run 'run' is still running")
    assert "%ft_stop" in shown[0]


def test_a_second_cluster_is_no_secret_and_can_be_stopped_by_name(shell, monkeypatch, capsys):
    clusters = {}

    def start(plan, progress):
        clusters[plan.name] = FakeConnection(plan.name, plan.num_ranks)
        return clusters[plan.name], None

    monkeypatch.setattr(launch, "running", lambda name: False)
    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(ending, "connect", lambda name: clusters[name])
    for name in ("first", "second", "third"):
        assert shell.run_cell(f"%ft_cluster start -n 2 --name {name}").success
    assert "'second' goes on. Back to it: %ft_cluster attach second" in capsys.readouterr().out
    assert shell.run_cell("%ft_cluster stop first\n%ft_cluster stop --name second").success
    assert [clusters[name].alive for name in clusters] == [False, False, True]
    assert current.session().name == "third"
    assert shell.run_cell("%ft_cluster stop").success
    assert current.session_or_none() is None and not clusters["third"].alive
    clusters["fourth"] = FakeConnection("fourth")
    assert shell.run_cell("%ft_cluster stop fourth").success  # without being attached to any
    assert not clusters["fourth"].alive


def test_events_and_logs_come_from_the_files(shell, connection, tmp_path, capsys):
    connection.answers["run_info"] = run_info(directory=str(tmp_path))
    (tmp_path / "events.jsonl").write_text('{"time": 5.0, "kind": "run_started", "generation": 1}\n')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").write_text("hello\n")
    assert shell.run_cell("%ft_events").success
    assert "run started" in capsys.readouterr().out
    assert shell.run_cell("%ft_logs --rank 0 -n 5").success
    assert "hello" in capsys.readouterr().out
