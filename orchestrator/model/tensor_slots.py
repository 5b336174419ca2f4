"""The attributes of a model that hold tensors, how to replace these tensors, and which of them share memory."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.modules import hooks_of, own_buffers, own_parameters
from orchestrator.compat.torch import FakeTensor, adopt_user_state, pytree, storage_key
from orchestrator.config.text import first_few

_ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class TensorSlot:
    """An attribute of a module that holds a tensor, by itself or in nested lists, tuples and dicts.

    Attributes:
        name: the path of the tensor in the model, such as ``encoder.weight`` or ``encoder.tables[0]``.
        owner: the module.
        attribute: the name of the parameter, buffer or plain attribute.
        tensor: the tensor in the slot.
    """

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor

    def fill(self, replacements: dict[int, Tensor]) -> None:
        """Replace the tensor by ``replacements[id(tensor)]``.

        The replacement of a parameter becomes a parameter, in ``replacements`` as well, so that it stays shared when
        the tensor's other slots are filled.
        """
        value = replacements[id(self.tensor)]
        if isinstance(self.tensor, nn.Parameter) and not isinstance(value, nn.Parameter):
            value = replacements[id(self.tensor)] = self._as_parameter(value)
        for attributes in (own_parameters(self.owner), own_buffers(self.owner), vars(self.owner)):
            if self.attribute in attributes:
                attributes[self.attribute] = pytree.tree_map_only(
                    Tensor, lambda t: value if t is self.tensor else t, attributes[self.attribute]
                )

    def _as_parameter(self, value: Tensor) -> nn.Parameter:
        """Make ``value`` a parameter with the attributes and hooks that the job has given to the present one."""
        parameter = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        adopt_user_state(parameter, self.tensor)
        return parameter


def tensor_slots(model: nn.Module) -> Iterator[TensorSlot]:
    """Yield the slot of every tensor in a model; a shared tensor has several."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        attributes = {**own_parameters(module), **own_buffers(module)}
        attributes |= {name: value for name, value in vars(module).items() if name not in _ATTRIBUTES_OF_EVERY_MODULE}
        for attribute, value in attributes.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            for path, leaf in pytree.tree_leaves_with_path(value):
                if isinstance(leaf, Tensor):
                    yield TensorSlot(name + pytree.keystr(path), module, attribute, leaf)


def sparse_error(names: Sequence[str]) -> str:
    """Return why a model cannot have the sparse tensors of these names."""
    return (
        f"job.model: {first_few(names, 2)} is sparse, and only dense tensors can be saved and sent to other workers; "
        "register its indices and its values as buffers, and make it of them in forward()"
    )


@contextlib.contextmanager
def new_tensors_dropped(model: nn.Module) -> Iterator[None]:
    """Restore at the end of the block the plain attributes of the modules that a forward pass has given new tensors.

    These are masks that it caches, for example, which another instance of the model does not have yet.
    """
    before = {
        module: {n: copy.copy(value) if isinstance(value, (dict, list)) else value for n, value in vars(module).items()}
        for module in model.modules()
    }
    known = {id(slot.tensor) for slot in tensor_slots(model)}
    try:
        yield
    finally:
        for module, attributes in before.items():
            for name, value in list(_plain(module)):
                if not any(isinstance(leaf, Tensor) and id(leaf) not in known for leaf in pytree.tree_leaves(value)):
                    continue
                if name not in attributes:
                    del vars(module)[name]
                elif isinstance(value, dict):  # other modules may share it
                    value.clear()
                    value.update(attributes[name])
                else:
                    vars(module)[name] = attributes[name]


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that hold neither parameters nor buffers nor modules, if they may hold tensors."""
    for name, value in vars(module).items():
        if name not in _ATTRIBUTES_OF_EVERY_MODULE and isinstance(value, (type(None), Tensor, tuple, list, dict)):
            yield name, value


def move(slots: Collection[TensorSlot], device: torch.device) -> None:
    """Move the tensors in these slots to ``device``. Slots that share a tensor share the moved one."""
    moved = {id(slot.tensor): slot.tensor.detach().to(device) for slot in slots}
    for slot in slots:
        slot.fill(moved)


@contextlib.contextmanager
def filled(module: nn.Module, value: Callable[[FakeTensor], Tensor]) -> Iterator[dict[int, Tensor]]:
    """Replace the fake tensors of a module by real ones, and put them back at the end of the block.

    Args:
        module: the module.
        value: returns the real tensor for a fake one; called once for a shared tensor.

    Yields:
        The real tensors by the ``id`` of the fake ones.
    """
    slots = [slot for slot in tensor_slots(module) if isinstance(slot.tensor, FakeTensor)]
    fakes = {id(slot.tensor): slot.tensor for slot in slots}
    memory = {key: value(fake) for key, fake in fakes.items() if isinstance(fake, FakeTensor)}
    for slot in slots:
        slot.fill(memory)
    back = {id(memory[key]): fake for key, fake in fakes.items()}
    try:
        yield memory
    finally:
        for slot in list(tensor_slots(module)):
            if id(slot.tensor) in back:
                slot.fill(back)


def random_like(fake: Tensor) -> Tensor:
    """Return a real tensor of the same kind, with small random numbers or zeros."""
    real = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
    if real.is_floating_point():
        real.uniform_(0.01, 0.1)
    return real.requires_grad_(fake.requires_grad)


def overlap_in(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of a trainable parameter and of another tensor that share elements; None if there are none.

    A parameter with several names is one tensor. The model may have no memory, as on the meta device.
    """
    by_storage: defaultdict[int, dict[int, TensorSlot]] = defaultdict(dict)
    for slot in tensor_slots(model):
        if slot.tensor.layout == torch.strided and not _may_be_replaced(slot):
            by_storage[storage_key(slot.tensor.untyped_storage())].setdefault(id(slot.tensor), slot)
    for slots in by_storage.values():
        for one, other in itertools.combinations(slots.values(), 2):
            if (_is_trained(one.tensor) or _is_trained(other.tensor)) and _share_elements(one.tensor, other.tensor):
                return one.name, other.name
    return None


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _may_be_replaced(slot: TensorSlot) -> bool:
    """Return whether a hook may set this plain attribute before each call, as ``spectral_norm`` of torch does."""
    return slot.attribute in vars(slot.owner) and bool(hooks_of(slot.owner))


def _share_elements(one: Tensor, other: Tensor) -> bool:
    if one.numel() == 0 or other.numel() == 0:
        return False
    spans = [_span(one), _span(other)]
    low, high = min(start for start, _ in spans), max(end for _, end in spans)
    if sum(end - start for start, end in spans) <= high - low:
        return False
    marks = torch.zeros(high - low, dtype=torch.bool, device="cpu")  # of bytes
    views = [
        marks.as_strided((*t.shape, t.itemsize), (*(s * t.itemsize for s in t.stride()), 1), start - low)
        for t, (start, _) in zip((one, other), spans, strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize
