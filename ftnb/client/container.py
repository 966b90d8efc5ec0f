"""How much this container can carry: memory and cores as the cgroup allows them, not as the host has them.

`look()` reads; everything else here is arithmetic on what it found.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ftnb.errors import UsageError

GB = 1e9
BYTES_PER_RANK = int(0.3 * GB)  # one idle rank with torch imported, its nanny included (measured)
SHARE_OF_FREE_MEMORY = 0.6  # the rest is for the model, the data and the notebook
DEFAULT_NUM_RANKS = 4
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number close to 2**63


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
    host_total, free = _host_memory(root)
    limit = host_total
    cores = _allowed_cores()
    for level in _cgroup_levels(root, "memory"):
        level_limit, level_used = _memory_of(level)
        if level_limit is not None:
            limit = min(limit, level_limit)
            free = min(free, max(0, level_limit - level_used))
    for level in _cgroup_levels(root, "cpu"):
        quota = _core_quota(level)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return Container(cores=cores, memory_bytes=limit, free_bytes=min(free, limit))


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


def _host_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes of the machine."""
    fields = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        number = value.split()
        if number:
            fields[key] = int(number[0]) * 1024
    if "MemTotal" in fields:
        total = fields["MemTotal"]
        return total, fields.get("MemAvailable", fields.get("MemFree", total))
    # No /proc (macOS): the total is known, what is free is not.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _cgroup_levels(root: Path, controller: str) -> list[Path]:
    """Folders that can limit this process, from its own cgroup up to the mount's top.

    Inside a container the path in /proc/self/cgroup is often the host's and does not exist here; then the
    top of the mount *is* the container's own cgroup, so non-existing folders are simply passed over.
    """
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in (controllers, controller)]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                folder = mount.joinpath(*parts[:depth])
                if folder.is_dir() and folder not in found:
                    found.append(folder)
    return found


def _memory_of(folder: Path) -> tuple[int | None, int]:
    """Limit (None: no limit) and bytes in use that cannot simply be dropped (file cache can)."""
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED:
        return None, 0
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    cache = {}
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if value.strip().isdigit():
            cache[key] = int(value)
    return limit, max(0, used - cache.get("total_inactive_file", cache.get("inactive_file", 0)))


def _core_quota(folder: Path) -> float | None:
    parts = _read(folder / "cpu.max").split()
    if len(parts) == 2 and parts[0].isdigit():
        return int(parts[0]) / int(parts[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):  # missing, or not readable from in here: no limit known
        return ""
