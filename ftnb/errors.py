"""The exception tree. Every message says what happened, where, and what to type next.

Errors cross the wire between supervisor and notebook as plain dictionaries (see `to_wire`), so that what
a rank found out is raised in the notebook as the same class, without unpickling anything.
"""

from __future__ import annotations

from typing import Any


class FtnbError(Exception):
    """Base class of all errors that ftnb raises for its users.

    `details` holds plain data (JSON types) for programs; the message alone is enough for people.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details

    def _render_traceback_(self) -> list[str]:
        # IPython calls this instead of printing ftnb's own frames, which help nobody in a notebook.
        return [f"{type(self).__name__}: {self}"]

    def to_wire(self) -> dict[str, Any]:
        return {"type": type(self).__name__, "message": str(self), "details": self.details}


class UsageError(FtnbError, ValueError):
    """A wrong option, value or name; nothing has been changed."""


class NoClusterError(FtnbError):
    """There is no cluster to talk to."""


class ClusterError(FtnbError):
    """The cluster could not be started, or it was lost."""


class CellError(FtnbError):
    """The user's own code raised.

    `details`: `ranks` (slots that raised it), `etype`, `evalue`, `lineno` (line of the cell, from 1, or
    None), `step` (None before training), `traceback` (text, the user's frames only) and `output` (what the
    ranks had printed before, as [[ranks, text], …]).
    """

    def _render_traceback_(self) -> list[str]:
        lines = str(self.details.get("traceback") or "").rstrip().splitlines()
        for ranks, text in self.details.get("output") or []:
            lines = [f"printed by rank {', '.join(map(str, ranks))}: {text}", *lines]
        return [*lines, "", f"{type(self).__name__}: {self}"] if lines else super()._render_traceback_()


class CheckError(FtnbError, ValueError):
    """The cell ran, but what it defines cannot be trained."""


class RunError(FtnbError):
    """The run is in a state in which this cannot be done."""


class CheckpointError(FtnbError):
    """A checkpoint is damaged, incomplete or malicious, or does not fit the model; nothing of it has been used."""


_CLASSES = {
    cls.__name__: cls
    for cls in (
        FtnbError, UsageError, NoClusterError, ClusterError, CellError, CheckError, RunError, CheckpointError,
    )
}


def from_wire(error: dict[str, Any]) -> FtnbError:
    """The exception that `to_wire` described; an unknown class becomes a plain `FtnbError`."""
    cls = _CLASSES.get(error.get("type", ""), FtnbError)
    return cls(error.get("message", "unknown error"), **(error.get("details") or {}))
