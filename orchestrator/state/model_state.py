"""What a model is saved as: its parameters and buffers by their own names, and what else its ``state_dict()`` has.

Hooks of ``state_dict()`` may drop and rename entries, and those of loading expect what they have made. So tensors are
saved and loaded without these hooks. Entries that are no parameters or buffers, such as ``get_extra_state()`` makes, go
through ``load_state_dict()``, and so does all the rest once more, if the model has code for that.

Of frozen parameters that a checkpoint leaves out (``checkpoint.only_trained``), a checksum says whether the job has
built the same again. That of a tensor is the sum of those of its shards, so that it depends neither on the layout that
saves nor on the one that loads.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.modules import has_loading_code, own_parameters, persistent_buffers
from orchestrator.planning.placement import Box
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


_LISTED = 4
_ADVICE = "use the fields and the code of the job that it was trained with"


def mismatches(
    model_shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    saved: Mapping[str, Tensor],
    *,
    partial: bool = False,
) -> list[str]:
    """Return one line per parameter or buffer that does not fit; a single one if many names differ.

    A change from one floating dtype to another fits.

    Args:
        model_shapes: the shape and dtype of each parameter and buffer of the model, by name.
        saved: the tensors of the checkpoint, by name.
        partial: whether the model is a part of the saved one, so that names only in the checkpoint fit too.
    """
    missing = [name for name in model_shapes if name not in saved]
    others = [name for name in saved if name not in model_shapes]
    unexpected = [] if partial else others
    unlike = []
    for name, (shape, dtype) in model_shapes.items():
        tensor = saved.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            unlike.append(f"{name}: {list(tensor.shape)} in the checkpoint, {list(shape)} in the model")
        elif tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
            unlike.append(f"{name}: {tensor.dtype} in the checkpoint, {dtype} in the model")

    if len(missing) + len(unexpected) > _LISTED:
        kinds = (
            (unexpected, "has {} tensors that the model lacks"),
            (missing, "lacks {} tensors of the model"),
            (unlike, "has {} of another shape or type"),
        )
        parts = [f"{text.format(len(found))}, such as {found[0]}" for found, text in kinds if found]
        return [f"the checkpoint {'; '.join(parts)}; {_ADVICE}"]

    def nearest(name: str, names: list[str]) -> str:
        found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        return f" (nearest: {found[0]})" if found else ""

    return [
        *(f"{name}: not in the checkpoint{nearest(name, others)}" for name in missing),
        *(f"{name}: not in the model{nearest(name, missing)}" for name in unexpected),
        *capped_lines(unlike, str, "differ in shape or type"),
    ]


def capped_lines(names: Sequence[str], line: Callable[[str], str], rest: str) -> Iterator[str]:
    """Yield ``line(name)`` for the first few names, then one line that counts the others: "and 3 more <rest>"."""
    yield from map(line, names[:_LISTED])
    if len(names) > _LISTED:
        yield f"and {len(names) - _LISTED} more {rest}"


LEFT_OUT = "left_out"
"""The entry of ``meta`` with the checksums of the frozen parameters that a checkpoint leaves out, by name."""


class FrozenError(ValueError):
    """The job does not build the frozen parameters of a checkpoint. The text explains it without a traceback."""


_CHUNK = 2**20
_ODD = 0x2545F4914F6CDD1D
_BITS = 2**64


def checksum(tensor: Tensor, box: Box) -> int:
    """Return 64 bits that depend on each value of a ``box`` of a tensor and on its place, but not on its dtype."""
    values = tensor.detach().reshape(-1)
    total = 0
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        bits = part.double().view(torch.int64) if part.is_floating_point() else part.long()
        mixed = (bits ^ (bits >> 32)) * _ODD
        mixed ^= mixed >> 29
        places = _places(torch.arange(start, start + len(part), device=part.device), box)
        total += int((mixed * (2 * places + 1)).sum())
    return total % _BITS


def total(sums: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the checksums of whole tensors by name, from those of the shards that ranks have."""
    every = Counter[str]()
    for own in sums:
        every.update(own)
    return {name: value % _BITS for name, value in every.items()}


def check_built(saved: Mapping[str, int], built: Mapping[str, int]) -> None:
    """Check that the job builds the frozen parameters that a checkpoint was trained with.

    Raises:
        FrozenError: it does not.
    """
    unlike = [name for name, value in saved.items() if built.get(name) != value]
    if unlike:
        more = f", and {len(unlike) - 1} more" if unlike[1:] else ""
        raise FrozenError(
            "the job builds other frozen parameters than the checkpoint was trained with: "
            f"{unlike[0]}{more}; let it read the same weights as before, because the checkpoint leaves these out "
            "(checkpoint.only_trained, or a hook of state_dict())"
        )


def _places(numbers: Tensor, box: Box) -> Tensor:
    """Return the places in the whole tensor of the elements of a box with these numbers."""
    places, stride = torch.zeros_like(numbers), 1
    for ranges, full in zip(reversed(box.ranges), reversed(box.full), strict=True):
        size = sum(n for _, n in ranges)
        own, first = numbers % size, 0
        place = own
        for start, n in ranges:
            place = torch.where(own >= first, own - first + start, place)
            first += n
        places += place * stride
        numbers = numbers // size
        stride *= full
    return places
