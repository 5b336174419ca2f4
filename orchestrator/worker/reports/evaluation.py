"""Evaluation of the model on this rank's share of the data, and what all ranks have measured together."""

from __future__ import annotations

import functools
import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators
from orchestrator.compat.modules import own_buffers, own_parameters
from orchestrator.compat.torch import version_of
from orchestrator.config.eval_splits import VAL
from orchestrator.config.text import did_you_mean
from orchestrator.job import Job
from orchestrator.protocol.core_metrics import evaluation_metrics
from orchestrator.protocol.messages import EvalPoint
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import gather_json, gather_states
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.measure.metric_objects import MOST_BYTES, MetricObjects
from orchestrator.user_code.errors import place_of, user_frames
from orchestrator.worker.control.control import CutOff, Outbox

Returned = TypeVar("Returned")


class Interruptible(Protocol):
    """Makes a call to code of the user, and may cut it off."""

    def __call__(self, call: Callable[[], Returned], /) -> Returned: ...


def run(call: Callable[[], Returned], /) -> Returned:
    """Return what ``call()`` returns. It is never cut off."""
    return call()


def cut_off_together(call: Callable[[], None], strategy: Strategy, device: torch.device) -> None:
    """Make a call in which this rank may do more than others. A collective operation.

    Raises:
        CutOff: the call of some rank was cut off.
        Exception: whatever ``call`` raises.
    """
    is_cut = False
    try:
        call()
    except CutOff:
        is_cut = True
    if (world_size := strategy.context.mesh.world_size) > 1:
        is_cut = any(gather_json(is_cut, world_size=world_size, device=device))
        strategy.hooks.confirm()
    if is_cut:
        raise CutOff


class MetricError(ValueError):
    """No evaluation reports a metric that the run follows. The text explains it without a traceback."""


def evaluate(
    strategy: Strategy,
    batches: Iterable[tuple[Any, int]],
    *,
    step: int,
    device: torch.device,
    outbox: Outbox,
    split: str = VAL,
    perplexity: bool = False,
    trial: bool = False,
    interruptible: Interruptible = run,
) -> EvalPoint:
    """Return the sums over this rank's samples of ``split`` after ``step``. The driver adds up the ranks.

    With metric objects, a collective operation.

    Args:
        batches: pairs of a batch and the number of its valid leading rows, as ``worker.data.EvalBatches`` yields them.
        perplexity: whether to report it.
        outbox: is told of the progress of predictions, which may take any time, as objects may.
        trial: whether only a few samples are evaluated, of which an object may be unable to compute anything.
        interruptible: makes the calls of predictions.

    Raises:
        CutOff: the predictions of a rank were cut off.
    """
    loss_sum, weight = torch.zeros((), device=device), torch.zeros(())
    sums: dict[str, torch.Tensor] = {}
    objects, predicts = MetricObjects(strategy.job, split, device), strategy.job.makes_predictions
    strategy.hooks.update_metrics = objects.update if objects and not predicts else None
    for batch, valid in batches:
        if valid == 0 and not strategy.traits.evaluates_padding:
            continue
        result = strategy.evaluate(batch, valid)
        loss_sum += result.loss_sum
        weight = weight + result.weight  # on a GPU if that is there: reading it would wait for every batch
        for name, value in result.metrics.items():
            sums[name] = sums[name] + value if name in sums else value
    strategy.hooks.update_metrics = None
    values: dict[str, float] | None = {}
    if objects:
        with outbox.within("callback"):
            if predicts:
                most = 1 if trial else None
                predicted = functools.partial(
                    predict, strategy, split, objects.update, device=device, most=most, progress=outbox.progress
                )
                cut_off_together(functools.partial(predicted, interruptible=interruptible), strategy, device)
            taken = [*sums, *(["perplexity"] if perplexity else [])]
            values = _values(strategy, objects, taken, device=device, trial=trial)
    return EvalPoint(
        step=step,
        split=split,
        time=time.time(),
        loss_sum=float(loss_sum),
        weight=float(weight),
        sums={name: float(value) for name, value in sums.items()},
        perplexity=perplexity,
        values=values,
    )


def _values(
    strategy: Strategy, objects: MetricObjects, taken: Sequence[str], *, device: torch.device, trial: bool
) -> dict[str, float] | None:
    """Join the objects of all ranks on rank 0, and return their values there; empty on the others.

    Args:
        taken: the names of the other metrics that this rank knows.
    """
    rank, world_size = strategy.context.global_rank, strategy.context.mesh.world_size
    if world_size > 1:
        own = TrainState(meta={"taken": taken}, model={**objects.packed(most=MOST_BYTES // world_size)}, optimizer={})
        states = gather_states(own, ranks=range(world_size), rank=rank, device=device)
        strategy.hooks.confirm()
        if states is None:
            return {}
        taken = [name for state in states for name in state.meta["taken"]]
        objects.join([state.model for state in states])

    def warn(name: str, error: Exception) -> None:
        strategy.hooks.warn(
            f"job.metric_objects: {name!r} cannot be computed in a trial with a few samples: "
            f"{error_with_place(error)}; if that happens in an evaluation, the run ends"
        )

    return objects.values(taken, failed=warn if trial else None)


def metrics_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of an evaluation by name, from the points of all ranks as ``gather_json`` returns them."""
    return evaluation_metrics([_point_of(part) for part in parts])


def value_of(metric: str, metrics: Mapping[str, float], *, key: str) -> float:
    """Return one of the ``metrics`` of an evaluation. Raises MetricError; ``key``: what asks for it."""
    if metric not in metrics:
        raise MetricError(f"{key}: no evaluation reports it; {did_you_mean(metric, metrics)}")
    return metrics[metric]


def _point_of(data: Mapping[str, Any]) -> EvalPoint:
    """Return the point that ``dataclasses.asdict`` and JSON have made plain."""
    ema = None if data["ema"] is None else _point_of(data["ema"])
    return EvalPoint(**{**data, "ema": ema, "others": tuple(map(_point_of, data["others"]))})


def predict(
    strategy: Strategy,
    split: str,
    update: Callable[[Any, Any], None],
    *,
    device: torch.device,
    most: int | None,
    progress: Callable[[], None],
    interruptible: Interruptible = run,
) -> None:
    """Let the job predict this rank's share of a ``split``. All ranks call this at the same step.

    Args:
        update: receives each prediction and its target.
        most: the number of predictions; None for all.
        progress: called after each of them.
        interruptible: makes the call.

    Raises:
        ModelChangedError: the job has changed the model.
        Exception: whatever the job raises.
    """
    job, model = strategy.job, strategy.own_model
    part, parts = strategy.context.dp_rank, strategy.context.mesh.data_parallel_size
    if strategy.traits.divides_model:
        weights = strategy.gather_model()
        strategy.hooks.confirm()
        if weights is not None:
            model, part, parts = rebuilt(job, weights), 0, 1
    if model is None:
        return
    whole: nn.Module = model

    def predicted() -> None:
        whole.eval()
        for output, target in itertools.islice(job.predictions(whole, split, part, parts), most):
            update(output, target)
            progress()

    call_without_effect(functools.partial(interruptible, predicted), method="predictions", model=whole, device=device)


def rebuilt(job: Job, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the job's model on the CPU with these ``weights``."""
    model = job.model()
    model.load_state_dict(weights)
    return model


class ModelChangedError(RuntimeError):
    """A method that may only look at the model has changed it."""


def call_without_effect(
    call: Callable[[], Returned], *, method: str, model: nn.Module | None, device: torch.device
) -> Returned:
    """Return what ``call()`` returns, and leave the training as it was.

    Gradients are not recorded. The random generators and the modes of the modules are restored afterwards.

    Args:
        method: the method, such as ``job.sample``, for the message.
        model: the model that it may look at; None if it has none.
        device: the device of the model.

    Raises:
        ModelChangedError: a parameter or a buffer was changed.
        Exception: whatever ``call`` raises.
    """
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    before = _versions(model)
    try:
        with kept_generators(device), torch.no_grad():
            return call()
    finally:
        for module, training in modes:
            module.training = training
        if (changed := _first_change(before, model)) is not None:
            remedy = "look at a copy of it"
            if changed.startswith("the buffer"):
                remedy += "; a forward pass in training mode changes buffers, so call model.eval() before one"
            raise ModelChangedError(
                f"{method} changed {changed}; it runs on one rank only, so the ranks would train different models. "
                f"Change the model in Job.training_step, or {remedy}"
            )


def error_with_place(error: Exception) -> str:
    """Return the last line of the error's traceback, and the place in the user's code where it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    frames = user_frames(error)
    return f"{text} ({place_of(frames[-1])}, in {frames[-1].tb_frame.f_code.co_name})" if frames else text


TensorVersion = tuple[int, int, bool]
"""The version, the address and ``requires_grad`` of a tensor."""


def _versions(model: nn.Module | None) -> dict[Tensor, TensorVersion]:
    """Return what identifies the present state of every parameter and buffer, without reading its values."""
    return {
        tensor: (version_of(tensor), tensor.data_ptr() if tensor.layout == torch.strided else 0, tensor.requires_grad)
        for module in ([] if model is None else model.modules())
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
        if tensor is not None
    }


def _first_change(before: Mapping[Tensor, TensorVersion], model: nn.Module | None) -> str | None:
    """Return what has changed in the model; None if nothing has."""
    after = _versions(model)
    if model is None or before == after:
        return None
    parameters = ((f"the parameter {name}", p) for name, p in model.named_parameters())
    buffers = ((f"the buffer {name}", b) for name, b in model.named_buffers())
    changed = (name for name, t in itertools.chain(parameters, buffers) if before.get(t) != after[t])
    return next(changed, "the set of parameters and buffers")
