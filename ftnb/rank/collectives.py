"""Collectives that another thread can break off.

Shutting a Gloo group's sockets down frees most blocked collectives, but not all: an operation whose data is half
written when its peer goes, or that meets a reset connection in the wrong moment, is never told (Gloo's TCP
`Pair::write` takes the error for "try again", and `signalException` passes such operations by). It then waits for
ever, more likely the larger the gradients. So the training thread never waits for Gloo itself: it waits for a
future of ours, which `break_off` completes with an error from any thread. What is stuck inside Gloo stays
there, and its group is never destroyed, because that would wait for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Groups that had an operation in hand when they were given up, with their collectives. The destructor of a group
# waits for its operations, so a group stays here until they have ended; those that are stuck stay for good.
_unsettled: list[tuple[Any, Collectives]] = []


# After an abort, what Gloo has in hand ends within milliseconds, or never.
SETTLE_S = 0.02


class BrokenOff(RuntimeError):
    """The collective was broken off because the group is given up."""


class Collectives:
    """What one generation's ranks exchange. The training thread calls, any thread may break it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[dist.Work, Callable[[Any], None]]] = {}
        self._number = 0
        self.broken = False

    def break_off(self) -> None:
        """Let every waiting and every later call raise `BrokenOff`. From any thread."""
        with self._lock:
            self.broken = True
            waiting = [complete for _, complete in self._open.values()]
        for complete in waiting:
            complete(BrokenOff("the process group was given up"))

    def sum_gradients(self, _, bucket):  # DDP inspects annotations and takes no strings for them
        """DDP communication hook: the sum over all ranks (each has scaled its loss by its share already)."""
        buffer = bucket.buffer()
        work = dist.group.WORLD.allreduce([buffer])
        if buffer.is_cuda:  # NCCL's future orders streams, which one of ours would not; NCCL has its own abort
            return work.get_future().then(lambda future: future.value()[0])
        result: torch.futures.Future[Any] = torch.futures.Future()
        self._start(work, result.set_result)

        def unwrap(future: torch.futures.Future[Any]) -> torch.Tensor:
            error = future.value()
            if error is not None:
                raise error
            return buffer

        return result.then(unwrap)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Overwrite the tensors with those of torch rank `source`; those of one type travel together."""
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            same = [t for t in tensors if t.dtype == dtype]
            if len(same) == 1 and same[0].is_contiguous():
                self._broadcast(same[0], source)
                continue
            flat = torch.cat([t.reshape(-1) for t in same])
            self._broadcast(flat, source)
            with torch.no_grad():
                for tensor, new in zip(same, flat.split([t.numel() for t in same])):
                    tensor.copy_(new.view_as(tensor))

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.is_cuda:
            dist.broadcast(tensor, source)
            return
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._start(dist.broadcast(tensor, source, async_op=True), done.put)
        error = done.get()
        if error is not None:
            raise error

    def settle(self, within_s: float) -> bool:
        """Wait for what Gloo still has in hand; False when something is stuck for good."""
        deadline = time.monotonic() + within_s
        while any(not work.is_completed() for work, _ in list(self._open.values())):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _start(self, work: dist.Work, complete: Callable[[Any], None]) -> None:
        """Call `complete(None or the error)` once: when Gloo is done, or when the group is given up."""
        once = threading.Lock()

        def complete_once(error: Any) -> None:
            if once.acquire(blocking=False):
                complete(error)

        with self._lock:
            self._number += 1
            number = self._number
            self._open[number] = (work, complete_once)
            broken = self.broken
        if broken:
            complete_once(BrokenOff("the process group was given up"))

        def finished(future: torch.futures.Future[Any]) -> None:
            error = None
            try:
                future.wait()
            except Exception as failed:
                error = failed.with_traceback(None)
            with self._lock:
                self._open.pop(number, None)
            complete_once(error)

        work.get_future().add_done_callback(finished)


def keep_until_settled(group: Any, collectives: Collectives) -> None:
    """Hold a reference to `group` as long as destroying it would wait; let go of earlier ones that have settled."""
    _unsettled[:] = [(g, c) for g, c in _unsettled if not c.settle(within_s=0)]
    if not collectives.settle(within_s=SETTLE_S):
        _unsettled.append((group, collectives))
