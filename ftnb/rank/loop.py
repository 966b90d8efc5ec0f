"""The training loop of one rank, over as many generations as it takes.

    wait for a generation → form its process group → copy state to whoever is behind → train step by step
          ▲                                                                                │
          └──── a collective failed, user code raised, or the supervisor wants a newer one ┘

Shapes: W = world size, G = global batch (samples per step over all ranks), n = this rank's share of it.
Each rank's loss is a mean over its n samples. It is scaled by n/G before backward, and the ranks' gradients are
added: the sum is the gradient of the mean over all G samples, whatever W is.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ftnb.core import sampler
from ftnb.errors import CheckError
from ftnb.rank import blame, cell, health, replicas, state, stepfaults, transfer
from ftnb.rank.anchor import Anchor
from ftnb.rank.data import BatchSource, Share
from ftnb.rank.forward import Forward
from ftnb.rank.gradients import Gradients
from ftnb.rank.group import FORM_TIMEOUT_S, MAX_FORM_TIMEOUT_S, Group
from ftnb.rank.link import WorkLink
from ftnb.rank.orders import Dropped, Orders, Superseded
from ftnb.rank.whereabouts import Whereabouts


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
        self.last_step_s = 0.0
        self.generation = 0
        self.weights: list[tuple[str, str, list[int], bytes]] | None = None
        self._backend, self._link, self._orders = backend, link, orders
        self._group: Group | None = None
        self._form_timeout_s = FORM_TIMEOUT_S
        self._where = Whereabouts()
        self._forward, self._gradients = Forward(job), Gradients(job, options["clip_norm"])
        self._faults = stepfaults.StepFaults(link, orders)
        self._has_buffers = next(job.model.buffers(), None) is not None
        self._snapshot = state.StepSnapshot(job.model if self._has_buffers else None)
        self._steps_per_epoch = sampler.steps_per_epoch(job.dataset_len, options["global_batch"])
        self._on_nan = options.get("on_nan") or "stop"
        self._check_every: int | None = options.get("check_replicas")
        self._checked = (0, 0)  # generation and step of the last check
        self._anchor: Anchor | None = None
        if options.get("recovery") == "restart" or self._on_nan == "rollback" or self._check_every:
            self._anchor = Anchor()
            self._anchor.take(job, 0)  # what the cell has made is the state after no step, also for who joins later
        self.source = BatchSource(
            job.dataset, job.collate_fn, global_batch=options["global_batch"], total_steps=self.total_steps,
            seed=options["seed"], workers=options["workers"], device=job.device,
            min_real=2 if job.has_batchnorm else 1,
        )

    @property
    def place(self) -> tuple[str, int | None, float]:
        """Where the training thread is: name, step, and time.monotonic() since when. From any thread."""
        return self._where.place

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
                if self.stage != "finished":
                    self._where.at("wait", self.in_flight)
                generation = self._orders.next_generation(self.generation)
                self._take_wanted_snapshot()
                if generation <= self.generation:
                    continue
                self.generation, self.stage, self.digest = generation, "ready", None
                self._where.at("wait", self.in_flight)
                self._link.tell(
                    "ready", generation=generation, committed=self.committed, in_flight=self.in_flight,
                    failure=failure, anchor=self._anchor.step if self._anchor is not None else None,
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
                    step = self.in_flight if self.in_flight is not None else max(self.committed, 0)
                    failure = blame.explain(error, step, self._group is not None and self._group.aborted)
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
        first_step = order["first_step"]
        self._where.at("form", first_step)
        group = Group(order["generation"], order["members"], self.rank, self._backend, self.job.device, self._where)
        self._group = group
        try:
            group.form(self._link, self._form_timeout_s)
        except RuntimeError:
            self._orders.check(group.generation)  # most likely a peer has died and a newer generation is wanted
            self._form_timeout_s = min(2 * self._form_timeout_s, MAX_FORM_TIMEOUT_S)
            raise
        self._form_timeout_s = FORM_TIMEOUT_S
        formed_at = time.time()
        self._where.at("share", first_step)
        # Before anything is given away: who joins shall not get statistics of a step that is to be done again.
        if self.in_flight == first_step and self._snapshot.step == first_step and self.committed == first_step - 1:
            self._snapshot.restore()
        if order.get("restore") is not None and self.rank not in order["behind"]:
            self._go_back(order["restore"])
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
                self._where.at("held", held_after)
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
        model, weight = self.job.model, self._gradients.weight
        self._gradients.forget()
        if weight is not None:  # hidden from the model again at once
            model.register_parameter("_ftnb_weight", weight)
        try:
            ddp = DistributedDataParallel(
                model, device_ids=[self.job.device.index] if self.job.device.type == "cuda" else None,
                init_sync=False, forward_sync_buffers=False, gradient_as_bucket_view=True,
            )
            ddp.register_comm_hook(None, group.collectives.sum_gradients)
            self._forward.watch(ddp)
            return ddp
        finally:
            if weight is not None:
                del model._parameters["_ftnb_weight"]

    def _go_back(self, step: int) -> None:
        """The state after `step`, of which every rank that is not behind has kept a copy."""
        if self._anchor is None or self._anchor.step != step:
            held = self._anchor and self._anchor.step
            raise RuntimeError(f"asked to go back to step {step}, but the copy that is kept here is of step {held}")
        self._invalidate()  # should it be broken off
        self._anchor.restore(self.job)
        self.committed = step
        self._snapshot.step = 0  # that was of a step which has not begun any more

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
        if self._anchor is not None and order.get("restore") is not None:
            self._anchor.take(self.job, order["restore"])

    def _invalidate(self) -> None:
        """From here until the new state is complete, this rank has none. Should that be broken off, it says so."""
        self.committed, self.in_flight = -1, None

    def _share_buffers(self, group: Group) -> None:
        """Everybody takes the buffers (BatchNorm statistics) of the first rank, as DDP does by default."""
        if self._has_buffers and group.world_size > 1:
            group.collectives.broadcast(list(self.job.model.buffers()), 0)

    def _leave_group(self) -> None:
        if self._group is not None:
            if self.stage != "finished":
                self._where.at("leave", self.in_flight)
            self._group.destroy()
            self._group = None

    # --- one step

    def _step(self, step: int, ddp: DistributedDataParallel, group: Group) -> None:
        started, waited_s = time.time(), self._where.waited_s
        job, where, gradients = self.job, self._where, self._gradients
        self.in_flight = step
        where.at("fetch", step)
        self._seed(step)
        self._share_buffers(group)
        self._snapshot.take(step)
        share, indices, batch = self.source.next()
        group.collectives.rebuild_buckets(ddp)
        where.at("forward", step)
        loss, weight, scalars = self._forward(ddp, batch, share.real, len(indices))
        self._faults.strike("forward", group, step)
        loss_value = float(loss.detach())
        # Told before the all-reduce: should this rank die in it, its share is known all the same.
        self._link.report(
            [
                "fetched", group.generation, step, self.rank, share.real, sampler.digest(indices[: share.real]),
                loss_value, weight, scalars,
            ]
        )
        struck = {fault.kind for fault in self._faults.strike("gradients", group, step)}
        if "deadlock" in struck:
            where.at("collective", step + 1)
            group.collectives.barrier()  # out of step with the others, where nobody else will come
        where.at("backward", step)
        self._backward(loss, weight, share, spoilt="nan" in struck)
        buckets = group.collectives.wait_for_gradients()
        where.at("update", step)
        gradients.check()
        if share.real == 0:
            self._snapshot.restore()  # statistics of borrowed samples do not count
        factor = gradients.average(share.global_samples)
        norm = gradients.norm(buckets)
        if norm is not None:
            gradients.clip()
            job.optimizer.step()
        else:
            group.collectives.rebuild_buckets(ddp)  # all ranks are here now; what follows needs none of them

            def once_more() -> torch.Tensor:
                return self._once_more(step, ddp, share, indices, batch, spoilt="nan" in struck)

            found = health.diagnose(loss_value, once_more, gradients, group.collectives, job.device, factor)
            self._leave_out(step, group, *found)
        gradients.forget()
        for fault in self._faults.strike("updated", group, step):
            stepfaults.flip_bit(job.model, fault.seed)
        lr = job.optimizer.param_groups[0]["lr"]
        self._step_scheduler(step, updated=norm is not None)
        self.committed, self.in_flight = step, None
        now = time.time()
        self.last_step_s = now - started
        own_s = now - started - (where.waited_s - waited_s)
        slept_s = self._faults.slow_down(own_s, group)
        self._link.report(
            [
                "committed", group.generation, step, self.rank, now, float(lr), norm, now - started + slept_s,
                own_s + slept_s,
            ]
        )
        if self._check_every and step % self._check_every == 0:
            self._check_replicas(step, group)
            self._anchor.take(job, step)
        every = self.options["evaluate_every"]
        if every and step % every == 0 and group.torch_rank == 0:
            self._evaluate(step)

    def _seed(self, step: int) -> None:
        """A step that is tried again must draw the same numbers, so each has a random stream of its own."""
        state.seed_everything(state.step_seed(self.options["seed"], self.rank, step))

    def _backward(self, loss: torch.Tensor, weight: float, share: Share, spoilt: bool) -> None:
        """This rank's part of the gradient. `spoilt`: as if it had come out as NaN."""
        scaled = loss * (weight / share.global_samples * (math.nan if spoilt else 1.0))
        if self._gradients.weight is not None:
            scaled = scaled + self._gradients.weight * weight
        scaled.backward()

    def _once_more(
        self, step: int, ddp: DistributedDataParallel, share: Share, indices: list[int], batch: Any, spoilt: bool
    ) -> torch.Tensor:
        """Forward and backward of the step in hand again, for this rank alone; returns its loss."""
        self._snapshot.restore()
        self._seed(step)
        batch = self.source.again(share.indices, batch)
        self._where.at("forward", step)
        with ddp.no_sync():
            loss, weight, _ = self._forward(ddp, batch, share.real, len(indices))
            self._where.at("backward", step)
            self._backward(loss, weight, share, spoilt)
        return loss

    def _leave_out(self, step: int, group: Group, source: bool, where: str) -> None:
        """The averaged gradient is not finite: raise, or go on without this update, as the run's options say.

        The buffers are those from before the step, in either case. A step that is left out is committed like any
        other, and its samples count as used.
        """
        self._where.at("update", step)
        self._snapshot.restore()
        if self._on_nan != "skip":
            raise health.NotFinite(step, source, where)
        self._link.report(["nan", group.generation, step, self.rank, where, source])

    def _step_scheduler(self, step: int, updated: bool) -> None:
        """Also after a step that was left out: a schedule is about steps and epochs, and shall end with the run."""
        scheduler = self.job.scheduler
        epoch_ends = step % self._steps_per_epoch == 0
        if scheduler is None or not (epoch_ends or self.options["scheduler_interval"] == "step"):
            return
        with contextlib.ExitStack() as stack:
            if not updated:  # torch would warn of a wrong order of calls when the first step is left out
                stack.enter_context(warnings.catch_warnings(action="ignore"))
            scheduler.step()

    def _check_replicas(self, step: int, group: Group) -> None:
        """Raise when some rank does not hold the same as the others after `step`."""
        digests = replicas.gather(self.job, group)
        if len(set(digests.values())) > 1:
            assert self._anchor is not None
            raise replicas.ReplicasDiffer(step, digests, self._anchor.step)
        self._checked = (group.generation, step)

    def _evaluate(self, step: int) -> None:
        """The user's `evaluate`, on one rank; the others wait in the next step."""
        self._where.at("evaluate", step)
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

    # --- the end, and looking in

    def _finish(self, group: Group) -> None:
        """Last step done: make the buffers equal (each rank has seen other samples), and tell the digest."""
        self._where.at("finish", self.total_steps)
        if self._check_every and self._checked != (group.generation, self.total_steps):
            # What has come in since the last check: once the run is over, nothing can be put right any more.
            self._check_replicas(self.total_steps, group)
        self._share_buffers(group)
        self.digest = state.weights_digest(self.job.model)
        self._link.tell("finished", generation=group.generation, digest=self.digest)
        self.stage = "finished"
        self._where.at("finished", self.total_steps)

    def _take_wanted_snapshot(self) -> None:
        if self._orders.take_snapshot_wish():
            name, step, _ = self._where.place
            self._where.at("save", step)
            self._link.tell("weights", **self.take_weights())
            self._where.at(name, step)

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
