"""A model as a sequence of layers: where it can be cut, and how a worker builds some of its layers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor, nn

from orchestrator.compat.modules import own_children
from orchestrator.model.partial_init import FakeModel, build_part
from orchestrator.model.stages.cut import Layer
from orchestrator.model.tensor_slots import tensor_slots


class DefinesStages(Protocol):
    """The part of a job that may define the stages of its model."""

    def stages(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Return the layers of ``model``, or None to leave the cutting to the strategy."""


class LayerSequence(abc.ABC):
    """The layers of a model, of fake tensors. Each is called with the result of the one before.

    Attributes:
        whole: the model as the job builds it, of fake tensors.
        names: the name of each layer.
        modules: each layer.
        unused: the names of the parameters and persistent buffers that no layer uses. The first layer holds them, so
            that they are in every checkpoint.
        call: how the whole model is called with its input, as ``Job.forward`` does; None if it is only called.
    """

    unused: frozenset[str] = frozenset()

    call: Callable[[nn.Module, Any], Any] | None = None

    def __init__(self, whole: FakeModel, names: Sequence[str], modules: Sequence[nn.Module]):
        self.whole = whole
        self.names = tuple(names)
        self.modules = tuple(modules)

    @property
    def layers(self) -> list[Layer]:
        """The name and the number of parameters of each layer."""
        return [
            Layer(
                name=name,
                trainable=any(p.requires_grad for p in module.parameters()),
                num_parameters=sum(p.numel() for p in module.parameters()),
            )
            for name, module in zip(self.names, self.modules, strict=True)
        ]

    def tensors_of(self, index: int, module: nn.Module) -> Mapping[str, Tensor]:
        """Return the parameters and persistent buffers of a layer by the model's own names.

        A layer that holds a shared tensor also has the names of it that no layer has, such as the name of a table that
        is only ever used under other names.

        Args:
            index: the index of the layer.
            module: the layer, either of fake tensors or as :meth:`build_layers` returns it.
        """
        tensors = self._tensors_of(index, module)
        return {**tensors, **{alias: tensors[name] for alias, name in self._aliases[index].items()}}

    @cached_property
    def saved_names(self) -> tuple[str, ...]:
        """The names in the model's ``state_dict()``, in order."""
        return tuple(self.whole.model.state_dict())

    @cached_property
    def _aliases(self) -> list[dict[str, str]]:
        """For each layer, the names that no layer has of tensors that it holds, and its own names of these tensors."""
        own = [self._tensors_of(index, module) for index, module in enumerate(self.modules)]
        known = set().union(*own)
        nameless = {name: id(t) for name, t in saved_tensors(self.whole.model).items() if name not in known}
        names = [{id(tensor): name for name, tensor in tensors.items()} for tensors in own]
        return [{alias: held[key] for alias, key in nameless.items() if key in held} for held in names]

    @abc.abstractmethod
    def _tensors_of(self, index: int, module: nn.Module) -> Mapping[str, Tensor]:
        """Return the parameters and persistent buffers of a layer by the names under which it uses them."""

    @abc.abstractmethod
    def of(self, model: nn.Module, indices: Collection[int]) -> dict[int, nn.Module]:
        """Return some of the layers, by index, of an instance of the model."""

    @abc.abstractmethod
    def uses(self, indices: Collection[int]) -> Callable[[str], bool]:
        """Return whether any of these layers uses the tensor of a given name."""

    def build_layers(
        self, build: Callable[[], nn.Module], indices: Collection[int], *, seed: int
    ) -> dict[int, nn.Module]:
        """Build some of the layers, with the values that they have in the whole model.

        Args:
            build: the model's constructor.
            indices: the indices of the layers.
            seed: the seed before the constructor runs.

        Returns:
            The layers by index.
        """
        return self.of(build_part(build, self.uses(indices), seed=seed), indices)


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in the ``state_dict()`` of a model, themselves and not copies."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


class SequentialLayers(LayerSequence):
    """The children of an ``nn.Sequential`` that only calls them."""

    def __init__(self, whole: FakeModel):
        children = {name: child for name, child in own_children(whole.model).items() if child is not None}
        super().__init__(whole, list(children), list(children.values()))

    def _tensors_of(self, index: int, module: nn.Module) -> Mapping[str, Tensor]:
        state: dict[str, Tensor] = module.state_dict(prefix=f"{self.names[index]}.", keep_vars=True)
        return state

    def of(self, model: nn.Module, indices: Collection[int]) -> dict[int, nn.Module]:
        return {index: model.get_submodule(self.names[index]) for index in indices}

    def uses(self, indices: Collection[int]) -> Callable[[str], bool]:
        own = {self.names[index] for index in indices}
        return lambda name: name.partition(".")[0] in own


class JobStages(LayerSequence):
    """The modules that ``Job.stages`` returns for the model."""

    def __init__(self, whole: FakeModel, job: DefinesStages):
        """
        Args:
            whole: the model, of fake tensors.
            job: returns the layers of the model.

        Raises:
            ValueError: a layer holds a parameter or buffer that the model does not hold, or no layer holds one that
                the model does.
        """
        modules = _layers_of(whole.model, job)
        known = {id(module): name for name, module in whole.model.named_modules()}
        names = [known.get(id(module)) or f"stage{index}" for index, module in enumerate(modules)]
        super().__init__(whole, names, modules)
        self._job = job
        own = {id(slot.tensor): slot.name for slot in reversed(list(tensor_slots(whole.model)))}
        self._model_names: list[dict[str, str]] = []
        for name, module in zip(names, modules, strict=True):
            slots = list(tensor_slots(module))
            if unknown := [slot.name for slot in slots if id(slot.tensor) not in own]:
                raise ValueError(f"Job.stages: {name} holds {unknown[0]}, which is not a tensor of the model")
            self._model_names.append({slot.name: own[id(slot.tensor)] for slot in slots})
        held = {name for names in self._model_names for name in names.values()}
        if missing := [name for name, t in saved_tensors(whole.model).items() if own.get(id(t), name) not in held]:
            raise ValueError(
                f"Job.stages: none of its modules holds {missing[0]}; add the module that does to the list"
            )

    def _tensors_of(self, index: int, module: nn.Module) -> Mapping[str, Tensor]:
        names = self._model_names[index]
        return {names[name]: tensor for name, tensor in module.state_dict(keep_vars=True).items()}

    def of(self, model: nn.Module, indices: Collection[int]) -> dict[int, nn.Module]:
        modules = _layers_of(model, self._job)
        return {index: modules[index] for index in indices}

    def uses(self, indices: Collection[int]) -> Callable[[str], bool]:
        return {name for index in indices for name in self._model_names[index].values()}.__contains__


def _layers_of(model: nn.Module, job: DefinesStages) -> list[nn.Module]:
    modules = list(job.stages(model) or ())
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ValueError("Job.stages: expected a list of modules, each of which is called with the result of the last")
    return modules
