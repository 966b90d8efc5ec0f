"""Letting a process of the pool run the cell of a run that goes on, so that it can take a slot in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ftnb.core import checks, protocol

if TYPE_CHECKING:
    from ftnb.supervisor.ranks import Slot
    from ftnb.supervisor.runs import ActiveRun
    from ftnb.supervisor.server import Supervisor


def load(supervisor: Supervisor, run: ActiveRun, slot: Slot) -> None:
    """Send it the cell; `loaded` hears how it went. Without the notebook's names (lost with a supervisor) it waits."""
    if run.names is None:
        run.ask_for_names()
        return
    slot.loaded, slot.phase = f"?{run.name}", "loading"
    supervisor.office.save_cluster()
    message: dict[str, Any] = {
        "run": _mark(run), "cell": run.cell, "options": run.options, "cwd": run.cwd,
        "sys_path": run.sys_path, "backend": run.backend, "gpu": slot.gpu, "threads": supervisor.threads,
        "world_size": run.num_ranks, "joins": True,
    }
    if run.names:
        message["names"] = run.names
    supervisor.tell(slot, "load", **message)


def loaded(supervisor: Supervisor, slot: Slot, answer: dict[str, Any]) -> None:
    """It has run the cell: if all is as on the other ranks, it is ready for a slot."""
    run = supervisor.going_run
    if run is not None and slot.loaded == f"?{run.name}" and answer["run"] != _mark(run):
        # It was still running the cell of the last run when that ended. It was told to leave that one then; another
        # word would take it out of this run, whose cell comes next.
        return
    if run is None or slot.loaded != f"?{run.name}":
        supervisor.tell(slot, "drop")  # that run is over
        slot.loaded = None
        return
    if not answer["ok"]:
        error = answer["error"]
        slot.loaded = None
        refuse(run, slot.intended, slot_words(slot) + " could not run the cell: " + _what(error), error)
        return
    number = slot.intended if slot.intended is not None else run.num_ranks
    reference = 1 if number == 0 else 0
    signatures = {reference: _without_values(run.signature), number: _without_values(answer["signature"])}
    if problem := checks.difference(signatures):
        slot.loaded = None
        supervisor.tell(slot, "drop")
        refuse(run, slot.intended, slot_words(slot) + " does not fit: " + problem, {})
        return
    slot.loaded = run.name
    supervisor.office.save_cluster()  # a successor ends those that may have been in the middle of it
    run.handle(protocol.SpareReady(slot.intended))


def _mark(run: ActiveRun) -> str:
    """Tells runs apart: names are used again, in another directory or when the user has removed the files."""
    return f"{run.name} {run.started}"


def refuse(run: ActiveRun, intended: int | None, words: str, error: dict[str, Any]) -> None:
    """Every other process would fail in the same way: nobody is started for this run any more."""
    text = f"{words} {hint(error)}Nobody is replaced in this run any more; it goes on with those that are left."
    run.no_joining = text
    run.emit("spare_lost", text, rank=intended)


def slot_words(slot: Slot) -> str:
    return "A spare" if slot.intended is None else f"The replacement of rank {slot.intended}"


def hint(error: dict[str, Any]) -> str:
    """What to do about a name that only the lost rank had."""
    found = re.search(r"name '(\w+)' is not defined", str(error.get("evalue"))) if error.get("etype") else None
    if error.get("etype") != "NameError" or not found:
        return ""
    return (
        f"A new process has only what the cell and the notebook define; `{found[1]}` was probably defined with %%px, "
        "on the ranks that were there. Define it in the cell or in the notebook. "
    )


def _what(error: dict[str, Any]) -> str:
    line = f" in line {error['lineno']} of the cell" if error.get("lineno") else ""
    kind = f"{error['etype']}: " if error.get("etype") else ""
    return f"{kind}{error.get('evalue', '')}".rstrip(". ") + f"{line}."


def _without_values(signature: dict[str, Any]) -> dict[str, Any]:
    """Initial values do not matter: the state of the training is copied over them."""
    return {**signature, "tensors": [[*tensor[:5], None] for tensor in signature["tensors"]]}
