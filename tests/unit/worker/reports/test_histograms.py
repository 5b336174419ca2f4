import io

import numpy as np
import torch
from PIL import Image

from orchestrator.worker.reports.histograms import (
    HIGHEST,
    LOWEST,
    NOT_FINITE,
    NUM_COUNTS,
    ZERO,
    added,
    counts_of,
    drawn,
    rows_of,
)


def place(exponent: int, sign: int) -> int:
    return ZERO + sign * (exponent - LOWEST + 1)


def filled(values: list[float], dtype: torch.dtype = torch.float32) -> dict[int, int]:
    """The bins that have an entry."""
    counts = counts_of(torch.tensor(values, dtype=dtype))
    assert counts.shape == (NUM_COUNTS,)
    return {bin: int(count) for bin, count in enumerate(counts) if count}


def test_an_entry_is_in_the_bin_of_its_power_of_two_and_its_sign() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert filled([1.0, 1.5, 2.0, -0.75, 0.0, -0.0], dtype) == {
            place(0, 1): 2, place(1, 1): 1, place(-1, -1): 1, ZERO: 2,
        }  # fmt: skip


def test_what_lies_beyond_the_bins_is_in_the_last_ones_and_what_is_not_finite_in_its_own() -> None:
    assert filled([1e30, -1e-30, 1e-44]) == {place(HIGHEST, 1): 1, place(LOWEST, -1): 1, place(LOWEST, 1): 1}
    assert filled([float("nan"), float("inf"), -float("inf")]) == {NOT_FINITE: 3}


def test_a_sparse_gradient_counts_as_the_dense_one() -> None:
    dense = torch.tensor([[0.0, 0.0], [1.0, -2.0], [0.0, 0.0]])
    assert torch.equal(counts_of(dense.to_sparse(1)), counts_of(dense))


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    whole = torch.randn(10, 3)
    parts = [{"weight": counts_of(part).tolist()} for part in whole.split(4)]
    assert added([*parts, {"bias": [1] * NUM_COUNTS}]) == {
        "weight": counts_of(whole).tolist(), "bias": [1] * NUM_COUNTS,
    }  # fmt: skip


def test_too_many_tensors_are_shown_by_module() -> None:
    names = [f"blocks.{block}.{part}.weight" for block in range(30) for part in ("q", "k", "v")]
    assert rows_of(names) == {name: name.rpartition(".")[0].rpartition(".")[0] for name in names}
    assert rows_of(names[:60]) == {name: name for name in names[:60]}


def test_a_frozen_model_with_few_gradients_has_the_same_rows_for_both() -> None:
    ones = [1] * NUM_COUNTS
    parameters = {f"blocks.{block}.{part}": ones for block in range(40) for part in ("weight", "lora")}
    trained = {name: counts for name, counts in parameters.items() if "lora" in name}
    heights = [
        Image.open(io.BytesIO(drawn({"parameters": parameters, "gradients": of}))).height
        for of in (trained, parameters)
    ]
    assert heights[0] == heights[1]


def test_the_picture_marks_what_is_not_finite() -> None:
    healthy = counts_of(torch.randn(100)).tolist()
    broken = counts_of(torch.tensor([1.0, float("nan")])).tolist()

    def reds(counts: list[int]) -> int:
        image = Image.open(io.BytesIO(drawn({"parameters": {"weight": healthy}, "gradients": {"weight": counts}})))
        pixels = np.asarray(image).astype(int)
        return int(((pixels[..., 0] > 150) & (pixels[..., 2] < 80)).sum())

    assert reds(healthy) == 0
    assert reds(broken) > 0
