"""DDP under Ray Train with ``FailureConfig``: all workers restart from the checkpoint when one dies."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from elastic import die_once, load, note_recovery, note_time, save
from settings import Settings, parse


def train_function(config: dict[str, Any]) -> None:
    """Train on one worker; Ray Train calls it on all of them."""
    settings = Settings(**config)
    folder = Path(settings.result).parent
    torch.set_num_threads(1)
    context = ray.train.get_context()
    torch.manual_seed(0)
    job = settings.make_job()
    model = ray.train.torch.prepare_model(job.model())
    optimizer = job.optimizer(model.parameters())
    resumed_at = step = load(folder, model.module, optimizer)
    batch_size = settings.global_batch_size // context.get_world_size()
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(job.dataset("train"), batch_size=batch_size, shuffle=True, drop_last=True)
    )
    while step < settings.steps:
        for inputs, target in loader:
            if context.get_world_rank() == 1 and settings.kills(step + 1):
                die_once(folder, step + 1)
            optimizer.zero_grad()
            job.loss(model(inputs), target).backward()
            optimizer.step()
            step += 1
            if context.get_world_rank() == 0:
                note_recovery(folder, resumed_at)
                note_time(folder, step, settings.steps)
                if step % settings.checkpoint_every == 0:
                    save(folder, model.module, optimizer, step)
            if step == settings.steps:
                break


def main() -> None:
    settings = parse()
    if settings.address != "local":
        ray.init(address=settings.address)
    TorchTrainer(
        train_function,
        train_loop_config=asdict(settings),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=settings.workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="peer",
            storage_path=str(Path(settings.result).parent / "ray_results"),
            failure_config=FailureConfig(max_failures=20),
        ),
    ).fit()


if __name__ == "__main__":
    main()
