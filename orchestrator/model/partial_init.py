"""Part of a model, with the values that the whole model would have and without its memory.

A constructor draws its weights one after another from one random generator, so the values of a layer depend on
everything that was drawn before it. :func:`build_part` therefore proceeds as follows:

1. It runs the constructor with fake tensors, which have a shape, a dtype and a device but no memory, and records every
   operation (:class:`~orchestrator.model.recorder.Recorder`).
2. Whenever a random operation is recorded, its generator's state is saved and the operation is also executed on scratch
   memory, so that the generator advances exactly as in the full construction.
3. Starting from the wanted tensors, it walks the recording backwards to find the operations that they depend on, and
   executes only those for real, each random one from its saved generator state.

Some constructors need values that fake tensors do not have, for example because they call ``.numpy()``. For these it
builds the whole model and replaces the tensors that are not wanted by fake ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import derived_seed, kept_generators, seed_generators
from orchestrator.compat.torch import FakeTensor, FakeTensorMode
from orchestrator.model.recorder import NeedsRandomValues, Recorder, fake_like
from orchestrator.model.tensor_slots import move, overlap_in, random_like, tensor_slots
from orchestrator.planning.placement import Index


@dataclass(frozen=True)
class FakeModel:
    """A model whose parameters and buffers are fake tensors, for a look at names and shapes without memory.

    Attributes:
        model: the model.
        mode: the mode in which to call the model.
        full_build_reason: why :func:`build_part` has to build the whole model first; None if it need not.
        overlap: the names of two tensors that share their memory where the constructor leaves them; None if none do.
        inputs: the fake inputs of the model and the real ones, by the ``id`` of the former.
    """

    model: nn.Module
    mode: FakeTensorMode
    full_build_reason: str | None = None
    overlap: tuple[str, str] | None = None
    inputs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def fake_like(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor with the shape, strides, dtype and device of ``tensor``."""
        return fake_like(tensor, self.mode)

    def fake_input(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor for an input of the model, real or fake, whose values modules get that need them."""
        fake = self.fake_like(tensor)
        self.inputs[id(fake)] = (fake, self.real_input(tensor) if isinstance(tensor, FakeTensor) else tensor)
        return fake

    def real_input(self, fake: Tensor) -> Tensor:
        """Return the real tensor for a fake input of the model, or random numbers for another fake tensor."""
        return self.inputs[id(fake)][1].clone() if id(fake) in self.inputs else random_like(fake)


def build_fake(build: Callable[[], nn.Module], device: torch.device, *, without_memory: bool = False) -> FakeModel:
    """Run a constructor with fake tensors and leave the random generators unchanged.

    Args:
        build: the constructor.
        device: the device that the fake tensors report.
        without_memory: whether to raise what the constructor raises with fake tensors, rather than build all of it.
    """
    recorder = Recorder(draw=False)
    reason = None
    with kept_generators(device):
        try:
            try:
                model = recorder.run(build)
            except NeedsRandomValues:
                recorder = Recorder(draw=True)
                model = recorder.run(build)
        except Exception as e:
            if without_memory:
                raise
            reason = f"{type(e).__name__}: {e}"
        if reason is not None:
            model = build()
        overlap = overlap_in(model)
        if reason is not None:
            model = _with_fakes(model, lambda name: False, recorder.mode)
    if device.type != "cpu":
        with recorder.mode:
            move(list(tensor_slots(model)), device)
    return FakeModel(model, recorder.mode, reason, overlap)


def build_part(build: Callable[[], nn.Module], wanted: Callable[[str], bool], *, seed: int) -> nn.Module:
    """Build a model with the random generators seeded, but with memory only for the wanted tensors.

    The generators are left as the full construction would leave them. Peak memory is the size of the wanted tensors and
    of the largest tensor that the constructor draws.

    Args:
        build: the constructor.
        wanted: whether the tensor of a given name is wanted. Called for each name of a shared tensor, of which one
            suffices.
        seed: the seed of the default generators.

    Returns:
        The model. Its other tensors are fake.
    """
    seed_generators(seed)
    recorder = Recorder(draw=True)
    with contextlib.suppress(Exception):
        model = recorder.run(build)
        unset = [s for s in tensor_slots(model) if isinstance(s.tensor, FakeTensor) or recorder.changed(s.tensor)]
        chosen = {id(slot.tensor): slot.tensor for slot in unset if wanted(slot.name)}
        values = recorder.values(chosen.values())
        for slot in unset:
            if id(slot.tensor) in chosen:
                slot.fill(values)
        return model
    # The full construction raises the constructor's own error, if that is why the recording failed.
    seed_generators(seed)
    return _with_fakes(build(), wanted, recorder.mode)


def build_divided(
    build: Callable[[], nn.Module],
    part: Callable[[torch.Size], Index],
    *,
    seed: int,
    device: torch.device,
    wanted: Callable[[str], bool] = lambda name: True,
    draws_as: int | None = None,
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Build a model with the random generators seeded, but with memory only for a part of each parameter.

    Parameters are computed one at a time. The generators are left as the full construction would leave them, unless
    parts are drawn.

    Args:
        build: the constructor.
        part: returns which part of a parameter of a given shape is kept.
        seed: the seed of the default generators.
        device: where the parts are kept.
        wanted: whether the tensor of a given name is wanted. Called for each name of a shared tensor, of which one
            suffices.
        draws_as: the number of the part, if the random numbers of a part are drawn without those of the others. They
            then depend on it. Parameters that are not filled entry by entry are drawn whole, alike for all parts. None:
            parts have the values of the whole model.

    Returns:
        The model, whose parameters are fake and whose other tensors are complete, if they are wanted; and the parts of
        the wanted parameters, by the parameter's first name.
    """

    def cut(whole: Tensor) -> Tensor:
        return whole[part(whole.shape)].to(device, copy=True)

    seed_generators(seed)
    recorder = Recorder(draw=draws_as is None)
    with contextlib.suppress(Exception):
        model = recorder.run(build)

        def value(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, FakeTensor) and not recorder.changed(tensor):
                return tensor
            return recorder.values([tensor], seed=None if draws_as is None else seed)[id(tensor)]

        def own(tensor: Tensor) -> Tensor:
            if draws_as is not None and tensor.ndim > 0:
                shape = tensor[part(tensor.shape)].shape
                drawn = recorder.drawn_part(tensor, shape, seed=derived_seed(seed, 1 + draws_as))
                if drawn is not None:
                    return drawn.to(device)
            return cut(value(tensor))

        return model, _divide(model, value, own, wanted, recorder.mode)
    if draws_as is not None:  # what is drawn decides what is built
        return build_divided(build, part, seed=seed, device=device, wanted=wanted)
    seed_generators(seed)  # as in build_part()
    model = build()
    return model, _divide(model, lambda tensor: tensor, cut, wanted, recorder.mode)


@torch.no_grad()
def _divide(
    model: nn.Module,
    value: Callable[[Tensor], Tensor],
    own: Callable[[Tensor], Tensor],
    wanted: Callable[[str], bool],
    mode: FakeTensorMode,
) -> dict[str, nn.Parameter]:
    """Replace the parameters of ``model`` by fake ones, and its other tensors that are wanted by their values.

    Returns the parts of the wanted parameters, as ``own`` returns them.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    parts: dict[str, nn.Parameter] = {}
    replaced: dict[int, Tensor] = {}
    slots = list(tensor_slots(model))
    chosen = {id(slot.tensor) for slot in slots if wanted(slot.name)}
    for tensor in {id(slot.tensor): slot.tensor for slot in slots}.values():
        if id(tensor) in chosen and tensor not in names:
            replaced[id(tensor)] = value(tensor)
            continue
        if id(tensor) in chosen:
            parts[names[tensor]] = nn.Parameter(own(tensor), requires_grad=tensor.requires_grad)
        replaced[id(tensor)] = tensor if isinstance(tensor, FakeTensor) else fake_like(tensor, mode)
    for slot in slots:
        slot.fill(replaced)
    return parts


def _with_fakes(model: nn.Module, wanted: Callable[[str], bool], mode: FakeTensorMode) -> nn.Module:
    """Replace the dense tensors of ``model`` that are not wanted under any of their names by fake ones."""
    slots = list(tensor_slots(model))
    kept = {id(slot.tensor) for slot in slots if wanted(slot.name)}
    dropped = [slot for slot in slots if id(slot.tensor) not in kept and slot.tensor.layout is torch.strided]
    fakes = {id(slot.tensor): fake_like(slot.tensor, mode) for slot in dropped}
    for slot in dropped:
        slot.fill(fakes)
    return model
