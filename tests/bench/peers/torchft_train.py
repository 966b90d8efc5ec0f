"""DDP with torchft: every rank is a replica group of one, under a torchrun of its own. Arguments: cell, directory.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000
    REPLICA_GROUP_ID=0 NUM_REPLICA_GROUPS=4 TORCHFT_LIGHTHOUSE=http://localhost:29510 \\
        torchrun --standalone --nproc-per-node 1 --max-restarts 10 torchft_train.py cell.py DIRECTORY

A lost replica is started again by its torchrun and gets the live state from another one; the others go on without
it. torchft's sampler gives each replica a fixed share of the data; what a lost one would have used is left out.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import job
import torchft
from torch.utils.data import DataLoader


def main(cell: str, directory: str) -> None:
    replica, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    names = job.build(cell)

    def load_state(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state, state_dict=state, min_replica_size=1,
        replica_id=f"replica_{replica}", timeout=timedelta(seconds=30),
    )  # fmt: skip
    model = torchft.DistributedDataParallel(manager, names["model"])
    optimizer = torchft.Optimizer(manager, names["optimizer"])
    sampler = torchft.DistributedSampler(
        names["dataset"], replica, replicas, group_rank=0, num_replicas=1, shuffle=True, seed=job.SEED
    )
    loader = DataLoader(names["dataset"], batch_size=job.GLOBAL_BATCH // replicas, sampler=sampler, drop_last=True)

    log = job.Log(directory, replica)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            before = manager.current_step()
            optimizer.zero_grad()
            loss = names["loss_fn"](model(inputs), target)
            loss.backward()
            optimizer.step()
            if manager.current_step() > before:
                log.committed(manager.current_step(), manager.num_participants())
        epoch += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
