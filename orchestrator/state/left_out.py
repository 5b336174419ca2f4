"""Frozen parameters that checkpoints leave out (``checkpoint.only_trained``), because the job builds them again.

A checksum of each says whether it has built the same. That of a tensor is the sum of those of its shards, so that it
depends neither on the layout that saves nor on the one that loads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from orchestrator.planning.boxes import Box

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
        raise FrozenError(
            "the job builds other frozen parameters than the checkpoint was trained with: "
            f"{unlike[0]}, the first of {len(unlike)}; let it read the same weights as before, because the checkpoint "
            "leaves these out (checkpoint.only_trained, or a hook of state_dict())"
        )


def _places(numbers: Tensor, box: Box) -> Tensor:
    """Return the places in the whole tensor of the elements of a box with these numbers."""
    places, stride = torch.zeros_like(numbers), 1
    for size, offset, full in zip(reversed(box.shape), reversed(box.offset), reversed(box.full), strict=True):
        places += (numbers % size + offset) * stride
        numbers = numbers // size
        stride *= full
    return places
