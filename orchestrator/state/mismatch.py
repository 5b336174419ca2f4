"""Reports of the differences between a checkpoint's tensors and a model's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

_LISTED = 4


def mismatches(
    model_shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    saved: Mapping[str, Tensor],
    *,
    partial: bool = False,
) -> list[str]:
    """Return one line per parameter or buffer that does not fit, at most the first few of each kind.

    A change from one floating dtype to another fits.

    Args:
        model_shapes: the shape and dtype of each parameter and buffer of the model, by name.
        saved: the tensors of the checkpoint, by name.
        partial: whether the model is a part of the saved one, so that names only in the checkpoint fit too.
    """
    missing = [name for name in model_shapes if name not in saved]
    unexpected = [name for name in saved if name not in model_shapes]
    unlike = []
    for name, (shape, dtype) in model_shapes.items():
        tensor = saved.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            unlike.append(f"{name}: {list(tensor.shape)} in the checkpoint, {list(shape)} in the model")
        elif tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
            unlike.append(f"{name}: {tensor.dtype} in the checkpoint, {dtype} in the model")

    def nearest(name: str, others: list[str]) -> str:
        found = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
        return f" (nearest: {found[0]})" if found else ""

    def not_in_checkpoint(name: str) -> str:
        return f"{name}: not in the checkpoint{nearest(name, unexpected)}"

    def not_in_model(name: str) -> str:
        return f"{name}: not in the model{nearest(name, missing)}"

    return [
        *capped_lines(missing, not_in_checkpoint, "are not in the checkpoint"),
        *([] if partial else capped_lines(unexpected, not_in_model, "are not in the model")),
        *capped_lines(unlike, str, "differ in shape or type"),
    ]


def capped_lines(names: Sequence[str], line: Callable[[str], str], rest: str) -> Iterator[str]:
    """Yield ``line(name)`` for the first few names, then one line that counts the others: "and 3 more <rest>"."""
    yield from map(line, names[:_LISTED])
    if len(names) > _LISTED:
        yield f"and {len(names) - _LISTED} more {rest}"
