"""Copies of the whole state that a rank goes back to; digests that tell whether all ranks hold the same."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from test_transfer import ADAMW, BATCHNORM, CASES, ODD, SCHEDULER

from ftnb.errors import CheckError
from ftnb.rank import cell, replicas, state, stepfaults
from ftnb.rank.anchor import Anchor
from ftnb.rank.collectives import Collectives

STATISTICS = """
for b in model.buffers():
    b.copy_(torch.full(b.shape, value))
if hasattr(model, "history"):
    model.history.append(value)
"""


def change(peer: peers.Peer, value: int) -> None:
    """What a step changes: weights, moments, schedule, statistics, extra state."""
    peer.learn(2)
    exec(STATISTICS, peer.namespace, {"value": value})


def back_and_forth(rank: int, directory: Path, code: str) -> None:
    peer = peers.Peer(rank, directory, code)
    addresses = {name: p.data_ptr() for name, p in peer.job.model.named_parameters()}
    anchor = Anchor()
    contents: list[Any] = []

    def moments() -> list[int]:
        return [t.data_ptr() for t in state.take_apart(peer.job.optimizer.state_dict())[1]]

    for value in (1, 2, 3):  # the second time into the memory of the first
        step = 2 * value - 2
        anchor.take(peer.job, step)
        assert anchor.step == step
        before = peers.contents(peer.job)
        for forgotten in (False, True, False):  # it can be put back more than once, and is no part of what goes on
            change(peer, value)
            assert not peers.same(before, peers.contents(peer.job))
            if forgotten:
                peer.job.optimizer.state.clear()
            held_at = moments()
            anchor.restore(peer.job)
            assert peers.same(before, peers.contents(peer.job))
            assert forgotten or value == 1 or moments() == held_at  # nothing is allocated anew
        assert {name: p.data_ptr() for name, p in peer.job.model.named_parameters()} == addresses
        held = {id(p) for g in peer.job.optimizer.param_groups for p in g["params"]}
        assert held == {id(p) for p in peer.job.model.parameters()}
        change(peer, value)
        contents.append(peers.contents(peer.job))
    # And the training goes on as if it had never been anywhere else.
    other = peers.Peer(rank, directory, code)
    for value in (1, 2, 3):
        change(other, value)
        assert peers.same(contents[value - 1], peers.contents(other.job))


@pytest.mark.parametrize("case", list(CASES))
def test_a_state_is_put_back_bit_by_bit(tmp_path, case):
    peers.run_ranks(back_and_forth, 1, tmp_path, CASES[case])


def refused(rank: int, directory: Path) -> str:
    peer = peers.Peer(rank, directory, BATCHNORM + ADAMW)
    peer.learn(1)
    anchor = Anchor()
    with pytest.raises(RuntimeError, match="holds no copy"):
        anchor.restore(peer.job)
    anchor.take(peer.job, 1)
    peer.job.optimizer.state[peer.job.model[0].weight]["odd"] = object()
    with pytest.raises(CheckError) as caught:
        anchor.take(peer.job, 2)
    assert anchor.step is None  # half a copy is none
    return str(caught.value)


def test_a_state_that_cannot_be_kept_is_refused(tmp_path):
    (text,) = peers.run_ranks(refused, 1, tmp_path)
    assert "after step 2" in text and "--check-replicas" in text and "object" in text


# --- digests


def job_of(code: str) -> cell.Job:
    namespace: dict[str, Any] = {}
    cell.run_cell(peers.DATA + code, namespace, {}, seed=0)
    return cell.check(namespace, peers.OPTIONS, peers.CPU, world_size=1)


def trained(code: str) -> cell.Job:
    job = job_of(code)
    for parameter in job.model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return job


def tensors_of(job: cell.Job) -> list[torch.Tensor]:
    found = [p.detach() for p in job.model.parameters()] + state.take_apart(job.optimizer.state_dict())[1]
    return [t for t in found if t.numel()]


def flip(tensor: torch.Tensor, position: int, bit: int) -> None:
    raw = stepfaults._element(tensor, position).view(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


SHORTER = ODD.replace("300, 3)", "30, 3)").replace("400, 400", "70, 71").replace("500, 300", "50, 31")


@pytest.mark.parametrize("code", [SHORTER + ADAMW, BATCHNORM + CASES["momentum"][len(BATCHNORM) :]], ids=["odd", "momentum"])
def test_any_flipped_bit_changes_the_digest(code):
    job, dice = trained(code), random.Random(0)
    clean = replicas.digest(job)
    tensors = tensors_of(job)
    for number in range(400):
        tensor = tensors[number % len(tensors)]
        where = dice.randrange(tensor.numel()), dice.randrange(8 * tensor.element_size())
        flip(tensor, *where)
        assert replicas.digest(job) != clean, (tensor.dtype, tensor.shape, where)
        flip(tensor, *where)
    for tensor in tensors:  # the last elements, which are no whole row
        for position in range(max(0, tensor.numel() - 5), tensor.numel()):
            flip(tensor, position, 0)
            assert replicas.digest(job) != clean, (tensor.dtype, tensor.shape, position)
            flip(tensor, position, 0)
    assert replicas.digest(job) == clean


def test_values_that_have_changed_places_change_the_digest():
    """Also such as differ in one bit only, in the same row or the same column of what is summed."""
    job, dice = trained(BATCHNORM + ADAMW), random.Random(0)
    clean = replicas.digest(job)
    flat = job.model[2].weight.detach().view(-1)  # 180,000 numbers, read as 300 rows of 300 pairs
    for number in range(120):
        i = dice.randrange(flat.numel())
        j = (i + dice.choice([1, 2, 600, 1200, dice.randrange(1, flat.numel())])) % flat.numel()
        kept = flat[i].clone(), flat[j].clone()
        flat[i], flat[j] = (-kept[1], kept[1]) if number % 2 else kept
        before = replicas.digest(job)
        flat[i], flat[j] = flat[j].clone(), flat[i].clone()
        assert replicas.digest(job) != before or kept[0] == kept[1]
        flat[i], flat[j] = kept
    assert replicas.digest(job) == clean


def test_what_is_no_tensor_is_in_the_digest_as_well():
    job = trained(BATCHNORM + ADAMW)
    digests = {replicas.digest(job)}
    job.optimizer.param_groups[0]["lr"] *= 1 + 2**-50
    digests.add(replicas.digest(job))
    job.optimizer.state[job.model[0].weight]["note"] = 1
    digests.add(replicas.digest(job))
    assert len(digests) == 3


def test_layout_and_buffers_are_not_in_the_digest():
    job = trained(SHORTER + ADAMW)
    clean = replicas.digest(job)
    for buffer in job.model.buffers():
        buffer.copy_(torch.ones(buffer.shape))
    weight = job.model.wide.weight
    assert not weight.is_contiguous()
    weight.data = weight.data.contiguous()
    assert replicas.digest(job) == clean


def received(rank: int, directory: Path, code: str) -> list[str]:
    peer = peers.Peer(rank, directory, code)
    if rank:
        peer.learn(3)
    group = peer.form([0, 1, 2])
    before = replicas.gather(peer.job, group)
    peer.share(group, 1, [0], first_step=4)
    after = replicas.gather(peer.job, group)
    group.destroy()
    assert before[1] == before[2] != before[0]
    return list(after.values())


@pytest.mark.parametrize("case", list(CASES))
def test_a_state_that_was_received_has_the_digest_of_its_givers(tmp_path, case):
    digests = peers.run_ranks(received, 3, tmp_path, CASES[case])
    assert len({text for of_rank in digests for text in of_rank}) == 1


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_bit_is_flipped_that_matters_and_no_other(dtype):
    places = set()
    for seed in range(100):
        model = torch.nn.Linear(30, 7).to(dtype)
        before = [p.detach().clone() for p in model.parameters()]
        stepfaults.flip_bit(model, seed)
        again = torch.nn.Linear(30, 7).to(dtype)
        again.load_state_dict(dict(zip(("weight", "bias"), before)))
        stepfaults.flip_bit(again, seed)
        changed = []
        for old, new, other in zip(before, model.parameters(), again.parameters()):
            assert peers.same(new.detach(), other.detach())  # the seed alone decides
            bits = state.as_bytes(old) ^ state.as_bytes(new)
            changed += [(i, int(b)) for i, b in enumerate(bits.tolist()) if b]
            assert torch.isfinite(torch.view_as_real(new) if new.is_complex() else new).all()
            assert not torch.equal(old, new) or not bits.any()
        ((place, byte),) = changed
        assert byte.bit_count() == 1
        places.add((place, byte))
    assert len(places) > 80


# --- in a training


def corrupted(rank: int, directory: Path, fault_step: int | None, options: dict[str, Any], members: list[int]) -> Any:
    """A bit is flipped on rank 1; all go back to where they agreed, and go on from there."""
    peer = peers.Peer(rank, directory, BATCHNORM + ADAMW + SCHEDULER, options)
    training = peer.training
    assert training._anchor.step == 0
    if rank == 1 and fault_step:
        peer.inject("bitflip", fault_step, seed=3)
    thread = peer.start(members)
    if fault_step is None:
        digest = peer.link.wait_told("finished", 1)["digest"]
        peer.end(thread)
        return digest
    failure = peer.link.wait_told("step_failed", 1)["failure"]  # all find it out together: nobody has to be told
    answer = peer.regroup(2)
    anchor = answer["anchor"]
    peer.go(2, members, None, [], anchor + 1, restore=anchor)
    digest = peer.link.wait_told("finished", 2)["digest"]
    peer.end(thread)
    return failure, answer, digest, training._anchor.step


@pytest.mark.parametrize("fault_step, found_at, anchor", [(2, 3, 0), (4, 6, 3), (6, 6, 3), (7, 8, 6), (8, 8, 6)])
def test_a_flipped_bit_is_found_at_the_next_check_and_undone(tmp_path, fault_step, found_at, anchor):
    """Steps 1 to 8, checked every 3 and at the end; two ranks, so that the sums do not depend on DDP's buckets."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    options = {"check_replicas": 3}
    clean = peers.run_ranks(corrupted, 2, tmp_path / "a", None, options, [0, 1])
    results = peers.run_ranks(corrupted, 2, tmp_path / "b", fault_step, options, [0, 1])
    for failure, answer, digest, last in results:
        assert (failure["cause"], failure["step"]) == ("divergence", found_at)
        digests = failure["error"]["digests"]
        assert set(digests) == {"0", "1"} and len(set(digests.values())) == 2
        assert failure["error"]["anchor"] == answer["anchor"] == anchor
        assert (answer["committed"], answer["in_flight"]) == (found_at, None)
        assert digest == clean[0] and last == 6
    assert results[0][0]["error"] == results[1][0]["error"]


def test_the_odd_one_of_three_can_be_told(tmp_path):
    results = peers.run_ranks(corrupted, 3, tmp_path, 4, {"check_replicas": 3}, [0, 1, 2])
    for failure, *_ in results:
        digests = failure["error"]["digests"]
        assert digests["0"] == digests["2"] != digests["1"]
    assert len({digest for _, _, digest, _ in results}) == 1


def one_without(rank: int, directory: Path) -> Any:
    """Ranks 0 and 1 have anchor 4, rank 2 has an older one, and is behind; rank 0 gives its state."""
    peer = peers.Peer(rank, directory, BATCHNORM + ADAMW + SCHEDULER, {"check_replicas": 2, "total_steps": 9})
    # Not both in generation 1: the members of a generation find each other by it.
    first, members, last = (1, [0, 1], 5) if rank < 2 else (2, [2], 2)
    thread = peer.start(members, generation=first, hold_after=last)
    peer.link.wait_told("held", first)
    assert peer.training._anchor.step == (4 if rank < 2 else 2)
    (directory / f"held-{rank}").touch()
    peers.wait_until(lambda: all((directory / f"held-{r}").exists() for r in range(3)), "all are held")
    answer = peer.regroup(3)
    peer.go(3, [0, 1, 2], 0, [2], 5, restore=4, hold_after=4)
    peer.link.wait_told("held", 3)
    kept, anchor = peers.contents(peer.job), peer.training._anchor.step
    peer.orders.release()
    digest = peer.link.wait_told("finished", 3)["digest"]
    peer.end(thread)
    return answer["committed"], kept, anchor, digest


def test_who_lacks_the_copy_gets_it_from_the_others(tmp_path):
    results = peers.run_ranks(one_without, 3, tmp_path)
    assert [result[0] for result in results] == [5, 5, 2]
    assert [result[2] for result in results] == [4, 4, 4]
    assert peers.same(results[0][1], results[2][1])
    assert len({result[3] for result in results}) == 1


def went_back(rank: int, directory: Path) -> None:
    training = peers.Peer(rank, directory, BATCHNORM + ADAMW, {"recovery": "restart"}).training
    training._snapshot.take(1)
    training.in_flight = 1
    training._go_back(0)
    assert (training.committed, training.in_flight) == (0, None)
    # Should the next step 1 be broken off before it has taken its own, this one must not be put back.
    assert training._snapshot.step != 1
    with pytest.raises(RuntimeError, match=r"back to step 7, .* of step 0"):
        training._go_back(7)


def test_the_statistics_of_the_step_in_flight_do_not_outlive_it(tmp_path):
    peers.run_ranks(went_back, 1, tmp_path)


def needs_restart(rank: int, directory: Path) -> Any:
    kept = {}
    for options in ({}, {"recovery": "restart"}, {"on_nan": "rollback"}, {"check_replicas": 5}, {"on_nan": "skip"}):
        peer = peers.Peer(rank, directory, BATCHNORM + ADAMW, options)
        kept[str(options)] = peer.training._anchor and peer.training._anchor.step
    return list(kept.values())


def test_a_copy_is_kept_only_where_it_may_be_needed(tmp_path):
    assert peers.run_ranks(needs_restart, 1, tmp_path) == [[None, 0, 0, 0, None]]


def restarted(rank: int, directory: Path) -> Any:
    """Back to the beginning in the middle of a step, which leaves nothing of it behind, statistics included."""
    peer = peers.Peer(rank, directory, BATCHNORM + ADAMW + SCHEDULER, {"recovery": "restart"})
    if rank == 0:
        peer.inject("deadlock", 5)
    thread = peer.start([0, 1])
    place = ("collective", 6 - rank)

    def stuck() -> bool:
        name, step, since = peer.training.place
        return (name, step) == place and time.monotonic() - since > 0.3

    peers.wait_until(stuck, "it is stuck")
    (directory / f"stuck-{rank}").touch()
    peers.wait_until((directory / f"stuck-{1 - rank}").exists, "the other one is, too")
    answer = peer.regroup(2)
    peer.go(2, [0, 1], None, [], 1, restore=0)
    restarted = peer.link.wait_told("finished", 2)["digest"]
    peer.end(thread)
    return answer["committed"], answer["anchor"], restarted


def test_a_restart_gives_what_the_first_try_would_have_given(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    clean = peers.run_ranks(corrupted, 2, tmp_path / "a", None, {"recovery": "restart"}, [0, 1])
    assert peers.run_ranks(restarted, 2, tmp_path / "b") == [(4, 0, clean[0])] * 2


def broken_off(rank: int, directory: Path) -> str:
    """The others have called, one does not come."""
    peer = peers.Peer(rank, directory, BATCHNORM + ADAMW)
    group = peer.form([0, 1])
    if rank == 0:
        peers.wait_until((directory / "done").exists, "the other is out")
        group.destroy()
        return "BrokenOff"
    peers.threading.Timer(0.2, group.abort).start()
    try:
        group.collectives.gather(torch.zeros(16, dtype=torch.uint8))
    except RuntimeError as error:
        (directory / "done").touch()
        group.destroy()
        return type(error).__name__
    raise AssertionError("it came back without the other rank")


def test_a_gathering_can_be_broken_off(tmp_path):
    assert Collectives().settled(0)
    assert set(peers.run_ranks(broken_off, 2, tmp_path)) <= {"BrokenOff", "RuntimeError"}
