"""What an optimizer says in its ``state_dict()``, by the names of the parameters, so that any layout can load it.

Tensors are kept apart from the rest, which becomes JSON. JSON cannot tell some values apart, so these become a mapping
with one key that begins with ``~``: tuples, mappings with other keys than text, references to tensors and parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.state.optimizers import AnyOptimizer, JointOptimizer, from_json, load_without_casts, to_json

FURTHER = "optimizer_further"
"""The entry of ``meta`` with what optimizers say beside the state of each parameter and the parameter groups."""

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that select how an update is computed, not its result. The loading process chooses its own."""
_INLINE = 4096
"""Tensors of the whole optimizer with up to so many elements are part of the JSON, which several stages may have."""
_INLINE_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
}
_OTHER = "~other"
"""The key of what is in the state of a parameter under keys that cannot be in the name of a tensor."""

Move = Callable[[str, str, nn.Parameter | None], Tensor]
"""Returns a saved tensor, given its path, its key and its parameter; None for those of the whole optimizer."""


@dataclass(frozen=True, kw_only=True)
class PackedState:
    """The state of an optimizer, or of several.

    Attributes:
        tensors: by ``"<parameter name>/<state key>"``; the name of those of the whole optimizer is empty.
        scalars: JSON of each parameter, by its name and the key.
        groups: JSON of the parameter groups.
        further: the rest, as JSON, by the number of the optimizer.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    further: dict[str, Any] = field(default_factory=dict)


def pack(optimizer: AnyOptimizer, names: Mapping[nn.Parameter, str]) -> PackedState:
    """Return what ``optimizer`` says, with its tensors and not copies of them.

    Raises:
        ValueError: some of it cannot be stored as tensors and JSON, or it is no state of these parameters.
    """
    packed = PackedState()
    for number, one in enumerate(optimizers_in(optimizer)):
        groups = [[name_of(p, names) for p in group["params"]] for group in one.param_groups]
        device = next((p.device for group in one.param_groups for p in group["params"]), None)
        _Packer(type(one).__name__, names, groups, device, packed).pack(one, str(number))
    return packed


def load(
    optimizer: AnyOptimizer,
    meta: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    paths: Iterable[str],
    move: Move,
    *,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Load what :func:`pack` returned.

    Args:
        optimizer: with the classes of the saved ones.
        meta: of the state.
        names: the saved name of each parameter, by parameter group.
        paths: of all saved tensors.
        move: returns the tensors, where ``optimizer`` has them.
        dtypes: of the saved parameters, by name.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        name, _, key = path.rpartition("/")
        keys[name].append(key)
    first = 0
    for number, one in enumerate(optimizers_in(optimizer)):
        own = slice(first, first := first + len(one.param_groups))
        parameters = [p for group in one.param_groups for p in group["params"]]
        by_name = dict(zip((name for group in names[own] for name in group), parameters, strict=True))
        loader = _Loader(by_name, [*map(len, names[own])], meta["optimizer_scalars"], keys, move)
        said = loader.state_dict(one, meta["param_groups"][own], meta.get(FURTHER, {}).get(str(number), {}))
        load_without_casts(one, said, by_name, dtypes)


def pack_values(label: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values``, which are no tensors, as JSON; ``label``: what has them.

    Raises:
        ValueError: something in them is neither a small tensor nor numbers and text.
    """
    into = PackedState()
    packer = _Packer(label, {}, [], None, into)
    found = {name: packer.json(value, "", repr(name)) for name, value in values.items()}
    if into.tensors:
        raise ValueError(f"{label}: its state has large tensors inside of other values; make them buffers")
    return found


def unpack_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`pack_values` got, with tensors in host memory."""
    loader = _Loader({}, [], {}, {}, None)
    return {name: loader.value(value, None) for name, value in found.items()}


def optimizers_in(optimizer: AnyOptimizer) -> Sequence[Optimizer]:
    """Return the optimizers that are joined, or the one."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else [optimizer]


def name_of(parameter: Tensor, names: Mapping[nn.Parameter, str]) -> str:
    """Return the name of a parameter of an optimizer.

    Raises:
        ValueError: the model does not have it.
    """
    name = names.get(parameter) if isinstance(parameter, nn.Parameter) else None
    if name is None:
        raise ValueError(
            f"the optimizer holds a tensor of shape {list(parameter.shape)} that is not a parameter "
            "of the model; Job.optimizer must use the parameters that it receives"
        )
    return name


class _Packer:
    """Packs one optimizer."""

    def __init__(
        self,
        label: str,
        names: Mapping[nn.Parameter, str],
        groups: Sequence[list[str]],
        device: torch.device | None,
        into: PackedState,
    ):
        self._label = label
        self._names = names
        self._groups = groups
        self._own = [name for group in groups for name in group]
        self._device = device
        self._into = into

    def pack(self, optimizer: Optimizer, number: str) -> None:
        for parameter in optimizer.state:
            if isinstance(parameter, Tensor):
                name_of(parameter, self._names)
        said = dict(optimizer.state_dict())
        groups = said.pop("param_groups", None) if self._are_own(said.get("param_groups")) else None
        self._pack_groups(optimizer.param_groups if groups is None else groups)
        further: dict[str, Any] = {}
        state = said.get("state")
        if isinstance(state, Mapping):
            del said["state"]
            others = {}
            for key, values in state.items():
                if type(key) is int and 0 <= key < len(self._own) and isinstance(values, Mapping):
                    self._pack_parameter(self._own[key], values)
                else:
                    others[key] = values
            if others:
                further["state"] = self.json(others, f"{number}.state", "'state'")
        further |= {key: self.json(value, f"{number}.{_clean(key)}", repr(key)) for key, value in said.items()}
        if further:
            self._into.further[number] = further

    def _are_own(self, groups: Any) -> bool:
        """Return whether ``groups`` are those of this optimizer, with numbers in place of parameters."""
        return isinstance(groups, list) and [self._numbers(g) for g in groups] == self._own_numbers

    @property
    def _own_numbers(self) -> list[Any]:
        numbers = iter(range(len(self._own)))
        return [[next(numbers) for _ in group] for group in self._groups]

    @staticmethod
    def _numbers(group: Any) -> list[int] | None:
        numbers = group.get("params") if isinstance(group, Mapping) else None
        return numbers if isinstance(numbers, list) and all(type(n) is int for n in numbers) else None

    def _pack_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        for group, names in zip(groups, self._groups, strict=True):
            kept = {k: v for k, v in group.items() if k not in {"params", "param_names"} | _IMPLEMENTATION}
            remedy = "use numbers and text"
            values = {k: to_json(v, f"{self._label}: its option {k!r}", remedy) for k, v in kept.items()}
            self._into.groups.append({**values, "params": names})

    def _pack_parameter(self, name: str, values: Mapping[Any, Any]) -> None:
        others = {}
        for key, value in values.items():
            if not isinstance(key, str) or "/" in key or key.startswith("~"):
                others[key] = value
            elif isinstance(value, Tensor):
                self._into.tensors[f"{name}/{key}"] = value.detach()
            else:
                found = self.json(value, key, f"{key!r} of {name}", of=name)
                self._into.scalars.setdefault(name, {})[key] = found
        if others:
            found = self.json(others, _OTHER, f"state of {name}", of=name)
            self._into.scalars.setdefault(name, {})[_OTHER] = found

    def json(self, value: Any, path: str, what: str, *, of: str | None = None) -> Any:
        """Return ``value`` as JSON, and keep its tensors.

        Args:
            path: what to name tensors by.
            what: the entry of the state, for messages.
            of: the parameter whose state the value is; None for that of the whole optimizer.
        """
        if isinstance(value, nn.Parameter) and value in self._names:
            return {"~parameter": self._names[value]}
        if isinstance(value, Tensor):
            return self._tensor(value, path, of)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return self._mapping(value, path, what, of)
        if type(value) in (list, tuple):
            items = [self.json(item, f"{path}.{i}", what, of=of) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"~tuple": items}
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy
            return value.item()
        raise ValueError(
            f"{self._label}: its state {what} has a value of type {type(value).__name__}; only tensors, numbers and "
            "text, also in lists, tuples and dicts, can be saved; let state_dict() return these"
        )

    def _tensor(self, value: Tensor, path: str, of: str | None) -> Any:
        on_host = value.device != self._device
        dtype = str(value.dtype).removeprefix("torch.")
        if of is None and value.numel() <= _INLINE and dtype in _INLINE_DTYPES:
            return {"~values": [dtype, list(value.shape), value.detach().reshape(-1).tolist(), on_host]}
        key = path
        while (full := f"{of or ''}/{key}") in self._into.tensors:
            key += "'"
        self._into.tensors[full] = value.detach()
        return {"~tensor": [key, on_host]}

    def _mapping(self, value: Mapping[Any, Any], path: str, what: str, of: str | None) -> Any:
        if of is None and (kind := self._kind_of_parameters(value)) is not None:
            for key, own in value.items():
                name = self._own[key] if kind == "number" else self._names[key]
                self._into.scalars.setdefault(name, {})[f"~{path}"] = self.json(own, path, what, of=name)
            return {"~parameters": [path, kind]}
        if not all(isinstance(key, str) and not key.startswith("~") for key in value):
            every = enumerate(value.items())
            pairs = [[self.json(k, path, what), self.json(v, f"{path}.{i}", what, of=of)] for i, (k, v) in every]
            return {"~pairs": pairs}
        found = {key: self.json(item, f"{path}.{_clean(key)}", what, of=of) for key, item in value.items()}
        if of is None and self._are_own(value.get("param_groups")):
            for number, group in enumerate(found["param_groups"]):
                group["params"] = {"~group": number}
        return found

    def _kind_of_parameters(self, value: Mapping[Any, Any]) -> str | None:
        """Return how the keys of ``value`` say parameters; None if they do not."""
        if not value or not all(isinstance(own, (Mapping, Tensor)) for own in value.values()):
            return None
        if all(isinstance(key, nn.Parameter) and key in self._names for key in value):
            return "tensor"
        return "number" if all(type(key) is int and 0 <= key < len(self._own) for key in value) else None


class _Loader:
    """Puts together what one optimizer loads, which casts to the dtypes and devices of its parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sizes: Sequence[int],
        scalars: Mapping[str, Mapping[str, Any]],
        keys: Mapping[str, Sequence[str]],
        move: Move | None,
    ):
        """``parameters``: by their saved names; ``sizes``: of the parameter groups."""
        self._parameters = parameters
        self._names = list(parameters)
        self._sizes = sizes
        self._scalars = scalars
        self._keys = keys
        self._move = move

    def state_dict(
        self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], further: Mapping[str, Any]
    ) -> dict[str, Any]:
        said = {key: self.value(value, None) for key, value in further.items()}
        own = optimizer.state_dict()
        if "state" in own:
            of_parameters = {i: values for i, name in enumerate(self._names) if (values := self._state_of(name))}
            said["state"] = {**of_parameters, **said.get("state", {})}
        if "param_groups" in own and "param_groups" not in said:
            said["param_groups"] = self._groups(optimizer, groups)
        return said

    def _groups(self, optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for number, (group, own) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
            packed = {k: v for k, v in own.items() if k != "params"}
            packed |= {k: from_json(v, own.get(k)) for k, v in group.items() if k != "params"}
            found.append({**packed, "params": self._numbers(number)})
        return found

    def _numbers(self, group: int) -> list[int]:
        first = sum(self._sizes[:group])
        return list(range(first, first + self._sizes[group]))

    def _state_of(self, name: str) -> dict[Any, Any]:
        saved = self._scalars.get(name, {})
        inside = {key for value in saved.values() for key in _keys_in(value)}
        parameter = self._parameters[name]
        assert self._move is not None
        values = {k: self._move(f"{name}/{k}", k, parameter) for k in self._keys.get(name, ()) if k not in inside}
        values |= {key: self.value(value, name) for key, value in saved.items() if not key.startswith("~")}
        others: dict[Any, Any] = self.value(saved.get(_OTHER, {}), name)
        return values | others

    def value(self, value: Any, of: str | None) -> Any:
        """Return what became the JSON ``value`` of a parameter, or of the whole optimizer."""
        if isinstance(value, list):
            return [self.value(item, of) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("~"):
            return {key: self.value(item, of) for key, item in value.items()}
        content = value[tag]
        match tag:
            case "~tuple":
                return tuple(self.value(item, of) for item in content)
            case "~pairs":
                return {self.value(key, of): self.value(item, of) for key, item in content}
            case "~parameter":
                return self._parameters[content]
            case "~group":
                return self._numbers(content)
            case "~parameters":
                path, kind = content
                found = {}
                for number, name in enumerate(self._names):
                    if (saved := self._scalars.get(name, {}).get(f"~{path}")) is not None:
                        key = number if kind == "number" else self._parameters[name]
                        found[key] = self.value(saved, name)
                return found
            case "~tensor":
                assert self._move is not None
                key, on_host = content
                tensor = self._move(f"{of or ''}/{key}", key, None if of is None else self._parameters[of])
                return self._placed(tensor, on_host=on_host)
            case _:
                dtype, shape, numbers, on_host = content
                return self._placed(torch.tensor(numbers, dtype=_INLINE_DTYPES[dtype]).view(shape), on_host=on_host)

    def _placed(self, tensor: Tensor, *, on_host: bool) -> Tensor:
        device = next((p.device for p in self._parameters.values()), tensor.device)
        return tensor.to("cpu" if on_host else device)


def _clean(key: Any) -> str:
    return str(key).replace("/", ".")


def _keys_in(value: Any) -> set[str]:
    """Return the keys of the tensors that a JSON value refers to."""
    if isinstance(value, list):
        return {key for item in value for key in _keys_in(item)}
    if not isinstance(value, dict):
        return set()
    return {value["~tensor"][0]} if "~tensor" in value else _keys_in([*value.values()])
