"""Do all ranks still hold the same? A digest of what must be bitwise equal, quick enough for every few dozen steps.

Each tensor is read as a matrix of integers, whose row sums and column sums are hashed: two passes at the speed of
memory, and no copy. A flipped bit changes one of each, by a power of two, which cannot vanish modulo 2^64; two values
that have changed places lie in different rows or in different columns, or both.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import torch

from ftnb.rank import cell
from ftnb.rank.group import Group

DIGEST_BYTES = 16
# Tensors below this size are hashed as they are: that is quicker than to sum them up.
_SMALL_BYTES = 4096
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class ReplicasDiffer(Exception):
    """Some rank's parameters or optimizer state are not those of the others. `digests`: of all members, by rank."""

    def __init__(self, step: int, digests: dict[int, str], anchor: int | None) -> None:
        super().__init__(f"the replicas differ after step {step}")
        self.failure = {
            "cause": "divergence", "step": step,
            "error": {"digests": {str(rank): text for rank, text in digests.items()}, "anchor": anchor},
        }  # fmt: skip


def gather(job: cell.Job, group: Group) -> dict[int, str]:
    """The digests of all members, by rank; they call this together."""
    own = torch.frombuffer(bytearray(digest(job)), dtype=torch.uint8).to(job.device)
    return {rank: bytes(t.tolist()).hex() for rank, t in zip(group.members, group.collectives.gather(own))}


def digest(job: cell.Job) -> bytes:
    """Of parameters and optimizer. Not of buffers: those are statistics of each rank's own samples."""
    digest = hashlib.sha256()
    for parameter in job.model.parameters():
        _add_tensor(digest, parameter)
    optimizer = job.optimizer.state_dict()
    _add(digest, [optimizer["state"], optimizer["param_groups"]])
    return digest.digest()[:DIGEST_BYTES]


def _add(digest: Any, value: Any) -> None:
    """Whatever an optimizer holds. The order of a dict does not count: a state that was received may have another."""
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, dict):
        digest.update(b"{")
        for key in sorted(value, key=lambda k: (type(k).__name__, k) if isinstance(k, (int, str)) else ("", repr(k))):
            digest.update(f"{key!r}:".encode())
            _add(digest, value[key])
        digest.update(b"}")
    elif isinstance(value, (list, tuple)):
        digest.update(b"[")
        for item in value:
            _add(digest, item)
        digest.update(b"]")
    else:
        if isinstance(value, (np.integer, np.floating, np.bool_)):
            value = value.item()  # which is what a rank that has received it holds
        digest.update(f"{value!r},".encode())


def _add_tensor(digest: Any, tensor: torch.Tensor) -> None:
    flat = tensor.detach().contiguous().reshape(-1)
    digest.update(json.dumps([str(tensor.dtype), list(tensor.shape)]).encode())
    if flat.nbytes < _SMALL_BYTES:
        digest.update(_raw(flat))
        return
    words = _as_words(flat)
    columns = math.isqrt(words.numel())
    whole = words.numel() // columns * columns
    matrix = words[:whole].view(-1, columns)
    for dim in (0, 1):
        digest.update(_raw(matrix.sum(dim, dtype=torch.int64)))
    digest.update(_raw(words[whole:]))
    if tail := flat.nbytes - words.nbytes:
        digest.update(_raw(flat.view(torch.uint8)[-tail:]))


def _raw(tensor: torch.Tensor) -> Any:
    return tensor.cpu().view(torch.uint8).numpy()


def _as_words(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, as wide as its position allows; a few bytes at the end may be left out."""
    raw = flat.view(torch.uint8)
    for word in _WORDS:
        if raw.storage_offset() % word.itemsize == 0:
            return raw[: raw.numel() // word.itemsize * word.itemsize].view(word)
    raise AssertionError("every position is a multiple of one byte")
