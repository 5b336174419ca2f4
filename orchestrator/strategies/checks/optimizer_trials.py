"""Trials of the job's optimizer on the driver, with small parameters.

Does it continue from what its ``state_dict()`` says? A resume and a recovery have nothing else. Do the stages of a
pipeline, each with an optimizer of its own parameters, make the updates of the whole model? And may it update one
tensor at a time? Where workers have shards of tensors, an optimizer that is not known to be element-wise gets whole
ones, a few at a time (``update/whole_tensors.py``). So its update of a tensor must not depend on the others, nor on
random numbers, which differ between workers.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_on_cpu
from orchestrator.compat.modules import own_parameters
from orchestrator.compat.torch import adopt_user_state, pytree
from orchestrator.config.schema import Config, TrainConfig
from orchestrator.job import Job, has_training_step
from orchestrator.model.stages.own_stages import module_of
from orchestrator.planning.memory import size_text
from orchestrator.planning.placement import Box, is_divisible
from orchestrator.planning.plan import Plan
from orchestrator.state.merge import merge
from orchestrator.state.optimizer_state import FURTHER, optimizers_in
from orchestrator.state.optimizers import AnyOptimizer, label_of
from orchestrator.state.train_state import TrainState, capture, restore
from orchestrator.strategies.training_step import joined, optimizers_of
from orchestrator.strategies.update.gradients import buckets
from orchestrator.strategies.update.job_optimizer import (
    ELEMENTWISE,
    optimizer_of,
    optimizer_of_part,
    own_step_errors,
    to_training,
    with_modes,
)
from orchestrator.strategies.update.weight_average import keep_average
from orchestrator.strategies.update.whole_tensors import ShardMap, computed
from orchestrator.user_code.results import needs_closure

_STEPS = range(3)
_PLACES = 4
"""The first dimension of a small parameter has at most so many places, and each further one may have one more."""
_SCALES = (0.1, 10.0, 1000.0)
"""Those of the gradients of each step, because an optimizer may clip the norm of all of them."""
_COUPLED = "updates a tensor differently if it updates others with it"
_TOLERANCE = 0.02
"""By how much of its largest change an update may differ: one of several tensors at once may round differently."""


class Trial:
    """An optimizer of small parameters.

    Attributes:
        parameters: by the names that they have in the model.
        alone: how they are divided if each of them is updated alone.
    """

    alone: ShardMap | None = None

    def __init__(self, optimizer: AnyOptimizer, parameters: Mapping[str, nn.Parameter], ema_decay: float | None):
        if ema_decay is not None:
            for one in optimizers_in(optimizer):
                keep_average(one, ema_decay)
        to_training(optimizer)
        self.optimizer = optimizer
        self.parameters = parameters

    def update(
        self,
        steps: Iterable[int],
        shapes: Mapping[str, torch.Size],
        *,
        noise: int = 0,
        scale: float = 0.1,
    ) -> None:
        """Make the updates of ``steps``, with gradients that depend on the step and the name alone.

        Args:
            shapes: those of the parameters, by name.
            noise: the seed of what the optimizer draws.
        """
        for step in steps:
            torch.manual_seed(step)
            gradients = {name: scale * torch.randn(shape) for name, shape in shapes.items()}
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name].to(parameter.dtype) if parameter.requires_grad else None
            seed_on_cpu(noise)
            for one in optimizers_in(self.optimizer):
                if self.alone is not None:
                    computed(one, self.alone, together=False).make(one)
                    continue
                try:
                    one.step()
                except Exception:  # those that compare gradients at several points need a closure
                    one.step(lambda: 0.0)

    def slow_down(self) -> None:
        """Change the learning rates, as a schedule does."""
        for group in self.optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0.5  # not in place, because a tensor may be the job's own

    def state(self) -> TrainState:
        """Return the state as a checkpoint has it."""
        boxes = {} if self.alone is None else self.alone.boxes
        state = capture(
            module_of(self.parameters),
            self.optimizer,
            None,
            step=len(_STEPS),
            samples_consumed=0,
            boxes={name: boxes[p][0] for name, p in self.parameters.items() if p in boxes},
            marked=bool(boxes),
        )
        return replace(state, meta=json.loads(json.dumps(state.meta)))

    def load(self, state: TrainState) -> None:
        restore(state, module_of(self.parameters), self.optimizer, None)


def optimizer_errors(config: Config, job: Job, plan: Plan, model: nn.Module) -> list[str]:
    """Return why a run with the job's optimizer could not be resumed, or not be trained in stages.

    Empty if it could, and if the trial cannot be made, because the optimizer refuses small parameters. ``model`` may be
    one without memory.
    """
    make = functools.partial(trial_of, model, job, config.train)
    with kept_generators():
        try:
            whole, other = make(seed=0), make(seed=1)
            if not whole.optimizer.param_groups:
                return []
            shapes = {name: p.shape for name, p in whole.parameters.items()}
            whole.update(_STEPS, shapes)
        except Exception:  # whatever the job raises, the workers will say it
            return []
        label = label_of(whole.optimizer)
        try:
            state = whole.state()
            if plan.mesh.pipeline > 1 and (reason := _why_no_stages(make, state, shapes)) is not None:
                return [f"strategy={config.strategy.name}: Job.optimizer: {label}: {reason}; use strategy=ddp"]
            other.load(state)
            lost = _difference(state, other.state())
            if lost is None:
                for trial in (whole, other):
                    trial.slow_down()
                    trial.update((len(_STEPS), len(_STEPS) + 1), shapes)
                lost = _difference(_weights(whole), _weights(other))
        except Exception as e:
            reason = str(e) if type(e) is ValueError else f"its state cannot be loaded: {type(e).__name__}: {e}"
            return [f"Job.optimizer: {reason}" if label in reason else f"Job.optimizer: {label}: {reason}"]
    if lost is None:
        return []
    return [
        f"Job.optimizer: {label}: {lost} after load_state_dict() of what state_dict() has returned, so a resume or a "
        "recovery would train another model; let these two methods have all of its state"
    ]


def trial_of(
    model: nn.Module, job: Job, train: TrainConfig, *, seed: int, own: Callable[[str], bool] | None = None
) -> Trial:
    """Return a trial with new small parameters of ``model``, or with its ``own`` ones."""
    torch.manual_seed(seed)
    with _made_small(model):
        parameters = {name: p for name, p in model.named_parameters() if own is None or own(name)}
        if own is not None:
            optimizer: AnyOptimizer = optimizer_of_part(job, model, module_of(parameters))
        else:
            optimizer = joined(optimizers_of(job, model)) if has_training_step(job) else optimizer_of(job, model)
    return Trial(optimizer, parameters, train.ema_decay)


@contextlib.contextmanager
def _made_small(model: nn.Module) -> Iterator[None]:
    """Replace the parameters of a model, which may have no memory, by small ones with random values, for a while."""
    small: dict[Tensor, nn.Parameter] = {}
    for parameter in model.parameters():
        places = [min(size, _PLACES + dimension) for dimension, size in enumerate(parameter.shape)]
        values = torch.randn(places).to(parameter.dtype)
        small[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        adopt_user_state(small[parameter], parameter)
    before = [(held, dict(held)) for held in map(own_parameters, model.modules())]
    for held, own in before:
        held.update({name: small[p] for name, p in own.items() if p is not None})
    try:
        yield
    finally:
        for held, own in before:
            held.update(own)


def _why_no_stages(make: Callable[..., Trial], whole: TrainState, shapes: Mapping[str, torch.Size]) -> str | None:
    """Return why two stages do not have the state of the whole model after the same updates; None if they do.

    None also if the state depends on random numbers, which are others in each layout.
    """
    names = list(shapes)
    halves: list[Collection[str]] = [{*names[: len(names) // 2]}, {*names[len(names) // 2 :]}]
    states = []
    for half in halves:
        try:
            trial = make(seed=0, own=half.__contains__)
            trial.update(_STEPS, shapes)
        except Exception:  # whatever the job raises, the workers will say it
            return None
        states.append(trial.state())
    lost = _difference(whole, merge(states, order=names))
    if lost is None or _draws(make, whole, shapes):
        return None
    return f"{lost} if each stage has an optimizer of its own parameters"


def _draws(make: Callable[..., Trial], whole: TrainState, shapes: Mapping[str, torch.Size]) -> bool:
    """Return whether the same updates lead to another state if the optimizer draws other random numbers."""
    trial = make(seed=0)
    trial.update(_STEPS, shapes, noise=1)
    return _difference(whole, trial.state()) is not None


def _weights(trial: Trial) -> TrainState:
    return TrainState(model=dict(trial.parameters), optimizer={}, meta={})


def _difference(a: TrainState, b: TrainState) -> str | None:
    """Return what differs between two states, as a clause; None if nothing does."""
    for kind in ("optimizer", "model"):
        one, other = getattr(a, kind), getattr(b, kind)
        for name in sorted({*one, *other}):
            if name not in one or name not in other or not _equal(one[name], other[name]):
                return f"{'its update of ' if kind == 'model' else ''}{name.removeprefix('/')} differs"
    for key in ("optimizer_scalars", "param_groups", FURTHER):
        if json.dumps(a.meta.get(key)) != json.dumps(b.meta.get(key)):
            return "a number or an option in it differs"
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def check_whole_tensors(config: Config, job: Job, model: nn.Module, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check that the job's optimizer can make updates where workers have shards of tensors.

    Args:
        model: the whole model, which may be of fake tensors.
        errors: receives a line if it cannot.

    Returns:
        A note on what is gathered for an update, printed with the plan.

    Raises:
        JobError: the optimizer depends on values that a fake model does not have.
    """
    options = config.strategy
    divides_state = getattr(options, "shard_optimizer", False)
    key, otherwise = f"strategy={options.name}", "use strategy=ddp"
    if divides_state:
        key, otherwise = "strategy.shard_optimizer=true", "set it to false"
    elif plan.mesh.num_shards == 1:
        from orchestrator.strategies.transforms.every import used_in  # which few runs need

        dimension = used_in(plan.mesh)[0].dimension
        key, otherwise = f"strategy.{dimension}={plan.mesh.size(dimension)}", "set it to 1"
    optimizer = optimizer_of_part(job, model, nn.Module())
    changed = own_step_errors(key, optimizer, otherwise=otherwise)
    if changed or type(optimizer) in ELEMENTWISE:
        errors += changed
        return ()
    name = type(optimizer).__name__
    if getattr(options, "cpu_offload", False):
        errors.append(
            f"strategy.cpu_offload=true: updates are made in host memory, where {name} would need whole tensors; set "
            "it to false, or use AdamW"
        )
        return ()
    found: Mapping[str, float] | str
    if needs_closure(optimizer):
        found = "asks for the loss at several points"
    elif with_modes(optimizer):
        found = "has a train() and an eval(), between which parameters change"
    else:
        found = _tried_alone(config, job, model)
    if isinstance(found, str):
        errors.append(
            f"{key}: workers have shards of tensors, and {name} {found}; use another optimizer, such as AdamW "
            f"or Muon, or {otherwise}"
        )
        return ()
    divided = [p for p in model.parameters() if p.requires_grad and is_divisible(p.shape)]
    sizes: dict[Tensor, float] = {p: p.nbytes * found[n] for n, p in model.named_parameters()}
    most = max((sum(sizes[p] for p in bucket) for bucket in buckets(divided)), default=0)
    return (
        f"{key}: {name} needs whole tensors: for each update, the workers that have shards of a tensor gather it, with "
        f"its gradient and its state, and each of them computes the update; of the whole model, these are "
        f"{size_text(sum(sizes[p] for p in divided))}, and up to {size_text(most)} are gathered at a time",
    )


def _tried_alone(config: Config, job: Job, model: nn.Module) -> Mapping[str, float] | str:
    """Return how many bytes are gathered for each byte of a parameter, by name, or why the optimizer cannot be used."""
    make = functools.partial(trial_of, model, job, config.train)
    with kept_generators():
        try:
            together, alone, drawing = (make(seed=0) for _ in range(3))
            for trial in (alone, drawing):
                trial.alone = ShardMap(boxes={p: [Box.whole(p.shape)] for p in trial.parameters.values()})
            shapes = {name: p.shape for name, p in together.parameters.items()}
            for step, scale in enumerate(_SCALES):
                before = _values_of(together)
                for trial in (together, alone, drawing):
                    trial.update((step,), shapes, scale=scale, noise=int(trial is drawing))
                if not _changed_alike(before, _values_of(alone), _values_of(drawing), tolerance=0):
                    return "draws random numbers, which would differ between workers"
                if not _changed_alike(before, _values_of(together), _values_of(alone), tolerance=_TOLERANCE):
                    return _COUPLED
            same = _rest(together.state()) == _rest(alone.state())
        except Exception as e:  # whatever the optimizer raises
            return f"fails in a trial that updates small tensors one at a time ({type(e).__name__}: {e})"
    if not same:
        return _COUPLED
    return {name: _gathered(p, together.optimizer.state.get(p, {})) for name, p in together.parameters.items()}


def _values_of(trial: Trial) -> Mapping[str, Tensor]:
    return {name: parameter.detach().double() for name, parameter in trial.parameters.items()}


def _changed_alike(
    before: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, tolerance: float
) -> bool:
    """Return whether ``one`` and ``other`` have come from ``before`` by the same changes, up to that part of each."""
    for name, values in before.items():
        largest = float((one[name] - values).abs().max()) if values.numel() else 0.0
        if not torch.allclose(one[name], other[name], rtol=0, atol=tolerance * largest, equal_nan=True):
            return False
    return True


def _rest(state: TrainState) -> str:
    """Return what else two states have to have in common: the shapes of tensors, numbers and options."""
    shapes = {path: list(tensor.shape) for path, tensor in state.optimizer.items()}
    numbers = {key: value for key, value in state.meta.items() if key != "tied"}
    return json.dumps([shapes, numbers], sort_keys=True)


def _gathered(parameter: Tensor, state: Mapping[str, object]) -> float:
    """Return the bytes of a parameter, its gradient and the state of its shape, for each byte of the parameter."""
    like = [t for t in pytree.tree_leaves(state) if isinstance(t, Tensor) and t.shape == parameter.shape]
    return 2 + sum(tensor.nbytes for tensor in like) / max(1, parameter.nbytes)
