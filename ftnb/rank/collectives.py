"""Collectives that another thread can break off.

Shutting a Gloo group's sockets down frees most blocked collectives, but not all: an operation whose data is half
written when its peer goes, or that meets a reset connection in the wrong moment, is never told (Gloo's TCP
`Pair::write` takes the error for "try again", and `signalException` passes such operations by). It then waits for
ever, more likely the larger the gradients. So the training thread waits in short slices and looks in between
whether the group is given up. What is stuck inside Gloo stays there, and its group is never destroyed, because
that would wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# How long a wait goes on before it looks up. An operation that ends, or fails, ends the wait at once.
SLICE = timedelta(milliseconds=20)
# After an abort, what Gloo has in hand ends within milliseconds, or never.
SETTLE_S = 0.02
# Groups that had an operation in hand when they were given up, with their collectives. The destructor of a group
# waits for its operations, so a group stays here until they have ended; those that are stuck stay for good.
_unsettled: list[tuple[Any, Collectives]] = []


class BrokenOff(RuntimeError):
    """The collective was broken off because the group is given up."""


class Collectives:
    """What one generation's ranks exchange. The training thread calls; `break_off` may come from any thread."""

    def __init__(self) -> None:
        self.broken = False
        self._in_hand: list[dist.Work] = []

    def break_off(self) -> None:
        """Let the collective that is waited for, and every later one, raise `BrokenOff`."""
        self.broken = True

    def sum_gradients(self, _, bucket):  # DDP inspects annotations and takes no strings for them
        """DDP communication hook: start the sum over all ranks (each has scaled its loss by its share already).

        DDP gets a future that is done, so that it does not wait: `wait_for_gradients` does, after backward. The sum
        happens in place, and the gradients are views of the bucket.
        """
        buffer = bucket.buffer()
        self._in_hand.append(dist.group.WORLD.allreduce([buffer]))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def wait_for_gradients(self) -> None:
        for work in self._in_hand:
            self._wait(work)
        self._in_hand.clear()

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Overwrite the tensors with those of torch rank `source`; those of one type travel together."""
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            same = [t for t in tensors if t.dtype == dtype]
            flat = same[0] if len(same) == 1 and same[0].is_contiguous() else torch.cat([t.reshape(-1) for t in same])
            self._in_hand.append(dist.broadcast(flat, source, async_op=True))
            self._wait(self._in_hand[-1])
            self._in_hand.clear()
            if flat is not same[0]:
                with torch.no_grad():
                    for tensor, new in zip(same, flat.split([t.numel() for t in same])):
                        tensor.copy_(new.view_as(tensor))

    def settled(self, within_s: float) -> bool:
        """Wait for what Gloo still has in hand; False when something seems to be stuck."""
        deadline = time.monotonic() + within_s
        while not all(work.is_completed() for work in self._in_hand):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def _wait(self, work: dist.Work) -> None:
        while not self.broken:
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    break  # it has failed; or it has ended just when the slice was over
        if not work.is_completed():
            raise BrokenOff("the process group was given up")
        work.wait()  # returns, or raises what it failed with


def keep_until_settled(group: Any, collectives: Collectives) -> None:
    """Hold a reference to `group` as long as destroying it would wait; let go of earlier ones that have settled."""
    _unsettled[:] = [(g, c) for g, c in _unsettled if not c.settled(within_s=0)]
    if not collectives.settled(within_s=SETTLE_S):
        _unsettled.append((group, collectives))
