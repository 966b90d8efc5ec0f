"""Was every sample of a run used exactly once? Judged by intervals and by digests, from the ledger alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftnb.core.sampler import batch_at, digest, digest_hex, permutation, samples_through
from ftnb.core.words import count, steps_text


@dataclass
class Audit:
    expected: int = 0
    used: int = 0
    missed: int = 0
    repeated: int = 0
    unverified: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def audit_samples(run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], last_step: int) -> Audit:
    """Was every sample of steps 1..last_step used exactly once? Judged by intervals and by digests."""
    audit = Audit()
    options = run.get("options") or {}
    dataset_len, global_batch, seed = run.get("dataset_len"), options.get("global_batch"), options.get("seed")
    if last_step == 0:
        return audit
    if not dataset_len or not global_batch or seed is None:
        audit.problems.append(
            "run.json lacks dataset_len, global_batch or seed: the samples cannot be checked"
        )
        return audit
    wrong = defaultdict(list)  # what is wrong -> steps
    unverified_steps = []
    intervals = defaultdict(list)  # epoch -> intervals of its permutation that were used
    num_lines = Counter(line["step"] for line in lines)
    wrong["no line in the ledger"] = [step for step in range(1, last_step + 1) if step not in num_lines]
    wrong["more than one line of the same generation"] = [step for step, n in num_lines.items() if n > 1]
    for line in lines:
        step, epoch, start, stop = line["step"], line["epoch"], line["start"], line["stop"]
        batch = batch_at(step, dataset_len, global_batch)
        if (batch.epoch, batch.start, batch.stop) != (epoch, start, stop):
            wrong["not the samples that belong to the step"].append(step)
        covered, num_unverified = _covered_by_digest(line)
        num_used = sum(line["shares"].values())
        if num_unverified:
            unverified_steps.append(step)
            audit.unverified += num_unverified
        elif num_used != stop - start:
            wrong["the shares do not add up to the batch"].append(step)
            continue
        if covered is not None:
            order = permutation(dataset_len, seed, epoch)
            indices = (index for first, end in covered for index in order[first:end])
            if digest_hex(digest(indices)) != line["digest"]:
                wrong["the ranks fetched other samples than planned (digest mismatch)"].append(step)
                continue
        audit.used += num_used
        intervals[epoch].append((start, stop))
    audit.problems += [f"{steps_text(steps)}: {what}" for what, steps in wrong.items() if steps]
    if unverified_steps:
        samples = count(audit.unverified, "sample")
        audit.notes.append(
            f"{steps_text(unverified_steps)}: {samples} used by ranks that were lost before they reported "
            "which; counted as used, not verified"
        )

    audit.expected = samples_through(last_step, dataset_len, global_batch)
    last = batch_at(last_step, dataset_len, global_batch)
    for epoch in {*intervals, *range(1, last.epoch + 1)}:
        expected = dataset_len if epoch < last.epoch else last.stop if epoch == last.epoch else 0
        position = 0
        for start, stop in sorted(intervals[epoch]):
            audit.missed += max(0, start - position)
            audit.repeated += max(0, min(stop, position) - start)
            position = max(position, stop)
        audit.missed += max(0, expected - position)
    return audit


def silent_steps(ledger: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> set[int]:
    """Steps whose share somebody did not report who was not lost in that generation: reports have been missed."""
    lost = {(str(event.get("rank")), event["generation"]) for event in events if event["kind"] == "rank_failed"}
    return {
        line["step"] for line in ledger for rank in line.get("unreported", ())
        if (str(rank), line["generation"]) not in lost
    }


def _covered_by_digest(line: Mapping[str, Any]) -> tuple[list[tuple[int, int]] | None, int]:
    """The positions that the line's digest should cover (None: cannot tell), and how many it does not."""
    start, stop, shares = line["start"], line["stop"], line["shares"]
    num_reported, _, num_members = line["shares_reported"].partition("/")
    if num_reported == num_members:
        return [(start, stop)], 0
    unreported = {str(rank) for rank in line.get("unreported", ())}
    if not unreported <= shares.keys() or not unreported or sum(shares.values()) != stop - start:
        return None, stop - start
    covered = []
    for (
        rank,
        num_samples,
    ) in shares.items():  # in torch-rank order, the order in which the batch is shared out
        if rank not in unreported:
            covered.append((start, start + num_samples))
        start += num_samples
    return covered, sum(shares[rank] for rank in unreported)
