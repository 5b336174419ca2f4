"""A hand-written training loop: on one GPU with autocast to bfloat16, or on the CPU if there is none."""

from __future__ import annotations

import contextlib
import itertools
import time

import torch
from settings import StepTimer, parse, write_timing
from torch.utils.data import DataLoader

from orchestrator.strategies.update.job_optimizer import fuse_updates


class GpuStepTimer:
    """The time at which the GPU completes each step."""

    def __init__(self) -> None:
        self._first_step_at = 0.0
        self._ends: list[torch.cuda.Event] = []

    def end_step(self) -> None:
        """Record the end of a step behind its kernels."""
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        if not self._ends:
            end.synchronize()
            self._first_step_at = time.time()
        self._ends.append(end)

    def write(self, path: str) -> None:
        """Write what :func:`write_timing` describes."""
        self._ends[-1].synchronize()
        write_timing(path, self._first_step_at, [a.elapsed_time(b) for a, b in itertools.pairwise(self._ends)])


def main() -> None:
    settings = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    job = settings.make_job()
    model = job.model().to(device)
    optimizer = job.optimizer(model.parameters())
    if on_gpu:
        fuse_updates(optimizer)  # the kernels that the orchestrator chooses
    scheduler = job.scheduler(optimizer, settings.steps)
    forward = torch.compile(model) if settings.compile else model
    loader = DataLoader(
        job.dataset("train"),
        batch_size=settings.global_batch_size,
        shuffle=True,
        drop_last=True,
        pin_memory=on_gpu,
        num_workers=settings.loading_processes,
        persistent_workers=settings.loading_processes > 0,
    )
    timer = GpuStepTimer() if on_gpu else StepTimer()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (inputs, target) in enumerate(itertools.islice(batches, settings.steps), 1):
        inputs, target = inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext():
            loss = job.loss(forward(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step % settings.log_every == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        timer.end_step()
    timer.write(settings.result)


if __name__ == "__main__":
    main()
