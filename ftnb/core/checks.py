"""Do all ranks hold the same training? Compares what each of them reported about its cell. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def difference(signatures: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The first difference between ranks in words (which rank, which parameter), or None when they agree.

    The majority is taken as right; with no majority, the lowest rank.
    """
    ranks = sorted(signatures)
    for key, what in (("dataset_len", "dataset length"), ("training", "way of training"), ("scheduler", "scheduler")):
        if odd := _odd_one([(r, signatures[r][key]) for r in ranks]):
            rank, value, reference, usual = odd
            return f"The {what} differs: {value} on rank {rank}, {usual} on rank {reference}. {_ADVICE}"
    names = {r: [(t[0], t[1]) for t in signatures[r]["tensors"]] for r in ranks}
    if odd := _odd_one([(r, names[r]) for r in ranks]):
        rank, value, reference, usual = odd
        only = [n for n in value if n not in usual] or [n for n in usual if n not in value]
        if only:
            kind, name = only[0]
            has, lacks = (rank, reference) if only[0] in value else (reference, rank)
            return f"The model differs: rank {has} has the {kind} `{name}`, rank {lacks} has not. {_ADVICE}"
        return f"The model differs: rank {rank} has its parameters in another order than rank {reference}. {_ADVICE}"
    for index, (kind, name) in enumerate(names[ranks[0]]):
        for position, what in ((2, "shape"), (3, "dtype"), (4, "requires_grad")):
            column = [(r, signatures[r]["tensors"][index][position]) for r in ranks]
            if odd := _odd_one(column):
                rank, value, reference, usual = odd
                return (
                    f"The model differs: the {what} of {kind} `{name}` is {value} on rank {rank}, but {usual} on "
                    f"rank {reference}. {_ADVICE}"
                )
        if odd := _odd_one([(r, signatures[r]["tensors"][index][5]) for r in ranks]):
            rank, _, reference, _ = odd
            return (
                f"The model differs: the initial values of {kind} `{name}` on rank {rank} are not those of rank "
                f"{reference}. ftnb seeds Python, NumPy and torch equally before the cell; take random numbers from "
                "those, or set the weights from something that is equal on all ranks."
            )
    if odd := _odd_one([(r, signatures[r]["optimizer"]) for r in ranks]):
        rank, _, reference, _ = odd
        return f"The optimizer of rank {rank} differs from that of rank {reference}. {_ADVICE}"
    return None


_ADVICE = "The cell must build the same on every rank; something in it depends on the rank, the time or the process."


def _odd_one(values: list[tuple[int, Any]]) -> tuple[int, Any, int, Any] | None:
    """(rank, its value, a rank of the majority, the usual value) for the first rank that differs."""
    keys = [(rank, repr(value)) for rank, value in values]
    usual = Counter(key for _, key in keys).most_common(1)[0][0]
    reference, usual_value = next((rank, value) for (rank, value), (_, key) in zip(values, keys) if key == usual)
    for (rank, value), (_, key) in zip(values, keys):
        if key != usual:
            return rank, value, reference, usual_value
    return None
