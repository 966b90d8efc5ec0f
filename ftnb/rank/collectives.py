"""Collectives that another thread can break off.

Shutting a Gloo group's sockets down frees most blocked collectives, but not all: an operation whose data is half
written when its peer goes, or that meets a reset connection in the wrong moment, is never told (Gloo's TCP
`Pair::write` takes the error for "try again", and `signalException` passes such operations by). It then waits for
ever, more likely the larger the gradients. So the training thread waits in short slices and looks in between
whether the group is given up. What is stuck inside Gloo stays there, and its group is never destroyed, because
that would wait for it.

Sends and receives are worse still: only who waits for them learns that they have ended, a wait that times out closes
all connections of the group, and the message that is half written or half read when the sockets go is never told
(with large messages there nearly always is one). So a thread of its own waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ftnb.rank.whereabouts import Whereabouts

# How long a wait goes on before it looks up. An operation that ends, or fails, ends the wait at once.
SLICE = timedelta(milliseconds=20)
# Once Gloo has closed its connections, what it has in hand ends at once, or never. It is not waited for any longer:
# a group that is kept for nothing goes when the next one is destroyed.
SETTLE_S = 0.002
# For sends and receives, Work.wait() without a limit has that of the group's forming, a fraction of a second. This
# one is longer than any transfer; what is stuck is let go when it is over.
TRANSFER_TIMEOUT = timedelta(hours=1)
# Groups that had an operation in hand when they were given up, with their collectives. The destructor of a group
# waits for its operations, so a group stays here until they have ended; those that are stuck stay for good.
_unsettled: list[tuple[Any, Collectives]] = []


Message = tuple[torch.Tensor, int]  # contiguous tensor, torch rank of the peer


class BrokenOff(RuntimeError):
    """The collective was broken off because the group is given up."""


class _Waiter(threading.Thread):
    """Waits for sends and receives; `woken` is set at the first failure, at the end, or by who gives the group up."""

    def __init__(self, works: list[dist.Work], device: torch.device) -> None:
        super().__init__(name="ftnb-transfer", daemon=True)
        self._works, self._device = works, device
        self.woken = threading.Event()
        self.error: RuntimeError | None = None

    def run(self) -> None:
        # To the end, also after a failure: as long as Gloo has any of them in hand, the group must live.
        for work in self._works:
            try:
                work.wait(TRANSFER_TIMEOUT)
            except RuntimeError as error:
                if self.error is None:
                    self.error = error
                    self.woken.set()
        if self._device.type == "cuda":  # NCCL has only queued them
            torch.cuda.synchronize(self._device)
        self._works = []
        self.woken.set()


class Collectives:
    """What one generation's ranks exchange. The training thread calls; `break_off` may come from any thread."""

    def __init__(self, whereabouts: Whereabouts | None = None) -> None:
        self.broken = False
        self.writes_state = False  # what is in hand goes straight into the state of the training
        self._buckets: list[torch.Tensor] = []
        self._whereabouts = whereabouts or Whereabouts()
        self._in_hand: list[dist.Work] = []
        self._waiter: _Waiter | None = None

    def break_off(self) -> None:
        """Let the collective that is waited for, and every later one, raise `BrokenOff`."""
        self.broken = True
        if (waiter := self._waiter) is not None:
            waiter.woken.set()

    def sum_gradients(self, _, bucket):  # DDP inspects annotations and takes no strings for them
        """DDP communication hook: start the sum over all ranks (each has scaled its loss by its share already).

        DDP gets a future that is done, so that it does not wait: `wait_for_gradients` does, after backward. The sum
        happens in place, and the gradients are views of the bucket.
        """
        buffer = bucket.buffer()
        self._buckets.append(buffer)
        self._in_hand.append(dist.group.WORLD.allreduce([buffer]))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def wait_for_gradients(self) -> list[torch.Tensor]:
        """The sums, as flat tensors: DDP's buckets, of which the parameters' gradients are views."""
        with self._whereabouts:
            for work in self._in_hand:
                self._wait(work)
        self._in_hand.clear()
        buckets, self._buckets = self._buckets, []
        return buckets

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, by torch rank; equal shapes and types."""
        everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        self._call(dist.all_gather(everybody, own, async_op=True))
        return everybody

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._call(dist.barrier(async_op=True))

    def rebuild_buckets(self, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        """Let DDP lay its buckets out anew, once, after a group's first step; all ranks must call it together.

        DDP would do it when its forward pass begins, and wait there for all ranks: a rank that waits for a peer would
        then be seen in the forward pass, as if its own code was slow.
        """
        with self._whereabouts:
            if ddp.reducer._rebuild_buckets():
                ddp._has_rebuilt_buckets = True

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Overwrite the tensors with those of torch rank `source`; those of one type travel together."""
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            same = [t for t in tensors if t.dtype == dtype]
            flat = same[0] if len(same) == 1 and same[0].is_contiguous() else torch.cat([t.reshape(-1) for t in same])
            self.writes_state = flat is same[0]
            self._call(dist.broadcast(flat, source, async_op=True))
            self.writes_state = False
            if flat is not same[0]:
                with torch.no_grad():
                    for tensor, new in zip(same, flat.split([t.numel() for t in same])):
                        tensor.copy_(new.view_as(tensor))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive point to point, all at once; messages between two ranks arrive in the order given.

        Received bytes go straight into the tensors. After `BrokenOff` Gloo may go on writing into them until it
        has closed the connections; see `Group.destroy`.
        """
        if not sends and not receives:
            return
        self.writes_state = bool(receives)
        works: list[dist.Work] = []
        waiter = self._waiter = _Waiter(works, (sends or receives)[0][0].device)
        try:
            self._start(sends, receives, works)
        finally:
            waiter.start()
        if not self.broken:  # looked at when `break_off` can find the waiter already
            with self._whereabouts:
                waiter.woken.wait()
        if self.broken:
            raise BrokenOff("the process group was given up")
        if waiter.error is not None:
            raise waiter.error
        self._waiter, self.writes_state = None, False

    @staticmethod
    def _start(sends: Sequence[Message], receives: Sequence[Message], works: list[dist.Work]) -> None:
        """Start them all; what has begun is in `works` also when one cannot be started any more."""
        world = dist.group.WORLD
        if (sends or receives)[0][0].device.type == "cuda":  # NCCL wants them in one batch
            operations = [dist.P2POp(dist.isend, tensor, group_peer=peer, group=world) for tensor, peer in sends]
            operations += [dist.P2POp(dist.irecv, tensor, group_peer=peer, group=world) for tensor, peer in receives]
            works += dist.batch_isend_irecv(operations)
            return
        for tensor, peer in sends:
            works.append(dist.isend(tensor, group_dst=peer))
        for tensor, peer in receives:
            works.append(dist.irecv(tensor, group_src=peer))

    def settled(self, within_s: float) -> bool:
        """Wait for what Gloo still has in hand; False when something seems to be stuck."""
        deadline = time.monotonic() + within_s
        while not all(work.is_completed() for work in self._in_hand) or (self._waiter and self._waiter.is_alive()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def _call(self, work: dist.Work) -> None:
        self._in_hand.append(work)
        with self._whereabouts:
            self._wait(work)
        self._in_hand.clear()

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
