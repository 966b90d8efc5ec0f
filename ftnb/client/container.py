"""How much this container can carry: memory and cores as the cgroup allows them, not as the host has them.

`look()` reads; everything else here is arithmetic on what it found.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ftnb.errors import UsageError
from ftnb.wire import cgroups

GB = 1e9
BYTES_PER_RANK = int(0.3 * GB)  # one idle rank with torch imported, its nanny included (measured)
SHARE_OF_FREE_MEMORY = 0.6  # the rest is for the model, the data and the notebook
DEFAULT_NUM_RANKS = 4


@dataclass(frozen=True)
class Container:
    cores: int
    memory_bytes: int
    free_bytes: int

    @property
    def ranks_that_fit(self) -> int:
        return int(self.free_bytes * SHARE_OF_FREE_MEMORY // BYTES_PER_RANK)


def look(root: Path = Path("/")) -> Container:
    """Memory and cores of the container this process runs in (`root` is replaced in tests)."""
    limit, free = cgroups.memory(root)
    cores = _allowed_cores()
    for level in cgroups.levels(root, "cpu"):
        quota = _core_quota(level)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return Container(cores=cores, memory_bytes=limit, free_bytes=free)


def default_num_ranks(container: Container, num_spares: int = 0) -> int:
    """4, or fewer where memory or cores are small; never less than one."""
    wanted = DEFAULT_NUM_RANKS if container.cores >= 2 else 2
    return max(1, min(wanted, container.ranks_that_fit - num_spares))


def default_threads(container: Container, num_ranks: int) -> int:
    return max(1, container.cores // num_ranks)


def refuse_more_than_fit(container: Container, num_ranks: int, num_spares: int = 0) -> None:
    """Raise `UsageError` when so many ranks and spares (which need as much) do not fit into the free memory."""
    fit = container.ranks_that_fit
    if num_ranks + num_spares <= fit:
        return
    advice = "Free some memory and try again"
    if fit and num_spares and num_ranks <= fit:
        rest = fit - num_ranks
        advice = f"With {_ranks(num_ranks)}, at most {_spares(rest)} can be kept: --spares {rest}"
    elif fit:
        advice = f"Start at most {fit}: %ft_cluster start -n {fit} (in Python: Session.start({fit}))"
    what = _ranks(num_ranks) + (f" and {_spares(num_spares)}" if num_spares else "")
    _refuse(container, what, num_ranks + num_spares, advice, num_ranks)


def refuse_to_grow(container: Container, num_ranks: int, present: int) -> None:
    """The same for a cluster of `present` ranks that is to have `num_ranks`."""
    more, fit = num_ranks - present, container.ranks_that_fit
    if more > fit:
        most = present + max(0, fit)
        advice = f"At most {most} are possible: -n {most}" if fit else "Free some memory and try again"
        _refuse(container, f"{_ranks(more)} more", more, advice, num_ranks)


def _refuse(container: Container, what: str, processes: int, advice: str, num_ranks: int) -> None:
    need, usable = processes * BYTES_PER_RANK / GB, container.free_bytes * SHARE_OF_FREE_MEMORY / GB
    raise UsageError(
        f"{what} {'needs' if processes == 1 else 'need'} about {need:.1f} GB, but only {usable:.1f} GB may be used for "
        f"ranks here ({container.free_bytes / GB:.1f} GB of {container.memory_bytes / GB:.1f} GB are free, of which "
        f"{SHARE_OF_FREE_MEMORY:.0%} go to ranks). {advice}.",
        num_ranks=num_ranks,
        ranks_that_fit=container.ranks_that_fit,
    )


def _spares(number: int) -> str:
    return "1 spare" if number == 1 else f"{number} spares"


def _ranks(number: int) -> str:
    return "One rank" if number == 1 else f"{number} ranks"


def _allowed_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _core_quota(folder: Path) -> float | None:
    parts = cgroups.text_in(folder / "cpu.max").split()
    if len(parts) == 2 and parts[0].isdigit():
        return int(parts[0]) / int(parts[1])
    quota, period = cgroups.number_in(folder / "cpu.cfs_quota_us"), cgroups.number_in(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None
