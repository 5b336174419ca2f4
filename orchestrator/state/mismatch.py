"""Reports of the differences between a checkpoint's tensors and a model's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

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
