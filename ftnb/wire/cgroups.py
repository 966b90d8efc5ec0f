"""What the control group of this container allows: its levels, and how much memory is free in them.

Everything reads files below `root`, which tests replace.
"""

from __future__ import annotations

import os
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number close to 2**63


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes of memory for this process, by the tightest level of its control group."""
    limit, free = _host_memory(root)
    for level in levels(root, "memory"):
        level_limit, level_used = _memory_of(level)
        if level_limit is not None:
            limit = min(limit, level_limit)
            free = min(free, max(0, level_limit - level_used))
    return limit, min(free, limit)


def _host_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes of the machine."""
    fields = {}
    for line in text_in(root / "proc/meminfo").splitlines():
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


def levels(root: Path, controller: str) -> list[Path]:
    """Folders that can limit this process, from its own cgroup up to the mount's top.

    Inside a container the path in /proc/self/cgroup is often the host's and does not exist here; then the
    top of the mount *is* the container's own cgroup, so non-existing folders are simply passed over.
    """
    found = []
    for line in text_in(root / "proc/self/cgroup").splitlines():
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
    limit = number_in(folder / "memory.max") or number_in(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED:
        return None, 0
    used = number_in(folder / "memory.current") or number_in(folder / "memory.usage_in_bytes") or 0
    cache = {}
    for line in text_in(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if value.strip().isdigit():
            cache[key] = int(value)
    return limit, max(0, used - cache.get("total_inactive_file", cache.get("inactive_file", 0)))


def number_in(path: Path) -> int | None:
    text = text_in(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def text_in(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):  # missing, or not readable from in here: no limit known
        return ""
