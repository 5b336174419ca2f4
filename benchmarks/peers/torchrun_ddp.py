"""A hand-written ``DistributedDataParallel`` script for ``torchrun --nproc-per-node=2``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from settings import StepTimer, parse
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    settings = parse()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    job = settings.make_job()
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer, settings.steps)
    dataset = job.dataset("train")
    sampler: DistributedSampler[object] = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=settings.global_batch_size // world_size, sampler=sampler, drop_last=True)
    timer = StepTimer()
    epoch = step = 0
    while step < settings.steps:
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = job.loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            step += 1
            if step % settings.log_every == 0 and rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            timer.end_step()
            if step == settings.steps:
                break
        epoch += 1
    if rank == 0:
        timer.write(settings.result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
