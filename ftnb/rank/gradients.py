"""What becomes of the gradients between backward and update: averaged, measured, clipped. The same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ftnb.errors import CheckError
from ftnb.rank import cell

_HALF = (torch.float16, torch.bfloat16)


class Gradients:
    """The gradients of all parameters that are trained, and the weight that travels with them."""

    def __init__(self, job: cell.Job, clip_norm: float | None) -> None:
        self._model, self._clip_norm = job.model, clip_norm
        self._total = torch.zeros(())
        self._trained = [p for p in job.model.parameters() if p.requires_grad]
        self.weight: torch.nn.Parameter | None = None
        if job.training_step:
            # The weight of this rank's loss rides along as the gradient of one more parameter: the sum of all
            # weights then needs no collective of its own.
            self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=job.device))

    def forget(self) -> None:
        """Of all that DDP averages, also of parameters that the optimizer does not hold."""
        for parameter in self._trained:
            parameter.grad = None
        if self.weight is not None:
            self.weight.grad = None

    def check(self) -> None:
        """Raise when a parameter has none."""
        if any(p.grad is None for p in self._trained):
            trained = {id(p) for p in self._trained}
            lacking = [(n, p) for n, p in self._model.named_parameters() if id(p) in trained and p.grad is None]
            if frozen := [n for n, p in lacking if not p.requires_grad]:
                raise CheckError(
                    f"The parameter {frozen[0]} was frozen (requires_grad_(False)) in the middle of the training. "
                    "Decide what is trained before the optimizer is made."
                )
            names = [n for n, _ in lacking]
            raise CheckError(
                f"{len(names)} parameter{'s' if len(names) > 1 else ''} got no gradient: {', '.join(names[:8])}"
                f"{', …' if len(names) > 8 else ''}. Use them in the forward pass, or freeze them with "
                "`requires_grad_(False)` before the optimizer is made."
            )

    def average(self, samples: int) -> float:
        """Divide the sums by the true sum of weights where that is not the number of samples; returns the factor."""
        if self.weight is None:
            return 1.0
        total = float(self.weight.grad)
        self.weight.grad.zero_()  # it lies in a bucket, and is no part of the gradient's norm
        if total <= 0:
            raise CheckError("The weights that `training_step` returned add up to 0 over the global batch.")
        if abs(total / samples - 1.0) <= 1e-6:
            return 1.0
        torch._foreach_mul_([p.grad for p in self._trained], samples / total)
        return samples / total

    def norm(self, buckets: Sequence[torch.Tensor]) -> float | None:
        """The norm of the averaged gradient; None when some element of it is not finite.

        Every rank asks, since every rank must know. All of them hold bitwise the same, so they agree.
        """
        if self._clip_norm is not None:
            # Over parameters, as torch does it: it decides on the update, and buckets are not the same in every step.
            self._total = torch.nn.utils.get_total_norm([p.grad for p in self._trained])
            norm = float(self._total)
        else:
            norm = math.sqrt(sum(_sums_of_squares(buckets)))
        if math.isfinite(norm):
            return norm
        # Squares overflow long before the gradient does, so this is looked at more closely.
        if not all(bool(torch.isfinite(p.grad).all()) for p in self._trained):
            return None
        norm = math.hypot(*(float(torch.linalg.vector_norm(p.grad, dtype=_wide(p.grad))) for p in self._trained))
        self._total = torch.tensor(norm, dtype=torch.float64)
        return norm

    def clip(self) -> None:
        """After averaging (clipped before, they would depend on the number of ranks), and after `norm`."""
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._trained, self._clip_norm, self._total)

    def first_bad(self) -> str | None:
        """The name of the first parameter whose gradient is not finite."""
        named = [(name, p) for name, p in self._model.named_parameters() if p.grad is not None]
        return next((name for name, p in named if not bool(torch.isfinite(p.grad).all())), None)

    def largest(self) -> float:
        """The largest element, by amount."""
        return max((float(p.grad.abs().max()) for p in self._trained if p.grad is not None and p.numel()), default=0.0)

    def limit(self) -> float:
        """The largest number that fits into every gradient."""
        return min(torch.finfo(p.dtype).max for p in self._trained)


def _sums_of_squares(buckets: Sequence[torch.Tensor]) -> list[float]:
    """A dot product takes the time of a norm, and is more exact with millions of elements."""
    sums = [
        torch.dot(b, b) if b.dtype in (torch.float32, torch.float64)
        else torch.linalg.vector_norm(b, dtype=torch.float32 if b.dtype in _HALF else None) ** 2
        for b in buckets
    ]  # fmt: skip
    return [float(s) for s in sums]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
