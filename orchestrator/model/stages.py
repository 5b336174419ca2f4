"""The stages of a model on one worker: built alone, equal in their numbers to those of the whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.model.cut import Cut
from orchestrator.model.partial_init import outline
from orchestrator.model.sequence import Children, LayerSequence


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
    """A stage on this worker. ``tensors``: its parameters and persistent buffers by the model's own names.

    ``inputs``: what the stage before sends; None for the first stage, which takes the model's own input.
    ``outputs``: what it sends; None for the last stage. ``packed``: it takes several tensors as one tuple.
    """

    index: int
    module: nn.Module
    tensors: Mapping[str, Tensor]
    inputs: tuple[Spec, ...] | None
    outputs: tuple[Spec, ...] | None
    packed: bool


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A parameter that several stages have. ``stages``, in order, each with the names it has there."""

    stages: Mapping[int, tuple[str, ...]]

    @property
    def first_name(self) -> str:
        return next(iter(self.stages.values()))[0]


def sequence_of(
    build: Callable[[], nn.Module], inputs: Any, device: torch.device, *, split: Sequence[str]
) -> LayerSequence:
    """The layers of the model that ``build`` returns; ``inputs`` is a real micro-batch, ``split`` asks for cuts.

    Raises:
        ValueError: it cannot be cut; the text says why and what else to do.
    """
    whole = outline(build, device)
    inside_a_child = any("." in name for name in split)
    if isinstance(whole.model, nn.Sequential) and not inside_a_child:
        return Children(whole)
    from orchestrator.model.tracing import Traced  # here, because the tracer takes seconds to import

    return Traced(build, inputs, device, split=split)


def build_stages(
    build: Callable[[], nn.Module],
    sequence: LayerSequence,
    values: Sequence[Any],
    cut: Cut,
    own: Iterable[int],
    *,
    device: torch.device,
    seed: int,
) -> list[Stage]:
    """The stages ``own`` of the model that ``build`` returns. ``values`` are those of ``layers.flow``.

    Raises:
        ValueError: something else than tensors flows between two stages.
    """
    n = len(sequence.names)
    boundaries = [None, *boundaries_of(sequence, values, cut), None]
    numbers = {stage: cut.layers_of(stage, n) for stage in sorted(own)}
    layers = sequence.realise(build, [i for of_stage in numbers.values() for i in of_stage], seed=seed)
    stages = []
    for stage, of_stage in numbers.items():
        module = nn.Sequential(*(layers[i] for i in of_stage)).to(device)
        stages.append(
            Stage(
                index=stage,
                module=module,
                tensors={name: t for i in of_stage for name, t in sequence.tensors_of(i, layers[i]).items()},
                inputs=boundaries[stage],
                outputs=boundaries[stage + 1],
                packed=stage > 0 and not isinstance(values[cut.starts[stage]], Tensor),
            )
        )
    return stages


def boundaries_of(sequence: LayerSequence, values: Sequence[Any], cut: Cut) -> list[tuple[Spec, ...]]:
    """What flows into each stage after the first. ``values`` are those of ``layers.flow``.

    Raises:
        ValueError: something else than tensors.
    """
    return [_specs(values[start], sequence.names[start - 1]) for start in cut.starts[1:]]


def state_of(stages: Sequence[Stage]) -> nn.Module:
    """A bare module with all tensors of these stages under the model's own names.

    Raises:
        ValueError: a module keeps something else than tensors in its ``state_dict()``.
    """
    root = nn.Module()
    for stage in stages:
        for name, tensor in stage.tensors.items():
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


def shared_parameters(sequence: LayerSequence, cut: Cut) -> list[Shared]:
    """The parameters that more than one stage has."""
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in sequence.outline.model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    n = len(sequence.names)
    in_stage = [
        {name for i in cut.layers_of(stage, n) for name in sequence.tensors_of(i, sequence.modules[i])}
        for stage in range(cut.num_stages)
    ]
    found = []
    for aliases in names.values():
        held = {stage: tuple(a for a in aliases if a in own) for stage, own in enumerate(in_stage)}
        held = {stage: own for stage, own in held.items() if own}
        if len(held) > 1:
            found.append(Shared(stages=held))
    return found


def _specs(value: Any, after: str) -> tuple[Spec, ...]:
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(t, Tensor) for t in tensors):
        raise ValueError(
            f"layer {after} returns {type(value).__name__}; between stages only a tensor or a tuple of tensors can "
            "flow; cut elsewhere with strategy.split"
        )
    return tuple(Spec(shape=tuple(t.shape), dtype=t.dtype, requires_grad=t.requires_grad) for t in tensors)
