"""Where ranks stand: the Python stacks of their training threads, asked of their agents."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftnb.supervisor.ranks import Slot
    from ftnb.supervisor.server import Supervisor


class Stacks:
    """Questions that are under way, and their answers."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._ids = itertools.count(1)
        self._awaited: dict[int, dict[str, asyncio.Future[dict[str, Any]]]] = {}  # by question and slot key

    async def ask(self, ranks: Iterable[int], limit_s: float) -> dict[int, dict[str, Any] | None]:
        """`place`, `step` and `stack` of each rank; None for who does not answer within `limit_s`."""
        number, loop = next(self._ids), asyncio.get_running_loop()
        slots = {rank: self._supervisor.ranks[rank] for rank in ranks if rank in self._supervisor.ranks}
        futures = {slot.key: loop.create_future() for slot in slots.values()}
        self._awaited[number] = futures
        try:
            for slot in slots.values():
                self._supervisor.tell(slot, "stacks", id=number)
            if futures:
                await asyncio.wait(futures.values(), timeout=limit_s)
        finally:
            del self._awaited[number]
        answers = {rank: futures[slot.key] for rank, slot in slots.items()}
        return {rank: answer.result() if answer.done() else None for rank, answer in answers.items()}

    def answered(self, slot: Slot, message: Mapping[str, Any]) -> None:
        future = self._awaited.get(message["id"], {}).get(slot.key)
        if future is not None and not future.done():
            future.set_result({key: message.get(key) for key in ("place", "step", "stack")})


def line_of_cell(answer: Mapping[str, Any] | None) -> str:
    """ " Line 3 of the cell: x = f(y)." of the innermost frame in the user's cell; nothing if there is none."""
    lines = list((answer or {}).get("stack") or ())
    for place in range(len(lines) - 1, -1, -1):
        if found := re.search(r"<ft_train cell>.*?line (\d+)", lines[place]):
            source = lines[place + 1].strip() if place + 1 < len(lines) and "File " not in lines[place + 1] else ""
            return f" Line {found[1]} of the cell" + (f": {source[:100]}" if source else ".")
    return ""


def grouped(answers: Mapping[int, Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """Ranks that stand in the same place of the same step with the same stack, together; in the order of ranks."""
    groups: dict[Any, dict[str, Any]] = {}
    for rank in sorted(answers):
        answer = answers[rank] or {"place": None, "step": None, "stack": []}
        stack = list(answer["stack"] or [])
        group = groups.setdefault(
            (answer["place"], answer["step"], tuple(stack), answers[rank] is None),
            {"ranks": [], "place": answer["place"], "step": answer["step"], "stack": stack},
        )
        group["ranks"].append(rank)
    return list(groups.values())
