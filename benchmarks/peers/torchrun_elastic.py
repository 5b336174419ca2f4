"""DDP under ``torchrun --max-restarts``: all workers restart from the checkpoint when one dies."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))
from elastic import die_once, load, note_recovery, note_time, save
from settings import parse


def main() -> None:
    settings = parse()
    folder = Path(settings.result).parent
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    job = settings.make_job()
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters())
    resumed_at = step = load(folder, model.module, optimizer)
    dataset = job.dataset("train")
    sampler: DistributedSampler[object] = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=settings.global_batch_size // world_size, sampler=sampler, drop_last=True)
    while step < settings.steps:
        for inputs, target in loader:
            if rank == 1 and settings.kills(step + 1):
                die_once(folder, step + 1)
            optimizer.zero_grad()
            job.loss(model(inputs), target).backward()
            optimizer.step()
            step += 1
            if rank == 0:
                note_recovery(folder, resumed_at)
                note_time(folder, step, settings.steps)
                if step % settings.checkpoint_every == 0:
                    save(folder, model.module, optimizer, step)
            if step == settings.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
