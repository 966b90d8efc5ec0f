"""Every tutorial, executed from top to bottom in a scratch directory, its outputs compared by nbval."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.notebook
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_does_what_it_shows(notebook, tmp_path):
    shutil.copy(notebook, tmp_path)
    mark = f"{tmp_path}/runtime"
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", "--nbval-cell-timeout", "240",
            "--sanitize-with", str(ROOT / "tests" / "nbval_sanitize.cfg"), notebook.name,
        ],
        cwd=tmp_path, env={**os.environ, "FTNB_RUNTIME_DIR": mark}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    left = _processes_with(mark)
    for process in left:
        process.kill()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert not left, f"the notebook left processes behind: {left}"


def _processes_with(runtime_dir: str) -> list[psutil.Process]:
    """Processes that were started for this notebook: supervisor and engines carry its runtime directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FTNB_RUNTIME_DIR") == runtime_dir:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
