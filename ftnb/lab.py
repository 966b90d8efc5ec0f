"""`ftnb lab`: copy the tutorials out of the package and open them in JupyterLab."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from ftnb.errors import FtnbError

FIRST = "00_quickstart.ipynb"


def lab(directory: str | Path, lab_options: Sequence[str] = ()) -> int:
    if importlib.util.find_spec("jupyterlab") is None:
        raise FtnbError(
            'JupyterLab is not installed in this environment. Install it: pip install "ftnb[lab]"'
        )
    target = Path(directory)
    for line in copy_tutorials(tutorials(), target):
        print(line)
    print(f"Opening {target / FIRST} in JupyterLab. Ctrl-C ends it.")
    sys.stdout.flush()
    os.chdir(target)
    # JupyterLab takes this process's place, so that Ctrl-C and the exit code are its own.
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", FIRST, *lab_options])


def tutorials() -> Traversable:
    """The folder of notebooks: in the installed package, or beside it in a checkout."""
    packaged = files("ftnb") / "_notebooks"
    if packaged.is_dir():
        return packaged
    checkout = Path(__file__).resolve().parents[1] / "notebooks"
    if checkout.is_dir():
        return checkout
    raise FtnbError("This installation of ftnb carries no tutorials. Install it again: pip install -U ftnb")


def copy_tutorials(source: Traversable, target: Path) -> list[str]:
    """Copy every tutorial file into `target`; a file that differs there is kept. Returns what to say."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FtnbError(f"{target} is not a directory. Give another one: ftnb lab DIR") from None
    said = []
    copied = 0
    for parts, file in _walk(source):
        content = file.read_bytes()
        path = target.joinpath(*parts)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            copied += 1
        elif path.read_bytes() != content:
            said.append(f"Kept your changed {path}. Remove or rename it to get the original again.")
    if copied:
        said.insert(0, f"Copied {copied} {'file' if copied == 1 else 'files'} to {target}.")
    return said


def _walk(folder: Traversable, above: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda found: found.name):
        if entry.name.startswith(".") or entry.name in ("__pycache__", "ftnb_runs"):
            continue
        if entry.is_dir():
            yield from _walk(entry, (*above, entry.name))
        else:
            yield (*above, entry.name), entry
