"""Whether the kernel has killed processes because memory ran out."""

from __future__ import annotations

from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed so far because memory ran out; None where it does not tell.

    In this process's control group and those above it, or on the whole machine if that counts more: a limit of a
    group above kills as well, and inside a container only one of the two may be visible.
    """
    counts = [_count(file) for file in [*_group_files(root), root / "proc/vmstat"]]
    return max((count for count in counts if count is not None), default=None)


def _group_files(root: Path) -> list[Path]:
    files = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":  # version 2
            top, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        group = top / path.lstrip("/")
        # Inside a container the path may be the host's, and the top of the mount is the container's own group.
        files += [folder / name for folder in (group, *group.parents) if folder == top or top in folder.parents]
    return files


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(value) for name, _, value in (line.partition(" ") for line in lines) if name == "oom_kill"), None)
