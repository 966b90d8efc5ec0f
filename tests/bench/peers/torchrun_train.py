"""DDP for torchrun: a checkpoint every 20 steps, loaded at the start. Arguments: cell, directory.

    torchrun --standalone --nproc-per-node 4 --max-restarts 10 torchrun_train.py cell.py DIRECTORY

torchrun restarts all ranks when one is lost, with the same store. Gloo finds the addresses of the dead ranks in it and
the restarted job never forms a group, unless each attempt has keys of its own: that is what the PrefixStore is for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import job
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

CHECKPOINT_EVERY = 20


def main(cell: str, directory: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

    names = job.build(cell)
    model, optimizer = DistributedDataParallel(names["model"]), names["optimizer"]
    sampler = DistributedSampler(names["dataset"], seed=job.SEED)
    loader = DataLoader(names["dataset"], batch_size=job.GLOBAL_BATCH // world_size, sampler=sampler, drop_last=True)

    checkpoint, step = Path(directory) / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    log = job.Log(directory, rank)
    while True:
        epoch, skip = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for number, (inputs, target) in enumerate(loader):
            if number < skip:
                continue
            optimizer.zero_grad()
            loss = names["loss_fn"](model(inputs), target)
            loss.backward()
            optimizer.step()
            step += 1
            log.committed(step, world_size)
            if step % CHECKPOINT_EVERY == 0 and rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
