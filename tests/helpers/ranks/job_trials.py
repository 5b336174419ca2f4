"""A job tried out by itself: checked, trained and evaluated in this process."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from helpers.ranks.batches import ALONE, HERE, opened
from orchestrator.config.job_loader import load_job
from orchestrator.config.schema import JobSpec
from orchestrator.job import Job
from orchestrator.model.batch import first_rows, split_batch
from orchestrator.worker.data.batches import EvalBatches, Sampling, train_batches


def errors(target: str, **fields: Any) -> list[str]:
    found: list[str] = []
    load_job(JobSpec(target=target, fields=fields), found)
    return found


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more threads, and lose much to them where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def trained(job: Job, *, steps: int, batch: int, seed: int = 0) -> tuple[nn.Module, list[float]]:
    """The model after ``steps`` steps, and the loss of each."""
    torch.manual_seed(seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer, steps)
    losses = []
    for [read] in train_batches(
        opened(job.dataset("train"), 0),
        Sampling(seed=seed),
        replace(ALONE, global_batch_size=batch),
        replace(HERE, collate=job.collate),
        samples_consumed=0,
        steps=steps,
    ):
        inputs, target = split_batch(read)
        loss = job.loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return model, losses


@one_thread()
def accuracy(job: Job, model: nn.Module) -> float:
    """The part of the validation set's units that ``model`` has right."""
    right, total = 0.0, 0.0
    for (inputs, target), valid in EvalBatches(
        job.dataset("val"), replace(HERE, collate=job.collate), batch_size=64, data_parallel_size=1, dp_rank=0
    ):
        inputs, target = first_rows(inputs, valid), first_rows(target, valid)
        with torch.no_grad():
            right += float(job.metrics(model(inputs), target)["accuracy"])
        weight = job.weight(target)
        total += valid if weight is None else float(weight)
    return right / total
