"""Giving a cluster another number of ranks: asked for, then watched until all of them are there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftnb.client import container
from ftnb.client.options import Option
from ftnb.client.run import ENDED, WaitInterrupted, WaitTimeout
from ftnb.errors import ClusterError, RunError, UsageError

if TYPE_CHECKING:
    from ftnb.client.session import Session

LIMIT_S = 120.0
POLL_S = 0.1
NUM_RANKS = Option("num_ranks", int, None, "ranks to have from now on", flag="--num-ranks", short="-n", minimum=1)
_WORKING = ("idle", "training")


def resize(
    session: Session, num_ranks: int, progress: Callable[[dict[str, Any]], None] | None, show: Callable[[str], None]
) -> None:
    """Ask for `num_ranks` and wait; whatever is refused is refused before anything changes."""
    if num_ranks is None:
        raise UsageError("How many ranks? %ft_cluster resize -n 4 (in Python: session.resize(4)).")
    num_ranks = NUM_RANKS.checked(num_ranks)
    status = session.status()
    present = status.get("wanted_ranks") or status["num_ranks"]
    if num_ranks == present and is_done(status, num_ranks):
        show(f"The cluster {session.name!r} has {_count(num_ranks)} already.")
        return
    _refuse_beyond_batch(session, num_ranks)
    if num_ranks > present:
        container.refuse_to_grow(container.look(), num_ranks, present)
    answer = session.request("resize", timeout_s=60, num_ranks=num_ranks)
    show(f"Cluster {session.name}: {_count(answer.get('was', present))} before, {_count(num_ranks)} wanted.")
    began = time.monotonic()
    try:
        _wait(session, num_ranks, began, progress)
    except KeyboardInterrupt:
        raise WaitInterrupted(
            f"stopped waiting; cluster {session.name!r} is still being resized to {_count(num_ranks)}. Look at it "
            "with %ft_cluster status."
        ) from None
    show(f"Cluster {session.name}: {_count(num_ranks)}, after {time.monotonic() - began:.1f} s.")


def _refuse_beyond_batch(session: Session, num_ranks: int) -> None:
    """Before memory is looked at, so that no number is recommended that cannot be; the supervisor checks again."""
    try:
        info = session.request("run_info", run=None)
    except RunError:
        return  # nothing has been trained yet
    global_batch = info.get("global_batch")
    if info.get("state") not in ENDED and global_batch is not None and num_ranks > global_batch:
        raise UsageError(
            f"Run {info['run']!r} has a global batch of {global_batch} samples: with {num_ranks} ranks some would "
            f"never get one. Resize to {global_batch} at most, or start a run with a larger --global-batch."
        )


def is_done(status: dict[str, Any], num_ranks: int) -> bool:
    """Whether there are exactly so many ranks, and all of them work."""
    states = [entry["state"] for entry in status["ranks"] if entry["rank"] is not None]
    working = len(states) == num_ranks and all(state in _WORKING for state in states)
    return working and status["world_size"] == num_ranks


def _wait(
    session: Session, num_ranks: int, began: float, progress: Callable[[dict[str, Any]], None] | None
) -> None:
    while True:
        status = session.status()
        elapsed_s = time.monotonic() - began
        if progress is not None:
            progress({**status, "elapsed_s": elapsed_s, "num_ranks": num_ranks})
        if problem := status.get("resize_problem"):
            raise ClusterError(f"Cluster {session.name!r} could not be resized to {_count(num_ranks)}: {problem}")
        wanted = status.get("wanted_ranks")
        if wanted not in (None, num_ranks):
            raise ClusterError(
                f"Cluster {session.name!r} is being resized to {_count(wanted)} by now, not to {num_ranks}: somebody "
                "else has asked for that meanwhile. Look at it with %ft_cluster status."
            )
        if is_done(status, num_ranks):
            return
        if lost := status.get("not_replaced"):
            names = f"rank {lost[0]} was" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} were"
            raise ClusterError(
                f"Cluster {session.name!r} does not get to {_count(num_ranks)}: {names} lost meanwhile, and nobody is "
                f"replaced now. Ask again: %ft_cluster resize -n {num_ranks} (in Python: session.resize({num_ranks}))."
            )
        if elapsed_s > LIMIT_S:
            working = sum(e["rank"] is not None and e["state"] in _WORKING for e in status["ranks"])
            raise WaitTimeout(
                f"After {LIMIT_S:.0f} s {working} of {_count(num_ranks)} of cluster {session.name!r} work; the rest is "
                "still being waited for in the background. Look at it with %ft_cluster status."
            )
        time.sleep(POLL_S)


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
