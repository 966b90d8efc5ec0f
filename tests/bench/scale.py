"""From SIGKILL of a rank to the next committed step, for more ranks and larger models.

    python tests/bench/scale.py [--kills 5] [--quick]
                                [--ranks 2 4 8] [--models mlp 1M 25M]

Two ways: `shrink` (the others go on alone; a run per kill), and a warm spare that takes the place of the lost rank in
the same regroup and so needs a copy of the state first (all kills in one run). Victims are the ranks in turn. "step"
is the time between two commits without a failure: the step in flight is done once more, so a recovery takes about a
step, and what comes on top is the recovery itself. --quick: 2 and 4 ranks, the two smaller models, 2 kills.

Goals: 4 ranks with 0.02M parameters as in recovery.py and join.py (0.10 s, spare 0.15 s); no figure for the others.
The table shows how the time grows. More ranks than cores make everything slower, so see each row beside its "step".
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

import harness

import ftnb
from ftnb.client.run import Run

# Samples per step of all ranks together, and how many steps to let pass between kills (large models have long ones).
GLOBAL_BATCH = {"mlp": 64, "1M": 64, "25M": 8}
SETTLE_STEPS = {"mlp": 10, "1M": 10, "25M": 4}


def measure(session: ftnb.Session, num_ranks: int, model: str, kills: int) -> dict[str, list[float]]:
    """Seconds per step, and from kill to next commit in both ways."""
    dice = random.Random(0)
    settle_steps = SETTLE_STEPS[model]
    found: dict[str, list[float]] = {"step": [], "shrink": [], "spare": []}
    for way, victims_of_runs in (
        ("shrink", [[number % num_ranks] for number in range(kills)]),
        ("spare", [[number % num_ranks for number in range(kills)]]),
    ):
        num_spares = 1 if way == "spare" else 0
        for victims in victims_of_runs:
            recovery = "replace" if way == "spare" else "shrink"
            with harness.training(session, model, recovery=recovery, global_batch=GLOBAL_BATCH[model]) as run:
                for victim in victims:
                    harness.wait_full(run, num_ranks, num_spares, settle_steps)
                    step_s = 1 / (run.info()["steps_per_s"] or 10)
                    harness.kill(run, victim, dice, within_s=max(0.1, step_s))
            harness.check(run)
            found["step"].append(_step_s(run, num_ranks))
            found[way] += [recovery.next_s for recovery in harness.recoveries(run, num_ranks)]
    return found


def _step_s(run: Run, num_ranks: int) -> float:
    """Between two commits of all ranks, without a failure in between."""
    return statistics.median(
        later["time"] - earlier["time"] for earlier, later in itertools.pairwise(run.metrics())
        if later["generation"] == earlier["generation"] and later["world_size"] == num_ranks
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--models", nargs="+", choices=list(harness.MODELS))
    args = parser.parse_args()
    ranks = args.ranks or ([2, 4] if args.quick else [2, 4, 8])
    models = args.models or (["mlp", "1M"] if args.quick else ["mlp", "1M", "25M"])
    kills = args.kills or (2 if args.quick else 5)
    began = time.monotonic()
    print(f"scale, {kills} kills per figure, ms, median (range): {harness.machine()}")
    print(f"  {'ranks':>5}  {'parameters':<10}  {'step':<18}  {'shrink':<18}  {'spare':<18}")
    for num_ranks in ranks:
        with harness.cluster(num_ranks, num_spares=1) as session:
            for model in models:
                found = measure(session, num_ranks, model, kills)
                cells = "  ".join(f"{_cell(found[column]):<18}" for column in ("step", "shrink", "spare"))
                print(f"  {num_ranks:>5}  {'0.02M' if model == 'mlp' else model:<10}  {cells}", flush=True)
    print(f"  took {time.monotonic() - began:.0f} s")


def _cell(seconds: list[float]) -> str:
    low, mid, high = (f"{1000 * s:.0f}" for s in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{mid} ({low}–{high})"


if __name__ == "__main__":
    main()
