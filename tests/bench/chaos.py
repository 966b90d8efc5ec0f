"""Throughput kept while faults come at random, one every `--mtbf` seconds.

    python tests/bench/chaos.py [--ranks 4] [--spares 1] [--mtbf 30 10] [--for 600] [--seed 0] [--baseline 30]
                                [--kinds kill,hang,exception,partition]

Each sample sleeps 1 ms in `training_step`, so that capacity grows with the ranks; a tiny model on two cores would be
faster with fewer of them, and the figure would mean nothing. Committed steps per second with faults against the same
job without any, before and after. Goals: 95 % at one fault every 30 s, 85 % at one every 10 s.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import Counter

import harness

STEP = """
def training_step(model, batch):
    import time
    x, y = batch
    time.sleep(0.001 * len(x))
    return torch.nn.functional.cross_entropy(model(x), y)
"""
GLOBAL_BATCH = 64


def cell() -> str:
    return harness.cell("mlp").replace("loss_fn = torch.nn.functional.cross_entropy", STEP)


def rate_of(metrics: list[dict], first: float, last: float) -> float:
    times = [line["time"] for line in metrics if line["time"] is not None and first <= line["time"] <= last]
    return (len(times) - 1) / (times[-1] - times[0])


def undisturbed(session: harness.ftnb.Session, args: argparse.Namespace) -> float:
    run = session.train(cell(), steps=harness.ENDLESS, global_batch=GLOBAL_BATCH, show=lambda _: None)
    harness.wait_full(run, args.ranks, args.spares)
    started = time.time()
    time.sleep(args.baseline)
    run.stop()
    return rate_of(run.metrics(), started, time.time())


def disturbed(session: harness.ftnb.Session, args: argparse.Namespace, mtbf_s: float) -> tuple[float, harness.Run]:
    run = session.train(cell(), steps=harness.ENDLESS, global_batch=GLOBAL_BATCH, show=lambda _: None)
    harness.wait_full(run, args.ranks, args.spares)
    started = time.time()
    run.chaos(mtbf_s=mtbf_s, kinds=args.kinds.split(","), for_s=args.for_s, seed=args.seed)
    time.sleep(args.for_s)
    ended = time.time()
    harness.wait_until(lambda: run.state == "running", "the last fault is recovered from")
    run.stop()
    return rate_of(run.metrics(), started, ended), run


def standstills(run: harness.Run) -> dict[str, list[float]]:
    """Per kind of fault: the seconds between the last step committed before it was noticed and the next one, less a usual step."""
    metrics = [line for line in run.metrics() if line["time"] is not None]
    usual = statistics.median(line["step_s"] for line in metrics)
    found: dict[str, list[float]] = {}
    for event in run.events():
        if event["kind"] != "fault_injected":
            continue
        pairs = itertools.pairwise(line["time"] for line in metrics if event["time"] - 2 <= line["time"] <= event["time"] + 60)
        gap = max((b - a for a, b in pairs if a <= event["time"] + 1.5 and b >= event["time"]), default=0.0)
        found.setdefault(event["fault"], []).append(max(0.0, gap - usual))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--mtbf", type=float, nargs="+", default=[30.0, 10.0])
    parser.add_argument("--for", dest="for_s", type=float, default=600.0)
    parser.add_argument("--baseline", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="kill,hang,exception,partition")
    args = parser.parse_args()
    print(f"chaos, {args.ranks} ranks and {args.spares} spare, {args.kinds}, {args.for_s:g} s each: {harness.machine()}")
    goals = {30.0: 0.95, 10.0: 0.85}
    with harness.cluster(args.ranks, args.spares) as session:
        before = undisturbed(session, args)
        for mtbf_s in args.mtbf:
            rate, run = disturbed(session, args, mtbf_s)
            harness.check(run)
            report = run.report()
            after = undisturbed(session, args)
            kept = rate / statistics.mean([before, after])
            goal = goals.get(mtbf_s)
            print(f"  one fault every {mtbf_s:g} s: {rate:.1f} steps/s against {before:.1f} and {after:.1f} without: {kept:.1%} kept"
                  f"{'' if goal is None else f' (goal {goal:.0%}' + ('' if kept >= goal else ', MISSED') + ')'}")
            fired = Counter(fault.kind for fault in report.faults if fault.fired)
            spared = sum(not fault.fired for fault in report.faults)
            print(f"    injected {dict(fired)}, {spared} spared; {len(report.failures)} failures, all survived; "
                  f"every sample once: {report.ok}")
            for kind, gaps in sorted(standstills(run).items()):
                print(f"    standstill after {kind:<10} {harness.spread(gaps, ' s')}")
            before = after


if __name__ == "__main__":
    main()
