"""Where the training thread says it is, how long it has worked itself, and ranks that are out of step or slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import peers
import pytest
import torch

from ftnb.core import watch
from ftnb.rank import group as group_module

SPIED = """
import torch
def spy(what):
    pass  # the test puts its own in this place

class Data:
    def __len__(self):
        return 16
    def __getitem__(self, i):
        spy("fetch")
        return torch.full((4,), float(i)), torch.zeros(4)

dataset = Data()
model = torch.nn.Linear(4, 4)
model.register_state_dict_pre_hook(lambda *_: spy("share"))

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        spy("update")
        super().step(closure)

optimizer = Optimizer(model.parameters(), lr=0.001)

def loss_fn(output, target):
    spy("forward")
    output.register_hook(lambda _: spy("backward"))
    return torch.nn.functional.mse_loss(output, target)

def evaluate(model):
    spy("evaluate")
    return {}
"""


def all_places(rank: int, directory: Path) -> Any:
    peer = peers.Peer(rank, directory, SPIED, {"total_steps": 3, "evaluate_every": 2})
    training, seen = peer.training, []
    peer.namespace["spy"] = lambda what: seen.append((what, *training.place[:2]))
    ask = peer.link.ask_store

    def ask_store(*args: Any, **fields: Any) -> Any:
        seen.append(("form", *training.place[:2]))
        return ask(*args, **fields)

    peer.link.ask_store = ask_store
    training.committed = 0 if rank == 0 else -1
    assert training.place[:2] == ("wait", None)
    thread = peer.start([0, 1], source=0, behind=[1], hold_after=2)
    peer.link.wait_told("held", 1)
    held = training.place[:2]
    peer.orders.release()
    peer.link.wait_told("finished", 1)
    finished = peers.wait_until(lambda: training.place[0] == "finished" and training.place[:2], "it has finished")
    peer.end(thread)
    return set(seen), held, finished, training.place[0]


def test_every_place_of_a_training_has_its_name(tmp_path):
    for rank, (seen, held, finished, at_last) in enumerate(peers.run_ranks(all_places, 2, tmp_path)):
        steps = {
            (name, name, step) for name in ("fetch", "forward", "backward", "update") for step in (1, 2, 3)
        }  # fmt: skip
        expected = steps | {("form", "form", 1), ("share", "share", 1)}
        assert seen == expected | ({("evaluate", "evaluate", 2)} if rank == 0 else set())
        assert (held, finished, at_last) == (("held", 2), ("finished", 3), "finished")


GATED = """
import threading
gate = threading.Event()
closed = None
counts = {"fetch": 0, "forward": 0}

def pass_by(place):
    counts[place] += 1
    if (place, counts[place]) == closed:
        gate.wait()

def collate_fn(samples):
    pass_by("fetch")
    return torch.utils.data.default_collate(samples)

def loss_fn(output, target):
    pass_by("forward")
    return torch.nn.functional.mse_loss(output, target)

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
"""


def one_is_late(rank: int, directory: Path, name: str, step: int) -> None:
    """Rank 0 stays in one place until rank 1 has been seen waiting for it."""
    peer = peers.Peer(rank, directory, GATED, {"total_steps": 4})
    if rank == 0:
        peer.namespace["closed"] = (name, step)
    thread = peer.start([0, 1])
    place = (name if rank == 0 else "collective", step)
    if rank == 1:  # which is in a collective for a moment in any case
        peers.wait_until((directory / "seen-0").exists, "rank 0 stays where it is")

    def stays() -> bool:
        return peer.training.place[:2] == place and time.monotonic() - peer.training.place[2] > 0.3

    peers.wait_until(stays, f"rank {rank} stays at {place}")
    (directory / f"seen-{rank}").touch()
    peers.wait_until((directory / "seen-1").exists, "rank 1 is seen to wait")
    peer.namespace["gate"].set()
    peer.link.wait_told("finished", 1)
    peer.end(thread)


# In step 2 DDP lays its buckets out anew before its forward pass, which all ranks do together.
@pytest.mark.parametrize("name, step", [("forward", 1), ("fetch", 2), ("forward", 3)])
def test_who_waits_is_told_from_who_is_waited_for(tmp_path, name, step):
    peers.run_ranks(one_is_late, 2, tmp_path, name, step)


SLEEPY = """
import time
naps = 0.0
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

def loss_fn(output, target):
    time.sleep(naps)
    return torch.nn.functional.mse_loss(output, target)
"""


def one_is_slow(rank: int, directory: Path) -> Any:
    peer = peers.Peer(rank, directory, SLEEPY, {"total_steps": 6})
    peer.namespace["naps"] = 0.15 if rank == 0 else 0.0
    thread = peer.start([0, 1])
    peer.link.wait_told("finished", 1)
    peer.end(thread)
    return [record[-2:] for record in peer.link.reported("committed")]


def test_the_own_time_of_a_step_leaves_out_what_was_waited_for_others(tmp_path):
    slow, quick = peers.run_ranks(one_is_slow, 2, tmp_path)
    assert len(slow) == len(quick) == 6
    assert all(0.15 <= own_s <= step_s for step_s, own_s in slow)
    assert all(0 < own_s <= step_s for step_s, own_s in quick)
    waited_s = sum(step_s - own_s for step_s, own_s in quick)
    assert waited_s > sum(step_s - own_s for step_s, own_s in slow) and waited_s > 6 * 0.15 / 2


def slowed_down(rank: int, directory: Path, duration_s: float | None) -> Any:
    peer = peers.Peer(rank, directory, SLEEPY, {"total_steps": 5})
    peer.namespace["naps"] = 0.02
    if rank == 1:
        peer.inject("slow", 3, factor=6.0, duration_s=duration_s)
    thread = peer.start([0, 1])
    out_of_step = []
    while not any(message["op"] == "finished" for message in peer.link.told) and thread.is_alive():
        committed, (name, step, _) = peer.training.committed, peer.training.place
        if name in watch.BEFORE_SUM and step is not None and step <= committed:
            out_of_step.append((committed, name, step))
        time.sleep(0.005)
    peer.link.wait_told("finished", 1)
    peer.end(thread)
    assert out_of_step == [], "the others stand in the next step meanwhile: they, or it, would be blamed"
    assert [m["step"] for m in peer.link.told if m["op"] == "fault_due"] == [3] * rank
    return [record[-2:] for record in peer.link.reported("committed")]


def test_a_rank_that_is_slowed_down_takes_so_many_times_as_long(tmp_path):
    other, slow = ([own_s for _, own_s in steps] for steps in peers.run_ranks(slowed_down, 2, tmp_path, None))
    assert min(slow[2:]) >= 6 * 0.02  # from step 3 on
    assert sorted(other)[2] < 6 * 0.02 and min(slow[:2]) < 6 * 0.02


def test_a_rank_is_slowed_down_for_so_long(tmp_path):
    _, slow = peers.run_ranks(slowed_down, 2, tmp_path, 0.03)
    assert slow[2][0] >= 0.049  # 20 ms of its own come before it, and 30 are what it lasts
    assert min(own_s for _, own_s in slow[3:]) < 6 * 0.02


LINEAR = """
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
"""


def out_of_step(rank: int, directory: Path) -> Any:
    peer = peers.Peer(rank, directory, LINEAR)
    if rank == 1:
        peer.inject("deadlock", 3)
    thread = peer.start([0, 1, 2])
    stuck = ("collective", 4 if rank == 1 else 3)
    peers.wait_until(lambda: peer.training.place[:2] == stuck, f"rank {rank} is at {stuck}")
    (directory / f"stuck-{rank}").touch()
    peers.wait_until(lambda: all((directory / f"stuck-{r}").exists() for r in range(3)), "all are stuck")
    since = time.monotonic()
    while time.monotonic() - since < 0.5:  # and stay so
        assert peer.training.place[:2] == stuck
        time.sleep(0.01)
    (directory / f"looked-{rank}").touch()
    peers.wait_until(lambda: all((directory / f"looked-{r}").exists() for r in range(3)), "all have looked")
    began = time.monotonic()
    answer = peer.regroup(2)
    freed_s = time.monotonic() - began
    peer.go(2, [0, 1, 2], None, [], 3)
    digest = peer.link.wait_told("finished", 2)["digest"]
    peer.end(thread)
    return answer["committed"], answer["in_flight"], digest, freed_s


def test_a_skipped_collective_blocks_all_and_all_come_out_of_it(tmp_path):
    results = peers.run_ranks(out_of_step, 3, tmp_path)
    assert [result[:2] for result in results] == [(2, 3)] * 3  # rank 1 has not updated anything
    assert len({digest for _, _, digest, _ in results}) == 1
    assert max(freed_s for *_, freed_s in results) < 5


def alone(rank: int, directory: Path) -> Any:
    peer = peers.Peer(rank, directory, LINEAR)
    peer.inject("deadlock", 3)
    thread = peer.start([0])
    peer.link.wait_told("finished", 1)
    peer.end(thread)
    return [m for m in peer.link.told if m["op"] == "fault_due"]


def test_one_rank_alone_cannot_be_out_of_step(tmp_path):
    assert peers.run_ranks(alone, 1, tmp_path) == [[]]


def leave_with_a_sum_in_hand(rank: int, directory: Path) -> Any:
    """Rank 0 leaves its group while a sum is in hand whose connections are not closed; rank 1 never joins in."""
    peer = peers.Peer(rank, directory, "model = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n")
    group = peer.form([0, 1])
    if rank == 0:
        group_module.CLOSE_TIMEOUT_S = 10 * peers.DEADLINE_S
        work = torch.distributed.all_reduce(torch.ones(4), async_op=True)
        group.collectives._in_hand.append(work)
        group.collectives.break_off()
        peer.training._leave_group()  # blocked here once
        left = peer.training.place[0], work.is_completed()
        peer.link.store.add("left", 1)
        return left
    peers.wait_until(lambda: peer.link.store.add("left", 0), "the other one has left")
    return None


def test_a_sum_that_never_ends_holds_nobody_up(tmp_path):
    """Gloo does not always close its connections. What is still read from them goes into gradients that nobody uses."""
    left, _ = peers.run_ranks(leave_with_a_sum_in_hand, 2, tmp_path)
    assert left == ("leave", False)
