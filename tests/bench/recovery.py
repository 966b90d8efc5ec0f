"""From SIGKILL of a rank to the next committed step.

    python tests/bench/recovery.py [--ranks 4] [--kills 20] [--victim R] [--workers W] [--model mlp|1M]

Each kill is a run of its own in one cluster (the lost rank is started again in between). Without --victim the
ranks take turns, rank 0 too. Goal: a median of at most 0.10 s.
"""

from __future__ import annotations

import argparse
import random

import harness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--victim", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--model", choices=list(harness.MODELS), default="mlp")
    args = parser.parse_args()
    phases: dict[str, list[float]] = {}
    totals = []
    dice = random.Random(0)
    with harness.cluster(args.ranks) as session:
        for number in range(args.kills):
            victim = args.victim if args.victim is not None else number % args.ranks
            run = session.train(
                harness.cell(args.model), steps=160, global_batch=64, workers=args.workers, show=lambda _: None
            )
            while run.step < 40:  # somewhere in the middle of the training, not at a step we chose
                pass
            run.inject("kill", rank=victim, after_s=dice.uniform(0, 0.1))
            run.wait()
            events = run.events()
            killed = next((e for e in events if e["kind"] == "fault_injected"), None)
            if killed is None or not any(e["kind"] == "recovered" for e in events):
                print(f"  kill {number}: the run was over first, not counted")
                continue
            after = next(m for m in run.metrics() if m["generation"] > 1)
            totals.append(after["time"] - killed["time"])
            recovered = next(e for e in events if e["kind"] == "recovered")
            for phase in ("detect_s", "fence_s", "regroup_s", "restore_s", "first_step_s"):
                phases.setdefault(phase, []).append(recovered[phase])
    who = f"rank {args.victim}" if args.victim is not None else "each rank in turn"
    print(f"recovery, {args.ranks} ranks, {args.model}, --workers {args.workers}, {who}: {harness.machine()}")
    print(f"  SIGKILL to next committed step  {harness.spread(totals, ' s')}   goal: median 0.10 s")
    for phase, values in phases.items():
        print(f"    {phase:<14} {harness.spread(values, ' s')}")


if __name__ == "__main__":
    main()
