"""Do all ranks hold the same training? The first difference is named: which rank, which parameter."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftnb.core import checks
from ftnb.core.checks import difference

WEIGHT, BIAS, MEAN = 0, 1, 2  # positions in `tensors`


def signature(**changes):
    """What one rank reports of its cell: (kind, name, shape, dtype, requires_grad, checksum) per tensor."""
    plain = {
        "dataset_len": 100,
        "training": "loss_fn",
        "scheduler": None,
        "tensors": [
            ["parameter", "fc.weight", [2, 3], "torch.float32", True, 111],
            ["parameter", "fc.bias", [2], "torch.float32", True, 222],
            ["buffer", "norm.running_mean", [2], "torch.float32", False, 333],
        ],
        "optimizer": ["SGD", {"lr": 0.1}],
    }
    return copy.deepcopy(plain) | changes


def with_tensor(index, position, value):
    changed = signature()
    changed["tensors"][index][position] = value
    return changed


def four(**odd):
    """Four ranks; `rank2=...` replaces the signature of rank 2."""
    return {rank: odd.get(f"rank{rank}", signature()) for rank in range(4)}


def test_equal_ranks_have_no_difference():
    assert difference(four()) is None
    assert difference({0: signature()}) is None


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (signature(dataset_len=99), "dataset length differs: 99 on rank 2, 100 on rank 0"),
        (signature(training="training_step"), "way of training differs: training_step on rank 2"),
        (signature(scheduler="StepLR"), "scheduler differs: StepLR on rank 2, None on rank 0"),
        (
            with_tensor(WEIGHT, 2, [5, 3]),
            "shape of parameter `fc.weight` is [5, 3] on rank 2, but [2, 3] on rank 0",
        ),
        (with_tensor(BIAS, 3, "torch.float64"), "dtype of parameter `fc.bias` is torch.float64 on rank 2"),
        (with_tensor(BIAS, 4, False), "requires_grad of parameter `fc.bias` is False on rank 2"),
        (
            with_tensor(WEIGHT, 5, 999),
            "initial values of parameter `fc.weight` on rank 2 are not those of rank 0",
        ),
        (
            with_tensor(MEAN, 5, 999),
            "initial values of buffer `norm.running_mean` on rank 2 are not those of rank 0",
        ),
        (signature(optimizer=["SGD", {"lr": 0.2}]), "optimizer of rank 2 differs from that of rank 0"),
    ],
)
def test_the_rank_and_what_differs_are_named(odd, words):
    assert words in difference(four(rank2=odd))


def test_a_missing_and_an_additional_tensor():
    less, more = signature(), signature()
    del less["tensors"][BIAS]
    more["tensors"].append(["parameter", "head.weight", [1], "torch.float32", True, 5])
    assert "rank 0 has the parameter `fc.bias`, rank 2 has not" in difference(four(rank2=less))
    assert "rank 2 has the parameter `head.weight`, rank 0 has not" in difference(four(rank2=more))


def test_the_same_tensors_in_another_order():
    odd = signature()
    odd["tensors"].reverse()
    assert "rank 2 has its parameters in another order than rank 0" in difference(four(rank2=odd))


def test_the_majority_is_right_even_against_rank_0():
    text = difference(four(rank0=signature(dataset_len=99)))
    assert "99 on rank 0, 100 on rank 1" in text


def test_without_a_majority_the_lowest_rank_is_the_reference():
    text = difference({3: signature(dataset_len=99), 1: signature()})
    assert "99 on rank 3, 100 on rank 1" in text


def test_what_differs_first_is_what_comes_first():
    """Another model has other values and another optimizer, too; only the cause is worth a message."""
    odd = with_tensor(WEIGHT, 2, [5, 3]) | {"optimizer": ["Adam", {}]}
    odd["tensors"][WEIGHT][5] = 999
    assert "the shape of parameter `fc.weight`" in difference(four(rank1=odd))


@given(st.integers(2, 6), st.data())
def test_one_odd_rank_among_many_is_always_found_and_named(num_ranks, data):
    odd_rank = data.draw(st.integers(0, num_ranks - 1))
    odd = data.draw(
        st.one_of(
            st.builds(with_tensor, st.integers(0, 2), st.integers(2, 5), st.integers().filter(lambda n: n > 999)),
            st.builds(lambda n: signature(dataset_len=n), st.integers(101)),
            st.builds(lambda lr: signature(optimizer=["SGD", {"lr": lr}]), st.floats(0.2, 1.0)),
        )
    )
    signatures = {rank: signature() for rank in range(num_ranks)} | {odd_rank: odd}
    text = difference(signatures)
    # Of two ranks neither is the majority; the lower one counts as usual.
    blamed = odd_rank if num_ranks > 2 else 1
    assert f"rank {blamed}" in text
    assert difference(dict.fromkeys(range(num_ranks), odd)) is None


# --- replicas and gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ({}, ()), ({0: "a"}, ()), ({0: "a", 1: "a"}, ()), ({0: "a", 1: "b"}, ()),
        ({0: "a", 1: "b", 2: "a"}, (1,)), ({3: "b", 1: "a", 2: "a"}, (3,)), ({0: "a", 1: "b", 2: "c"}, ()),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, ()), ({0: "a", 1: "a", 2: "a", 3: "b", 4: "c"}, (3, 4)),
        ({0: "a", 1: "a", 2: "b", 3: "c"}, ()),
    ],
)  # fmt: skip
def test_the_odd_ones_have_a_strict_majority_against_them(digests, odd):
    assert checks.odd_ones(digests) == odd


def test_words_on_replicas_that_differ():
    said = checks.divergence_words(40, {0: "a", 1: "a", 2: "a", 3: "b", 4: "c"})
    assert said == "After step 40, ranks 3 and 4 differ from ranks 0, 1 and 2."
    said = checks.divergence_words(40, {1: "a", 0: "b"})
    assert said == "After step 40, ranks 0 and 1 differ, and no majority says which of them is right."


@pytest.mark.parametrize(
    ("told", "end"),
    [
        ({0: (False, ""), 2: (True, "loss")}, ": rank 2 has brought it in (loss)."),
        ({0: (True, "a"), 1: (True, "b"), 2: (False, "")}, ": ranks 0 and 1 have brought it in (a, b)."),
        ({0: (True, ""), 1: (True, "")}, ": on every rank, so it is the loss itself."),
        ({0: (True, "loss")}, ": rank 0 has brought it in (loss)."),
        ({0: (False, ""), 1: (False, "the sum over all ranks")}, " by itself: the sum over all ranks."),
        ({0: (False, "")}, " by itself."),
    ],
)
def test_words_on_a_gradient_that_is_not_finite(told, end):
    said = checks.nan_words(7, told)
    assert said.startswith("The gradient of step 7 is not finite (NaN or infinite)") and said.endswith(end)
