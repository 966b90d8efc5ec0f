"""Text and HTML twins, and the live display without a front end."""

from __future__ import annotations

import io
import threading

import pytest

from ftnb.display import live as live_module
from ftnb.display.events import events_table
from ftnb.display.live import Live, Output, Terminal
from ftnb.display.stacks import stacks
from ftnb.display.status import cluster_status, resizing_cluster, run_status, starting_cluster
from ftnb.display.table import Shown, seconds, show
from ftnb.errors import ClusterError

RANKS = [
    {
        "rank": rank,
        "engine": k,
        "pid": 10 + k,
        "host": "box",
        "state": state,
        "step": step,
        "heartbeat_age_s": age,
    }
    for k, (rank, state, step, age) in enumerate(
        [(0, "training", 50, 0.02), (1, "failed", 49, 9.0), (None, "spare", None, None)]
    )
]
INFO = {
    "run": "run", "state": "running", "step": 50, "total_steps": 200, "epoch": 2, "loss": 0.25,
    "steps_per_s": 99.6, "generation": 2, "world_size": 3, "num_ranks": 4, "global_batch": 32, "failures": 1,
    "elapsed_s": 0.5, "eta_s": 1.5, "goodput": 0.97, "ranks": RANKS, "recent": ["rank 1 was <killed>"],
    "error": None, "reason": "",
}  # fmt: skip


def test_run_status_in_text():
    lines = run_status(INFO).text.splitlines()
    assert lines[0] == "Run run: running"
    assert lines[1] == "[########......................] step 50 of 200"
    assert lines[2] == (
        "loss 0.25 · epoch 2 · world size 3 of 4 · generation 2 · global batch 32 · 1 rank lost"
    )
    assert lines[3] == "500 ms · 99.6 steps/s · about 1.5 s left · goodput 97.0 %"
    assert lines[-1] == "- rank 1 was <killed>"
    assert any("failed" in line and line.startswith("1 ") for line in lines)


def test_chaos_is_part_of_the_status():
    chaos = {"mtbf_s": 30.0, "kinds": ["kill"], "injected": 3, "spared": 1}
    assert "chaos every 30 s on average (3 injected, 1 spared)" in run_status(INFO | {"chaos": chaos}).text
    assert "chaos" not in run_status(INFO | {"chaos": None}).text


def test_equal_stacks_are_shown_once():
    waiting = {"place": "collective", "step": 41, "stack": ["  File <cell>, line 3", "    loss.backward()"]}
    shown = stacks({
        0: waiting, 1: waiting, 3: dict(waiting), 2: {"place": "forward", "step": 42, "stack": ["<lambda>"]},
        4: {"problem": "it holds the interpreter lock or is stopped."}, 5: {"place": None, "step": None, "stack": []},
    })  # fmt: skip
    assert shown.text.splitlines() == [
        "ranks 0, 1 and 3, all-reduce of step 41:",
        "    File <cell>, line 3",
        "      loss.backward()",
        "rank 2, forward and loss of step 42:",
        "  <lambda>",
        "rank 4, it holds the interpreter lock or is stopped.",
        "rank 5, not in a training.",
    ]
    assert "&lt;lambda&gt;" in shown.html and "<lambda>" not in shown.html
    assert shown.html.count("loss.backward()") == 1
    assert stacks({}).text == "No rank is there."
    assert "dreaming (step 3)" in stacks({0: {"place": "dreaming", "step": 3}}).text, "a place that it does not know"


def test_run_status_in_html_says_the_same_and_escapes():
    html = run_status(INFO).html
    assert "&lt;killed&gt;" in html and "<killed>" not in html
    for words in ("step 50 of 200", "world size 3 of 4", "width:25.0%", "training"):
        assert words in html


def test_a_failed_run_shows_the_users_traceback_once():
    error = {"etype": "ValueError", "evalue": "no", "traceback": "line 7\n  bad()\nValueError: no\n"}
    shown = run_status(INFO | {"state": "failed", "error": error, "reason": "Every rank raised."})
    assert shown.text.count("bad()") == 1
    assert shown.text.endswith("ValueError: no")
    assert shown.text.count("Every rank raised.") == 1
    assert shown.html.count("bad()") == 1


def test_what_is_not_known_yet_is_left_out():
    bare = {"run": "run", "state": "starting", "step": None, "total_steps": None, "loss": None}
    assert run_status(bare).text == "Run run: starting\n[..............................] step 0\n\n"


def test_a_loss_that_is_not_finite_is_visible():
    assert "loss not finite" in run_status(INFO | {"loss": None}).text
    assert "loss not finite" in run_status(INFO | {"loss": None}).html
    assert "loss" not in run_status(INFO | {"loss": None, "step": 1, "failures": 0}).text.splitlines()[2]


def test_one_rank_is_not_called_ranks():
    ranks = [{"rank": 0, "state": "idle"}]
    status = {"supervisor_pid": 9, "state": "idle", "generation": 0, "world_size": 1, "run": None, "ranks": ranks}
    assert "1 rank · supervisor" in cluster_status(status, "mine").text
    start = {"ranks": ranks, "num_ranks": 1, "elapsed_s": 3.2}
    assert starting_cluster(start, "mine").text == "Cluster mine: 1 rank ready, after 3.2 s."
    start["ranks"] = [{"state": "starting"}]
    assert starting_cluster(start, "mine").text == "Starting cluster mine: 0 of 1 rank ready (3 s)"


def test_cluster_status():
    status = {
        "supervisor_pid": 9,
        "state": "running",
        "generation": 2,
        "world_size": 3,
        "run": "run",
        "ranks": RANKS,
    }
    shown = cluster_status(status, "mine")
    assert "Cluster mine: running" in shown.text
    assert "spare" in shown.text and "spare" in shown.html
    assert "no ranks" in cluster_status(status | {"ranks": []}, "mine").text


SPARE = {"rank": None, "engine": 4, "pid": 104, "host": "box", "state": "spare", "step": None, "heartbeat_age_s": 0.1}


def test_spares_are_counted_apart_and_ranks_that_join_are_shown():
    ranks = [
        {**SPARE, "rank": 0, "state": "training", "step": 7},
        {**SPARE, "rank": 1, "state": "joining"},
        {**SPARE, "rank": 2, "state": "starting", "pid": None, "heartbeat_age_s": None},
        SPARE,
        {**SPARE, "state": "starting"},
    ]
    status = {"supervisor_pid": 9, "state": "running", "generation": 2, "world_size": 2, "run": "run", "ranks": ranks}
    for wanted, words in ((None, "3 ranks · 2 spares · supervisor"), (3, "3 ranks · 2 spares"), (4, "3 ranks · 4 wanted · 2 spares")):
        assert words in cluster_status(status | {"wanted_ranks": wanted, "num_ranks": 3}, "mine").text
    text = cluster_status(status, "mine").text
    assert [line.split()[:2] for line in text.splitlines()[3:]] == [
        ["0", "training"], ["1", "joining"], ["2", "starting"], ["spare", "spare"], ["spare", "starting"]]  # fmt: skip
    assert "spare" in run_status(INFO | {"ranks": ranks}).text and "joining" in run_status(INFO | {"ranks": ranks}).html
    problem = "Rank 3 could <not> start."
    shown = cluster_status(status | {"resize_problem": problem}, "mine")
    assert shown.text.endswith(f"Resizing failed: {problem}") and "could &lt;not&gt; start." in shown.html


def test_spares_do_not_count_as_ranks_that_are_ready():
    status = {"ranks": [{"rank": 0, "state": "idle"}, {"rank": 1, "state": "starting"}, SPARE], "num_ranks": 2, "elapsed_s": 3.2}
    assert "1 of 2 ranks ready" in starting_cluster(status, "mine").text
    assert "Resizing cluster mine to 2 ranks: 2 there, 1 of them working (3 s)" in resizing_cluster(status, "mine").text


def test_starting_cluster_counts_the_ranks_that_answered():
    ranks = [{"state": "idle"}, {"state": "starting"}]
    status = {"ranks": ranks, "num_ranks": 2, "elapsed_s": 3.2}
    assert "1 of 2 ranks ready" in starting_cluster(status, "mine").text
    assert "2 ranks ready, after" in starting_cluster(status | {"ranks": [{"state": "idle"}] * 2}, "mine").text


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "–"),
        (0.0345, "34 ms"),
        (4.25, "4.2 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (59.99, "60.0 s"),
    ],
)
def test_lengths_of_time(value, text):
    assert seconds(value) == text


def test_events_in_words():
    events = [
        {"time": 100.0, "kind": "run_started", "generation": 1, "reason": "4 ranks"},
        {
            "time": 101.25,
            "kind": "rank_failed",
            "generation": 1,
            "rank": 2,
            "step": 7,
            "reason": "it <was> killed",
        },
    ]
    shown = events_table(events)
    assert shown.text.splitlines()[2].split()[:6] == ["+1.250", "s", "rank", "failed", "2", "7"]
    assert "&lt;was&gt;" in shown.html
    assert events_table([]).text == "No events yet."


class Recorder(Output):
    def __init__(self):
        self.shown: list[str] = []
        self.threads: set[str] = set()

    def show(self, content):
        self.shown.append(content.text)
        self.threads.add(threading.current_thread().name)


def follow(states, monkeypatch):
    """Follow the given states without real waiting; an exception among them is raised."""
    monkeypatch.setattr(live_module, "MIN_INTERVAL_S", 0)
    left = list(states)

    def fetch():
        state = left.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    output = Recorder()
    live = Live(
        fetch, lambda s: Shown(f"<{s}>", f"<{s}>"), lambda s: s == "end", output, interval_s=0
    ).start()
    live.join(5)
    return output


def test_live_shows_the_first_state_at_once_and_ends_with_the_last(monkeypatch):
    output = follow(["one", "two", "end", "never"], monkeypatch)
    assert output.shown == ["<one>", "<two>", "<end>"]
    assert output.threads == {threading.current_thread().name, "ftnb-live"}


def test_a_lost_cluster_is_said_below_the_last_state(monkeypatch):
    output = follow(["one", ClusterError("the supervisor is gone")], monkeypatch)
    assert output.shown == ["<one>", "<one>\n\nthe supervisor is gone"]


def test_a_fault_of_the_display_is_shown_and_logged(monkeypatch, caplog):
    output = follow(["one", KeyError("oops")], monkeypatch)
    assert "KeyError: 'oops'" in output.shown[-1]
    assert "the live status has ended" in caplog.text


def test_a_live_display_that_is_finished_shows_the_present_state_and_ends_its_thread():
    states = ["on"]
    output = Recorder()
    live = Live(lambda: states[-1], lambda s: Shown(s, s), lambda s: s == "end", output, interval_s=60).start()
    states.append("end")
    live.finish()
    assert not live._thread.is_alive()
    assert output.shown == ["on", "end"]
    live.finish()  # what has ended already is left as it is
    assert output.shown == ["on", "end"]


def test_what_is_shown_in_the_middle_of_a_cell_is_whole(capsys):
    show(Shown("a\nb", "<b>"))
    assert capsys.readouterr().out == "a\nb\n"


def test_updates_are_at_most_five_a_second():
    assert (
        Live(lambda: 0, lambda s: Shown("", ""), lambda s: True, Recorder(), interval_s=0)._interval_s >= 0.2
    )


def test_output_is_silent_without_a_front_end(capsys):
    Output().show(Shown("text", "html"))
    assert capsys.readouterr().out == ""


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_redrawn_in_place():
    screen = Screen()
    terminal = Terminal(screen)
    terminal.show("a\nb")
    terminal.show("c")
    assert screen.getvalue() == "a\nb\n\x1b[2F\x1b[Jc\n"


def test_a_file_gets_a_line_per_tenth():
    stream = io.StringIO()
    terminal = Terminal(stream)
    for step in range(101):
        terminal.show("long text", step / 100, f"step {step}")
    assert stream.getvalue().splitlines() == [f"step {step}" for step in range(0, 101, 10)]
