"""The memory of an optimizer's state, which its own update of tensors without memory shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.compat.torch import TorchDispatchMode, pytree, reads_number
from orchestrator.job import Job
from orchestrator.model.stages.own_stages import module_of
from orchestrator.state.optimizer_state import optimizers_in
from orchestrator.strategies.update.job_optimizer import optimizer_of_part
from orchestrator.user_code.results import needs_closure

_ON_DEVICE = ("fused", "capturable")
"""Options that need a device, and change the place of the count of steps alone."""


@dataclass(frozen=True, kw_only=True)
class StateSize:
    """The state of a parameter, in bytes.

    Attributes:
        divided: the tensors of its shape, of which a worker has its own shards.
        whole: all others, such as factors, which each worker with a shard has.
    """

    divided: float
    whole: float


NO_STATE = StateSize(divided=0.0, whole=0.0)


def state_sizes(job: Job, model: nn.Module) -> Mapping[str, StateSize] | None:
    """Return the optimizer state of the parameters, by name; None if the optimizer cannot be tried.

    Args:
        job: has the optimizer.
        model: may be of fake tensors.
    """
    for stand_in in (_without_memory, _small, _sparse):
        own = {name: stand_in(parameter) for name, parameter in model.named_parameters()}
        try:
            optimizer = optimizer_of_part(job, model, module_of(own))
            _step(optimizer)
        except Exception:  # whatever the optimizer raises, the workers will say it
            continue
        return _sizes(optimizer, {name: (own[name], p.numel()) for name, p in model.named_parameters()})
    return None


def _sizes(optimizer: Optimizer, tried: Mapping[str, tuple[nn.Parameter, int]]) -> Mapping[str, StateSize]:
    """Return the sizes for parameters, each given as what was updated in its place, and its own number of elements."""
    state = {key: values for one in optimizers_in(optimizer) for key, values in one.state.items()}
    found = {}
    for name, (parameter, elements) in tried.items():
        tensors = _tensors(state.pop(parameter, {}))
        alike = sum(t.nbytes for t in tensors if t.shape == parameter.shape)
        others = sum(t.nbytes for t in tensors if t.shape != parameter.shape)
        found[name] = StateSize(divided=alike * elements / max(1, parameter.numel()), whole=others)
    shared = sum(t.nbytes for t in _tensors([*state.values()]))
    first = next((name for name, (parameter, _) in tried.items() if parameter.requires_grad), None)
    if first is not None and shared:
        found[first] = StateSize(divided=found[first].divided, whole=found[first].whole + shared)
    return found


def _tensors(state: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor) and leaf.ndim]


def _step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group.update({name: False for name in _ON_DEVICE if group.get(name)})
    step: Callable[..., Any] = optimizer.step
    with _AnyValues():  # type: ignore[no-untyped-call]
        if needs_closure(optimizer):
            step(lambda: torch.zeros((), device=next(p.device for g in optimizer.param_groups for p in g["params"])))
        else:
            step()


class _AnyValues(TorchDispatchMode):
    """Lets tensors without memory have a value where one is asked for: 1, or False."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_number(func) and args[0].is_meta:
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **kwargs or {})


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    return _with_gradient(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter)


def _small(parameter: nn.Parameter) -> nn.Parameter:
    return _with_gradient(torch.zeros((2,) * parameter.ndim, dtype=parameter.dtype), parameter)


def _sparse(parameter: nn.Parameter) -> nn.Parameter:
    found = _small(parameter)
    found.grad = None if found.grad is None or not found.ndim else found.grad.to_sparse(1)
    return found


def _with_gradient(values: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    found = nn.Parameter(values, requires_grad=parameter.requires_grad)
    found.grad = torch.zeros_like(values) if parameter.requires_grad else None
    return found
