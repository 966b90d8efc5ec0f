"""Starting a run: missing ranks are started again, every rank runs the cell, all must agree."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftnb.core import checks
from ftnb.errors import CellError, CheckError, ClusterError, RunError, from_wire
from ftnb.supervisor.recorder import new_run_directory
from ftnb.supervisor.runs import ActiveRun
from ftnb.wire import paths

if TYPE_CHECKING:
    from ftnb.supervisor.server import Supervisor

# Mistakes show in the first step; the cell waits for it, but not for a slow one (compilation, say).
FIRST_STEP_S = 3.0
# How long a new run waits for ranks to come out of the last one.
BUSY_PATIENCE_S = 5.0


async def start(supervisor: Supervisor, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a client's `train` request; nothing is changed when it raises."""
    if supervisor.state == "failed":
        raise from_wire(supervisor.error or {})
    if supervisor.state == "starting":
        raise ClusterError("The cluster is still starting; try again when %ft_cluster status says idle.")
    going = supervisor.run
    if supervisor.training_task_active or (going is not None and not going.is_over):
        which = f"Run {going.name!r} is going on (step {going.step} of {going.total_steps})" if going else "A run is"
        if supervisor.training_task_active:
            which = "A run is just being started"
        raise RunError(f"{which}; one at a time. Wait for it with %ft_wait, or end it with %ft_stop.")
    paths.check_name(request["options"]["name"], "run")
    supervisor.training_task_active, supervisor.called_off = True, False
    try:
        return await _start(supervisor, request)
    finally:
        supervisor.training_task_active = False


async def _start(supervisor: Supervisor, request: dict[str, Any]) -> dict[str, Any]:
    options, notes = request["options"], []
    busy = await _end_busy(supervisor)
    supervisor.check_called_off()
    if busy:
        notes.append(f"{_named(busy)} did not come out of the last run's step: ended, and started again.")
    lost = set(await supervisor.fleet.complete())
    if named := sorted(lost.difference(busy)):
        notes.append(f"{_named(named)} had been lost and {'were' if len(named) > 1 else 'was'} started again.")
    while supervisor.fleet.notes:
        notes.append(supervisor.fleet.notes.popleft())
    members = list(range(supervisor.num_ranks))
    backend = supervisor.backend()
    answers, output = await _load(supervisor, request, members, backend)
    if dead := [rank for rank in members if not supervisor.ranks[rank].usable]:
        _drop(supervisor, [rank for rank in members if rank not in dead])
        raise _died(dead[0], supervisor.ranks[dead[0]].problem or "it is gone")
    signatures = {rank: answer["signature"] for rank, answer in answers.items()}
    if problem := checks.difference(signatures):
        _drop(supervisor, members)
        raise CheckError(problem)
    if signatures[members[0]]["evaluate"] and not options["evaluate_every"]:
        notes.append("The cell defines evaluate(), but nothing calls it: add --evaluate-every K (evaluate_every=K).")
    first = answers[members[0]]
    cwd = Path(request["cwd"])
    try:
        directory = new_run_directory(cwd / "ftnb_runs", options["name"])
    except OSError as error:
        _drop(supervisor, members)
        raise RunError(f"The run directory cannot be made below {cwd / 'ftnb_runs'}: {error.strerror}.") from None
    job = {
        "name": directory.name, "directory": str(directory), "options": options, "cell": request["cell"],
        "cwd": request["cwd"], "sys_path": request["sys_path"], "backend": backend, "num_ranks": len(members),
        "dataset_len": first["dataset_len"], "total_steps": first["total_steps"], "started": time.time(),
        "versions": supervisor.versions(), "signature": first["signature"],
    }
    supervisor.office.save_job(job)
    run = supervisor.run = ActiveRun(supervisor, job, request.get("names") or b"")
    supervisor.office.save_cluster()
    supervisor.fleet.run_began()
    for rank, lines in output.items():
        for line in lines:
            run.log(rank, run.started, line)
    await run.wait(lambda: run.is_over or run.step >= 1, FIRST_STEP_S)
    if run.state == "failed":
        raise run_error(run)
    return {
        "run": run.name, "directory": str(run.directory), "total_steps": run.total_steps,
        "dataset_len": run.dataset_len, "notes": notes, "output": _grouped(output),
    }


async def _end_busy(supervisor: Supervisor) -> list[int]:
    """Ranks whose training thread is still in the last run (a very long step, an endless loop) are ended."""
    deadline = time.monotonic() + BUSY_PATIENCE_S

    def busy() -> list[int]:
        return [rank for rank, slot in supervisor.ranks.items() if slot.usable and slot.phase != "idle"]

    while busy() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    ended = busy()
    for rank in ended:
        supervisor.signal_rank(rank)
    while any(supervisor.ranks[rank].usable for rank in ended):
        await asyncio.sleep(0.02)
    return ended


async def _load(
    supervisor: Supervisor, request: dict[str, Any], members: list[int], backend: str
) -> tuple[dict[int, dict[str, Any]], dict[int, list[str]]]:
    """Every rank runs the cell; returns their answers and what each of them printed."""
    loop = asyncio.get_running_loop()
    supervisor.loads = {rank: loop.create_future() for rank in members}
    supervisor.load_output = {}
    try:
        for rank in members:
            slot = supervisor.ranks[rank]
            if not slot.usable:
                died = {"ok": False, "kind": "died", "error": {"evalue": slot.problem or "it is gone"}}
                supervisor.loads[rank].set_result(died)
                continue
            message = {
                "run": request["options"]["name"], "cell": request["cell"], "options": request["options"],
                "cwd": request["cwd"], "sys_path": request["sys_path"], "backend": backend,
                "gpu": slot.gpu, "threads": supervisor.threads, "world_size": len(members),
            }
            if request.get("names"):
                message["names"] = request["names"]
            supervisor.tell_rank(rank, "load", **message)
        answers = {rank: await supervisor.loads[rank] for rank in members}
    finally:
        supervisor.loads = {}
        output, supervisor.load_output = supervisor.load_output or {}, None
    if bad := {rank: answer for rank, answer in answers.items() if not answer["ok"]}:
        _drop(supervisor, [rank for rank in members if rank not in bad])
        raise _load_error(bad, len(members), _grouped(output))
    return answers, output


def _drop(supervisor: Supervisor, ranks: list[int]) -> None:
    for rank in ranks:
        supervisor.tell_rank(rank, "drop")


def _load_error(
    bad: dict[int, dict[str, Any]], num_ranks: int, output: list[list[Any]]
) -> CellError | CheckError | ClusterError | RunError:
    """One error for what one or more ranks answered: the same thing said four times is said once."""
    first = bad[min(bad)]
    error = first["error"]
    ranks = sorted(r for r, a in bad.items() if _key(a) == _key(first))
    where = "all ranks" if len(ranks) == num_ranks and num_ranks > 1 else f"rank {', '.join(map(str, ranks))}"
    if called_off := [rank for rank, answer in bad.items() if answer["kind"] == "called off"]:
        return RunError(
            f"The training was called off while {_named(called_off).lower()} still ran the cell; the next %%ft_train "
            "starts them again."
        )
    if first["kind"] == "died":
        return _died(ranks[0], error["evalue"])
    if first["kind"] == "check":
        return CheckError(error["evalue"] if len(ranks) == num_ranks else f"On {where}: {error['evalue']}")
    line = f" in line {error['lineno']} of the cell" if error["lineno"] else ""
    text = f"{error['etype']}: {error['evalue']}".rstrip(": ")
    return CellError(f"{text}\n(raised{line}, on {where}; the engines are unharmed, look at them with %%px)", **{
        "ranks": ranks, "output": output, **{k: error[k] for k in ("etype", "evalue", "lineno", "step", "traceback")},
    })


def _died(rank: int, words: str) -> ClusterError:
    return ClusterError(
        f"Rank {rank} ended while the cell was run: {words.rstrip('.')}. The other ranks are unharmed; the next "
        "%%ft_train starts it again."
    )


def _named(ranks: list[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _key(answer: dict[str, Any]) -> tuple[Any, ...]:
    error = answer["error"]
    return answer["kind"], error.get("etype"), error.get("evalue"), error.get("lineno")


def run_error(run: ActiveRun) -> CellError | CheckError | RunError:
    """Why the run failed, as the exception to raise in the notebook."""
    error = run.error
    if not error:
        return RunError(run.reason)
    if error.get("check"):
        return CheckError(error["evalue"])
    keys = ("ranks", "etype", "evalue", "lineno", "step", "traceback", "rank")
    return CellError(run.reason, **{k: error.get(k) for k in keys})


def _grouped(output: dict[int, list[str]]) -> list[list[Any]]:
    """What the ranks printed, the same text once: [[ranks, text], …]."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(output):
        by_text["\n".join(output[rank])].append(rank)
    return [[ranks, text] for text, ranks in by_text.items() if text]
