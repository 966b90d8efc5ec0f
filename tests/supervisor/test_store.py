"""The rendezvous store, and the run directory."""

from __future__ import annotations

import json

import pytest

from ftnb.supervisor.recorder import Recorder, new_run_directory
from ftnb.supervisor.store import StoreServer


def ask(store, sender, number, command, generation=1, **fields):
    answers = store.handle(sender, {"id": number, "generation": generation, "command": command, **fields})
    return [(a.to, a.request_id, a.ok, a.fields) for a in answers]


@pytest.fixture
def store():
    store = StoreServer()
    store.open(1)
    return store


def test_a_get_waits_until_the_key_is_set(store):
    assert ask(store, "a", 1, "get", key="k") == []
    assert ask(store, "b", 1, "set", key="k", value=b"v") == [("b", 1, True, {}), ("a", 1, True, {"value": b"v"})]
    assert ask(store, "a", 2, "get", key="k") == [("a", 2, True, {"value": b"v"})]


def test_a_wait_needs_all_of_its_keys(store):
    assert ask(store, "a", 1, "wait", keys=["x", "y"]) == []
    assert ask(store, "b", 1, "set", key="x", value=b"") == [("b", 1, True, {})]
    assert ("a", 1, True, {}) in ask(store, "b", 2, "set", key="y", value=b"")


def test_counters_and_the_rest(store):
    assert ask(store, "a", 1, "add", key="n", amount=2)[0][3] == {"number": 2}
    assert ask(store, "a", 2, "add", key="n", amount=3)[0][3] == {"number": 5}
    assert ask(store, "a", 3, "check", keys=["n", "m"])[0][3] == {"number": 0}
    assert ask(store, "a", 4, "compare_set", key="m", expected=b"", desired=b"1")[0][3] == {"value": b"1"}
    assert ask(store, "a", 5, "compare_set", key="m", expected=b"0", desired=b"2")[0][3] == {"value": b"1"}
    assert ask(store, "a", 6, "num_keys")[0][3] == {"number": 2}
    assert ask(store, "a", 7, "delete", key="m")[0][3] == {"number": 1}
    assert ask(store, "a", 8, "append", key="s", value=b"x") and ask(store, "a", 9, "append", key="s", value=b"y")
    assert ask(store, "a", 10, "get", key="s")[0][3] == {"value": b"xy"}


def test_a_new_generation_forgets_all_keys_and_sends_the_waiting_away(store):
    ask(store, "a", 1, "set", key="k", value=b"old")
    ask(store, "b", 7, "get", key="never")
    assert [(a.to, a.request_id, a.ok) for a in store.open(2)] == [("b", 7, False)]
    assert ask(store, "a", 2, "check", generation=2, keys=["k"])[0][3] == {"number": 0}


def test_an_old_generation_is_refused(store):
    store.open(2)
    assert ask(store, "zombie", 1, "set", generation=1, key="k", value=b"v") == [("zombie", 1, False, {})]
    assert ask(store, "a", 1, "check", generation=2, keys=["k"])[0][3] == {"number": 0}


def test_a_taken_run_name_gets_a_numbered_sibling(tmp_path):
    names = [new_run_directory(tmp_path / "ftnb_runs", "run").name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_events_are_on_the_disk_at_once_and_hold_no_nan(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.event({"kind": "paused", "loss": float("nan"), "list": [float("inf"), 1.0]})
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {"kind": "paused", "loss": None, "list": [None, 1.0]}
    recorder.log(2, 0.0, "hello")
    recorder.flush()
    assert (tmp_path / "logs" / "rank-2.log").read_text().endswith(" hello\n")
    recorder.close()


def test_a_request_that_is_asked_again_is_done_once():
    store = StoreServer()
    store.open(1)
    add = {"id": 1, "generation": 1, "command": "add", "key": "a", "amount": 1}
    first = store.handle("r0", add)
    assert store.handle("r0", add) == first and first[0].fields == {"number": 1}
    wait = {"id": 1, "generation": 1, "command": "wait", "keys": ["b"]}
    assert store.handle("r1", wait) == [] and store.handle("r1", wait) == []
    answers = store.handle("r0", {"id": 2, "generation": 1, "command": "set", "key": "b", "value": b"1"})
    assert [(answer.to, answer.request_id) for answer in answers] == [("r0", 2), ("r1", 1)]
    assert [answer.ok for answer in store.handle("r1", wait)] == [True], "the answer was lost, and is given again"
    assert store.handle("r0", {"id": 3, "generation": 1, "command": "add", "key": "a", "amount": 1})[0].fields == {"number": 2}
