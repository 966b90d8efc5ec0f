"""Getting a successor for a lost supervisor: start it, see it take over, give it up after a while.

Several notebooks may try at once: the cluster's lock lets one successor in, the others end and are of no harm.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from ftnb.wire import paths, proc, sockets

# Starts a successor. It is told whom it replaces, so that one that comes late does not end another successor.
Spawn = Callable[[proc.ProcessId], subprocess.Popen]

LIMIT_S = 30.0
# It did not work out, but may in a moment: another successor was in charge, and has died in turn, say.
_AGAIN_AFTER_S = 1.0
_MAX_FAULTS = 3  # so many that end by themselves, for no reason that is known, are enough


class Takeover:
    """The search for a successor of `lost`. Call `step` again and again with the present connection file."""

    def __init__(self, spawn: Spawn, lost: proc.ProcessId, what: str) -> None:
        self._spawn, self._lost, self.what = spawn, lost, what
        self._began = time.monotonic()
        self._child: subprocess.Popen | None = None
        self._not_before = self._began
        self._faults = 0
        self._handed_out: list[subprocess.Popen] = []
        self.problem: str | None = None  # why it was given up

    def new_children(self) -> list[subprocess.Popen]:
        """Those started since the last call; somebody has to wait for them."""
        children, self._handed_out = self._handed_out, []
        return children

    def step(self, present: sockets.Connection | None) -> sockets.Connection | None:
        """The connection of a living successor, once there is one."""
        now = time.monotonic()
        if present is not None:
            process = proc.ProcessId(present.pid, present.pid_started)
            if process != self._lost and process.is_alive():
                return present
            self._lost = process  # perhaps another successor, dead in turn
        code = self._child.poll() if self._child is not None else None
        if code == paths.EXIT_CANNOT_ADOPT:
            self.problem = "A successor could not take over, so what was left of the cluster was ended."
        elif present is None:
            self.problem = "The cluster was stopped meanwhile."
        elif now - self._began > LIMIT_S:
            self.problem = f"No successor was in charge after {LIMIT_S:.0f} s."
        elif self._child is not None and code is not None:
            self._child = None
            self._not_before = now + _AGAIN_AFTER_S
            self._faults += code not in (paths.EXIT_NAME_TAKEN, 0) and code > 0
            if self._faults >= _MAX_FAULTS:
                self.problem = f"Its successors ended with exit code {code} before they were in charge."
        elif self._child is None and now >= self._not_before:
            try:
                self._child = self._spawn(self._lost)
                self._handed_out.append(self._child)
            except OSError as error:
                self.problem = f"A successor could not be started: {error}."
        return None
