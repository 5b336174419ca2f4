"""A model as layers that are called one after another: where it can be cut, what each layer is made of."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

from orchestrator.model.cut import Layer
from orchestrator.model.partial_init import Outline, build_part


class LayerSequence(abc.ABC):
    """Layers of fake tensors, as :func:`~orchestrator.model.partial_init.outline` makes them.

    ``outline``: the model as the job builds it. ``modules``: each is called with what the one before returned.
    """

    def __init__(self, outline: Outline, names: Sequence[str], modules: Sequence[nn.Module]):
        self.outline = outline
        self.names = tuple(names)
        self.modules = tuple(modules)

    @property
    def layers(self) -> list[Layer]:
        return [
            Layer(
                name=name,
                trainable=any(p.requires_grad for p in module.parameters()),
                num_parameters=sum(p.numel() for p in module.parameters()),
            )
            for name, module in zip(self.names, self.modules, strict=True)
        ]

    @abc.abstractmethod
    def tensors_of(self, number: int, module: nn.Module) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers of a layer by the model's own names; ``module`` is it or its like."""

    @abc.abstractmethod
    def realise(self, build: Callable[[], nn.Module], numbers: Collection[int], *, seed: int) -> dict[int, nn.Module]:
        """These layers with the numbers that the whole model has after ``torch.manual_seed(seed)``."""


class Children(LayerSequence):
    """The children of an ``nn.Sequential``."""

    def __init__(self, outline: Outline):
        children = {name: child for name, child in outline.model._modules.items() if child is not None}
        super().__init__(outline, list(children), list(children.values()))

    def tensors_of(self, number: int, module: nn.Module) -> Mapping[str, Tensor]:
        state: dict[str, Tensor] = module.state_dict(prefix=f"{self.names[number]}.", keep_vars=True)
        return state

    def realise(self, build: Callable[[], nn.Module], numbers: Collection[int], *, seed: int) -> dict[int, nn.Module]:
        own = {self.names[number] for number in numbers}
        model = build_part(build, lambda name: name.partition(".")[0] in own, seed=seed)
        return {number: model.get_submodule(self.names[number]) for number in numbers}
