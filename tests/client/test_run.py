"""`Run` against a scripted supervisor and files on the disk."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
import torch
from client_fakes import FakeConnection, run_info

from ftnb.client import run as run_module
from ftnb.client.run import Run, WaitInterrupted, failure, read_lines
from ftnb.client.session import Session
from ftnb.display.status import run_status
from ftnb.errors import CellError, CheckError, ClusterError, RunError, UsageError


@pytest.fixture(autouse=True)
def plain_report(monkeypatch):
    """The report has tests of its own."""
    monkeypatch.setattr(run_module, "build_report", lambda record, *_: SimpleNamespace(state=record["state"]))


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"state": "finished"}))
    return tmp_path


def make(directory, **answers):
    connection = FakeConnection(**({"run_info": run_info()} | answers))
    return Run(Session(connection), "run", directory), connection


def waits(*states):
    """Answers to `wait`, one after the other; the last one for ever."""
    left = list(states)
    return lambda run, hold_s: run_info(left.pop(0) if len(left) > 1 else left[0])


@pytest.mark.parametrize("end", ["finished", "stopped", "failed"])
def test_wait_returns_the_report_however_the_run_ends(directory, end):
    run, connection = make(directory, wait=waits("running", "recovering", "running", end))
    assert run.wait().state == "finished"
    assert connection.ops().count("wait") == 4


def test_wait_gives_up_in_time_and_says_what_goes_on(directory):
    run, _ = make(directory, wait=waits("running"))
    with pytest.raises(TimeoutError, match=r"still running \(step 50 of 200\).*%ft_stop.*run.stop\(\)") as caught:
        run.wait(timeout_s=0.05)
    assert caught.value._render_traceback_() == [f"TimeoutError: {caught.value}"]
    with pytest.raises(UsageError, match="Did you mean timeout_s"):
        run.wait(timeout=1)
    with pytest.raises(UsageError):
        run.wait(timeout_s=-1)


def test_an_ended_run_is_seen_with_no_time_to_wait_at_all(directory):
    run, _ = make(directory, wait=waits("finished"))
    assert run.wait(timeout_s=0).state == "finished"


def test_interrupting_stops_the_waiting_only(directory):
    run, connection = make(directory, wait=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        run.wait()
    assert isinstance(caught.value, WaitInterrupted)
    assert "the training goes on" in caught.value._render_traceback_()[0]
    assert connection.ops() == ["hello", "wait"]


def test_awaiting_leaves_the_event_loop_free(directory):
    def slow(run, hold_s):
        time.sleep(0.02)
        slow.calls += 1
        return run_info("finished" if slow.calls > 5 else "running")

    slow.calls = 0
    run, _ = make(directory, wait=slow)

    async def both():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        report = await run
        ticker.cancel()
        return report, ticks

    report, ticks = asyncio.run(both())
    assert report.state == "finished"
    assert ticks > 10


def test_the_report_of_an_ended_run_outlives_the_cluster(directory):
    run, connection = make(directory, wait=waits("finished"))
    connection.alive = False
    assert run.wait().state == "finished"
    assert run.state == "finished"
    assert run.step == 0


def test_the_state_of_an_ended_run_outlives_the_cluster(directory, monkeypatch):
    monkeypatch.undo()  # the real report
    record = {"name": "run", "state": "stopped", "options": {"global_batch": 8, "seed": 0}, "total_steps": 9,
              "dataset_len": 22, "num_ranks": 4, "started": 1.0, "ended": 2.0}  # fmt: skip
    (directory / "run.json").write_text(json.dumps(record))
    run, connection = make(directory, inject=RunError("over"))
    assert run.info()["state"] == "running"  # the supervisor is asked first
    with pytest.raises(RunError, match=r"over \(stopped after 0 steps in 1.0 s\).*--steps"):
        run.inject("kill")
    connection.alive = False
    info = run.info()
    assert (info["state"], info["step"], info["total_steps"], info["ranks"]) == ("stopped", 0, 9, [])
    assert run_status(info).text.startswith("Run run: stopped")


def test_a_lost_cluster_in_the_middle_of_a_run_is_told(directory):
    (directory / "run.json").write_text(json.dumps({"state": "running"}))
    run, connection = make(directory)
    connection.alive = False
    with pytest.raises(ClusterError):
        run.wait()
    with pytest.raises(ClusterError):
        _ = run.state
    with pytest.raises(ClusterError):
        run.info()


def test_a_line_being_written_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    assert read_lines(path) == [{"a": 1}]
    assert read_lines(tmp_path / "missing.jsonl") == []


def test_a_damaged_line_in_the_middle_is_not_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": \n{"a": 2}\n')
    with pytest.raises(ValueError):
        read_lines(path)


def test_logs_are_the_last_lines_of_each_rank(directory):
    (directory / "logs").mkdir()
    (directory / "logs/rank-0.log").write_text("".join(f"line {i}\n" for i in range(30_000)))
    (directory / "logs/rank-11.log").write_text("one\ntwo")
    run, _ = make(directory)
    assert run.logs(rank=0, n=2) == "line 29998\nline 29999"
    assert run.logs(n=1) == "[rank 0] line 29999\n[rank 11] two"
    with pytest.raises(UsageError, match=r"no log of rank 5.*Ranks: 0, 11"):
        run.logs(rank=5)
    with pytest.raises(UsageError):
        run.logs(n=0)


def test_inject_checks_first_and_then_asks(directory):
    run, connection = make(directory, inject={"rank": 2, "reason": "rank 2 will be killed"})
    assert run.inject("kill", rank=2, at_step=50)["rank"] == 2
    assert connection.sent("inject") == {
        "run": "run", "kind": "kill", "rank": 2, "at_step": 50, "after_s": None, "duration_s": None, "factor": None,
        "probability": None, "seed": None,
    }  # fmt: skip
    run.inject("slow", duration_s=2, factor=4)
    assert (connection.sent("inject")["duration_s"], connection.sent("inject")["factor"]) == (2.0, 4.0)
    count = len(connection.asked)
    for wrong in (
        {"kind": "disk-full"}, {"kind": "kil"}, {"kind": 3}, {"kind": "kill", "rank": -1}, {"kind": "kill", "at_step": 0},
        {"kind": "kill", "at_step": 3, "after_s": 1}, {"kind": "kill", "at_step": 3, "probability": 0.1},
        {"kind": "kill", "duration_s": 1}, {"kind": "hang", "factor": 2}, {"kind": "kill", "seed": 1},
        {"kind": "kill", "probability": 1.5}, {"kind": "kill", "probability": 0}, {"kind": "slow", "factor": 1},
        {"kind": "hang", "duration_s": 0}, {"kind": "kill", "x": 1},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            run.inject(**wrong)
    assert len(connection.asked) == count


def test_chaos_checks_first_and_then_asks(directory):
    run, connection = make(directory, chaos={"reason": "Chaos goes on"}, chaos_stop={"reason": "over"})
    assert run.chaos(mtbf_s=30, kinds=["kill", "hang"], seed=4)["reason"] == "Chaos goes on"
    assert connection.sent("chaos") == {
        "run": "run", "mtbf_s": 30.0, "kinds": ["kill", "hang"], "for_s": None, "seed": 4, "no_mercy": False,
    }  # fmt: skip
    run.chaos(5, "exit, partition", for_s=60, no_mercy=True)
    assert connection.sent("chaos")["kinds"] == ["exit", "partition"]
    run.chaos(5)
    assert connection.sent("chaos")["kinds"] is None
    count = len(connection.asked)
    for wrong in (
        {}, {"mtbf_s": 0}, {"mtbf_s": float("inf")}, {"mtbf_s": 5, "kinds": "kil"}, {"mtbf_s": 5, "kinds": ""},
        {"mtbf_s": 5, "kinds": 7}, {"mtbf_s": 5, "for_s": -1}, {"mtbf_s": 5, "seed": -1}, {"mtbf_s": 5, "no_mercy": 1},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            run.chaos(**wrong)
    assert len(connection.asked) == count
    assert run.chaos_stop() == {"reason": "over"}


def test_stacks_come_by_rank(directory):
    entry = {"place": "forward", "step": 3, "stack": ["line 1"]}
    run, _ = make(directory, stacks={"ranks": {"10": entry, "2": {"problem": "silent"}}})
    assert list(run.stacks().items()) == [(2, {"problem": "silent"}), (10, entry)]


def test_steering_names_the_run_so_that_an_old_one_cannot_steer_the_next(directory):
    run, connection = make(directory, pause={}, unpause={}, stop_run={}, inject={})
    run.pause(), run.unpause(), run.stop(), run.inject("kill")
    assert [args["run"] for op, args in connection.asked if op != "hello"] == ["run"] * 4


def test_a_run_that_the_cluster_has_left_behind_is_read_from_the_disk(directory):
    unknown = RunError("not the last one")
    run, _ = make(directory, run_info=unknown, wait=unknown)
    assert run.state == "finished"
    assert run.wait().state == "finished"


def test_weights_come_back_as_tensors(directory, monkeypatch):
    weights = [
        ("w", "torch.float32", [2, 2], torch.arange(4.0).numpy().tobytes()),
        ("steps", "int64", [], torch.tensor(7).numpy().tobytes()),
        ("none", "float32", [0, 3], b""),
    ]
    run, _ = make(directory, prepare_weights={"rank": 2, "engine": 9})
    asked = []

    class View:
        def apply_sync(self, function, text):
            asked.append((function, text))
            return weights

    monkeypatch.setattr(Session, "client", {9: View()})
    state = run.state_dict()
    assert list(state) == ["w", "steps", "none"]
    assert state["w"].tolist() == [[0, 1], [2, 3]]
    assert state["steps"].item() == 7 and state["none"].shape == (0, 3)
    state["w"] += 1  # the tensors own writable memory
    assert asked[0][0] is eval and "take_weights" in asked[0][1]


def test_what_ended_a_run_becomes_the_right_exception():
    raised = {"etype": "ValueError", "evalue": "no", "lineno": 3, "traceback": "t"}
    assert isinstance(failure(run_info("failed", error=raised, reason="why")), CellError)
    assert isinstance(failure(run_info("failed", error={"check": True, "evalue": "no grad"})), CheckError)
    lost = failure(run_info("failed", reason="All ranks are lost."))
    assert isinstance(lost, RunError) and str(lost) == "All ranks are lost."


def test_shown_form_is_stable(directory):
    run, _ = make(directory)
    assert repr(run) == "Run('run')"
    assert run._repr_html_() == run._repr_html_()
    assert str(directory) not in run._repr_html_()
