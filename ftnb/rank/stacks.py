"""Where a thread stands, in a few lines of text."""

from __future__ import annotations

import os
import sys
import threading
import traceback

MAX_LINES = 30
CELL = "<ft_train cell>"  # as `cell.FILENAME`, for which torch would have to be imported
_HERE = os.path.dirname(os.path.abspath(__file__))
# How the training thread came to what it does (or that it has nothing to do): the same in every stack.
_OUTER_FILES = {os.path.abspath(threading.__file__), *(os.path.join(_HERE, name) for name in ("worker.py", "agent.py"))}


def stack_of(thread_id: int | None) -> list[str]:
    """The Python stack of that thread, innermost last: from its first line of meaning on, and not too long.

    That is the user's first line, where their code runs, else ftnb's own loop. Paths are told as seen from the
    folders in which Python looks for modules, so that equal stacks are equal on all ranks.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return []
    frames = traceback.extract_stack(frame)
    while frames and os.path.abspath(frames[0].filename) in _OUTER_FILES:
        del frames[0]
    cell = next((n for n, found in enumerate(frames) if found.filename == CELL), 0)
    lines: list[str] = []
    for found in frames[cell:]:
        lines.append(f'File "{_short(found.filename)}", line {found.lineno}, in {found.name}')
        if found.line:
            lines.append("    " + found.line)
    if len(lines) > MAX_LINES:
        left_out = len(lines) - MAX_LINES + 1
        lines = [f"({left_out} lines left out)", *lines[left_out:]]
    return lines


def _short(path: str) -> str:
    folders = [os.path.join(folder, "") for folder in sys.path if folder and path.startswith(os.path.join(folder, ""))]
    return path[len(max(folders, key=len)) :] if folders else path
