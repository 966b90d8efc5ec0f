"""What a notebook can ask of the supervisor: one function per request, its arguments as they come over the wire."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import ftnb
from ftnb.core import planner
from ftnb.errors import ClusterError, RunError, UsageError
from ftnb.supervisor import training
from ftnb.supervisor.runs import ActiveRun

if TYPE_CHECKING:
    from ftnb.supervisor.server import Supervisor

WEIGHTS_TIMEOUT_S = 60.0


async def hello(supervisor: Supervisor, **_: Any) -> dict[str, Any]:
    stands = supervisor.engines is not None and supervisor.state not in ("starting", "failed")
    return {
        "name": supervisor.name, "supervisor_pid": os.getpid(), "version": ftnb.__version__,
        "num_ranks": supervisor.num_ranks, "backend": supervisor.backend(), "threads": supervisor.threads,
        "ipp_file": supervisor.engines.client_file if stands else None, "num_spares": supervisor.fleet.num_spares,
        "term": supervisor.term,
        "state": supervisor.state, "run": supervisor.run.name if supervisor.run else None,
    }


async def ping(supervisor: Supervisor, **_: Any) -> dict[str, Any]:
    return {}


async def status(supervisor: Supervisor, **_: Any) -> dict[str, Any]:
    run = supervisor.run
    return {
        "name": supervisor.name, "supervisor_pid": os.getpid(),
        "state": run.state if run and not run.is_over else supervisor.state,
        "generation": run.generation if run else 0,
        "world_size": len(run.members) if run and not run.is_over else sum(s.usable for s in supervisor.ranks.values()),
        "run": run.name if run else None, "num_ranks": supervisor.num_ranks, "ranks": supervisor.fleet.statuses(),
        "num_spares": supervisor.fleet.num_spares, "wanted_ranks": supervisor.num_ranks, "term": supervisor.term,
        "resize_problem": supervisor.resize_problem(), "not_replaced": supervisor.fleet.not_replaced(),
        "notes": [*supervisor.fleet.notes],
        "backend": supervisor.backend(), "threads": supervisor.threads, "error": supervisor.error,
    }


async def train(supervisor: Supervisor, **request: Any) -> dict[str, Any]:
    return await training.start(supervisor, request)


async def run_info(supervisor: Supervisor, run: str | None = None, **_: Any) -> dict[str, Any]:
    return the_run(supervisor, run).info()


async def wait(supervisor: Supervisor, run: str | None = None, hold_s: float = 1.0, **_: Any) -> dict[str, Any]:
    active = the_run(supervisor, run)
    await active.wait(lambda: active.is_over, min(hold_s, 5.0))
    return active.info()


async def pause(supervisor: Supervisor, run: str | None = None, **_: Any) -> dict[str, Any]:
    active = going_run(supervisor, run)
    active.pause()
    await active.wait(lambda: active.state == "paused" or active.is_over, 10.0)
    return active.info()


async def unpause(supervisor: Supervisor, run: str | None = None, **_: Any) -> dict[str, Any]:
    active = going_run(supervisor, run)
    active.unpause()
    return active.info()


async def stop_run(supervisor: Supervisor, run: str | None = None, save: bool = True, **_: Any) -> dict[str, Any]:
    if supervisor.training_task_active and (supervisor.loads or supervisor.run is None or supervisor.run.is_over):
        supervisor.called_off = True
        call_load_off(supervisor)
        return {"state": "stopped"}
    active = going_run(supervisor, run)
    active.stop()
    await active.wait(lambda: active.is_over, planner.STOP_PATIENCE_S + 2)
    return active.info()


async def inject(
    supervisor: Supervisor, kind: str, rank: int | None = None, at_step: int | None = None,
    after_s: float | None = None, duration_s: float | None = None, factor: float | None = None,
    probability: float | None = None, seed: int | None = None, run: str | None = None, **_: Any,
) -> dict[str, Any]:
    if rank is not None and rank not in supervisor.ranks:
        raise UsageError(f"There is no rank {rank}: this cluster has ranks 0 to {supervisor.num_ranks - 1}.")
    return await going_run(supervisor, run).faults.inject(
        kind, rank, at_step=at_step, after_s=after_s, duration_s=duration_s, factor=factor, probability=probability,
        seed=seed,
    )


async def chaos(
    supervisor: Supervisor, mtbf_s: float, kinds: list[str] | None = None, for_s: float | None = None, seed: int = 0,
    no_mercy: bool = False, run: str | None = None, **_: Any,
) -> dict[str, Any]:
    return going_run(supervisor, run).chaos.start(mtbf_s, kinds, for_s, seed, no_mercy)


async def chaos_stop(supervisor: Supervisor, run: str | None = None, **_: Any) -> dict[str, Any]:
    return going_run(supervisor, run).chaos.stop()


async def stacks(supervisor: Supervisor, run: str | None = None, **_: Any) -> dict[str, Any]:
    """Where the training thread of each rank stands: `place`, `step` and `stack`, or a `problem`.

    Also when the run is over: perhaps because they are stuck, and then they still are.
    """
    found = await the_run(supervisor, run).stacks()
    return {"ranks": {str(rank): answer for rank, answer in found.items()}}


async def resize(supervisor: Supervisor, num_ranks: int, run: str | None = None, **_: Any) -> dict[str, Any]:
    """Change the number of ranks; answers at once, the rest happens in the background."""
    was = supervisor.num_ranks
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise UsageError(f"A cluster needs at least 1 rank, not {num_ranks!r}. To end it: %ft_cluster stop.")
    if supervisor.state != "idle":
        raise ClusterError(f"The cluster is {supervisor.state}; try again when %ft_cluster status says idle.")
    if supervisor.training_task_active and (supervisor.run is None or supervisor.run.is_over):
        raise RunError("A run is just being started; resize the cluster when its first step is done.")
    if run is not None:
        going_run(supervisor, run)
    going = supervisor.going_run
    if going is not None and num_ranks > going.options["global_batch"]:
        raise UsageError(
            f"Run {going.name!r} has a global batch of {going.options['global_batch']} samples: with {num_ranks} ranks "
            "some would never get one. Resize to fewer, or start a run with a larger --global-batch."
        )
    supervisor.fleet.resize(num_ranks)  # also to the number of before: whoever is missing is tried again
    return {"num_ranks": num_ranks, "was": was}


async def prepare_weights(supervisor: Supervisor, run: str | None = None, **_: Any) -> dict[str, Any]:
    active = the_run(supervisor, run)
    if active is not supervisor.run:
        raise RunError(f"The ranks hold another run's weights by now ({supervisor.run and supervisor.run.name!r}).")
    others = [rank for rank in sorted(supervisor.ranks) if rank not in active.members]  # who has moved to another slot
    for rank in [*active.members, *others]:
        if rank not in supervisor.ranks or not supervisor.ranks[rank].usable:
            continue
        future = supervisor.weights.get(rank)
        if future is None:  # else somebody has asked already, and shares the answer
            future = supervisor.weights[rank] = asyncio.get_running_loop().create_future()
            supervisor.tell_rank(rank, "weights")
        try:
            answer = await asyncio.wait_for(asyncio.shield(future), WEIGHTS_TIMEOUT_S)
        except TimeoutError:
            if supervisor.weights.get(rank) is future:
                del supervisor.weights[rank]  # whoever asks next asks anew
            continue
        if "problem" in answer:
            raise RunError(f"The weights cannot be sent: {answer['problem']}.")
        if answer["step"] is not None and rank in supervisor.ranks:
            return {"rank": rank, "engine": supervisor.ranks[rank].engine_id, "step": answer["step"]}
    raise RunError(f"No living rank holds the weights of run {active.name!r} any more. Run the cell again.")


async def stop_cluster(supervisor: Supervisor, **_: Any) -> dict[str, Any]:
    asyncio.get_running_loop().call_later(0.02, supervisor.stop, "a client asked for it")
    return {}


def the_run(supervisor: Supervisor, name: str | None) -> ActiveRun:
    if supervisor.run is None:
        raise RunError("Nothing has been trained on this cluster yet. Start with a %%ft_train cell.")
    if name is not None and name != supervisor.run.name:
        raise RunError(f"The run {name!r} is not the last one of this cluster ({supervisor.run.name!r} is).")
    return supervisor.run


def going_run(supervisor: Supervisor, name: str | None) -> ActiveRun:
    run = the_run(supervisor, name)
    if run.is_over:
        raise RunError(f"Run {run.name!r} is over ({run.state}). Start one with a %%ft_train cell.")
    return run


def call_load_off(supervisor: Supervisor) -> None:
    """Give up waiting for ranks that still run the cell. A thread cannot be interrupted: they are killed."""
    for rank, future in supervisor.loads.items():
        if not future.done():
            future.set_result({"ok": False, "kind": "called off", "error": {"evalue": ""}})
            supervisor.signal_rank(rank)


HANDLERS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    handler.__name__: handler
    for handler in (
        hello, ping, status, train, run_info, wait, pause, unpause, stop_run, inject, chaos, chaos_stop, resize,
        prepare_weights, stop_cluster, stacks,
    )
}
