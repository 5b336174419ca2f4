"""What a case describes, trained in plain torch on one process, in whole batches: what every layout has to come to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers.conformance.cases import Case, having
from helpers.conformance.training import Steps, batches_in, losses, make, snapshot, steps, watched
from helpers.ranks.job_trials import one_thread
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors, num_rows, split_batch
from orchestrator.state.optimizers import AVERAGE
from orchestrator.strategies.update.job_optimizer import scheduler_of
from orchestrator.user_code.callbacks import set_current_step
from orchestrator.worker.data.batches import Share


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank saw, the averages of the weights that it would save, and the model of a plain loop."""

    steps: Steps
    averages: dict[str, Tensor]
    model: nn.Module | None = None


def trained(rank: int, case: Case, want_grad_norm: bool) -> Seen:
    """Train ``case`` on this rank."""
    strategy = make(case, rank)
    seen = watched(strategy, steps(strategy, want_grad_norm=want_grad_norm))
    state = strategy.capture(step=0, samples_consumed=0, into=None)
    return Seen(steps=seen, averages={} if state is None else averages(state.optimizer))


def averages(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The averages in the optimizer's part of a state, by parameter."""
    return {path.removesuffix(f"/{AVERAGE}"): t for path, t in state.items() if path.endswith(f"/{AVERAGE}")}


def plain_losses(job: Job, *, batch: int, steps: int, seed: int = 0) -> dict[int, float]:
    """The loss of each step of a plain loop on one thread."""
    return numbered(plainly(job, batch=batch, steps=steps, seed=seed))


def numbered(seen: Seen) -> dict[int, float]:
    """The loss by step."""
    return dict(enumerate(losses([seen.steps]).tolist(), 1))


def plainly(job: Job, *, batch: int, steps: int, seed: int = 0) -> Seen:
    """Train a job in a plain loop on one thread."""
    with one_thread():
        return trained_plainly(Case(job=job, train=having(steps=steps, global_batch_size=batch), seed=seed))


def trained_plainly(case: Case) -> Seen:
    """Train ``case`` without any of our code, but for the order of the samples."""
    job, train = case.job, case.train
    torch.manual_seed(case.seed)
    model = job.model().train()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    optimizer = job.optimizer(job.parameter_groups(named))
    share = Share(global_batch_size=train.global_batch_size, data_parallel_size=1, dp_rank=0, grad_accumulation=1)
    dataset: Any = job.dataset("train")
    epoch = len(dataset) / train.global_batch_size if hasattr(dataset, "__len__") else None
    scheduler = scheduler_of(job, optimizer, steps=train.steps, steps_per_epoch=epoch)
    seen = Steps(loss_sums=[], weights=[], norms=[], skipped=[], metrics=[], model={})
    kept: dict[str, Tensor] = {}
    for step, (batch,) in enumerate(batches_in(job, case.seed, share, range(1, train.steps + 1)), 1):
        set_current_step(step)
        inputs, target = split_batch(batch)
        output = job.forward(model, inputs)
        loss = job.loss(output, target)
        optimizer.zero_grad()
        loss.backward()
        weight = job.weight(target)
        weight = num_rows(target) if weight is None else int(weight)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        skipped = train.on_nonfinite == "skip" and not bool(norm.isfinite())
        with torch.no_grad():
            metrics = {
                name: float(value)
                for name, value in job.train_metrics(map_tensors(Tensor.detach, output), target).items()
            }
        seen.loss_sums.append(float(loss.detach()) * weight)
        seen.weights.append(weight)
        seen.norms.append(float(norm))
        seen.skipped.append(skipped)
        seen.metrics.append(metrics)
        if skipped:
            continue
        if train.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, train.clip_norm)
        if train.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, train.clip_value)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if (decay := train.ema_decay) is not None:
            now = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone() for name, p in named}
            kept = {name: decay * kept.get(name, p) + (1 - decay) * p for name, p in now.items()}
    seen.model.update(snapshot(model))
    return Seen(steps=seen, averages=kept, model=model)
