"""What a model is saved as: its parameters and buffers by their own names, and what else its ``state_dict()`` has.

Hooks of ``state_dict()`` may drop and rename entries, and those of loading expect what they have made. So tensors are
saved and loaded without these hooks. Entries that are no parameters or buffers, such as ``get_extra_state()`` makes, go
through ``load_state_dict()``, and so does all the rest once more, if the model has code for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.torch import has_loading_code, own_parameters, persistent_buffers
from orchestrator.state.optimizer_state import pack_values, unpack_values

MODEL_FURTHER = "model_further"
"""The entry of ``meta`` with what is in the ``state_dict()`` of a model and no tensor."""


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by all their names, themselves and not copies."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*own_parameters(module).items(), *persistent_buffers(module).items()):
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def further_entries(model: nn.Module) -> dict[str, Any]:
    """Return what ``state_dict()`` has beside parameters and buffers, under whatever names."""
    own = own_tensors(model)
    known = {id(tensor) for tensor in own.values()}
    said = model.state_dict(keep_vars=True)
    return {name: value for name, value in said.items() if name not in own and id(value) not in known}


def dropped_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that ``state_dict()`` leaves out although the model has them."""
    said = model.state_dict(keep_vars=True)
    known = {id(value) for value in said.values()}
    return frozenset(
        name
        for name, tensor in own_tensors(model).items()
        if isinstance(tensor, nn.Parameter) and name not in said and id(tensor) not in known
    )


def pack_further(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the further entries of ``state_dict()``: the tensors among them, and JSON of the others.

    Raises:
        ValueError: one is neither a tensor nor numbers and text.
    """
    further = further_entries(model)
    tensors = {name: value.detach() for name, value in further.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in further.items() if name not in tensors}
    return tensors, pack_values(type(model).__name__, others)


@torch.no_grad()
def load_tensors(model: nn.Module, values: Mapping[str, Tensor], further: Mapping[str, Any]) -> None:
    """Give a model the values of its own tensors, and let it load its further entries.

    Args:
        model: the model.
        values: parameters and buffers by name, and further tensors.
        further: what :func:`pack_further` returned as JSON.
    """
    own = own_tensors(model)

    def copy() -> None:
        for name, value in values.items():
            if name in own:
                own[name].copy_(value)

    copy()
    others = {**{name: value for name, value in values.items() if name not in own}, **unpack_values(further)}
    if others or has_loading_code(model):
        model.load_state_dict({**model.state_dict(), **others}, strict=False)
        copy()  # hooks may have rounded them


def saving_errors(model: nn.Module, *, in_parts: bool) -> list[str]:
    """Return why a model, which may have no memory, cannot be saved; ``in_parts``: by ranks that have parts of it."""
    errors = []
    for name, parameter in model.named_parameters():
        if any(step == 0 and size > 1 for step, size in zip(parameter.stride(), parameter.shape, strict=True)):
            errors.append(f"job.model(): elements of {name} share their memory, so it cannot be updated; clone() it")
    own = own_tensors(model)
    try:
        pack_further(model)
        said = model.state_dict(keep_vars=True)
    except ValueError as e:
        return [*errors, f"job.model(): {e}"]
    except Exception:  # code of the model that needs values
        return errors
    if in_parts and (odd := [name for name in {**own, **said} if own.get(name) is not said.get(name)]):
        errors.append(
            f"job.model(): its state_dict() changes, adds or leaves out {odd[0]}, by a hook or get_extra_state(), and "
            "ranks that have stages or shards of the model save parameters and buffers as they are; make it a buffer "
            "and leave the hook out, or use strategy=ddp without strategy.shard_optimizer"
        )
    return errors
