"""How long a rank that joins waits for the live state, against bare sends of the same bytes.

    python tests/bench/transfer.py [--rounds 12]

Four processes on Gloo: three give, one takes a model with Adam state. Measured on the receiver, in turn: the whole path that a
training takes (`_share_state`, into memory that is there, as for a rank that was one step behind; and for one that
has just joined, which has no optimizer state yet), and nothing but isend and irecv of the same stripes into memory
that is there. Goal with 25M parameters: at most 1.5 times the bare sends.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rank"))

import harness
import peers

from ftnb.rank import stripes

# Width and number of square layers: 0.02M, 1M, 25M parameters.
SIZES = {"0.02M": (100, 2), "1M": (500, 4), "25M": (1580, 10)}
MODEL = """
model = torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range({depth})])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
"""
GIVERS = 3
PATHS = ("bare", "behind", "joined")


def measure(rank: int, directory: Path, size: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each path on the receiver, after a warm-up; the order turns round in every second round."""
    width, depth = SIZES[size]
    peer = peers.Peer(rank, directory, MODEL.format(width=width, depth=depth))
    peer.learn(1)
    group = peer.form(list(range(GIVERS + 1)))
    tensors = [t for p in peer.job.model.parameters() for t in (p.detach(), *peer.job.optimizer.state[p].values())]
    contents = [torch.zeros_like(t).reshape(-1).view(torch.uint8) for t in tensors]
    total = sum(c.numel() for c in contents)
    bare = torch.cat(contents)
    del contents, tensors
    plan = stripes.plan_stripes([total], GIVERS)
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    for number in range(rounds + 1):
        for path in PATHS if number % 2 == 0 else PATHS[::-1]:
            if path == "joined" and rank == GIVERS:
                peer.job.optimizer.state.clear()
            dist.barrier()
            began = time.perf_counter()
            if path == "bare":
                works = [
                    dist.irecv(bare[p.start : p.stop], giver) if rank == GIVERS else dist.isend(bare[p.start : p.stop], GIVERS)
                    for giver in range(GIVERS) if rank in (giver, GIVERS) for p in plan[giver]
                ]  # fmt: skip
                for work in works:
                    work.wait()
            else:
                peer.share(group, 0, [GIVERS], first_step=2)
            if number:
                seconds[path].append(time.perf_counter() - began)
    dist.barrier()
    group.destroy()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    print(f"transfer, {GIVERS} givers, 1 receiver, Adam: {harness.machine()}")
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="ftnb-bench-") as scratch:
            seconds = peers.run_ranks(measure, GIVERS + 1, Path(scratch), size, args.rounds)[GIVERS]
        bare = statistics.median(seconds["bare"])
        print(f"  {size} parameters")
        for path, values in seconds.items():
            ratio = statistics.median(values) / bare
            print(f"    {path:<7} {harness.spread([v * 1000 for v in values], ' ms', 2)}   {ratio:.2f} × bare")


if __name__ == "__main__":
    main()
