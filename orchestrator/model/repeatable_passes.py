"""Forward passes without an effect on the model, in which random numbers are replaced by their expected values.

Two of them can be compared, although dropout draws other numbers for a batch than for its parts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import seed_generators
from orchestrator.compat.torch import BatchNorm, TorchDispatchMode, argument_names, storage_key, written_tensors
from orchestrator.model.tensor_slots import tensor_slots

_COLLECTIVES = ("c10d", "_c10d_functional")
ATOL = 1e-6
"""Differences that are rounding errors wherever the compared values are near 0."""
_DROPOUT = ("dropout_p", "dropout")
"""Arguments of operators that compute something else as well, such as attention."""


class NotRepeatableError(Exception):
    """A forward pass does something that cannot be repeated for a comparison; the text names it."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What forward passes have computed.

    Attributes:
        loss: the mean loss of the batch.
        states: the buffers after them, and the parameters that they have changed, by name; one for each part of a
            batch that began with the model as it was.
        gradients: those of the trained parameters, by name; empty if none were wanted, or autograd has none.
    """

    loss: Tensor
    states: Sequence[dict[str, Tensor]]
    gradients: Mapping[str, Tensor]

    def differs(self, other: Passed, tolerance: float) -> bool:
        """Return whether the losses differ. One that is not finite is no evidence."""
        finite = bool(self.loss.isfinite() & other.loss.isfinite())
        return finite and not _close(self.loss, other.loss, tolerance)

    def gradients_apart(self, other: Passed, *, share: float = 1.0) -> dict[str, float]:
        """Return by how much gradients differ from ``share`` of the ``other`` ones, relative to the norm of all.

        Those that are equal, or not finite, are left out.
        """
        if self.gradients.keys() != other.gradients.keys():
            return {}
        norm = share * math.hypot(*(float(gradient.norm()) for gradient in other.gradients.values()))
        apart = {name: float((g - share * other.gradients[name]).norm()) for name, g in self.gradients.items()}
        found = {name: distance - ATOL for name, distance in apart.items() if ATOL < distance < math.inf}
        return {name: distance / norm if norm else math.inf for name, distance in found.items()}

    def changed(self, other: Passed, tolerance: float) -> tuple[str, ...]:
        """Return the names of the tensors that have other values after some part than after the whole ``other``."""
        (whole,) = other.states
        return tuple(
            name
            for name in dict.fromkeys(name for state in (*self.states, whole) for name in state)
            if not all(_close(state.get(name), whole.get(name), tolerance) for state in self.states)
        )


def passed(
    model: nn.Module,
    parts: Callable[[], Sequence[Any]],
    forward: Callable[[nn.Module, Any], Any],
    loss: Callable[[Sequence[Any], Sequence[Any]], Tensor],
    *,
    in_turn: bool,
    seed: int,
    nudged: Collection[str] = (),
    gradients: bool = False,
) -> Passed:
    """Run the parts of a batch through copies of a model that share its parameters.

    BatchNorm uses its running statistics. The model is left as it is; the random generators are not.

    Args:
        model: the model.
        parts: returns the parts.
        forward: returns the output of a model for a part.
        loss: returns the mean loss of all parts, given their outputs and the parts.
        in_turn: whether a part finds what the one before has left in the model, as micro-batches do; otherwise
            each begins with the model as it is, as replicas do.
        seed: seeds the random generators before the parts are made.
        nudged: the names of parameters that begin with slightly other values.
        gradients: whether to compute the gradients of the loss.

    Raises:
        NotRepeatableError: the forward pass cannot be compared with another one.
        Exception: whatever the model, its loss or ``parts`` raises.
    """
    seed_generators(seed)
    with torch.set_grad_enabled(gradients):
        with ExpectedNumbers():
            made = list(parts())
        outputs, states = [], list[dict[str, Tensor]]()
        shared = _Shared(model)
        try:
            for number, part in enumerate(made):
                if number == 0 or not in_turn:
                    shared.restore()
                    shared.nudge(nudged)
                    module = _copy_of(model)
                with ExpectedNumbers(shared.keep):
                    outputs.append(forward(module, part))
                if number == len(made) - 1 or not in_turn:
                    states.append({**dict(module.named_buffers()), **shared.changed()})
        finally:
            shared.restore()
        with ExpectedNumbers():
            mean = loss(outputs, made)
            found = _gradients(mean, model) if gradients else {}
    return Passed(loss=mean.detach().double().cpu(), states=states, gradients=found)


def _gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model's parameters; none if a backward pass fails, as after changes in place."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    except RuntimeError:
        return {}
    return {
        name: (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
        for name, gradient in zip(trained, found, strict=True)
        if gradient is not None
    }


class _Shared:
    """The parameters of a model, which a forward pass may overwrite."""

    def __init__(self, model: nn.Module):
        self._parameters = {name: (p, p.detach(), _key(p)) for name, p in model.named_parameters() if _has_memory(p)}
        self._trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
        self._keys = {key for _, _, key in self._parameters.values()}
        self._kept: dict[str, Tensor] = {}

    def keep(self, overwritten: Tensor) -> None:
        """Keep the values of a parameter that is about to be overwritten."""
        if _has_memory(overwritten) and (written := _key(overwritten)) in self._keys:
            for name, (_, values, key) in self._parameters.items():
                if key == written and name not in self._kept:
                    self._kept[name] = values.clone()

    def nudge(self, names: Collection[str]) -> None:
        """Change the values of some parameters by a hundredth."""
        for name in names:
            _, values, _ = self._parameters[name]
            self.keep(values)
            values.mul_(1.01)

    def changed(self) -> dict[str, Tensor]:
        """Return copies of the parameters that have been overwritten, or been given other memory, by name."""
        return {
            name: parameter.detach().clone()
            for name, (parameter, _, key) in self._parameters.items()
            if name in self._kept or _key(parameter) != key
        }

    def restore(self) -> None:
        """Give the parameters their memory and their values back, and freeze what the model has unfrozen."""
        for parameter, trained in self._trained.items():
            parameter.requires_grad_(trained)
        for name, (parameter, values, key) in self._parameters.items():
            if _key(parameter) != key:
                parameter.data = values
            if name in self._kept:
                values.copy_(self._kept[name])


class ExpectedNumbers(TorchDispatchMode):
    """Replaces random numbers by their expected values.

    Attributes:
        drew: whether any were drawn.
        dtypes: the floating-point types of results that have 16 bits.
    """

    def __init__(self, before_write: Callable[[Tensor], None] | None = None, *, communicates: bool = False) -> None:
        """
        Args:
            before_write: called before a tensor is overwritten.
            communicates: whether passes may communicate with other ranks.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False
        self.dtypes: set[torch.dtype] = set()
        self._before_write = before_write
        self._communicates = communicates

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES and not self._communicates:
            raise NotRepeatableError(f"it communicates with other workers ({func.overloadpacket.__name__})")
        if (before_write := self._before_write) is not None:
            for tensor in written_tensors(func, args, kwargs):
                before_write(tensor)
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.drew = True
            return _expected(func, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype in (torch.bfloat16, torch.float16):
            self.dtypes.add(out.dtype)
        return out


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a random operator draws numbers: attention does not if nothing is dropped."""
    given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
    dropped = [argument for argument in _DROPOUT if argument in argument_names(func)]
    return not dropped or any(given.get(argument, 0.0) for argument in dropped)


def _expected(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a random operator, and replace its result by the expected one."""
    name, names = func.overloadpacket.__name__, argument_names(func)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if drops := {argument for argument in _DROPOUT if argument in names}:
        without = [0.0 if argument in drops else value for argument, value in zip(names, args, strict=False)]
        return func(*without, **{**kwargs, **dict.fromkeys(drops.intersection(names[len(args) :]), 0.0)})
    out = func(*args, **kwargs)
    match name.removesuffix("_").removesuffix("_functional").removesuffix("_like"):
        case "bernoulli":
            value = given.get("p", 0.5) if name.endswith("_") or "p" in given else args[0]
        case "rand":
            value = 0.5
        case "uniform":
            value = (given.get("from", 0.0) + given.get("to", 1.0)) / 2
        case "randn":
            value = 0
        case "random":
            value = given.get("from", 0)
        case "normal":
            value = given.get("mean", 0.0)
        case "randint":
            value = given.get("low", 0)
        case "exponential":
            value = 1 / given.get("lambd", 1.0)
        case "randperm":
            value = torch.arange(len(out), device=out.device)
        case _:
            raise NotRepeatableError(f"it draws random numbers ({name})")
    return out.copy_(value) if isinstance(value, Tensor) else out.fill_(value)


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a copy that has the same parameters and copies of all else; its BatchNorms are in eval mode."""
    tensors = {id(slot.tensor): slot.tensor for slot in tensor_slots(model)}
    same = {key: t if isinstance(t, nn.Parameter) else t.detach().clone() for key, t in tensors.items()}
    copied = copy.deepcopy(model, same)
    for module in copied.modules():
        if isinstance(module, BatchNorm):
            module.eval()
    return copied


def _close(one: Tensor | None, other: Tensor | None, tolerance: float) -> bool:
    """Return whether two tensors are equal, up to ``tolerance`` of their largest value."""
    if one is None or other is None or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = max(float(t.abs().max()) for t in (one, other)) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=tolerance * scale + ATOL, equal_nan=True)


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided
