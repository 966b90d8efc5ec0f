"""From SIGKILL of a rank to the next committed step.

    python tests/bench/recovery.py [--ranks 4] [--kills 20] [--victim R] [--workers W] [--model mlp|1M|25M]
                                   [--recovery replace|shrink]
    python tests/bench/recovery.py --against torchrun torchft [--rounds 3] [--peers-python PYTHON]

With `replace` all kills fall in one run, each once all ranks train again; with `shrink` each kill is a run of its own
in one cluster (the lost rank is started again in between). Without --victim the ranks take turns, rank 0 too.
Goal: a median of at most 0.10 s.

--against gives the same job to other tools as well: see against.py, which says how each of them is used.
"""

from __future__ import annotations

import argparse
import random

import against
import harness


def measure(args: argparse.Namespace) -> list[harness.Recovery]:
    victims = [number % args.ranks if args.victim is None else args.victim for number in range(args.kills)]
    groups = [victims] if args.recovery == "replace" else [[victim] for victim in victims]
    dice = random.Random(0)
    found = []
    with harness.cluster(args.ranks) as session:
        for group in groups:
            with harness.training(session, args.model, recovery=args.recovery, workers=args.workers) as run:
                for victim in group:
                    harness.wait_full(run, args.ranks)
                    harness.kill(run, victim, dice)
            harness.check(run)
            found += harness.recoveries(run, args.ranks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--victim", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--model", choices=list(harness.MODELS), default="mlp")
    parser.add_argument("--recovery", choices=("replace", "shrink"), default="replace")
    against.add_options(parser)
    args = parser.parse_args()
    if args.against:
        against.compare(args.against, args.ranks, args.model, args.rounds, args.peers_python)
        return
    found = measure(args)
    who = f"rank {args.victim}" if args.victim is not None else "each rank in turn"
    how = f"{args.ranks} ranks, {args.model}, --workers {args.workers}, {args.recovery}, {who}"
    print(f"recovery, {how}: {harness.machine()}")
    print(f"  SIGKILL to next committed step  {harness.spread([r.next_s for r in found], ' s')}   goal: median 0.10 s")
    for phase in harness.PHASES:
        print(f"    {phase:<14} {harness.spread([r.phases[phase] for r in found], ' s')}")


if __name__ == "__main__":
    main()
