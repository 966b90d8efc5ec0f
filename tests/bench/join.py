"""From SIGKILL of a rank to going on, and to all ranks training again, for each way of filling its place.

    python tests/bench/join.py [--ranks 4] [--kills 10] [--model mlp|1M|25M] [--ways spare forked plain]

Three ways: a warm spare (a new one has run the cell before each kill); a replacement from the fork server, which is
the default; and a replacement that starts from nothing (FTNB_FORK_SERVER=0). The ranks are the victims in turn, rank
0 too; all kills of a way fall in one run, each once all ranks train again. Times are those in the run's own files.

Goals (medians): a spare has all ranks training again after 0.15 s. A replacement lets the training go on after 0.10 s,
and has all ranks training again after 8 s, after 1.5 s with the fork server.
"""

from __future__ import annotations

import argparse
import random

import harness

WAYS = {
    "spare": ("warm spare", 1, {}, "0.15 s", "0.15 s"),
    "forked": ("replacement, forked", 0, {}, "0.10 s", "1.5 s"),
    "plain": ("replacement, started anew", 0, {"FTNB_FORK_SERVER": "0"}, "0.10 s", "8 s"),
}


def measure(way: str, num_ranks: int, kills: int, model: str) -> list[harness.Recovery]:
    _, num_spares, environment, *_ = WAYS[way]
    dice = random.Random(0)
    with harness.cluster(num_ranks, num_spares, environment) as session:
        with harness.training(session, model) as run:
            for number in range(kills):
                harness.wait_full(run, num_ranks, num_spares)
                harness.kill(run, number % num_ranks, dice)
            harness.wait_full(run, num_ranks, num_spares)
        harness.check(run)
        return harness.recoveries(run, num_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--model", choices=list(harness.MODELS), default="mlp")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    args = parser.parse_args()
    print(f"join, {args.ranks} ranks, {args.model}, each rank in turn: {harness.machine()}")
    for way in args.ways:
        found = measure(way, args.ranks, args.kills, args.model)
        label, _, _, next_goal, full_goal = WAYS[way]
        print(f"  {label}")
        on, full = [r.next_s for r in found], [r.full_s for r in found]
        print(f"    SIGKILL to next committed step  {harness.spread(on, ' s')}   goal: {next_goal}")
        print(f"    ... by all ranks                {harness.spread(full, ' s')}   goal: {full_goal}", flush=True)


if __name__ == "__main__":
    main()
