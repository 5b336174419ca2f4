"""A hand-written pipeline of two ``torch.distributed.pipelining`` stages, for ``torchrun --nproc-per-node=2``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from settings import StepTimer, parse
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, RandomSampler

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


def main() -> None:
    settings = parse()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    job = settings.make_job()
    dataset = job.dataset("train")
    model = job.model()
    assert isinstance(model, nn.Sequential)
    cut = [name for name, _ in model.named_children()].index(settings.split)
    front, back = model[:cut], model[cut:]

    rows = settings.global_batch_size // settings.num_microbatches
    example, _ = next(iter(DataLoader(dataset, batch_size=rows)))
    with torch.no_grad():
        between = front(example)
        output = back(between)
    between.requires_grad_()  # otherwise the stages exchange no gradients
    stage = PipelineStage(
        front if first else back,
        stage_index=0 if first else 1,
        num_stages=2,
        device=torch.device("cpu"),
        input_args=(example if first else between,),
        output_args=(between if first else output,),
    )
    schedule = SCHEDULES[settings.schedule](stage, settings.num_microbatches, loss_fn=job.loss)
    optimizer = job.optimizer(stage.submod.parameters())
    scheduler = job.scheduler(optimizer, settings.steps)
    # Both ranks draw the same samples: the first needs the inputs, the second the targets.
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    loader = DataLoader(dataset, batch_size=settings.global_batch_size, sampler=sampler, drop_last=True)
    timer = StepTimer()
    step = 0
    while step < settings.steps:
        for inputs, target in loader:
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if first:
                schedule.step(inputs)
            else:
                schedule.step(target=target, losses=losses, return_outputs=False)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            step += 1
            if step % settings.log_every == 0 and losses:
                print(f"step {step} loss {torch.stack(losses).mean().item():.4f}", flush=True)
            timer.end_step()
            if step == settings.steps:
                break
    if first:
        timer.write(settings.result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
