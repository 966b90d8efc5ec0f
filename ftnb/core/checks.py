"""Do all ranks hold the same training? Compares what each of them reported about its cell. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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


def odd_ones(digests: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks that a strict majority is against. None where all agree, and none where nobody has a majority."""
    if not digests:
        return ()
    usual, number = Counter(digests.values()).most_common(1)[0]
    if 2 * number <= len(digests):
        return ()
    return tuple(sorted(rank for rank, digest in digests.items() if digest != usual))


def divergence_words(step: int, digests: Mapping[int, str]) -> str:
    """A sentence on replicas that differ after `step`."""
    if odd := odd_ones(digests):
        verb = "differs" if len(odd) == 1 else "differ"
        return f"After step {step}, {_ranks(odd)} {verb} from {_ranks(sorted(digests.keys() - set(odd)))}."
    return f"After step {step}, {_ranks(sorted(digests))} differ, and no majority says which of them is right."


def nan_words(step: int, told: Mapping[int, tuple[bool, str]]) -> str:
    """A sentence on a gradient that was not finite in `step`.

    `told`: by each rank that could, whether it brought that in, and where.
    """
    sources = {rank: where for rank, (source, where) in told.items() if source}
    begin = f"The gradient of step {step} is not finite (NaN or infinite)"
    if not sources:
        where = next((where for _, where in told.values() if where), "")
        return f"{begin}, although it is finite on every rank by itself{f': {where}' if where else ''}."
    places = sorted({where for where in sources.values() if where})
    where = f" ({', '.join(places[:3])}{', …' if len(places) > 3 else ''})" if places else ""
    if len(sources) == len(told) > 1:
        return f"{begin}: on every rank{where}, so it is the loss itself."
    verb = "has" if len(sources) == 1 else "have"
    return f"{begin}: {_ranks(sorted(sources))} {verb} brought it in{where}."


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


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
