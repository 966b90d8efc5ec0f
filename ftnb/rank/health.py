"""A gradient that is not finite: which rank brought it in, and where it came up there."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ftnb.rank.collectives import Collectives
from ftnb.rank.gradients import Gradients


class NotFinite(Exception):
    """The averaged gradient of a step is not finite, and the run shall not go on over it."""

    def __init__(self, step: int, source: bool, where: str) -> None:
        super().__init__(f"the gradient of step {step} is not finite")
        self.failure = {"cause": "nan", "step": step, "error": {"source": source, "where": where}}


def diagnose(
    loss: float, compute: Callable[[], torch.Tensor], gradients: Gradients, collectives: Collectives,
    device: torch.device, factor: float,
) -> tuple[bool, str]:
    """Whether this rank's own part is not finite, and where. All ranks call this together; it takes one more step.

    `loss` is that of the first try. `compute` does forward and backward of the same samples again, without the
    others, and returns the loss. `factor`: by which the sum was multiplied.
    """
    gradients.forget()
    source, where, largest = not math.isfinite(loss), "", 0.0
    if source:
        where = "loss"
    else:
        try:
            if not math.isfinite(float(compute().detach())):
                source, where = True, "loss"
            elif (name := gradients.first_bad()) is not None:
                source, where = True, f"gradient of {name}"
            else:
                largest = gradients.largest()
        except Exception as error:  # the user's code; that it came through once is no promise
            where = f"unknown: computing it again failed with {type(error).__name__}: {error}"
        gradients.forget()
    everybody = collectives.gather(torch.tensor([source, largest], dtype=torch.float64, device=device))
    found: list[list[float]] = torch.stack(everybody).tolist()
    if where or any(bad for bad, _ in found):
        return source, where
    if sum(amount for _, amount in found) * max(1.0, factor) > gradients.limit():
        return False, "the sum over all ranks"
    return False, "unknown: it was finite everywhere when it was computed again"
