"""Pictures from tensors, as the job returns them in its samples."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_GAP = 2
"""Pixels between the images of a grid."""
_TOLERANCE = 0.01
"""How far a value may be outside [0, 1], as interpolation may leave it."""


def picture(images: Tensor) -> np.ndarray:
    """Return an image, or a grid of images, as 8-bit pixels of shape (height, width) or (height, width, 3).

    Args:
        images: shape (H, W), (C, H, W) or (N, C, H, W) with C of 1 or 3; floats in [0, 1], or uint8.

    Raises:
        ValueError: the tensor has another shape, type or range.
    """
    shape = tuple(images.shape)
    batch = images.detach().cpu()[(None,) * max(0, 4 - images.ndim)]
    if images.ndim not in (2, 3, 4) or batch.shape[1] not in (1, 3) or batch.numel() == 0:
        raise ValueError(
            f"a tensor of shape {shape} is not an image; images have shape (H, W), (C, H, W) or (N, C, H, W), where C "
            "is 1 or 3"
        )
    grid = _grid(_as_bytes(batch))
    pixels: np.ndarray = grid.permute(1, 2, 0).squeeze(-1).contiguous().numpy()
    return pixels


def _as_bytes(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise ValueError(f"an image of type {images.dtype}; images are floats in [0, 1], or torch.uint8")
    values = images.float()
    low, high = float(values.min()), float(values.max())
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # also if one of them is NaN
        raise ValueError(f"an image with values from {low:g} to {high:g}; images are floats in [0, 1], or torch.uint8")
    return (values.clamp(0, 1) * 255).round().to(torch.uint8)


def _grid(images: Tensor) -> Tensor:
    """Return images of shape (N, C, H, W) in rows and columns, as one of shape (C, height, width)."""
    count, channels, height, width = images.shape
    if count == 1:
        return images[0]
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    padded = F.pad(images, (0, _GAP, 0, _GAP))
    cells = padded.new_zeros(rows * columns, channels, height + _GAP, width + _GAP)
    cells[:count] = padded
    grid = cells.view(rows, columns, channels, height + _GAP, width + _GAP).permute(2, 0, 3, 1, 4)
    return grid.reshape(channels, rows * (height + _GAP), columns * (width + _GAP))[:, :-_GAP, :-_GAP]
