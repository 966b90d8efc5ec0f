"""Injected faults that the training loop does to itself: a slow rank, NaN, a skipped collective, a flipped bit.

What concerns the process alone (`faults.strike`) is started from here as well, at its point of the step. Nothing is
done before the supervisor has it on record and says so.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import torch

from ftnb.rank import faults
from ftnb.rank.group import Group
from ftnb.rank.link import WorkLink
from ftnb.rank.orders import Fault, Orders

ALLOW_TIMEOUT_S = 5.0
DEFAULT_FACTOR = 3.0
_NAP_S = 0.02
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRIES = 1000


class StepFaults:
    """What has been injected into this rank's steps."""

    def __init__(self, link: WorkLink, orders: Orders) -> None:
        self._link, self._orders = link, orders
        self._slow: tuple[float, float] | None = None  # factor, until when

    def strike(self, point: str, group: Group, step: int) -> list[Fault]:
        """Faults due at this point: those of the process are done, those that the loop has to do are returned."""
        if not (due := self._orders.due_faults(step, point)):
            return []
        if group.world_size == 1:  # nobody to be out of step with: it is reported as one that did not fire
            due = [fault for fault in due if fault.kind != "deadlock"]
        return [fault for fault in due if self._allowed(fault, step) and not self._done(fault, group, step)]

    def _allowed(self, fault: Fault, step: int) -> bool:
        """Tell the supervisor, which puts it on record first; False when no word of it comes: then it is forgotten."""
        self._link.tell("fault_due", fault_id=fault.fault_id, step=step)
        return fault.allowed.wait(ALLOW_TIMEOUT_S)

    def _done(self, fault: Fault, group: Group, step: int) -> bool:
        if fault.kind == "slow":
            until = math.inf if fault.duration_s is None else time.monotonic() + fault.duration_s
            self._slow = (fault.factor or DEFAULT_FACTOR, until)
        elif fault.kind in ("nan", "deadlock", "bitflip"):
            return False
        else:
            faults.strike(fault, group.members[group.torch_rank], step)
        return True

    def slow_down(self, own_s: float, group: Group) -> float:
        """Sleep until this rank has taken `factor` times as long as it did for its own part of the step.

        Returns the seconds slept; breaks off when the group is given up.
        """
        if self._slow is None:
            return 0.0
        factor, until = self._slow
        began = time.monotonic()
        if began >= until:
            self._slow = None
            return 0.0
        # Its place stays the update: in the forward pass of a step whose sum the others have, it would be out of step.
        awake = min(began + (factor - 1) * own_s, until)
        while (left_s := awake - time.monotonic()) > 0 and not group.aborted:
            time.sleep(min(left_s, _NAP_S))
        return time.monotonic() - began


def flip_bit(model: torch.nn.Module, seed: int) -> None:
    """Flip one bit of one element of one parameter, all drawn from `seed`.

    The bit is one that matters, and lets the training go on: the value stays finite, and changes by a thousandth at
    least and fourfold at most. (One more or less in the last place may be rounded away by the next update, and a
    weight of 1e38 would be found as a NaN.)
    """
    dice = random.Random(seed)
    parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
    sizes = [p.numel() for p in parameters]
    with torch.no_grad():
        for _ in range(_TRIES):
            (parameter,) = dice.choices(parameters, sizes)
            element = _element(parameter.detach(), dice.randrange(parameter.numel()))
            if element.is_complex():
                element = torch.view_as_real(element)[dice.randrange(2)]
            bits = element.view(_INTEGERS[element.element_size()])
            before = bits.clone()
            candidates = [n for n in range(8 * element.element_size()) if _matters(element, before, n)]
            if candidates:
                bits.copy_(_flipped(before, dice.choice(candidates)))
                return
        bits.copy_(_flipped(before, 0))  # all of them are 0, say


def _element(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """One element as a tensor without dimensions, whatever the layout; a view."""
    for size, dim in zip(reversed(tensor.shape), range(tensor.dim() - 1, -1, -1)):
        position, index = divmod(position, size)
        tensor = tensor.select(dim, index)
    return tensor


def _flipped(bits: torch.Tensor, number: int) -> torch.Tensor:
    width = 8 * bits.element_size()
    mask: Any = 1 << number
    if bits.dtype != torch.uint8 and number == width - 1:
        mask -= 1 << width  # the sign
    return bits ^ torch.tensor(mask, dtype=bits.dtype, device=bits.device)


def _matters(element: torch.Tensor, bits: torch.Tensor, number: int) -> bool:
    old = float(element)
    new = float(_flipped(bits, number).view(element.dtype))
    return math.isfinite(new) and 0.001 * abs(old) <= abs(new - old) <= 4 * abs(old) and new != old
