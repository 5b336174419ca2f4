"""The optimizer of a job, for the whole model or for a part of it, its schedule, and what is special about its class.

Some optimizers ask for the loss at several points (:class:`Closure`), such as ``LBFGS``. Some have ``train()`` and
``eval()``, between which the parameters change, such as schedule-free ones: a checkpoint has the weights of ``eval()``,
because those are evaluated and exported, and as a part of the optimizer's state those of ``train()``, so that a resume
is exact. What ranks send each other stays in training mode.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from orchestrator.compat.torch import DataDependentOutputException, FakeTensor, changes_step, pytree, version_of
from orchestrator.config.schema import Config, StrategyConfig, TrainConfig
from orchestrator.config.text import to_cli
from orchestrator.job import Job, has_steering
from orchestrator.state.optimizer_state import optimizers_in
from orchestrator.state.optimizers import AnyOptimizer, Schedule
from orchestrator.strategies.data.datasets import DatasetError
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of, needs_closure


def optimizer_of(job: Job, model: nn.Module) -> Optimizer:
    """Return the optimizer of the trained parameters of ``model``."""
    return _made(job, _groups_of(job, model))


def optimizer_of_part(job: Job, whole: nn.Module, part: nn.Module) -> Optimizer:
    """Return the optimizer of a part of the model, with all groups of the whole: some may be empty.

    The job sees the parameters of the whole model, so that its groups and its rates do not depend on the part.

    Args:
        whole: the whole model, which may be of fake tensors.
        part: a module with some of its parameters, or with shards of them, under the model's own names.

    Raises:
        JobError: the optimizer depends on values that the whole model does not have.
    """
    own = dict(part.named_parameters(remove_duplicate=False))
    replaced: dict[Tensor, nn.Parameter | None] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        replaced[parameter] = own.get(name, replaced.get(parameter))
    lacking = "of which each worker has only a part"
    remedy = "let it depend on names and shapes alone, or use strategy=ddp"
    try:
        optimizer = optimizer_of(job, whole)
    except DataDependentOutputException as e:
        raise JobError(f"job.optimizer reads values of parameters, {lacking}; {remedy}") from e
    _take_part(optimizer, replaced)
    kept = pytree.tree_leaves([optimizer.param_groups, *optimizer.state.values()])
    if any(isinstance(value, FakeTensor) for value in kept):
        what = f"{kind_of(optimizer)} that keeps values of parameters"
        raise JobError(f"job.optimizer returns {what}, {lacking}; {remedy}")
    return optimizer


def schedule_of(
    job: Job, optimizers: Sequence[Optimizer], train: TrainConfig, *, steps_per_epoch: float | None
) -> Schedule | None:
    """Return the schedule of the learning rates of ``optimizers``; None if all are constant."""
    make: Callable[..., LRScheduler | None] = functools.partial(scheduler_of, job)
    if train.lr_range is not None:
        make = functools.partial(rising, *train.lr_range)
    made = Schedule(optimizers, make, steps=train.steps, steps_per_epoch=steps_per_epoch)
    return made if made.label or has_steering(job) else None


def scheduler_of(job: Job, optimizer: Optimizer, *, steps: int, steps_per_epoch: float | None) -> LRScheduler | None:
    """Return the schedule of the learning rates of ``optimizer``; None if they are constant.

    Args:
        optimizer: an optimizer of the job.
        steps: the number of updates in the run.
        steps_per_epoch: the number of updates in an epoch; None if it is not known.

    Raises:
        DatasetError: the job needs ``steps_per_epoch``, and it is not known.
    """
    argument = inspect.signature(job.scheduler).parameters.get("steps_per_epoch")
    if argument is None:
        return job.scheduler(optimizer, steps)
    if steps_per_epoch is not None:
        by_epochs: Any = job.scheduler
        return cast("LRScheduler | None", by_epochs(optimizer, steps, steps_per_epoch=steps_per_epoch))
    if argument.default is argument.empty:
        raise DatasetError(
            "job.scheduler takes steps_per_epoch, and job.dataset('train') returns a stream that does not tell its "
            "length: give the stream __len__, or the argument a default, or leave it out"
        )
    return job.scheduler(optimizer, steps)


def rising(
    first: float, last: float, optimizer: Optimizer, *, steps: int, steps_per_epoch: float | None = None
) -> LRScheduler:
    """Return a schedule by which the rate of the first group rises exponentially, with the others in proportion."""
    groups = optimizer.param_groups
    scale = first / float(groups[0]["lr"]) if groups[0]["lr"] else 1.0
    for group in groups:
        group["lr"] = group["initial_lr"] = scale * float(group["lr"]) or first
    return LambdaLR(optimizer, lambda update: (last / first) ** (update / max(1, steps - 1)))


def check_optimizer(job: Job, model: nn.Module, config: Config) -> list[str]:
    """Make the optimizer and its schedule, for a model that may have no values, to see whether they can be used.

    Returns:
        Why this strategy cannot use them.

    Raises:
        JobError: none can. Any other error may come from the missing values; a worker reports it.
    """
    train = config.train
    try:
        optimizer = optimizer_of(job, model)
        scheduler_of(job, optimizer, steps=train.steps, steps_per_epoch=float(train.steps))
    except JobError:
        raise
    except Exception:
        return []
    return closure_errors(optimizer, train, config.strategy) if needs_closure(optimizer) else []


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are not frozen, with their names."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _groups_of(job: Job, model: nn.Module) -> list[Any]:
    """Return the parameters of ``model`` as the optimizer takes them.

    Raises:
        JobError: there are none to train, or a group has none.
    """
    if not (trained := trained_parameters(model)):
        frozen = any(True for _ in model.parameters())
        what = "whose parameters are all frozen; unfreeze some" if frozen else "which has no parameters to train"
        raise JobError(f"job.model returns {kind_of(model)}, {what}")
    groups = list(job.parameter_groups(trained))
    if any(isinstance(group, Mapping) and "params" not in group for group in groups):
        raise JobError("job.parameter_groups returns a dict without 'params'; put the parameters of the group there")
    return groups


def _made(job: Job, entries: Iterable[Any]) -> Optimizer:
    """Return the optimizer of parameters or groups.

    Raises:
        JobError: an optimizer of torch holds other tensors, such as the parameters of another model.
    """
    listed = [{**e, "params": _listed(e["params"])} if isinstance(e, Mapping) else e for e in entries]
    optimizer = job.optimizer(listed)
    if type(optimizer).__module__.startswith("torch.optim."):  # others may hold copies
        parts = [part for e in listed for part in (e["params"] if isinstance(e, Mapping) else [e])]
        given = {part[1] if isinstance(part, tuple) else part for part in parts}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if foreign := [parameter for parameter in held if parameter not in given]:
            what = f"{kind_of(optimizer)} of {kind_of(foreign[0])} that it was not given"
            raise JobError(f"job.optimizer returns {what}; make it of its argument")
    return optimizer


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _take_part(optimizer: Optimizer, replaced: Mapping[Tensor, nn.Parameter | None]) -> None:
    """Replace the parameters of an optimizer in its groups, which stay the same lists, and in its state."""
    for group in optimizer.param_groups:
        parameters = [replaced.get(parameter, parameter) for parameter in group["params"]]
        group["params"][:] = [p for p in parameters if p is not None]
        if names := group.get("param_names"):
            group["param_names"] = [name for name, p in zip(names, parameters, strict=True) if p is not None]
    state = {p: optimizer.state.pop(p) for p in replaced if p in optimizer.state}
    optimizer.state.update({own: values for p, values in state.items() if (own := replaced[p]) is not None})
    if isinstance(optimizer, Adagrad) and optimizer.state:  # which does not wait for the first gradient
        first = optimizer.defaults["initial_accumulator_value"]
        optimizer.state.update(Adagrad(list(optimizer.state), initial_accumulator_value=first).state)


class Closure:
    """Returns the loss of a step's batch at the present weights, and leaves its gradients.

    What an optimizer finds in its first call has been computed already, unless it has changed weights or gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], loss: Tensor, again: Callable[[], Tensor]):
        """Begin with the ``loss`` whose gradients the parameters have; ``again``: adds new ones and returns theirs."""
        self._parameters = parameters
        self._again = again
        self._loss = loss
        self._versions = self._present()

    def __call__(self) -> Tensor:
        if self._present() != self._versions:
            for parameter in self._parameters:
                parameter.grad = None
            with torch.enable_grad():
                self._loss = self._again()
            self._versions = self._present()
        return self._loss

    def _present(self) -> list[tuple[int, int | None]]:
        return [(version_of(p), None if p.grad is None else version_of(p.grad)) for p in self._parameters]


def closure_errors(optimizer: Optimizer, train: TrainConfig, options: StrategyConfig) -> list[str]:
    """Return why the run cannot have an ``optimizer`` that needs a closure."""
    what = f"job.optimizer returns {kind_of(optimizer)}, whose step() needs a closure"
    if options.name not in ("single", "ddp"):
        return [
            f"strategy={options.name}: {what}, which needs the whole model on each worker; use strategy=single or "
            "strategy=ddp"
        ]
    powersgd = getattr(options, "comm_hook", "none") == "powersgd"
    refused = {
        "train.clip_norm": (train.clip_norm is not None, train.clip_norm, "null"),
        "train.clip_value": (train.clip_value is not None, train.clip_value, "null"),
        "train.precision": (train.precision == "fp16", "fp16", "fp32"),
        "train.on_nonfinite": (train.on_nonfinite == "skip", "skip", "stop"),
        "strategy.comm_hook": (powersgd, "powersgd", "none"),
    }
    return [
        f"{key}={to_cli(value)}: {what}, and compares gradients at several points, which this key would change; set it "
        f"to {remedy}"
        for key, (is_set, value, remedy) in refused.items()
        if is_set
    ]


ELEMENTWISE: tuple[type[Optimizer], ...] = (
    SGD,
    Adam,
    AdamW,
    Adagrad,
    Adadelta,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    ASGD,
)
"""Optimizers that update each element of a tensor by itself, so that the shards of a tensor can be updated alone."""


def own_step_errors(key: str, optimizer: Optimizer, *, otherwise: str) -> list[str]:
    """Return an error if the job has changed the step of ``optimizer``.

    Args:
        key: what divides tensors, as typed on the command line.
        otherwise: what to set for any optimizer.
    """
    if not changes_step(optimizer):
        return []
    return [
        f"{key}: job.optimizer gives {type(optimizer).__name__} hooks or a step of its own, which would see only "
        f"shards of tensors; change gradients in Job.loss, or {otherwise}"
    ]


MODE = "optimizer_mode"
"""The entry of ``meta`` of a state that was taken in evaluation mode."""
TRAINED = "param_train"
"""The key of the weights of ``train()`` in the optimizer state of a parameter."""


def with_modes(optimizer: AnyOptimizer) -> list[Any]:
    """Return the optimizers that have both modes."""
    methods = ("train", "eval")
    return [o for o in optimizers_in(optimizer) if all(callable(getattr(o, method, None)) for method in methods)]


def to_training(optimizer: AnyOptimizer) -> None:
    """Set optimizers that have modes to training."""
    for one in with_modes(optimizer):
        one.train()


@contextlib.contextmanager
def evaluation_weights(optimizer: AnyOptimizer) -> Iterator[None]:
    """Set optimizers that have modes to evaluation, and give the parameters exactly their own values at the end.

    Needs memory for a copy of the parameters.
    """
    modal = with_modes(optimizer)
    own = {p: p.detach().clone() for one in modal for group in one.param_groups for p in group["params"]}
    for one in modal:
        one.eval()
    try:
        for one in modal:
            for parameter in (p for group in one.param_groups for p in group["params"]):
                one.state[parameter][TRAINED] = own[parameter]
        yield
    finally:
        _take_back(modal)


@contextlib.contextmanager
def loading_in_mode(optimizer: AnyOptimizer, mode: Any) -> Iterator[None]:
    """Load a state in the mode in which it was taken, and go on in training mode.

    Args:
        optimizer: whose state and parameters are loaded.
        mode: what the state has as ``MODE``.
    """
    modal = with_modes(optimizer) if mode is not None else []
    for one in modal:
        one.eval()
    yield
    _take_back(modal)


@torch.no_grad()
def _take_back(modal: list[Any]) -> None:
    """Set optimizers to training, with exactly the weights that are in their state."""
    for one in modal:
        one.train()
        for parameter, values in list(one.state.items()):
            if isinstance(values, dict) and (own := values.pop(TRAINED, None)) is not None:
                parameter.copy_(own)
                if not values:  # the optimizer has not made its own yet
                    del one.state[parameter]


def fuse_updates(optimizer: Optimizer, *, sparse: Iterable[Tensor] = ()) -> None:
    """Let ``optimizer`` update its parameters with one kernel for each group that allows it.

    A group is left as it is if the job has chosen how it is updated (``fused``, ``foreach``, ``capturable`` or
    ``differentiable``), if the class has no such kernel for one of its parameters, or if these are on several devices.

    Args:
        optimizer: the optimizer, before its first update.
        sparse: the parameters whose gradients are sparse.
    """
    excluded = set(sparse)
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("capturable") or group.get("differentiable")
        if "fused" not in group or group["fused"] is not None or chosen:
            continue
        group["fused"] = (
            all(
                parameter.device == group["params"][0].device
                and parameter.is_floating_point()
                and parameter not in excluded
                for parameter in group["params"]
            )
            or None
        )


def sparse_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of which ``DistributedDataParallel`` expects sparse gradients."""
    return [
        parameter
        for root in modules
        for module in root.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for parameter in module.parameters(recurse=False)
    ]
