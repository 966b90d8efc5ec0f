"""From a fault to the next committed step, for each kind, and the other side: how long a pause is tolerated.

    python tests/bench/detect.py [--ranks 4] [--rounds 5] [--hang-timeout 2] [--kinds hang,partition,…] [--no-pauses]

All faults of a kind fall in one run, on the ranks in turn, each once all ranks train again. `--hang-timeout` matters for
those that can only be told by time (stall, gil). Goals (medians): kill 0.10 s, exception 0.15 s, hang and partition 1.0 s,
deadlock at once, stall and gil the time-out and 1 s; a flipped bit at the next check (every 10 steps here).

Pauses: one rank is stopped (SIGSTOP), cut off, or keeps the interpreter lock, for longer and longer, until that costs
it its place; then everything, the supervisor too, is stopped for 5 s at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time

import harness
import psutil

KINDS = ("kill", "exit", "exception", "hang", "partition", "deadlock", "stall", "gil", "oom", "bitflip")
GOALS_S = {"kill": 0.10, "exception": 0.15, "hang": 1.0, "partition": 1.0}
CHECK_EVERY = 10
PAUSES_S = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
HELD_S = (1.0, 3.0, 5.0)


def of_kind(run: harness.Run, kind: str) -> list[dict]:
    return [event for event in run.events() if event["kind"] == kind]


def measure(session: harness.ftnb.Session, args: argparse.Namespace, kind: str) -> None:
    options = {"hang_timeout_s": args.hang_timeout}
    if kind == "bitflip":
        options["check_replicas"] = CHECK_EVERY
    with harness.training(session, "mlp", **options) as run:
        for number in range(args.rounds):
            harness.wait_full(run, args.ranks)
            seen = len(of_kind(run, "recovered"))
            run.inject(kind, rank=number % args.ranks)
            what = f"{kind} of rank {number % args.ranks} is recovered from"
            harness.wait_until(lambda seen=seen: len(of_kind(run, "recovered")) > seen, what)
    harness.check(run)
    found = harness.recoveries(run, args.ranks)
    failures = run.report().failures
    named = sum(failure.injected == kind for failure in failures)
    total = [recovery.next_s for recovery in found]
    detect = [recovery.phases["detect_s"] for recovery in found]
    goal = GOALS_S.get(kind) or (args.hang_timeout + 1 if kind in ("stall", "gil", "deadlock") else None)
    words = "" if goal is None else f"  goal {goal:g} s{'' if statistics.median(total) <= goal else ' MISSED'}"
    steps = ""
    if kind == "bitflip":
        steps = f", {statistics.median(failure.lost_steps for failure in failures):.0f} steps done again"
    kinds = ", ".join(sorted({failure.kind for failure in failures}))
    print(
        f"  {kind:<10} {harness.spread(total, ' s')}{words}; detected after {statistics.median(detect):.3f} s, found as "
        f"{kinds}, {named} of {args.rounds} the right one{steps}",
        flush=True,
    )


def tolerated(session: harness.ftnb.Session, args: argparse.Namespace, kind: str, lengths_s: tuple[float, ...]) -> None:
    """The longest pause of one rank that was nobody's failure."""
    longest = 0.0
    for length_s in lengths_s:
        innocent = True
        with harness.training(session, "mlp", hang_timeout_s=30) as run:
            for number in range(3):
                harness.wait_full(run, args.ranks)
                run.inject(kind, rank=number % args.ranks, duration_s=length_s)
                time.sleep(length_s + 1.5)  # the pause itself, and time for a late verdict
            innocent = not of_kind(run, "rank_failed") and not of_kind(run, "rank_suspected")
        if not innocent:
            break
        longest = length_s
    print(f"  {kind:<10} up to {longest:g} s on one rank (3 of 3 times each; tried: {lengths_s})", flush=True)


def everything(session: harness.ftnb.Session, args: argparse.Namespace, length_s: float) -> None:
    supervisor = psutil.Process(session.status()["supervisor_pid"])
    with harness.training(session, "mlp") as run:
        harness.wait_full(run, args.ranks)
        processes = [supervisor, *supervisor.children(recursive=True)]
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(length_s)
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
        before = run.step
        harness.wait_until(lambda: run.step > before + 50, "it goes on")
        time.sleep(2)
        blamed = [*of_kind(run, "rank_failed"), *of_kind(run, "rank_suspected")]
        print(f"  everything stopped for {length_s:g} s: {blamed or 'nobody blamed'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hang-timeout", type=float, default=2.0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--no-pauses", action="store_true")
    args = parser.parse_args()
    print(f"detect, {args.ranks} ranks, mlp, {args.rounds} of each, --hang-timeout {args.hang_timeout:g}: {harness.machine()}")
    with harness.cluster(args.ranks) as session:
        for kind in args.kinds.split(","):
            measure(session, args, kind)
        if not args.no_pauses:
            print("pauses that cost nobody their place:")
            tolerated(session, args, "hang", PAUSES_S)
            tolerated(session, args, "partition", PAUSES_S)
            tolerated(session, args, "gil", HELD_S)
            everything(session, args, 5.0)


if __name__ == "__main__":
    main()
