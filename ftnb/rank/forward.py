"""The user's part of a step: from a batch to a loss that can be trained on, with a clear word when it cannot."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ftnb.errors import CheckError
from ftnb.rank import cell


class Loss(NamedTuple):
    """The mean over this rank's share (scalar tensor), its weight in the global mean, and further scalars."""

    loss: torch.Tensor
    weight: float
    scalars: dict[str, float] | None


class Forward:
    """Calls `loss_fn` or `training_step` on the model as DDP has wrapped it."""

    def __init__(self, job: cell.Job) -> None:
        self._job = job
        self._called = False

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Notice whether `training_step` calls the model."""
        if self._job.training_step:
            ddp.register_forward_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._called = True

    def __call__(self, ddp: DistributedDataParallel, batch: Any, real: int, fetched: int) -> Loss:
        """`real` of the `fetched` samples count; the others are stand-ins."""
        job = self._job
        scalars, weight = None, float(real)
        if job.loss_fn is not None:
            loss = job.loss_fn(*self._output_and_target(ddp, batch))
        else:
            self._called = False
            loss = job.training_step(ddp, batch)
            if not self._called:
                # DDP would average nothing, and the ranks would drift apart without a word.
                raise CheckError(
                    "`training_step` did not call `model(...)`. Gradients are averaged only for what goes through that "
                    "call; move the work of a part (`model.module.part(...)`) into the model's `forward`."
                )
            if isinstance(loss, dict):
                result = dict(loss)
                if "loss" not in result:
                    raise CheckError("`training_step` returned a dict without 'loss'.")
                loss = result.pop("loss")
                if (own := result.pop("weight", None)) is not None:
                    weight = cell.plain_number(own, "weight") * real / fetched
                    if not (weight >= 0 and math.isfinite(weight)):
                        raise CheckError(f"`training_step` returned the weight {weight}; it must be finite, 0 or more.")
                scalars = {str(k): cell.plain_number(v, str(k)) for k, v in result.items()} or None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CheckError(f"The loss must be a tensor with one element (the mean over the batch), not {shape}.")
        if not loss.requires_grad:
            raise CheckError("The loss does not depend on the model's parameters, so there is no gradient.")
        return Loss(loss.reshape(()), weight, scalars)

    @staticmethod
    def _output_and_target(ddp: DistributedDataParallel, batch: Any) -> tuple[Any, Any]:
        try:
            inputs, target = batch
        except (TypeError, ValueError):
            raise CheckError(
                "`loss_fn` needs samples of the form (input, target); this dataset gives something else. Define "
                "`training_step(model, batch)` instead."
            ) from None
        try:
            return ddp(inputs), target
        except Exception as error:
            shape = list(inputs.shape) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
            error.add_note(f"(raised by model(input); this rank's input: {shape})")
            raise
