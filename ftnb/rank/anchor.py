"""A copy of the whole state in this rank's memory, to which the training can go back."""

from __future__ import annotations

from typing import Any

import torch

from ftnb.errors import CheckError
from ftnb.rank import cell, state, transfer


class Anchor:
    """Parameters, buffers, optimizer and scheduler as they were after `step`; None while there is no copy.

    The copies go into memory that is allocated once, so an anchor costs as much memory as the state itself.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._description: Any = None
        self._copies: dict[int, torch.Tensor] = {}
        self._same_as: dict[int, int] = {}  # number of a tensor whose copy another one has: tied weights

    def take(self, job: cell.Job, step: int) -> None:
        """Copy the state, which is that after `step`. Raises CheckError where that cannot be done."""
        self.step = None  # half a copy is none
        try:
            with torch.no_grad():
                self._description, tensors = state.take_apart(transfer.whole_state(job))
                self._make_room(tensors)
                numbers = list(self._copies)
                torch._foreach_copy_([self._copies[n] for n in numbers], [tensors[n] for n in numbers])
        except (MemoryError, RuntimeError, TypeError) as error:
            raise CheckError(
                f"No copy of the state after step {step} could be kept in memory: {error}. --recovery restart, "
                "--on-nan rollback and --check-replicas need one, as large as model and optimizer together: leave "
                "them out, or use fewer ranks on this machine."
            ) from None
        self.step = step

    def _make_room(self, tensors: list[torch.Tensor]) -> None:
        before, self._copies, self._same_as = self._copies, {}, {}
        seen: dict[tuple[Any, ...], int] = {}
        for number, tensor in enumerate(tensors):
            if tensor.numel() and (first := seen.setdefault(transfer.identity(tensor), number)) != number:
                self._same_as[number] = first
                continue
            mine = before.get(number)
            if mine is None or (mine.dtype, mine.shape, mine.device) != (tensor.dtype, tensor.shape, tensor.device):
                mine = torch.empty_like(tensor)
            self._copies[number] = mine

    def restore(self, job: cell.Job) -> None:
        """Put the copy back, bit for bit, into the tensors that model and optimizer hold wherever they have them."""
        if self.step is None:
            raise RuntimeError("this rank holds no copy of an earlier state to go back to")
        own = transfer.whole_state(job)
        description, tensors = state.take_apart(own)
        mine = {place: tensors[leaf.number] for place, leaf in state.tensor_places(description).items()}
        targets: dict[int, torch.Tensor] = {}
        for place, leaf in state.tensor_places(self._description).items():
            there = mine.get(place)
            if there is None or leaf.number in targets or leaf.number in self._same_as:
                continue
            if (there.dtype, list(there.shape)) == (leaf.dtype, leaf.shape) and transfer.is_writable(there):
                targets[leaf.number] = there
        with torch.no_grad():
            for number, copy in self._copies.items():
                if number in targets:
                    targets[number].copy_(copy)
                else:  # the optimizer did not hold it, say; the copy stays for the next time
                    targets[number] = copy.clone()
        for number, first in self._same_as.items():
            targets[number] = targets[first]
        restored = [targets[number] for number in range(len(targets))]
        transfer.load(job, state.put_together(self._description, restored), own)
