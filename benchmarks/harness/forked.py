"""Training in forked processes with gloo, without Ray, for benchmarks that look inside a strategy."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from orchestrator.config.compose import compose
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.strategies import registry
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.rank_context import Context
from orchestrator.worker.data.batches import Sampling, Share, train_batches
from orchestrator.worker.data.data_loader import Loading

TIMEOUT_S = 300

WARM_UP_STEPS = 5

T = TypeVar("T")

_context = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One rank's steps after warm-up: their durations in seconds, their losses, and the rank's metrics."""

    seconds: Sequence[float]
    losses: Sequence[float]
    metrics: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


def train(
    overrides: Sequence[str], job: Job, function: Callable[[Strategy, Config], T], *, timeout_s: float = TIMEOUT_S
) -> list[T]:
    """Call ``function`` on every rank and return the results, in the order of the ranks.

    The function receives the strategy that ``overrides`` choose, ready to train, and the configuration.

    Raises:
        RuntimeError: The overrides are wrong, or a process failed or took longer than ``timeout_s``.
    """
    errors: list[str] = []
    config, _ = compose(overrides, errors, registry.config_class)
    if config is None or errors:
        raise RuntimeError("\n".join(errors))
    node = Node(node_id="here", name="here", cpus=64, gpus=0)
    plan = make_plan(config, registry.load(config.strategy.name), (node,), oversubscribe_cpus=True)
    results: SimpleQueue[tuple[int, T]] = _context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        store = f"{folder}/store"  # a file, because a TCP store would start threads before the fork
        processes = [
            _context.Process(target=_run, args=(rank, config, plan, job, function, store, results))
            for rank in range(plan.world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    for process in processes:
        process.kill()
    if failed:
        raise RuntimeError(f"{' '.join(overrides)}: ranks {failed} failed")
    return [result for _, result in sorted((results.get() for _ in processes), key=lambda pair: pair[0])]


def time_steps(strategy: Strategy, config: Config) -> StepTimes:
    """Run all steps and time those after warm-up; a function for :func:`train`."""
    context, job, settings = strategy.context, strategy.job, config.train
    batches = train_batches(
        job.dataset("train"),
        Sampling(seed=config.seed),
        Share(
            global_batch_size=settings.global_batch_size,
            data_parallel_size=context.mesh.data_parallel_size,
            dp_rank=context.dp_rank,
            grad_accumulation=1,
        ),
        Loading(collate=job.collate, num_workers=0, pin_memory=False, timeout_s=TIMEOUT_S),
        samples_consumed=0,
        steps=settings.steps,
        read=strategy.traits.reads_data,
    )
    seconds, losses = [], []
    for step, batch in enumerate(batches):
        if step == WARM_UP_STEPS:
            with strategy.quiesced():
                dist.barrier()
            strategy.metrics()  # discard the warm-up's
        start = time.perf_counter()
        result = strategy.train_step(batch, want_grad_norm=False, want_metrics=False)
        seconds.append(time.perf_counter() - start)
        losses.append(float(result.loss_sum) / max(1.0, float(result.weight)))
    metrics = {name: metric.value for name, metric in strategy.metrics().items()}
    with strategy.quiesced():
        return StepTimes(seconds=seconds[WARM_UP_STEPS:], losses=losses[WARM_UP_STEPS:], metrics=metrics)


def _run(
    rank: int,
    config: Config,
    plan: Plan,
    job: Job,
    function: Callable[[Strategy, Config], Any],
    store: str,
    results: SimpleQueue[Any],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, plan.world_size), rank=rank, world_size=plan.world_size)
    context = Context(
        mesh=plan.mesh,
        global_rank=rank,
        device=torch.device("cpu"),
        seed=config.seed,
        train=config.train,
        options=config.strategy,
        collective_timeout_s=config.cluster.collective_timeout_s,
        pipeline=plan.pipeline,
        num_devices=plan.devices_per_worker,
    )
    strategy = registry.load(config.strategy.name).create(context, job)
    strategy.setup(job.dataset("train"))
    strategy.attach()
    strategy.sync_initial_state()
    results.put((rank, function(strategy, config)))
    strategy.close()
    dist.destroy_process_group()
