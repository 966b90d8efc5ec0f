"""Which samples belong to which step, epoch and rank.

The samples of a step depend on the seed, the epoch and the step alone, never on the world size. That is why
a step can be repeated, or taken over by fewer ranks, without losing or doubling a sample.

Steps and epochs count from 1; positions count from 0 within the shuffled order (permutation) of the epoch.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch of one step: positions start..stop-1 of the permutation of its epoch."""

    step: int
    epoch: int
    start: int
    stop: int


def steps_per_epoch(dataset_len: int, global_batch: int) -> int:
    if dataset_len < 1:
        raise ValueError(f"the dataset has {dataset_len} samples; training needs at least one")
    if global_batch < 1:
        raise ValueError(f"the global batch is {global_batch}; it must be at least 1")
    return -(-dataset_len // global_batch)


def batch_at(step: int, dataset_len: int, global_batch: int) -> Batch:
    """The global batch of `step`; the last one of an epoch holds what is left and may be short."""
    if step < 1:
        raise ValueError(f"there is no step {step}; steps count from 1")
    epochs_done, steps_done = divmod(step - 1, steps_per_epoch(dataset_len, global_batch))
    start = steps_done * global_batch
    return Batch(step, epochs_done + 1, start, min(start + global_batch, dataset_len))


def samples_through(step: int, dataset_len: int, global_batch: int) -> int:
    """How many samples steps 1..step use together."""
    epochs_done, steps_done = divmod(step, steps_per_epoch(dataset_len, global_batch))
    return epochs_done * dataset_len + steps_done * global_batch


def split(start: int, stop: int, world_size: int) -> list[tuple[int, int]]:
    """One contiguous share (start, stop) per torch rank; sizes differ by one at most, and may be 0."""
    if world_size < 1:
        raise ValueError(f"cannot share a batch among {world_size} ranks")
    size, larger = divmod(stop - start, world_size)
    shares = []
    for rank in range(world_size):
        end = start + size + (rank < larger)
        shares.append((start, end))
        start = end
    return shares


@lru_cache(maxsize=2)  # two, since the batches of the next epoch may be fetched before this one is over
def permutation(dataset_len: int, seed: int, epoch: int) -> array[int]:
    """The shuffled order of the samples in `epoch`. The result is shared: read it, do not change it."""
    order = array("q", range(dataset_len))
    # Seeding with a string goes through SHA-512, so neighbouring seeds and epochs give unrelated orders.
    random.Random(f"ftnb:{seed}:{epoch}").shuffle(order)
    return order


def index_hash(index: int) -> int:
    """64 well mixed bits for a sample's index (the SplitMix64 generator, started at `index`)."""
    z = (index + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def digest(indices: Iterable[int]) -> int:
    """Fingerprint of a collection of indices: a sum, so neither order nor the split into shares matters."""
    return sum(map(index_hash, indices)) & _MASK


def digest_hex(value: int) -> str:
    """A digest as it is written into the ledger: 16 hex digits."""
    return f"{value & _MASK:016x}"
