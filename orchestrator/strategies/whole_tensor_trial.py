"""A trial on the driver with small parameters: may the job's optimizer update one tensor at a time?

Where workers have shards of tensors, an optimizer that is not known to be element-wise gets whole ones, a few at a time
(``update/whole_tensors.py``). So its update of a tensor must not depend on the others, nor on random numbers, which
differ between workers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators
from orchestrator.compat.torch import pytree
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.planning.memory import size_text
from orchestrator.planning.placement import Box, is_divisible
from orchestrator.planning.plan import Plan
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.resume_trial import Trial, trial_of
from orchestrator.strategies.update.gradients import buckets
from orchestrator.strategies.update.job_optimizer import ELEMENTWISE, optimizer_of_part, own_step_errors, with_modes
from orchestrator.strategies.update.whole_tensors import ShardMap
from orchestrator.user_code.results import needs_closure

_SCALES = (0.1, 10.0, 1000.0)
"""Those of the gradients of each step, because an optimizer may clip the norm of all of them."""
_COUPLED = "makes another update of a tensor if it updates others with it"
_TOLERANCE = 0.02
"""By how much of its largest change an update may differ: one of several tensors at once may round differently."""


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
        key, otherwise = f"strategy.tensor={plan.mesh.tensor}", "set it to 1"
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
        found = _trial(config, job, model)
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


def _trial(config: Config, job: Job, model: nn.Module) -> Mapping[str, float] | str:
    """Return how many bytes are gathered for each byte of a parameter, by name, or why the optimizer cannot be used."""
    make = functools.partial(trial_of, model, job, config.train)
    with kept_generators():
        try:
            together, alone, drawing = (make(seed=0) for _ in range(3))
            for trial in (alone, drawing):
                trial.alone = ShardMap(boxes={p: [Box.whole(p.shape)] for p in trial.parameters.values()})
            shapes = {name: p.shape for name, p in together.parameters.items()}
            for step, scale in enumerate(_SCALES):
                before = _weights(together)
                for trial in (together, alone, drawing):
                    trial.update((step,), shapes, scale=scale, noise=int(trial is drawing))
                if not _equal(before, _weights(alone), _weights(drawing), tolerance=0):
                    return "draws random numbers, which would differ between workers"
                if not _equal(before, _weights(together), _weights(alone), tolerance=_TOLERANCE):
                    return _COUPLED
            same = _rest(together.state()) == _rest(alone.state())
        except Exception as e:  # whatever the optimizer raises
            return f"cannot update small tensors one at a time, which is tried ({type(e).__name__}: {e})"
    if not same:
        return _COUPLED
    return {name: _gathered(p, together.optimizer.state.get(p, {})) for name, p in together.parameters.items()}


def _weights(trial: Trial) -> Mapping[str, Tensor]:
    return {name: parameter.detach().double() for name, parameter in trial.parameters.items()}


def _equal(
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
