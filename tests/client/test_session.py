"""`Session` against a scripted supervisor: what is sent, what is refused before anything is sent."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path

import pytest
from client_fakes import FakeConnection, run_info

from ftnb.client import launch
from ftnb.client import session as session_module
from ftnb.client.run import WaitInterrupted
from ftnb.client.session import Session, result_lines
from ftnb.errors import CellError, ClusterError, NoClusterError, RunError, UsageError
from ftnb.wire import paths

STARTED = {"run": "run", "directory": "ftnb_runs/run", "total_steps": 200, "dataset_len": 10, "notes": [],
           "output": []}  # fmt: skip
CELL = "model = optimizer = dataset = loss_fn = scale"


@pytest.fixture(autouse=True)
def no_other_sessions(monkeypatch):
    monkeypatch.setattr(session_module, "_sessions", {})


def test_train_sends_the_cell_its_names_and_all_options():
    connection = FakeConnection(train=STARTED)
    run = Session(connection).train(CELL, names={"scale": 3, "other": 4}, steps=20, seed=1)
    assert repr(run) == "Run('run')"
    sent = connection.sent("train")
    assert sent["cell"] == CELL
    assert pickle.loads(sent["names"]) == {"scale": 3}
    assert sent["options"]["steps"] == 20
    assert "wait" not in sent["options"]
    assert sent["cwd"] and sent["sys_path"]


def test_a_function_is_sent_as_its_body():
    connection = FakeConnection(train=STARTED)

    width = 5

    def job():
        """What to train."""
        model = width
        if model:
            dataset = RunError  # noqa: F841

    Session(connection).train(job)
    sent = connection.sent("train")
    assert sent["cell"].splitlines()[1:] == [
        "model = width", "if model:", "    dataset = RunError  # noqa: F841"]  # fmt: skip
    assert pickle.loads(sent["names"])["width"] == 5


def returning():
    model = 1
    return model


def taking(x):
    model = x  # noqa: F841


@pytest.mark.parametrize("cell", [returning, taking, len, 3, "", "  \n"])
def test_what_is_no_cell_is_refused(cell):
    connection = FakeConnection(train=STARTED)
    with pytest.raises(UsageError):
        Session(connection).train(cell)
    assert "train" not in connection.ops()


@pytest.mark.parametrize(
    "cell, options, error",
    [
        ("a = = 1", {}, CellError),
        (CELL, {"stps": 3}, UsageError),
        (CELL, {"exact": True}, UsageError),
        (CELL, {"global_batch": 3}, UsageError),
    ],
)
def test_nothing_is_sent_for_a_mistake_that_the_notebook_can_see(cell, options, error):
    connection = FakeConnection(train=STARTED)
    session = Session(connection)
    with pytest.raises(error):
        session.train(cell, names={}, **options)
    assert "train" not in connection.ops()


@pytest.mark.parametrize("cell", ["my_training.py", "  code/my training.py\n", Path("my_training.py")])
def test_the_path_of_a_file_is_no_cell(cell):
    connection = FakeConnection(train=STARTED)
    with pytest.raises(UsageError, match=r"not the path of a file.*open\(.*my.training.py.*\)\.read\(\)"):
        Session(connection).train(cell, names={})
    assert "train" not in connection.ops()


def test_a_cell_of_one_line_is_no_path():
    connection = FakeConnection(train=STARTED)
    Session(connection).train("model = package.py", names={})
    assert connection.sent("train")["cell"] == "model = package.py"


def test_the_search_path_travels_as_text(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/some/where"), None])
    connection = FakeConnection(train=STARTED)
    Session(connection).train(CELL, names={})
    assert connection.sent("train")["sys_path"] == [*sys.path[:-2], "/some/where"]


def test_a_second_training_is_refused_while_one_runs():
    connection = FakeConnection(train=STARTED, run_info=run_info("paused"))
    with pytest.raises(RunError, match=r"Run 'run' is still paused.*%ft_wait.*%ft_stop"):
        Session(connection).train(CELL, names={})
    assert "train" not in connection.ops()


def test_what_the_ranks_printed_is_shown_once(capsys):
    output = [[[0, 1, 2, 3], "hello\n"], [[2], "only me\n"], [[1, 0], "a\nb"]]
    connection = FakeConnection(train=STARTED | {"output": output, "notes": ["shares differ"]})
    Session(connection).train(CELL, names={})
    assert capsys.readouterr().out.splitlines() == [
        "[all ranks] hello", "[rank 2] only me", "[ranks 0, 1] a", "[ranks 0, 1] b", "Note: shares differ",
    ]  # fmt: skip


def test_a_single_rank_is_called_by_its_number():
    assert list(result_lines({"output": [[[0], "x"]]}, 1)) == ["[rank 0] x"]


def test_ctrl_c_while_the_cell_runs_calls_the_attempt_off():
    states = iter([])

    def info(run):
        return run_info(next(states, "starting"))

    connection = FakeConnection(train=KeyboardInterrupt(), stop_run={}, run_info=RunError("none"))
    session = Session(connection)

    def interrupted(**_):
        connection.answers["run_info"] = info
        raise KeyboardInterrupt

    connection.answers["train"] = interrupted
    with pytest.raises(WaitInterrupted, match="called off"):
        session.train(CELL, names={})
    assert connection.sent("stop_run") == {"run": "run", "save": False}


def test_ctrl_c_once_the_training_has_begun_leaves_it_alone():
    connection = FakeConnection()

    def interrupted(**_):
        connection.answers["run_info"] = run_info("running")
        raise KeyboardInterrupt

    connection.answers["train"] = interrupted
    with pytest.raises(WaitInterrupted, match="goes on"):
        Session(connection).train(CELL, names={})
    assert "stop_run" not in connection.ops()


def test_before_the_first_run_there_is_none():
    assert Session(FakeConnection()).run is None
    assert Session(FakeConnection(run_info={"run": None})).run is None


def test_stop_waits_until_the_supervisor_is_gone_and_is_harmless_twice():
    connection = FakeConnection()
    with Session(connection) as session:
        assert session.alive
    assert not connection.alive
    session.stop()
    assert connection.ops().count("stop_cluster") == 1
    with pytest.raises(NoClusterError, match="has been stopped"):
        session.status()


class FakeProcess:
    pid = 4242  # the scripted supervisor's

    def __init__(self, returncode):
        self.returncode = returncode

    def wait(self, timeout):
        return self.returncode


@pytest.mark.parametrize(
    ("process", "connection_left", "kept"),
    [(FakeProcess(0), False, False), (None, False, False), (FakeProcess(1), False, True), (None, True, True)],
)
def test_the_clusters_directory_goes_with_it_unless_it_ended_badly(
    process, connection_left, kept, tmp_path, monkeypatch
):
    monkeypatch.setenv("FTNB_RUNTIME_DIR", str(tmp_path))
    directory = paths.make_private_dir(paths.cluster_dir("default"))
    (directory / "supervisor.log").write_text("what happened")
    if connection_left:
        paths.connection_file("default").write_text("{}")
    Session(FakeConnection(), process).stop()
    assert (directory / "supervisor.log").exists() == directory.exists() == kept


def test_stop_after_the_supervisor_has_died_is_no_error():
    connection = FakeConnection()
    session = Session(connection)
    connection.alive = False
    session.stop()


def test_an_error_of_stop_is_not_hidden_while_the_supervisor_lives():
    with pytest.raises(ClusterError, match="not now"):
        Session(FakeConnection(stop_cluster=ClusterError("not now"))).stop()


def test_starting_twice_gives_the_same_session_and_says_so(monkeypatch):
    monkeypatch.setattr(launch, "running", lambda name: False)
    monkeypatch.setattr(
        launch, "start", lambda plan, progress: (FakeConnection(num_ranks=plan.num_ranks), None)
    )
    said = []
    first = Session.start(2, show=said.append)
    assert Session.start(3, show=said.append) is first
    assert len(said) == 1
    assert "runs already, with 2 ranks" in said[0] and "stop it first" in said[0]
    first.stop()
    assert Session.start(2, show=said.append) is not first


def test_a_cluster_started_elsewhere_is_not_taken_over(monkeypatch):
    monkeypatch.setattr(launch, "running", lambda name: True)
    match = r"%ft_cluster attach default.*Session.attach.*%ft_cluster stop default.*ends by itself.*--name"
    with pytest.raises(ClusterError, match=match):
        Session.start(2)


@pytest.mark.parametrize(
    "options",
    [
        {"num_ranks": 0}, {"num_ranks": "4"}, {"num_spares": -1}, {"num_spares": 100_000}, {"engines": "ssh"}, {"backend": "mpi"},
        {"threads": 0}, {"linger_s": -1}, {"name": "a b"}, {"num_ranks": 100_000}, {"ranks": 3},
    ],
)  # fmt: skip
def test_wrong_start_options_start_nothing(options, monkeypatch):
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("something was started"))
    with pytest.raises(UsageError):
        Session.start(**options)


def test_a_wrong_keyword_of_start_gets_a_suggestion():
    with pytest.raises(UsageError, match=r"Session.start\(\) has no option 'ranks'. Did you mean num_ranks"):
        Session.start(ranks=3)


def test_one_rank_is_not_called_ranks():
    assert "with 1 rank;" in Session(FakeConnection(num_ranks=1)).already_runs(2)


def test_requests_from_many_threads():
    session = Session(FakeConnection())
    threads = [threading.Thread(target=session.status) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert session.status()["state"] == "idle"


def test_session_and_run_do_not_travel_to_the_ranks():
    session = Session(FakeConnection(train=STARTED))
    with pytest.raises(UsageError, match=r"`s` from the notebook .*belongs to the notebook"):
        session.train("model = s", names={"s": session})
