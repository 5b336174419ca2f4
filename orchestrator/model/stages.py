"""The stages of a model on one worker: built alone, equal in their numbers to those of the whole model."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.model.boundary import Boundary
from orchestrator.model.cut import Cut
from orchestrator.model.partial_init import outline
from orchestrator.model.sequence import Children, LayerSequence


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage on this worker.

    ``tensors``: its parameters and persistent buffers by the model's own names, as they are when it is called.
    ``inputs``: None for the first stage, which takes the model's own input; ``outputs``: None for the last one.
    """

    index: int
    module: nn.Module
    tensors: Callable[[], Mapping[str, Tensor]]
    inputs: Boundary | None
    outputs: Boundary | None


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A parameter or buffer that several stages have. ``stages``, in order, each with the names it has there."""

    stages: Mapping[int, tuple[str, ...]]

    def names_on(self, stage_ranks: Sequence[int], rank: int) -> list[str]:
        """The names it has in the stages of a rank."""
        return [name for stage, names in self.stages.items() if stage_ranks[stage] == rank for name in names]


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

    def tensors(of_stage: range) -> dict[str, Tensor]:
        return {name: t for i in of_stage for name, t in sequence.tensors_of(i, layers[i]).items()}

    return [
        Stage(
            index=stage,
            module=nn.Sequential(*(layers[i] for i in of_stage)).to(device),
            tensors=functools.partial(tensors, of_stage),
            inputs=boundaries[stage],
            outputs=boundaries[stage + 1],
        )
        for stage, of_stage in numbers.items()
    ]


def boundaries_of(sequence: LayerSequence, values: Sequence[Any], cut: Cut) -> list[Boundary]:
    """What flows into each stage after the first. ``values`` are those of ``layers.flow``.

    Raises:
        ValueError: something else than tensors.
    """
    return [Boundary.of(values[start], after=sequence.names[start - 1]) for start in cut.starts[1:]]


def state_of(stages: Sequence[Stage]) -> nn.Module:
    """A bare module with all tensors of these stages under the model's own names.

    Raises:
        ValueError: a module keeps something else than tensors in its ``state_dict()``.
    """
    tensors: dict[str, Tensor] = {}
    for stage in stages:
        for name, tensor in stage.tensors().items():
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{name} in the model's state_dict() is a {type(tensor).__name__}; only tensors can be saved"
                )
            tensors[name] = tensor
    return module_of(tensors)


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A bare module that has these tensors under their names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        owner = root
        *path, attribute = name.split(".")
        for part in path:
            owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        # Not through the methods, which refuse names that a module has of its own, such as "half".
        if isinstance(tensor, nn.Parameter):
            owner._parameters[attribute] = tensor
        else:
            owner._buffers[attribute] = tensor
    return root


def shared_parameters(sequence: LayerSequence, cut: Cut) -> list[Shared]:
    """The parameters that more than one stage has."""
    return _shared(sequence.outline.model.named_parameters(remove_duplicate=False), sequence, cut)


def shared_buffers(sequence: LayerSequence, cut: Cut) -> list[Shared]:
    """The persistent buffers that more than one stage has."""
    return _shared(sequence.outline.model.named_buffers(remove_duplicate=False), sequence, cut)


def _shared(named: Iterable[tuple[str, Tensor]], sequence: LayerSequence, cut: Cut) -> list[Shared]:
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for name, tensor in named:
        names[tensor].append(name)
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
