"""Who sends which bytes, when several ranks give the same state. Pure: giver and receiver compute the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MESSAGE_BYTES = 64 * 1024 * 1024
# Cuts are made at multiples of this, seen from the tensor's start.
ALIGN_BYTES = 64


class Piece(NamedTuple):
    """The bytes [start, stop) of one tensor."""

    tensor: int
    start: int
    stop: int


def plan_stripes(sizes: Sequence[int], num_givers: int, most: int = MESSAGE_BYTES) -> list[list[Piece]]:
    """What each giver sends of tensors of these sizes (bytes): every byte once, in even shares, cut into messages."""
    total = sum(sizes)
    plan = []
    for giver in range(num_givers):
        first, last = total * giver // num_givers, total * (giver + 1) // num_givers
        pieces, offset = [], 0
        for tensor, size in enumerate(sizes):
            start, stop = _cut(first - offset, size), _cut(last - offset, size)
            pieces += split_messages(tensor, start, stop, most)
            offset += size
        plan.append(pieces)
    return plan


def _cut(position: int, size: int) -> int:
    """The cut in a tensor that lies nearest below `position`; positions outside it are its ends."""
    return max(0, position) // ALIGN_BYTES * ALIGN_BYTES if position < size else size


def split_messages(tensor: int, start: int, stop: int, most: int = MESSAGE_BYTES) -> list[Piece]:
    return [Piece(tensor, at, min(at + most, stop)) for at in range(start, stop, most)]
