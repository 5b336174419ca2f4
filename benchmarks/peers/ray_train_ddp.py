"""DDP under Ray Train's ``TorchTrainer``, written as its documentation shows."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from settings import Settings, StepTimer, parse


def train_function(config: dict[str, Any]) -> None:
    """Train on one worker; Ray Train calls it on all of them."""
    settings = Settings(**config)
    torch.set_num_threads(1)
    context = ray.train.get_context()
    torch.manual_seed(0)
    job = settings.make_job()
    model = ray.train.torch.prepare_model(job.model())
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer, settings.steps)
    batch_size = settings.global_batch_size // context.get_world_size()
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(job.dataset("train"), batch_size=batch_size, shuffle=True, drop_last=True)
    )
    timer = StepTimer()
    epoch = step = 0
    while step < settings.steps:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, target in loader:
            loss = job.loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            step += 1
            if step % settings.log_every == 0:
                ray.train.report({"step": step, "loss": loss.item()})
            timer.end_step()
            if step == settings.steps:
                break
        epoch += 1
    if context.get_world_rank() == 0:
        timer.write(settings.result)


def main() -> None:
    settings = parse()
    if settings.address != "local":
        ray.init(address=settings.address)
    elif not settings.dashboard:
        ray.init(include_dashboard=False)
    trainer = TorchTrainer(
        train_function,
        train_loop_config=asdict(settings),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=settings.workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="peer", storage_path=str(Path(settings.result).parent / "ray_results")),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
