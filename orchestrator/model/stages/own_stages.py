"""The pipeline stages of one worker, built alone with the values that they have in the whole model."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.modules import is_plain_sequential, own_buffers, own_children, own_parameters
from orchestrator.compat.torch import FakeTensor
from orchestrator.config.text import first_few
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.precision import Precision
from orchestrator.model.stages.boundary import Boundary
from orchestrator.model.stages.cut import Cut
from orchestrator.model.stages.layers import change_their_input
from orchestrator.model.stages.recorded import RecordedLayers
from orchestrator.model.stages.sequence import DefinesStages, JobStages, LayerSequence, SequentialLayers
from orchestrator.model.stages.tape import Call, TapeError
from orchestrator.user_code.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage on this worker.

    Attributes:
        index: its position in the pipeline.
        module: the module that runs its layers.
        sequence: all layers of the model.
        layers: the layers of this stage, by their indices in ``sequence``.
        inputs: the boundary to the previous stage; None for the first stage, which takes the model's own input.
        outputs: the boundary to the next stage; None for the last stage.
    """

    index: int
    module: nn.Module
    sequence: LayerSequence
    layers: Mapping[int, nn.Module]
    inputs: Boundary | None
    outputs: Boundary | None

    def of(self, model: nn.Module) -> Stage:
        """Return the same stage of another instance of the model."""
        layers = self.sequence.of(model, list(self.layers))
        before = [layer for layer in self.module.children() if isinstance(layer, Copy)]
        return dataclasses.replace(
            self,
            module=nn.Sequential(*before, *(layers[index] for index in self.layers)),
            layers={index: layers[index] for index in self.layers},
        )

    def computed(self, output: Any) -> Any:
        """Return the output of the module.

        Raises:
            JobError: it has no values, because the module has used a tensor of a layer that is on another worker.
        """
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(output)):
            names = first_few([self.sequence.names[index] for index in self.layers], 3)
            raise JobError(
                f"stage {self.index} ({names}) uses a layer of another stage, and reaches it by a function "
                "or an object that refers to it. Make it an attribute of the module that uses it, cut elsewhere with "
                "strategy.split, define Job.stages, or use strategy=ddp"
            )
        return output

    def tensors(self) -> dict[str, Tensor]:
        """Return the current parameters and persistent buffers by the model's own names."""
        return {
            name: tensor
            for index, layer in self.layers.items()
            for name, tensor in self.sequence.tensors_of(index, layer).items()
        }


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A parameter or buffer that several stages hold. ``stages`` maps each of them, in order, to its names there."""

    stages: Mapping[int, tuple[str, ...]]

    def names_on(self, stage_ranks: Sequence[int], rank: int) -> list[str]:
        """Return its names in the stages of ``rank``; ``stage_ranks`` holds the rank of each stage."""
        return [name for stage, names in self.stages.items() if stage_ranks[stage] == rank for name in names]


def sequence_of(
    whole: FakeModel,
    inputs: Any,
    *,
    split: Sequence[str],
    num_stages: int,
    job: DefinesStages,
    call: Call | None = None,
) -> LayerSequence:
    """Divide a model into layers, with fake tensors.

    ``Job.stages`` decides, if the job defines it. Otherwise an ``nn.Sequential`` that only calls its children is
    divided into them. Of any other model the forward pass is recorded.

    Args:
        whole: the model.
        inputs: a real micro-batch on the device of the model.
        split: the names of layers at which stages are to begin; empty to choose among the layers later.
        num_stages: the number of stages.
        job: may define the stages.
        call: calls the model with the inputs, as ``Job.forward`` does; None if that only calls it.

    Raises:
        ValueError: the model cannot be cut; the text says why and what else to do.
    """
    if job.stages(whole.model) is not None:
        if call is not None:
            raise ValueError(
                "the job overrides Job.forward, and Job.stages says what stages do in its place; remove one of them"
            )
        return JobStages(whole, job)
    splits_a_child = any("." in name for name in split)
    if call is None and _only_calls_its_children(whole.model) and not splits_a_child:
        sequence = SequentialLayers(whole)
        if split or _has_layers_for(sequence, num_stages):
            return sequence
    try:
        return _recorded(whole, inputs, call, split=split, num_stages=num_stages)
    except TapeError as e:
        remedy = (
            "Define Job.stages(model), which returns its parts in order, make job.model() an nn.Sequential"
            if call is None
            else "Let Job.model return an nn.Module that takes the input of a batch as it is, without Job.forward"
        )
        raise ValueError(f"the model cannot be cut: {e}. {remedy}, or use strategy=ddp") from e


def _only_calls_its_children(model: nn.Module) -> bool:
    """Return whether a call of the model is one call of each child, with the result of the one before."""
    return is_plain_sequential(model) and not own_parameters(model) and not own_buffers(model)


def _recorded(
    whole: FakeModel, inputs: Any, call: Call | None, *, split: Sequence[str], num_stages: int
) -> LayerSequence:
    """Divide a model at ``split``, or else so finely that no layer is larger than a stage, if that is possible."""
    if split:
        return RecordedLayers(whole, inputs, split=split, call=call)
    closed = frozenset[str]()
    first_error: TapeError | None = None
    while True:
        try:
            layers = RecordedLayers(whole, inputs, split=(), largest_share=1 / num_stages, closed=closed, call=call)
        except TapeError as e:
            first_error = first_error or e
            if not e.module or e.module in closed:
                layers = RecordedLayers(whole, inputs, split=(), call=call)
            else:
                closed |= {e.module}  # the code inside of a large module cannot be recorded, so it stays in one piece
                continue
        if first_error is not None and not _has_layers_for(layers, num_stages):
            raise first_error
        return layers


def _has_layers_for(sequence: LayerSequence, num_stages: int) -> bool:
    return sum(layer.num_parameters > 0 for layer in sequence.layers) >= num_stages


def build_stages(
    build_layers: Callable[[Sequence[int]], Mapping[int, nn.Module]],
    sequence: LayerSequence,
    values: Sequence[Any],
    cut: Cut,
    own: Iterable[int],
    *,
    precision: Precision,
) -> list[Stage]:
    """Build the stages of one worker.

    Args:
        build_layers: returns the layers of some indices, by index.
        sequence: the layers of the model.
        values: the result of :func:`~orchestrator.model.stages.layers.flow`.
        cut: the division of the layers into stages.
        own: the indices of the stages to build.
        precision: what the forward pass is computed in.

    Raises:
        ValueError: something other than tensors flows between two stages.
    """
    num_layers = len(sequence.names)
    boundaries = [None, *boundaries_of(sequence, values, cut), None]
    indices = {stage: cut.layers_of(stage, num_layers) for stage in sorted(own)}
    layers = build_layers([i for of_stage in indices.values() for i in of_stage])

    def entrance(of_stage: Sequence[int]) -> list[nn.Module]:
        # What a stage receives is a leaf of its autograd graph, and may be the output of a stage on the same worker.
        # Micro-batches are views of one batch, so that a change of one counts as a change of all.
        changed = change_their_input(sequence, of_stage, values[of_stage[0]], precision=precision)
        return [Copy()] if changed else []

    return [
        Stage(
            index=stage,
            module=nn.Sequential(*entrance(of_stage), *(layers[i] for i in of_stage)),
            sequence=sequence,
            layers={i: layers[i] for i in of_stage},
            inputs=boundaries[stage],
            outputs=boundaries[stage + 1],
        )
        for stage, of_stage in indices.items()
    ]


class Copy(nn.Module):
    """Copies what the layers behind it change in place."""

    def forward(self, value: Any) -> Any:
        return map_tensors(torch.clone, value)


def boundaries_of(sequence: LayerSequence, values: Sequence[Any], cut: Cut) -> list[Boundary]:
    """Return the boundary before each stage but the first; ``values`` is the result of ``layers.flow``.

    Raises:
        ValueError: something other than tensors flows there.
    """
    return [Boundary.of(values[start], after=sequence.names[start - 1]) for start in cut.starts[1:]]


def state_of(stages: Sequence[Stage], parts: Mapping[str, Tensor] = MappingProxyType({})) -> nn.Module:
    """Return a bare module with all tensors of these stages under the model's own names.

    Args:
        stages: the stages of one rank.
        parts: what stands for parameters of which the rank has only a part, by name.

    Raises:
        ValueError: a module keeps something other than tensors in its ``state_dict()``.
    """
    tensors: dict[str, Tensor] = {}
    for stage in stages:
        for name, tensor in stage.tensors().items():
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{name} in the model's state_dict() is a {type(tensor).__name__}; only tensors can be saved"
                )
            tensors[name] = parts.get(name, tensor)
    # In the whole model's order, so that the first name of a shared tensor is the same everywhere.
    names = stages[0].sequence.saved_names if stages else ()
    return module_of({name: tensors[name] for name in (*names, *tensors) if name in tensors})


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a bare module with these tensors as its parameters and buffers, by dotted names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        owner = root
        *path, attribute = name.split(".")
        for part in path:
            owner = own_children(owner).setdefault(part, nn.Module())  # type: ignore[assignment]
        # The register methods refuse the names of a module's own methods, such as "half".
        if isinstance(tensor, nn.Parameter):
            own_parameters(owner)[attribute] = tensor
        else:
            own_buffers(owner)[attribute] = tensor
    return root


def shared_tensors(sequence: LayerSequence, cut: Cut) -> list[Shared]:
    """Return the parameters, and then the persistent buffers, that several stages hold."""
    model = sequence.whole.model
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
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
