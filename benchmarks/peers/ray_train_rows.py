"""DDP under Ray Train, with a dataset of Ray Data that ``streaming_split`` divides among the workers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

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
    shard = ray.train.get_dataset_shard("train")
    timer, step = StepTimer(), 0
    while step < settings.steps:
        for batch in shard.iter_torch_batches(
            batch_size=settings.global_batch_size // context.get_world_size(), drop_last=True, prefetch_batches=2
        ):
            loss = job.loss(job.forward(model, batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % settings.log_every == 0:
                ray.train.report({"step": step, "loss": loss.item()})
            timer.end_step()
            if step == settings.steps:
                break
    if context.get_world_rank() == 0:
        timer.write(settings.result)


def main() -> None:
    settings = parse()
    ray.init(address=settings.address)
    trainer = TorchTrainer(
        train_function,
        train_loop_config=asdict(settings),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=settings.workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="peer", storage_path=str(Path(settings.result).parent / "ray_results")),
        datasets={"train": settings.make_job().dataset("train")},
        dataset_config=DataConfig(datasets_to_split=["train"]),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
