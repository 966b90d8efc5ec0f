from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftnb.core.sampler import (
    Batch,
    batch_at,
    digest,
    digest_hex,
    index_hash,
    permutation,
    samples_through,
    split,
    steps_per_epoch,
)

lengths = st.integers(1, 400)
batches = st.integers(1, 80)


def test_batches_of_a_small_dataset():
    assert steps_per_epoch(10, 4) == 3
    assert [batch_at(step, 10, 4) for step in (1, 2, 3, 4)] == [
        Batch(1, 1, 0, 4),
        Batch(2, 1, 4, 8),
        Batch(3, 1, 8, 10),
        Batch(4, 2, 0, 4),
    ]
    assert [samples_through(step, 10, 4) for step in range(5)] == [0, 4, 8, 10, 14]


@pytest.mark.parametrize("size", [0, -3])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"dataset has {size} samples"):
        steps_per_epoch(size, 4)
    with pytest.raises(ValueError, match=f"global batch is {size}"):
        steps_per_epoch(10, size)
    with pytest.raises(ValueError, match=f"among {size} ranks"):
        split(0, 4, size)
    with pytest.raises(ValueError, match=f"no step {size}"):
        batch_at(size, 10, 4)


@given(lengths, batches, st.integers(1, 3))
def test_every_epoch_covers_every_position_once(dataset_len, global_batch, epochs):
    num_steps = epochs * steps_per_epoch(dataset_len, global_batch)
    seen: dict[int, list[int]] = {}
    total = 0
    for step in range(1, num_steps + 1):
        batch = batch_at(step, dataset_len, global_batch)
        assert batch.step == step
        assert 0 < batch.stop - batch.start <= global_batch
        seen.setdefault(batch.epoch, []).extend(range(batch.start, batch.stop))
        total += batch.stop - batch.start
        assert samples_through(step, dataset_len, global_batch) == total
    assert seen == {epoch: list(range(dataset_len)) for epoch in range(1, epochs + 1)}


@given(st.integers(0, 1000), st.integers(0, 100), st.integers(1, 40))
def test_shares_are_contiguous_and_even(start, size, world_size):
    shares = split(start, start + size, world_size)
    assert len(shares) == world_size
    assert (shares[0][0], shares[-1][1]) == (start, start + size)
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    sizes = [stop - begin for begin, stop in shares]
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1


@given(lengths, st.integers(0, 10**9), st.integers(1, 50))
def test_a_permutation_holds_every_index_once_and_does_not_change(dataset_len, seed, epoch):
    order = list(permutation(dataset_len, seed, epoch))
    assert sorted(order) == list(range(dataset_len))
    permutation.cache_clear()
    random.random()  # the state of the global generator plays no part
    assert list(permutation(dataset_len, seed, epoch)) == order


def test_permutations_stay_the_same_between_versions():
    # A run resumed with a newer ftnb or Python must go on in the same order.
    assert list(permutation(10, 0, 1)) == [9, 8, 6, 0, 2, 7, 4, 5, 3, 1]
    assert permutation(100, 0, 1) != permutation(100, 0, 2) != permutation(100, 1, 2)


def test_the_last_two_permutations_are_kept():
    first, second = permutation(50, 7, 1), permutation(50, 7, 2)
    assert permutation(50, 7, 1) is first
    assert permutation(50, 7, 2) is second


def test_index_hash_is_splitmix64():
    # The first outputs of the reference generator started at 0 are the mixes of multiples of its increment.
    assert index_hash(0) == 0xE220A8397B1DCDAF
    assert index_hash(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert len({index_hash(i) for i in range(10_000)}) == 10_000


@given(st.lists(st.integers(0, 10**12), max_size=60), st.randoms(use_true_random=False), st.integers(0, 60))
def test_a_digest_depends_neither_on_order_nor_on_shares(indices, rng, cut):
    shuffled = indices.copy()
    rng.shuffle(shuffled)
    assert digest(shuffled) == digest(indices)
    assert (digest(indices[:cut]) + digest(indices[cut:])) % 2**64 == digest(indices)
    assert 0 <= digest(indices) < 2**64


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=40), st.data())
def test_a_digest_tells_a_lost_doubled_or_wrong_sample(indices, data):
    indices = sorted(indices)
    one = data.draw(st.sampled_from(indices))
    others = [i for i in indices if i != one]
    assert digest(others) != digest(indices)
    assert digest([*indices, one]) != digest(indices)
    assert digest([*others, 5001]) != digest(indices)


def test_digest_hex_has_16_digits():
    assert digest_hex(0) == "0" * 16
    assert digest_hex(255) == "00000000000000ff"
    assert digest_hex(2**64 + 1) == "0000000000000001"
    assert int(digest_hex(digest(range(9))), 16) == digest(range(9))
