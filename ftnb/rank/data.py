"""Batches of one rank: its share of every global batch, fetched here or by DataLoader workers.

Indices travel through the fetch together with the samples, so that what is reported to the ledger is what
was really fetched, not what had been planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from ftnb.core import sampler


@dataclass(frozen=True)
class Share:
    """One rank's part of one step. `real` samples count; stand-ins only keep the collectives going."""

    step: int
    indices: list[int]
    real: int
    global_samples: int


class _Fetch:
    """A dataset whose samples come with their index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


class _FetchMany(_Fetch):
    """The same for a dataset that can fetch a whole list at once (`__getitems__`, as torch's DataLoader asks)."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Any]]:
        return list(zip(indices, self.dataset.__getitems__(indices)))


class _Collate:
    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, pairs: list[tuple[int, Any]]) -> tuple[list[int], Any]:
        return [index for index, _ in pairs], self.collate_fn([sample for _, sample in pairs])


class BatchSource:
    """Yields `(share, indices, batch)` for step after step, from wherever `begin` says.

    With `workers` > 0, the worker processes are forked here, before the first process group exists: so they
    hold none of its sockets, and they outlive every regroup.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable | None, *, global_batch: int, total_steps: int, seed: int,
        workers: int, device: torch.device, min_real: int,
    ) -> None:
        self._dataset_len = len(dataset)
        self._global_batch, self._total_steps, self._seed = global_batch, total_steps, seed
        self._min_real = min_real  # 2 for a model with BatchNorm, which cannot normalise a single value
        self._device = device
        self._fetch = _FetchMany(dataset) if hasattr(dataset, "__getitems__") else _Fetch(dataset)
        self._collate = _Collate(collate_fn or default_collate)
        self._plan: Iterator[Share] = iter(())
        self._planned: deque[Share] = deque()
        self._loader: DataLoader | None = None
        self._batches: Any = None
        if workers:
            self._loader = DataLoader(
                self._fetch, batch_sampler=_PlannedSampler(self), num_workers=workers, collate_fn=self._collate,
                persistent_workers=True, generator=torch.Generator().manual_seed(seed),
                multiprocessing_context="fork", pin_memory=device.type == "cuda",
            )
            self._batches = iter(self._loader)

    def begin(self, first_step: int, torch_rank: int, world_size: int) -> None:
        """Go on with `first_step`, as member `torch_rank` of `world_size`; what was prefetched is dropped."""
        self._plan = self._shares(first_step, torch_rank, world_size)
        self._planned.clear()
        if self._loader is not None:
            self._batches = iter(self._loader)

    def next(self) -> tuple[Share, list[int], Any]:
        """The next share: what it was to be, the indices really fetched, and the batch on the rank's device."""
        if self._loader is not None:
            indices, batch = next(self._batches)
            share = self._planned.popleft()
        else:
            share = next(self._plan)
            indices, batch = share.indices, self._fetch_here(share.indices)
        return share, indices, to_device(batch, self._device)

    def again(self, indices: list[int], batch: Any) -> Any:
        """The batch of the step in hand once more: fetched anew, if that was done in this process.

        Then the same random numbers are drawn as in the first try, and what a step changed in its batch is undone.
        """
        return batch if self._loader is not None else to_device(self._fetch_here(indices), self._device)

    def _fetch_here(self, indices: list[int]) -> Any:
        dataset, many = self._fetch.dataset, isinstance(self._fetch, _FetchMany)
        return self._collate.collate_fn(dataset.__getitems__(indices) if many else [dataset[i] for i in indices])

    def close(self) -> None:
        if self._batches is not None:
            self._batches._shutdown_workers()
        self._batches = self._loader = None

    def _shares(self, first_step: int, torch_rank: int, world_size: int) -> Iterator[Share]:
        for step in range(first_step, self._total_steps + 1):
            batch = sampler.batch_at(step, self._dataset_len, self._global_batch)
            order = sampler.permutation(self._dataset_len, self._seed, batch.epoch)
            start, stop = sampler.split(batch.start, batch.stop, world_size)[torch_rank]
            indices = list(order[start:stop])
            real = len(indices)
            if real == 0:
                # Collectives need this rank too: it borrows samples of the same batch, with weight zero.
                indices = list(order[batch.start : min(batch.start + self._min_real, batch.stop)])
            if len(indices) < self._min_real:
                indices = indices * self._min_real
            yield Share(step, indices, real, batch.stop - batch.start)


class _PlannedSampler:
    """Batch sampler for the DataLoader: whatever its source plans at the time."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __iter__(self) -> Iterator[list[int]]:
        for share in self._source._plan:
            self._source._planned.append(share)
            yield share.indices


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; nothing is touched on the CPU."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)({k: to_device(v, device) for k, v in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(v, device) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(v, device) for v in batch)
    return batch
