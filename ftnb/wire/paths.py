"""Where a cluster keeps its private files: one directory per cluster name, readable by its owner only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ftnb.errors import ClusterError, UsageError

# Exit code of a supervisor that found another one of its name.
EXIT_NAME_TAKEN = 75
# Exit code of a successor that could not take the cluster over, and has ended what was left of it.
EXIT_CANNOT_ADOPT = 76

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str, what: str = "cluster") -> str:
    """Return `name` when it can be a directory name, else raise `UsageError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise UsageError(
            f"{name!r} cannot be the name of a {what}: use letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, 64 characters at most."
        )
    return name


def runtime_dir() -> Path:
    """The directory of all clusters of this user on this machine.

    `FTNB_RUNTIME_DIR` overrides it; `XDG_RUNTIME_DIR` (private, emptied at log-out) is taken where it is
    writable; else the user's state directory.
    """
    if explicit := os.environ.get("FTNB_RUNTIME_DIR"):
        return Path(explicit)
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg and os.access(xdg, os.W_OK):
        return Path(xdg) / "ftnb"
    return Path.home() / ".local" / "state" / "ftnb"


def cluster_dir(name: str) -> Path:
    return runtime_dir() / "clusters" / check_name(name)


def connection_file(name: str) -> Path:
    return cluster_dir(name) / "connection.json"


def make_private_dir(path: Path) -> Path:
    """Create `path` (and its parents) with mode 0700; an existing last component is tightened to it."""
    try:
        for directory in [*reversed(path.parents), path]:
            if not directory.exists():
                directory.mkdir(mode=0o700, exist_ok=True)
        os.chmod(path, 0o700)
    except OSError as error:
        raise ClusterError(
            f"The directory for ftnb's own files, {path}, cannot be made ({error.strerror}). Set FTNB_RUNTIME_DIR to "
            "one that can."
        ) from None
    return path


def write_private(path: Path, text: str) -> None:
    """Write `text` so that the file is never, not even briefly, readable by others, nor half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as f:
        f.write(text)
    os.replace(temporary, path)
