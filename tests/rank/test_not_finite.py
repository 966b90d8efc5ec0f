"""Gradients that are not finite: found before the update, by all ranks; the one that brought them in is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peers
import pytest

MODEL = """
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
"""
ADAM = """
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
"""
# The same training without the update of one step.
LEFT_OUT = """
class WithoutOne(torch.optim.Adam):
    calls = 0
    def step(self, closure=None):
        self.calls += 1
        if self.calls != left_out:
            super().step(closure)
optimizer = WithoutOne(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
"""


def skipping(rank: int, directory: Path, code: str, fault_step: int | None, options: dict[str, Any]) -> Any:
    peer = peers.Peer(rank, directory, code, {"on_nan": "skip", **options})
    if rank == 1 and fault_step:
        peer.inject("nan", fault_step)
    thread = peer.start([0, 1, 2])
    digest = peer.link.wait_told("finished", 1)["digest"]
    peer.end(thread)
    found = [(step, who, where, source) for _, _, step, who, where, source in peer.link.reported("nan")]
    norms = {step: norm for _, _, step, _, _, _, norm, *_ in peer.link.reported("committed")}
    return digest, found, norms, peers.contents(peer.job)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("fault_step", [1, 4])
def test_a_step_that_is_skipped_leaves_no_trace(tmp_path, fault_step, clip_norm):
    """Weights, moments and schedule are bitwise those of a training in which only the update is missing."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    options = {"clip_norm": clip_norm}
    with_nan = peers.run_ranks(skipping, 3, tmp_path / "a", MODEL + ADAM, fault_step, options)
    reference = peers.run_ranks(
        skipping, 3, tmp_path / "b", f"left_out = {fault_step}\n" + MODEL + LEFT_OUT, None, options
    )
    assert len({result[0] for result in with_nan + reference}) == 1
    assert all(peers.same(a[3], b[3]) for a, b in zip(with_nan, reference))
    for rank, (_, found, norms, _) in enumerate(with_nan):
        where = "gradient of 0.weight" if rank == 1 else ""
        assert found == [(fault_step, rank, where, rank == 1)]
        assert [step for step, norm in norms.items() if norm is None] == [fault_step] and len(norms) == 8
    assert all(found == [] and None not in norms.values() for _, found, norms, _ in reference)
    assert all(a[2][step] == b[2][step] for a, b in zip(with_nan, reference) for step in range(1, fault_step))


OWN = """
import torch
dataset = [(torch.full((4,), float(i)), torch.tensor(i)) for i in range(16)]
model = torch.nn.Linear(4, 4)
model.extra = torch.nn.Linear(4, 1, bias=False)
tries, loss_fn = [], None

def training_step(model, batch):
    x, i = batch
    x += 1  # in place: what is computed again must not see it twice
    bad = 5 in i.tolist()
    tries.append((bad, x.tolist(), float(torch.rand(1))))
    extra = model.module.extra.weight
    loss = (model(x) ** 2).mean() + (extra ** 2).sum()
    if bad and kind == "loss":
        loss = loss * torch.tensor(float("nan"))
    elif bad:
        loss = loss + (extra * 0).sum().sqrt()  # nothing, with an infinite slope
    return {"loss": loss, "weight": len(x) * 1.5}

optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
"""


def own_nan(rank: int, directory: Path, kind: str) -> Any:
    peer = peers.Peer(rank, directory, f"kind = {kind!r}\n" + OWN, {"total_steps": 2, "on_nan": "skip"})
    thread = peer.start([0, 1])
    digest = peer.link.wait_told("finished", 1)["digest"]
    peer.end(thread)
    return digest, peer.link.reported("nan"), peer.namespace["tries"]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_the_rank_that_brought_it_in_is_named_and_where_it_came_up(tmp_path, kind):
    """One sample of 16 spoils it; losses are weighted."""
    results = peers.run_ranks(own_nan, 2, tmp_path, kind)
    assert len({digest for digest, _, _ in results}) == 1
    (source,) = [rank for rank, (_, _, tries) in enumerate(results) if any(bad for bad, _, _ in tries)]
    for rank, (_, found, tries) in enumerate(results):
        ((_, _, step, who, where, is_source),) = found
        expected = ("loss" if kind == "loss" else "gradient of extra.weight") if rank == source else ""
        assert (who, where, is_source) == (rank, expected, rank == source)
        # The step was computed again where that tells more, with the same samples and random numbers.
        if rank == source and kind == "loss":
            assert len(tries) == 2
        else:
            assert len(tries) == 3 and tries[step - 1] == tries[step]


def stopping(rank: int, directory: Path, on_nan: str) -> Any:
    """Held after step 3, so that it can be compared with what is there when step 4 has failed."""
    code = MODEL.replace("torch.nn.Tanh()", "torch.nn.BatchNorm1d(8)") + ADAM
    peer = peers.Peer(rank, directory, code, {"on_nan": on_nan})
    if rank == 2:
        peer.inject("nan", 4)
    thread = peer.start([0, 1, 2], hold_after=3)
    peer.link.wait_told("held", 1)
    before = peers.contents(peer.job)
    (directory / f"held-{rank}").touch()
    peers.wait_until(lambda: all((directory / f"held-{r}").exists() for r in range(3)), "all are held")
    peer.orders.release()
    failure = peer.link.wait_told("step_failed", 1)["failure"]
    peers.wait_until(lambda: peer.training.stage == "waiting", "the step is left")
    after = peers.contents(peer.job)
    answer = peer.regroup(2)
    peer.end(thread)
    assert failure.pop("time") > 0
    return before, after, failure, [answer[k] for k in ("committed", "in_flight", "failure", "anchor")]


@pytest.mark.parametrize("on_nan", ["stop", "rollback"])
def test_a_step_that_is_not_finite_is_left_with_the_state_before_it(tmp_path, on_nan):
    results = peers.run_ranks(stopping, 3, tmp_path, on_nan)
    buffers = results[0][0]["buffers"]  # those that all have taken when step 4 began
    for rank, (before, after, failure, answer) in enumerate(results):
        assert failure == {
            "cause": "nan", "step": 4,
            "error": {"source": rank == 2, "where": "gradient of 0.weight" if rank == 2 else ""},
        }  # fmt: skip
        assert answer[:2] == [3, 4] and answer[2]["cause"] == "nan"
        assert answer[3] == (0 if on_nan == "rollback" else None)
        assert all(peers.same(before[part], after[part]) for part in ("optimizer", "scheduler"))
        assert all(peers.same(before["model"][name], after["model"][name]) for name in before["model"] if name not in buffers)
        assert all(peers.same(buffers[name], after["buffers"][name]) for name in buffers)


LARGE = """
model = torch.nn.Linear(4, 4)
with torch.no_grad():
    model.weight.zero_()
loss_fn = None
def training_step(model, batch):
    model(batch[0])
    w = model.module.weight.sum()
    return w * size + w * size + 0 * model.module.bias.sum()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
"""


def large(rank: int, directory: Path, size: float, clip_norm: float | None) -> Any:
    options = {"total_steps": 2, "on_nan": "skip", "clip_norm": clip_norm}
    peer = peers.Peer(rank, directory, f"size = {size}\n" + LARGE, options)
    thread = peer.start([0, 1])
    peer.link.wait_told("finished", 1)
    peer.end(thread)
    return [r[-2:] for r in peer.link.reported("nan")], [r[6] for r in peer.link.reported("committed")]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_large_gradients_are_finite_until_their_sum_is_not(tmp_path, clip_norm):
    for name, size in (("a", 1e25), ("b", 3e38)):
        (tmp_path / name).mkdir()
        for found, norms in peers.run_ranks(large, 2, tmp_path / name, size, clip_norm):
            if size == 1e25:  # squares of it do not fit into a float32
                assert found == []
                assert all(math.isclose(norm, 4 * 2e25, rel_tol=1e-5) for norm in norms)
            else:
                assert found == [["the sum over all ranks", False]] * 2 and norms == [None, None]


def finite(rank: int, directory: Path, dtype: str, weighted: bool) -> Any:
    """The norm against torch's own, over buckets that are laid out anew after the first step."""
    code = MODEL + f"model.to(torch.{dtype})\n" + """
dataset = [(x.to(model[0].weight.dtype), y.to(model[0].weight.dtype)) for x, y in dataset]
class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        norms.append(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm().item())
        super().step(closure)
norms = []
optimizer = Optimizer(model.parameters(), lr=0.01)
"""
    if weighted:
        code += """
mse, loss_fn = loss_fn, None
def training_step(model, batch):
    return {"loss": mse(model(batch[0]), batch[1]), "weight": 3.0 + rank}
"""
    peer = peers.Peer(rank, directory, code)
    thread = peer.start([0, 1])
    peer.link.wait_told("finished", 1)
    peer.end(thread)
    return peer.namespace["norms"], [r[6] for r in peer.link.reported("committed")]


@pytest.mark.parametrize("dtype, weighted", [("float32", False), ("float32", True), ("float64", False), ("bfloat16", False)])
def test_the_norm_is_that_of_the_averaged_gradient(tmp_path, dtype, weighted):
    for expected, norms in peers.run_ranks(finite, 2, tmp_path, dtype, weighted):
        assert norms == pytest.approx(expected, rel=1e-5) and len(norms) == 8
