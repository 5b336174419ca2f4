"""A hand-written ``DistributedDataParallel`` script for torchrun: with gloo, or with NCCL and autocast on GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from plain_loop import GpuStepTimer
from settings import StepTimer, parse
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from orchestrator.strategies.update.job_optimizer import fuse_updates


def replicated(model: nn.Module) -> nn.Module:
    """Return a model whose gradients are averaged over the ranks."""
    return DistributedDataParallel(model, gradient_as_bucket_view=torch.cuda.is_available())


def main(distributed: Callable[[nn.Module], nn.Module], *, together: bool = False) -> None:
    """Train; ``distributed`` wraps the model, on its device, for all ranks. They train on the same if ``together``."""
    settings = parse()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    on_gpu = torch.cuda.is_available()
    index = 0 if settings.share_gpu else int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    if settings.share_gpu:  # NCCL allows it on different hosts, which it tells apart by this name
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rank, replicas = dist.get_rank(), 1 if together else dist.get_world_size()
    torch.manual_seed(0)
    job = settings.make_job()
    model = distributed(job.model().to(device))
    optimizer = job.optimizer(model.parameters())
    if on_gpu:
        fuse_updates(optimizer)  # the kernels that the orchestrator chooses
    scheduler = job.scheduler(optimizer, settings.steps)
    dataset = job.dataset("train")
    sampler: DistributedSampler[object] = DistributedSampler(
        dataset, num_replicas=replicas, rank=rank % replicas, shuffle=True, drop_last=True
    )
    loader = DataLoader(
        dataset,
        batch_size=settings.global_batch_size // replicas,
        sampler=sampler,
        drop_last=True,
        pin_memory=on_gpu,
        num_workers=settings.loading_processes,
        persistent_workers=settings.loading_processes > 0,
    )
    timer = GpuStepTimer() if on_gpu else StepTimer()
    epoch = step = 0
    while step < settings.steps:
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            inputs, target = inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext():
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
    main(replicated)
