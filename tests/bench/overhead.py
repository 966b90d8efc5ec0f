"""Step rate of %%ft_train against a hand-written DDP loop in the same engines.

    python tests/bench/overhead.py [--model mlp|1M] [--ranks 4] [--steps 400] [--rounds 6] [--batch]

B is what a careful person writes: DistributedSampler and DataLoader, DDP with its defaults, zero_grad,
backward, step, and the loss read once per step. A also writes metrics and a ledger, and is ready to lose a rank.
ftnb schedules its training threads as batch work (SCHED_BATCH); --batch gives that to B as well, to see what the
bookkeeping alone costs. Goal: A / B of at least 0.97.
"""

from __future__ import annotations

import argparse

import harness

BASELINE = """
import os, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

def baseline(cell, rank, world, port, steps, global_batch, warm, batch):
    import torch
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.sched_setscheduler(0, os.SCHED_BATCH if batch else os.SCHED_OTHER, os.sched_param(0))
    names = {}
    torch.manual_seed(0)
    exec(cell, names)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, use_libuv=True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = DistributedDataParallel(names["model"])
    optimizer, loss_fn, dataset = names["optimizer"], names["loss_fn"], names["dataset"]
    sampler = DistributedSampler(dataset, world, rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=global_batch // world, sampler=sampler)
    done, epoch, began, losses = 0, 0, None, []
    while done < steps:
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            done += 1
            if done == warm:
                began = time.perf_counter()
            if done == steps:
                break
        epoch += 1
    took = time.perf_counter() - began
    del model
    dist.destroy_process_group()
    return (steps - warm) / took
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(harness.MODELS), default="mlp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--batch", action="store_true", help="give the hand-written loop SCHED_BATCH, as ftnb's has")
    args = parser.parse_args()
    warm = max(20, args.steps // 10)
    cell = harness.cell(args.model)
    with harness.cluster(args.ranks) as session:
        session.client.wait_for_engines(args.ranks, timeout=60)  # a client knows them one by one
        view = session.client[:]
        view.block = True
        view.execute(BASELINE)

        def ours() -> float:
            run = session.train(cell, steps=args.steps, global_batch=args.global_batch, show=lambda _: None)
            run.wait()
            times = [m["time"] for m in run.metrics()]
            return (args.steps - warm) / (times[-1] - times[warm - 1])

        def plain() -> float:
            port = harness.free_port()
            results = [
                session.client[rank].apply_async(
                    _call, cell, rank, args.ranks, port, args.steps, args.global_batch, warm,
                    args.batch,
                )
                for rank in range(args.ranks)
            ]
            return min(result.get() for result in results)

        ours(), plain()  # both once for warming up
        a, b = harness.in_turn(args.rounds, ours, plain)
    print(f"overhead, {args.model}, {args.ranks} ranks, global batch {args.global_batch}: {harness.machine()}")
    print(f"  %%ft_train          {harness.spread(a, ' steps/s', 1)}")
    print(f"  hand-written DDP{'+batch' if args.batch else '':6}{harness.spread(b, ' steps/s', 1)}")
    print(f"  ratio, round by round  {harness.spread([x / y for x, y in zip(a, b)])}   goal: 0.97")


def _call(*args):
    return baseline(*args)  # noqa: F821  (defined on the engine by BASELINE)


if __name__ == "__main__":
    main()
