"""The recovery benchmark's other tools: the same job, each as it is meant to be used. Run it by recovery.py --against.

Same model, data, global batch and seed, 4 ranks on one machine, Gloo on loopback, one thread per rank. Tools take
turns, and in each round rank 2 is lost by SIGKILL and, once all ranks train again, rank 0.

- torchrun restarts everybody (--max-restarts), and the script loads its last checkpoint, of which it makes one every
  20 steps. See peers/torchrun_train.py for what Gloo needs for that.
- torchft (torchft-nightly; of the release 0.2.0 all survivors crash with an AssertionError) has a lighthouse and one
  torchrun per rank. It is measured with the lighthouse as its README starts it, and with time-outs of one second in
  it ("short"): survivors wait until the lighthouse has not heard of the lost rank for so long, 5 s by default.

The figure: from SIGKILL to the first step that nobody had committed before, and that is committed by those who train
after the loss (a step that was all but done at the kill does not count). So for torchrun, doing the steps since its
checkpoint again is part of the time. There is no goal for others; ftnb's is a median of at most 0.10 s.

Peers run with the Python of --peers-python, so that they need not be installed beside ftnb.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import psutil

HERE = Path(__file__).resolve().parent / "peers"
LIGHTHOUSE = {
    "torchft": ("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
    "torchft, short": ("--quorum_tick_ms", "20", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"),
}
TOOLS = {"torchrun": ("torchrun",), "torchft": tuple(LIGHTHOUSE)}
VICTIMS = (2, 0)
MARK = "FTNB_BENCH_PEER"  # in the environment of every process of a peer
SETTLE_STEPS = 30


@dataclass(frozen=True)
class Loss:
    """What one kill cost."""

    rank: int
    next_s: float
    steps_lost: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", nargs="+", choices=list(TOOLS), help="give the same job to these tools, too")
    parser.add_argument("--rounds", type=int, default=3, help="how often each tool is started (with --against)")
    parser.add_argument("--peers-python", default=sys.executable, help="a Python with torch 2.13 and torchft-nightly")


def compare(tools: list[str], num_ranks: int, model: str, rounds: int, python: str) -> None:
    names = ["ftnb", *(name for tool in TOOLS if tool in tools and _installed(tool, python) for name in TOOLS[tool])]
    losses: dict[str, list[Loss]] = {name: [] for name in names}
    dice = random.Random(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by SIGTERM."))  # so that peers are not left behind
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            if name == "ftnb":
                losses[name] += _ours(num_ranks, model, dice)
            else:
                losses[name] += _theirs(name, num_ranks, model, dice, python)
    print(f"recovery against others, {num_ranks} ranks, {model}: {harness.machine()}")
    for victim in VICTIMS:
        print(f"  rank {victim} lost: SIGKILL to next committed step")
        for name in names:
            of_victim = [loss for loss in losses[name] if loss.rank == victim]
            line = harness.spread([loss.next_s for loss in of_victim], " s")
            lost = [loss.steps_lost for loss in of_victim]
            if name == "torchrun":
                line += f"   steps done again: {harness.spread(lost, digits=0)}"
            elif any(lost):
                line += f"   steps lost: {lost}"
            print(f"    {name:<14} {line}")


def _installed(tool: str, python: str) -> bool:
    module = "torchft" if tool == "torchft" else "torch"
    try:
        tried = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
        problem = tried.stderr.strip().splitlines()[-1:] if tried.returncode else None
    except OSError as error:
        problem = [str(error)]
    if problem is None and tool == "torchft" and not _lighthouse(python).exists():
        problem = [f"there is no {_lighthouse(python)}"]
    if problem is None:
        return True
    print(
        f"{tool} is left out: {python} cannot import {module} ({''.join(problem)}). To install it:\n"
        "  python3 -m venv peers && peers/bin/pip install torch==2.13.0 torchft-nightly\n"
        "and then add: --peers-python peers/bin/python"
    )
    return False


def _lighthouse(python: str) -> Path:
    return Path(python).parent / "torchft_lighthouse"


def _ours(num_ranks: int, model: str, dice: random.Random) -> list[Loss]:
    with harness.cluster(num_ranks) as session:
        with harness.training(session, model) as run:
            for victim in VICTIMS:
                harness.wait_full(run, num_ranks, settle_steps=SETTLE_STEPS)
                harness.kill(run, victim, dice)
        harness.check(run)  # so no step is lost or done again
        return [Loss(r.rank, r.next_s, 0) for r in harness.recoveries(run, num_ranks)]


def _theirs(tool: str, num_ranks: int, model: str, dice: random.Random, python: str) -> list[Loss]:
    kills = []
    with tempfile.TemporaryDirectory(prefix="ftnb-bench-") as scratch:
        directory = Path(scratch)
        (directory / "cell.py").write_text(harness.cell(model))
        with _job(tool, num_ranks, directory, python):
            for victim in VICTIMS:
                _wait_full(directory, num_ranks, tool, 0.0)
                time.sleep(dice.uniform(0, 0.3))  # no step and no checkpoint shall decide when
                before = _last_lines(directory, num_ranks)
                pid = before[victim]["pid"]
                kills.append((victim, pid, time.time()))
                os.kill(pid, signal.SIGKILL)
                _wait_full(directory, num_ranks, tool, time.time(), gone=pid)
        lines = [line for rank in range(num_ranks) for line in harness.jsonl(directory / f"rank-{rank}.jsonl")]
    return [_loss(lines, num_ranks, *killed) for killed in kills]


def _loss(lines: list[dict[str, Any]], num_ranks: int, victim: int, pid: int, killed: float) -> Loss:
    """A line is from before the loss was handled, if its process and all its peers were there before the kill."""
    old_pids = {line["pid"] for line in lines if line["time"] <= killed}
    lines = sorted(lines, key=lambda line: line["time"])
    after = [
        line for line in lines
        if line["time"] > killed and (line["pid"] not in old_pids or line["world_size"] < num_ranks)
    ]  # fmt: skip
    committed = max(line["step"] for line in lines if line["time"] < after[0]["time"])
    first = next(line for line in after if line["step"] > committed)
    return Loss(victim, first["time"] - killed, max(0, committed + 1 - after[0]["step"]))


# Their processes


@contextlib.contextmanager
def _job(tool: str, num_ranks: int, directory: Path, python: str) -> Iterator[None]:
    mark = uuid.uuid4().hex
    # The directory for temporary files, since torchrun leaves some there.
    environment = {
        **os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(directory),
    }  # fmt: skip
    environment.pop("PYTHONPATH", None)  # it may be another Python
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "10"]
    with (directory / "output.log").open("wb") as output:

        def start(command: list[str], **more: str) -> None:
            subprocess.Popen(
                command, env={**environment, **more}, cwd=directory, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

        try:
            if tool == "torchrun":
                script = [str(HERE / "torchrun_train.py"), "cell.py", "."]
                start([*torchrun, "--nproc-per-node", str(num_ranks), *script])
            else:
                address = f"127.0.0.1:{harness.free_port()}"
                start([str(_lighthouse(python)), "--bind", address, "--min_replicas", "1", *LIGHTHOUSE[tool]])
                script = [str(HERE / "torchft_train.py"), "cell.py", "."]
                for replica in range(num_ranks):
                    start(
                        [*torchrun, "--nproc-per-node", "1", *script], REPLICA_GROUP_ID=str(replica),
                        NUM_REPLICA_GROUPS=str(num_ranks), TORCHFT_LIGHTHOUSE=f"http://{address}",
                    )  # fmt: skip
            yield
        finally:
            _end(mark)


def _end(mark: str) -> None:
    """End all processes of this job, also those that outlived whoever had started them."""
    for _ in range(100):
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
                    process.kill()
        if not left:
            return
        psutil.wait_procs(left, timeout=0.2)
    raise SystemExit(f"These processes could not be ended: {left}")


def _last_lines(directory: Path, num_ranks: int) -> dict[int, dict[str, Any]]:
    """The last whole line of each rank that has one."""
    found = {}
    for rank in range(num_ranks):
        with contextlib.suppress(FileNotFoundError), (directory / f"rank-{rank}.jsonl").open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 4096))
            lines = stream.read().split(b"\n")
            if len(lines) > 2:
                found[rank] = json.loads(lines[-2])
    return found


def _wait_full(directory: Path, num_ranks: int, tool: str, since: float, gone: int | None = None) -> None:
    """Wait until every rank has committed steps with all others, and then some more. `gone`: a killed process."""
    started: dict[str, int] = {}

    def full() -> bool:
        last = _last_lines(directory, num_ranks)
        complete = len(last) == num_ranks and all(
            line["time"] > since and line["world_size"] == num_ranks and line["pid"] != gone for line in last.values()
        )
        if complete:
            started.setdefault("at", min(line["step"] for line in last.values()))
            return all(line["step"] >= started["at"] + SETTLE_STEPS for line in last.values())
        started.clear()
        return False

    try:
        harness.wait_until(full, f"all {num_ranks} ranks of {tool} train")
    except SystemExit as error:
        tail = (directory / "output.log").read_text(errors="replace").splitlines()[-20:]
        raise SystemExit("\n".join([str(error), "The end of its output:", *tail])) from None


if __name__ == "__main__":
    sys.exit(__doc__)
