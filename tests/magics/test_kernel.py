"""Display, `await run` and Ctrl-C in a real notebook kernel (the supervisor is scripted)."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

HERE = Path(__file__).resolve()
SETUP = f"""
import sys
sys.path[:0] = [{str(HERE.parents[2])!r}, {str(HERE.parents[1] / "client")!r}]
import json, pathlib, tempfile, threading, time
from client_fakes import FakeConnection, run_info
from ftnb.client import run as run_module
from ftnb.client.session import Session
from ftnb.magics import current

class Report(str):
    def _repr_html_(self):
        return f"<b>{{self}}</b>"

real_report = run_module.build_report
run_module.build_report = lambda record, *_: Report(record["state"])
current.activate_px = lambda session: None
directory = pathlib.Path(tempfile.mkdtemp())
(directory / "run.json").write_text(json.dumps({{"state": "finished"}}))
gate = threading.Event()
steps = iter(range(1, 100_000))

def info(run=None, hold_s=0.0):
    if hold_s:
        print("waiting", flush=True)
    gate.wait(min(hold_s, 0.05))
    state = "finished" if gate.is_set() else "running"
    return run_info(state, directory=str(directory), step=next(steps))

def train(**request):
    connection.answers |= {{"run_info": info, "wait": info}}
    return {{"run": "run", "directory": str(directory), "output": [[[0, 1, 2, 3], "hello"]]}}

connection = FakeConnection(train=train)
%load_ext ftnb
current.bind(Session(connection))
"""


class Kernel:
    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def execute(self, code, interrupt_when=None, timeout_s=30):
        """All messages that the cell sends, and its reply; interrupted once it has printed a certain text."""
        messages = []

        def hook(message):
            messages.append(message)
            if message["msg_type"] == "stream" and interrupt_when in message["content"]["text"].split():
                self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(code, timeout=timeout_s, output_hook=hook)
        return messages, reply["content"]

    def late(self, kind, seconds):
        """Messages of `kind` that come although no cell runs."""
        found, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            if message["msg_type"] == kind:
                found.append(message)
        return found

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    _, reply = kernel.execute(SETUP, timeout_s=60)
    assert reply["status"] == "ok", reply
    yield kernel
    kernel.close()


def text(messages):
    parts = []
    for message in messages:
        content = message["content"]
        parts.append(content.get("text") or content.get("data", {}).get("text/plain") or "")
    return "\n".join(parts)


def test_the_status_lives_under_the_cell_after_it_has_returned(kernel):
    kernel.execute("gate.clear()")
    messages, reply = kernel.execute("%%ft_train --steps 200\nmodel = 1\n")
    assert reply["status"] == "ok", reply
    assert "[all ranks] hello" in text(messages)
    shown = [m for m in messages if m["msg_type"] == "display_data"]
    assert len(shown) == 1
    display_id = shown[0]["content"]["transient"]["display_id"]
    assert set(shown[0]["content"]["data"]) == {"text/plain", "text/html"}
    updates = kernel.late("update_display_data", 1.2)
    assert 2 <= len(updates) <= 6  # at most five a second
    assert {m["content"]["transient"]["display_id"] for m in updates} == {display_id}
    kernel.execute("gate.set()")
    last = kernel.late("update_display_data", 1.0)[-1]
    assert "Run run: finished" in last["content"]["data"]["text/plain"]
    assert kernel.late("update_display_data", 0.5) == []


def test_await_run_leaves_the_kernels_loop_free(kernel):
    code = """
import asyncio
gate.clear()
ticks = 0
async def tick():
    global ticks
    while True:
        ticks += 1
        if ticks == 30:
            gate.set()
        await asyncio.sleep(0.01)
ticker = asyncio.get_running_loop().create_task(tick())
report = await run
ticker.cancel()
print(report, ticks >= 30)
"""
    messages, reply = kernel.execute(code)
    assert reply["status"] == "ok", reply
    assert "finished True" in text(messages)


@pytest.mark.parametrize("waiting", ["run.wait()", "await run", "%ft_wait"])
def test_ctrl_c_ends_the_waiting_only(kernel, waiting):
    kernel.execute("gate.clear(); before = len(connection.asked)")
    _, reply = kernel.execute(waiting, interrupt_when="waiting")
    assert reply["status"] == "error", reply
    assert reply["ename"] == ("WaitCancelled" if waiting == "await run" else "WaitInterrupted")
    assert "the training goes on" in "".join(reply["traceback"])
    assert len(reply["traceback"]) == 1
    messages, _ = kernel.execute(
        "print({op for op, _ in connection.asked[before:]} <= {'wait', 'run_info'}, run.state); gate.set()"
    )
    assert "True running" in text(messages)
    _, reply = kernel.execute("report = await run")
    assert reply["status"] == "ok", reply


def test_the_report_is_shown_in_the_middle_of_a_cell_once(kernel):
    for code in ("%ft_wait\nx = 1", "%ft_report", "%ft_wait"):
        messages, reply = kernel.execute(code)
        assert reply["status"] == "ok", reply
        shown = [m for m in messages if m["msg_type"] in ("display_data", "execute_result")]
        assert [m["content"]["data"]["text/html"] for m in shown] == ["<b>finished</b>"]
        assert "finished" in shown[0]["content"]["data"]["text/plain"]


def test_an_error_is_one_line_in_the_notebook(kernel):
    _, reply = kernel.execute("%ft_inject disk-full")
    assert reply["ename"] == "UsageError"
    (line,) = reply["traceback"]
    assert line.startswith("UsageError: The fault 'disk-full' is not available yet. Available: kill, ")


def test_the_status_ends_with_the_run_although_the_cluster_is_stopped_at_once(kernel):
    """Run All: the status would have looked again only when nobody could be asked any more."""
    kernel.execute("gate.clear(); run_module.build_report = real_report")
    kernel.execute(STOPPED)
    _, reply = kernel.execute("%%ft_train --steps 200\nmodel = 1\n")
    assert reply["status"] == "ok", reply
    updates, reply = kernel.execute("%ft_cluster stop")
    assert reply["status"] == "ok", reply
    updates = [m for m in updates if m["msg_type"] == "update_display_data"] + kernel.late("update_display_data", 1.0)
    last = updates[-1]["content"]["data"]["text/plain"]
    assert last.startswith("Run run: stopped") and "gone" not in last, last


STOPPED = """
from ftnb.errors import RunError
connection.alive = True
connection.answers["run_info"] = RunError("none yet")
session = Session(connection)
current.bind(session)

def end():
    record = {"name": "run", "state": "stopped", "reason": "The cluster was stopped."}
    (directory / "run.json").write_text(json.dumps(record))
    connection.alive = False
    return {}

connection.answers["stop_cluster"] = end
"""
