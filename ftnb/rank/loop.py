"""The training loop of one rank, over as many generations as it takes.

    wait for a generation → form its process group → copy state to whoever is behind → train step by step
          ▲                                                                                │
          └──── a collective failed, user code raised, or the supervisor wants a newer one ┘

Shapes: W = world size, G = global batch (samples per step over all ranks), n = this rank's share of it.
Each rank's loss is a mean over its n samples. It is scaled by n/G before backward, and the ranks' gradients are
added: the sum is the gradient of the mean over all G samples, whatever W is.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ftnb.core import sampler
from ftnb.errors import CheckError
from ftnb.rank import cell, faults, state, transfer
from ftnb.rank.data import BatchSource
from ftnb.rank.group import FORM_TIMEOUT_S, MAX_FORM_TIMEOUT_S, Group
from ftnb.rank.link import WorkLink
from ftnb.rank.orders import Dropped, Orders, Superseded

# What torch 2.13 says when a Gloo or NCCL peer is gone; anything else that comes up in a step is the user's.
_COLLECTIVE_SIGNS = (
    "gloo", "nccl", "connection closed by peer", "connection reset", "connection refused", "broken pipe",
    "connectfullmesh", "timed out waiting", "socket", "process group",
)


# DDP's forward (buffers) and backward (gradients), torch.distributed itself, and ftnb's own calls of it.
_COLLECTIVE_FILES = (
    *(os.path.join(os.path.dirname(torch.__file__), *part) for part in
      (("autograd", ""), ("distributed", ""), ("nn", "parallel", "distributed.py"))),
    os.path.join(os.path.dirname(os.path.abspath(__file__)), ""),
)  # fmt: skip


class Training:
    """One run on one rank. Lives in the training thread; `abort` alone is called from the agent thread."""

    def __init__(
        self, job: cell.Job, options: dict[str, Any], rank: int | None, backend: str, link: WorkLink, orders: Orders,
        joins: bool = False,
    ) -> None:
        self.job, self.options = job, options
        self.rank = rank  # None: a spare, which gets its slot before its first generation
        self.total_steps: int = options["total_steps"]
        # Somebody who joins a training that goes on holds no state of it until it is copied (-1).
        self.committed = -1 if joins else 0
        self.stage = "waiting"  # then "ready", "training", "held", "finished"
        self.digest: str | None = None  # of the weights, once finished
        self.in_flight: int | None = None
        self.generation = 0
        self.weights: list[tuple[str, str, list[int], bytes]] | None = None
        self._backend, self._link, self._orders = backend, link, orders
        self._group: Group | None = None
        self._form_timeout_s = FORM_TIMEOUT_S
        self._trainable = [p for p in job.model.parameters() if p.requires_grad]
        self._has_buffers = next(job.model.buffers(), None) is not None
        self._snapshot = state.StepSnapshot(job.model if self._has_buffers else None)
        self._steps_per_epoch = sampler.steps_per_epoch(job.dataset_len, options["global_batch"])
        self._weight: torch.nn.Parameter | None = None
        if job.training_step:
            self._weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=job.device))
        self.source = BatchSource(
            job.dataset, job.collate_fn, global_batch=options["global_batch"], total_steps=self.total_steps,
            seed=options["seed"], workers=options["workers"], device=job.device,
            min_real=2 if job.has_batchnorm else 1,
        )

    # --- generations

    def abort(self) -> None:
        """Free the training thread from a collective that will not end. Any thread."""
        group = self._group
        if group is not None:
            group.abort()

    def run(self) -> None:
        """Train until the run is over for this rank; returns when the supervisor says so."""
        failure: dict[str, Any] | None = None
        try:
            while True:
                generation = self._orders.next_generation(self.generation)
                self._take_wanted_snapshot()
                if generation <= self.generation:
                    continue
                self.generation, self.stage, self.digest = generation, "ready", None
                self._link.tell(
                    "ready", generation=generation, committed=self.committed, in_flight=self.in_flight,
                    failure=failure,
                )
                try:
                    order = self._orders.wait_go(generation)
                    failure = None
                    self._generation(order)
                except Superseded:
                    pass
                except Dropped:
                    raise
                except BaseException as error:  # user code may call sys.exit()
                    failure = self._explain(error, generation)
                    # The error holds frames that hold the old group; kept alive, it would leak sockets and threads.
                    traceback.clear_frames(error.__traceback__)
                    error.__traceback__ = None
                    del error
                    self.abort()  # so that the neighbours, too, notice at once
                    self._link.tell("step_failed", generation=generation, failure=failure)
                finally:
                    if self.stage != "finished":
                        self.stage = "waiting"
                    self._leave_group()
        except Dropped:
            pass
        finally:
            self._leave_group()
            self.source.close()

    def _generation(self, order: dict[str, Any]) -> None:
        group = Group(order["generation"], order["members"], self.rank, self._backend, self.job.device)
        self._group = group
        try:
            group.form(self._link, self._form_timeout_s)
        except RuntimeError:
            self._orders.check(group.generation)  # most likely a peer has died and a newer generation is wanted
            self._form_timeout_s = min(2 * self._form_timeout_s, MAX_FORM_TIMEOUT_S)
            raise
        self._form_timeout_s = FORM_TIMEOUT_S
        formed_at = time.time()
        first_step = order["first_step"]
        # Before anything is given away: who joins shall not get statistics of a step that is to be done again.
        if self.in_flight == first_step and self._snapshot.step == first_step and self.committed == first_step - 1:
            self._snapshot.restore()
        self._share_state(group, order)
        self.in_flight = None
        ddp = self._wrap(group)
        self.source.begin(first_step, group.torch_rank, group.world_size)
        self.stage = "training"
        self._link.tell("formed", generation=group.generation, formed_at=formed_at, restored_at=time.time())
        if order.get("evaluate") and group.torch_rank == 0:
            self._evaluate(order["evaluate"])
        for step in range(first_step, self.total_steps + 1):
            while (held_after := self._orders.enter_step(step, group.generation)) is not None:
                self._take_wanted_snapshot()
                self.stage = "held"
                self._link.tell("held", generation=group.generation, step=held_after)
                self._orders.wait_released(step, group.generation)
                self.stage = "training"
            self._take_wanted_snapshot()
            self._step(step, ddp, group)
        self._finish(group)

    def _wrap(self, group: Group) -> DistributedDataParallel:
        """DDP for this generation's group, built anew: all ranks then rebuild its buckets in the same step.

        All members hold equal weights already (checked, or copied just now), so nothing is synchronised.
        """
        model = self.job.model
        self._forget_gradients()
        if self._weight is not None:
            # The weight of this rank's loss rides along as the gradient of one more parameter: the sum of all
            # weights then needs no collective of its own. It is hidden from the model again at once.
            self._weight.grad = None
            model.register_parameter("_ftnb_weight", self._weight)
        try:
            ddp = DistributedDataParallel(
                model, device_ids=[self.job.device.index] if self.job.device.type == "cuda" else None,
                init_sync=False, forward_sync_buffers=False, gradient_as_bucket_view=True,
            )
            ddp.register_comm_hook(None, group.collectives.sum_gradients)
            if self.job.training_step:
                ddp.register_forward_pre_hook(self._note_forward)
            return ddp
        finally:
            if self._weight is not None:
                del model._parameters["_ftnb_weight"]

    def _note_forward(self, *_: Any) -> None:
        self._forward_called = True

    def _share_state(self, group: Group, order: dict[str, Any]) -> None:
        """Everybody who is up to date gives a part of the state to those that are behind, or have just joined."""
        if order["source"] is None:
            return
        roles = transfer.Roles(group.members, order["source"], order["behind"])
        transport = self.job.device if self._backend == "nccl" else torch.device("cpu")
        if self.rank not in roles.behind:
            transfer.give(self.job, group.collectives, roles, self.rank, transport)
            return
        transfer.take(self.job, group.collectives, roles, transport, self._invalidate)
        self.committed = order["first_step"] - 1

    def _invalidate(self) -> None:
        """From here until the new state is complete, this rank has none. Should that be broken off, it says so."""
        self.committed, self.in_flight = -1, None

    def _share_buffers(self, group: Group) -> None:
        """Everybody takes the buffers (BatchNorm statistics) of the first rank, as DDP does by default."""
        if self._has_buffers and group.world_size > 1:
            group.collectives.broadcast(list(self.job.model.buffers()), 0)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None

    # --- one step

    def _step(self, step: int, ddp: DistributedDataParallel, group: Group) -> None:
        started = time.time()
        job, options = self.job, self.options
        self.in_flight = step
        # A step that is tried again must draw the same numbers, so each has a random stream of its own.
        state.seed_everything(state.step_seed(options["seed"], self.rank, step))
        self._share_buffers(group)
        self._snapshot.take(step)
        share, indices, batch = self.source.next()
        loss, weight, scalars = self._forward(ddp, batch, share.real, len(indices))
        # Told before the all-reduce: should this rank die in it, its share is known all the same.
        self._link.report(
            [
                "fetched", group.generation, step, self.rank, share.real, sampler.digest(indices[: share.real]),
                float(loss.detach()), weight, scalars,
            ]
        )
        scaled = loss * (weight / share.global_samples)
        if self._weight is not None:
            scaled = scaled + self._weight * weight
        scaled.backward()
        group.collectives.wait_for_gradients()
        self._check_gradients()
        if share.real == 0:
            self._snapshot.restore()  # statistics of borrowed samples do not count
        norm = self._average_and_clip(group, share.global_samples)
        job.optimizer.step()
        self._forget_gradients()
        epoch_ends = step % self._steps_per_epoch == 0
        lr = job.optimizer.param_groups[0]["lr"]
        if job.scheduler is not None and (epoch_ends or options["scheduler_interval"] == "step"):
            job.scheduler.step()
        self.committed, self.in_flight = step, None
        now = time.time()
        self._link.report(
            ["committed", group.generation, step, self.rank, now, float(lr), norm, now - started]
        )
        if options["evaluate_every"] and step % options["evaluate_every"] == 0 and group.torch_rank == 0:
            self._evaluate(step)

    def _forward(
        self, ddp: DistributedDataParallel, batch: Any, real: int, fetched: int
    ) -> tuple[torch.Tensor, float, dict[str, float] | None]:
        """Loss (scalar tensor), its weight in the global mean, and further scalars of this rank's share."""
        step = self.in_flight
        assert step is not None
        job = self.job
        scalars: dict[str, float] | None = None
        weight = float(real)
        if job.loss_fn is not None:
            try:
                inputs, target = batch
            except (TypeError, ValueError):
                raise CheckError(
                    "`loss_fn` needs samples of the form (input, target); this dataset gives something else. Define "
                    "`training_step(model, batch)` instead."
                ) from None
            try:
                output = ddp(inputs)
            except Exception as error:
                shape = list(inputs.shape) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
                error.add_note(f"(raised by model(input); this rank's input: {shape})")
                raise
            loss = job.loss_fn(output, target)
        else:
            self._forward_called = False
            loss = job.training_step(ddp, batch)
            if not self._forward_called:
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
        for fault in self._orders.due_faults(step, "forward"):
            self._suffer(fault, step)
        return loss.reshape(()), weight, scalars

    def _forget_gradients(self) -> None:
        """Of all that DDP averages, also of parameters that the optimizer does not hold."""
        for parameter in self._trainable:
            parameter.grad = None

    def _check_gradients(self) -> None:
        if any(p.grad is None for p in self._trainable):
            trained = {id(p) for p in self._trainable}
            lacking = [(n, p) for n, p in self.job.model.named_parameters() if id(p) in trained and p.grad is None]
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

    def _average_and_clip(self, group: Group, samples: int) -> float | None:
        """Divide by the true sum of weights where that is not the number of samples; clip after averaging.

        Returns the norm of the averaged gradient before clipping, or None on ranks that need not know it.
        """
        gradients = [p.grad for p in self._trainable]
        if self._weight is not None:
            total = float(self._weight.grad)
            self._weight.grad = None
            if total <= 0:
                raise CheckError("The weights that `training_step` returned add up to 0 over the global batch.")
            if abs(total / samples - 1.0) > 1e-6:
                torch._foreach_mul_(gradients, samples / total)
        clip = self.options["clip_norm"]
        if clip is not None:
            return float(torch.nn.utils.clip_grad_norm_(self._trainable, clip))
        if group.torch_rank == 0:  # equal on all ranks, so one of them computes it
            return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        return None

    def _evaluate(self, step: int) -> None:
        """The user's `evaluate`, on one rank; the others wait in the next step."""
        model = self.job.model
        training = [m for m in model.modules() if m.training]
        model.eval()
        try:
            with torch.no_grad():
                result = self.job.evaluate(model)
            if not isinstance(result, dict):
                raise CheckError(f"`evaluate` returned a {type(result).__name__}; it must return a dict of numbers.")
            scalars = {str(k): cell.plain_number(v, str(k)) for k, v in result.items()}
        finally:
            for module in training:
                module.training = True
        self._link.report(["evaluated", self.rank, step, scalars])

    def _suffer(self, fault: Any, step: int) -> None:
        """An injected failure is due. It is recorded by the supervisor before it takes effect."""
        self._link.tell("fault_due", fault_id=fault.fault_id, step=step)
        if fault.allowed.wait(5):
            faults.strike(fault, self.rank, step)

    # --- the end, and looking in

    def _finish(self, group: Group) -> None:
        """Last step done: make the buffers equal (each rank has seen other samples), and tell the digest."""
        self._share_buffers(group)
        self.digest = state.weights_digest(self.job.model)
        self._link.tell("finished", generation=group.generation, digest=self.digest)
        self.stage = "finished"

    def _take_wanted_snapshot(self) -> None:
        if self._orders.take_snapshot_wish():
            self._link.tell("weights", **self.take_weights())

    def take_weights(self) -> dict[str, Any]:
        """Copy the model's state for the notebook, between two steps; returns the answer to the supervisor."""
        if self.committed < 0:
            return {"step": None}  # half a state; another rank is asked
        try:
            self.weights = [
                (name, str(t.dtype), list(t.shape), state.as_bytes(t).numpy().tobytes())
                for name, t in self.job.model.state_dict().items()
                if isinstance(t, torch.Tensor)  # a module's get_extra_state() may be anything
            ]
        except Exception as error:  # the user's own state_dict(), say; not a reason to end the training
            return {"step": self.committed, "problem": f"{type(error).__name__}: {cell.printable(error)}"}
        return {"step": self.committed}

    def _explain(self, error: BaseException, generation: int) -> dict[str, Any]:
        """Whose fault the exception is: the user's code, or a peer that did not answer."""
        text = cell.printable(error).lower()
        collective = aborted = False
        if isinstance(error, RuntimeError) and _talks_to_peers(error):
            collective = any(sign in text for sign in _COLLECTIVE_SIGNS)
            aborted = self._group is not None and self._group.aborted
        step = self.in_flight if self.in_flight is not None else max(self.committed, 0)
        details = cell.describe_error(error, step)
        if isinstance(error, CheckError):
            details["check"] = True
        return {
            "cause": "collective" if collective or aborted else "user",
            "step": step,
            "time": details["time"],
            "error": details,
        }


def _talks_to_peers(error: BaseException) -> bool:
    """Whether it was raised where collectives run: elsewhere it is the user's own error, whatever its words."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or trace.tb_frame.f_code.co_filename.startswith(_COLLECTIVE_FILES)
