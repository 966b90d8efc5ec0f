"""What a rank does by itself: its state taken apart and put together, its share of the data."""

from __future__ import annotations

import pytest
import torch

from ftnb.core import sampler
from ftnb.errors import CheckError
from ftnb.rank import cell, state
from ftnb.rank.data import BatchSource

CPU = torch.device("cpu")


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


def test_the_state_of_a_training_survives_being_taken_apart():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(4, 1).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    full = {"m": dict(model.state_dict()), "o": optimizer.state_dict(), "s": cell.scheduler_state(scheduler),
            "x": (1, 0.1, None, "t", True, [torch.zeros(0), torch.tensor(3)])}  # fmt: skip
    description, tensors = state.take_apart(full)
    assert same(state.put_together(description, tensors), full)


def test_a_state_that_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match="object"):
        state.take_apart({"a": object()})


def test_the_digest_sees_every_parameter_and_buffer():
    model = torch.nn.BatchNorm1d(3)
    before = state.weights_digest(model)
    assert state.weights_digest(model) == before
    model.running_mean[1] += 1e-6
    assert state.weights_digest(model) != before


def test_random_streams_differ_by_rank_and_step_and_repeat():
    def draw(rank, step):
        state.seed_everything(state.step_seed(0, rank, step))
        return torch.rand(3).tolist()

    streams = [tuple(draw(r, s)) for r in range(4) for s in range(1, 20)]
    assert len(set(streams)) == len(streams)
    assert tuple(draw(2, 7)) == streams[2 * 19 + 6]


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_sample_of_an_epoch_is_fetched_once_over_all_ranks(workers, world_size):
    """10 samples in batches of 4: the last batch has 2, so with 3 or 4 ranks some have nothing of their own."""
    seen = []
    for rank in range(world_size):
        source = BatchSource(
            Samples(), None, global_batch=4, total_steps=6, seed=1, workers=workers, device=CPU, min_real=1
        )
        source.begin(1, rank, world_size)
        for step in range(1, 7):
            share, indices, (inputs, target) = source.next()
            assert share.step == step and len(indices) == len(inputs) >= 1
            assert inputs[:, 0].tolist() == [float(i) for i in indices] == target.tolist()
            seen += [(sampler.batch_at(step, 10, 4).epoch, i) for i in indices[: share.real]]
        source.close()
    assert sorted(seen) == [(epoch, i) for epoch in (1, 2) for i in range(10)]


def test_after_a_regroup_workers_go_on_with_the_new_shares():
    source = BatchSource(Samples(), None, global_batch=4, total_steps=6, seed=1, workers=2, device=CPU, min_real=1)
    source.begin(1, 0, 2)
    source.next()
    source.begin(2, 1, 3)  # what was prefetched for the old share is dropped
    share, indices, _ = source.next()
    batch = sampler.batch_at(2, 10, 4)
    start, stop = sampler.split(batch.start, batch.stop, 3)[1]
    assert share.step == 2 and indices == list(sampler.permutation(10, 1, 1)[start:stop])
    source.close()


def test_batchnorm_never_sees_a_single_sample():
    source = BatchSource(Samples(), None, global_batch=4, total_steps=3, seed=1, workers=0, device=CPU, min_real=2)
    source.begin(3, 0, 2)  # the last batch of the epoch: 2 samples for 2 ranks
    share, indices, _ = source.next()
    assert share.real == 1 and len(indices) == 2 and indices[0] == indices[1]
    source.close()


GOOD = {"model": torch.nn.Linear(1, 1), "dataset": Samples(), "loss_fn": torch.nn.functional.mse_loss}
OPTIONS = {"global_batch": 4, "evaluate_every": None}


def check(**changes):
    names = {**GOOD, "optimizer": torch.optim.SGD(GOOD["model"].parameters(), lr=0.1), **changes}
    return cell.check({k: v for k, v in names.items() if v is not None}, OPTIONS, CPU, world_size=2)


def test_a_sound_cell_passes():
    assert check().dataset_len == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "does not define `model`"),
        ({"dataset": None, "optimizer": None}, "`optimizer` and `dataset`"),
        ({"loss_fn": None}, "neither `loss_fn"),
        ({"training_step": len}, "both"),
        ({"model": 3}, "not a torch.nn.Module"),
        ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(5))], lr=1.0)}, "does not have"),
        ({"optimizer": torch.optim.LBFGS(GOOD["model"].parameters())}, "closure"),
        ({"dataset": torch.utils.data.DataLoader(Samples())}, "DataLoader"),
        ({"dataset": type("I", (torch.utils.data.IterableDataset,), {"__iter__": iter})()}, "IterableDataset"),
        ({"dataset": []}, "empty"),
        ({"dataset": [1, 2, 3]}, "larger than the dataset"),
        ({"loss_fn": 5}, "not a function"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_words(changes, message):
    with pytest.raises(CheckError, match=message):
        check(**changes)


def test_a_cell_that_forgets_its_model_does_not_get_the_last_one():
    namespace = {"mine": 1}
    cell.run_cell("model = object(); dataset = [1]", namespace, {}, seed=0)
    namespace["dataset"] = "the user's own, by %%px"
    cell.run_cell("x = 1", namespace, {}, seed=0)
    assert "model" not in namespace and namespace["dataset"] == "the user's own, by %%px" and namespace["mine"] == 1


def test_an_error_names_the_line_of_the_cell_and_shows_the_users_frames():
    namespace = {}
    cell.run_cell("def f(x):\n    return torch.ones(2) @ x\nimport torch\n", namespace, {}, seed=0)
    try:
        torch.nn.Module.__call__(type("M", (torch.nn.Module,), {"forward": staticmethod(namespace["f"])})(), 0)
    except TypeError as error:
        error.__traceback__ = error.__traceback__.tb_next  # without the frame of this test
        described = cell.describe_error(error, step=7)
    assert described["lineno"] == 2 and described["step"] == 7 and described["etype"] == "TypeError"
    assert "return torch.ones(2) @ x" in described["traceback"]
    assert "torch/nn" not in described["traceback"]
