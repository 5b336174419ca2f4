"""The stages of a model on one worker: built alone, equal in their numbers to those of the whole model."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.model.cut import Cut
from orchestrator.model.partial_init import Outline, build_part


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor that flows from stage to stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def example(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage on this worker. ``module`` bears the model's own names.

    ``inputs``: what the stage before sends; None for the first stage, which takes the model's own input.
    ``outputs``: what it sends; None for the last stage. ``packed``: it takes several tensors as one tuple.
    """

    index: int
    module: nn.Module
    inputs: tuple[Spec, ...] | None
    outputs: tuple[Spec, ...] | None
    packed: bool


def build_stages(
    build: Callable[[], nn.Module],
    outline: Outline,
    values: Sequence[Any],
    cut: Cut,
    own: Iterable[int],
    *,
    device: torch.device,
    seed: int,
) -> list[Stage]:
    """The stages ``own`` of the Sequential that ``build`` returns. ``values`` are those of ``layers.flow``.

    Raises:
        ValueError: something else than tensors flows between two stages.
    """
    names = [name for name, layer in outline.model._modules.items() if layer is not None]
    boundaries = [None, *(_specs(values[start], names[start - 1]) for start in cut.starts[1:]), None]
    own = sorted(own)
    mine = {names[i] for stage in own for i in cut.layers_of(stage, len(names))}
    model = build_part(build, lambda name: name.partition(".")[0] in mine, seed=seed)
    stages = []
    for stage in own:
        layers = OrderedDict((names[i], model._modules[names[i]]) for i in cut.layers_of(stage, len(names)))
        stages.append(
            Stage(
                index=stage,
                module=nn.Sequential(layers).to(device),  # type: ignore[arg-type]
                inputs=boundaries[stage],
                outputs=boundaries[stage + 1],
                packed=stage > 0 and not isinstance(values[cut.starts[stage]], Tensor),
            )
        )
    return stages


def state_of(stages: Sequence[Stage]) -> nn.Module:
    """A bare module with the parameters and persistent buffers of all these stages under the model's own names.

    Raises:
        ValueError: a module keeps something else than tensors in its ``state_dict()``.
    """
    root = nn.Module()
    for stage in stages:
        for name, tensor in stage.module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{name} in the model's state_dict() is a {type(tensor).__name__}; only tensors can be saved"
                )
            owner = root
            *path, attribute = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(attribute, tensor)
            else:
                owner.register_buffer(attribute, tensor)
    return root


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one, in the model's order."""
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [found for found in names.values() if len(found) > 1]


def stage_of_name(name: str, cut: Cut, layer_names: Sequence[str]) -> int:
    """The stage that has the parameter or buffer of that name."""
    layer = layer_names.index(name.partition(".")[0])
    return sum(start <= layer for start in cut.starts) - 1


def _specs(value: Any, after: str) -> tuple[Spec, ...]:
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(t, Tensor) for t in tensors):
        raise ValueError(
            f"layer {after} returns {type(value).__name__}; between stages only a tensor or a tuple of tensors can "
            "flow; cut elsewhere with strategy.split"
        )
    return tuple(Spec(shape=tuple(t.shape), dtype=t.dtype, requires_grad=t.requires_grad) for t in tensors)
