"""Pictures from tensors: their pixels, and what is not an image."""

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.worker.reports.job_reports import picture


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_from_0_to_1_become_bytes(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, 0.25, 1.0], [0.5, 0.75, 1.0]], dtype=dtype)
    assert picture(values).tolist() == [[0, 64, 255], [128, 191, 255]]


def test_bytes_stay_as_they_are() -> None:
    values = torch.arange(12, dtype=torch.uint8).view(3, 4)
    assert (picture(values) == values.numpy()).all()
    assert picture(values).dtype == np.uint8


def test_channels_come_last_and_a_single_one_disappears() -> None:
    red = torch.stack([torch.ones(4, 5), torch.zeros(4, 5), torch.zeros(4, 5)])
    assert picture(red).shape == (4, 5, 3)
    assert picture(red)[0, 0].tolist() == [255, 0, 0]
    assert picture(red[:1]).shape == (4, 5)


def test_a_value_that_requires_a_gradient_is_an_image() -> None:
    assert picture(torch.ones(2, 2, requires_grad=True)).tolist() == [[255, 255], [255, 255]]


def test_a_batch_is_a_grid_in_rows_with_gaps() -> None:
    images = torch.full((5, 1, 3, 4), 1.0) * torch.arange(1, 6).view(5, 1, 1, 1) / 5
    grid = picture(images)
    assert grid.shape == (2 * 3 + 2, 3 * 4 + 2 * 2), "three columns and two rows"
    assert [int(grid[0, column]) for column in (0, 6, 12)] == [51, 102, 153]
    assert [int(grid[5, column]) for column in (0, 6, 12)] == [204, 255, 0], "the last place is empty"
    assert grid[3:5].max() == 0, "a gap"
    assert grid[:, 4:6].max() == 0, "a gap"
    assert picture(images[:1]).shape == (3, 4), "one image has no grid"
    assert picture(torch.rand(7, 3, 3, 4)).shape == (3 * 3 + 2 * 2, 3 * 4 + 2 * 2, 3)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (torch.ones(3), "shape (3,) is not an image"),
        (torch.ones(()), "shape () is not an image"),
        (torch.ones(2, 4, 4), "shape (2, 4, 4) is not an image"),
        (torch.ones(4, 4, 3), "shape (4, 4, 3) is not an image"),
        (torch.ones(1, 1, 1, 4, 4), "shape (1, 1, 1, 4, 4) is not an image"),
        (torch.ones(0, 1, 4, 4), "shape (0, 1, 4, 4) is not an image"),
        (torch.ones(4, 4, dtype=torch.int64), "type torch.int64; images are floats in [0, 1], or torch.uint8"),
        (torch.linspace(-1, 1, 16).view(4, 4), "values from -1 to 1; images are floats in [0, 1]"),
        (torch.full((4, 4), float("nan")), "values from nan to nan"),
    ],
)
def test_anything_else_is_refused_with_what_an_image_is(images: Tensor, text: str) -> None:
    with pytest.raises(ValueError, match="image") as refused:
        picture(images)
    assert text in str(refused.value)
