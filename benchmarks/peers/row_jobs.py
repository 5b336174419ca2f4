"""A job whose rows are made by tasks of Ray Data, in which most of the work may be theirs or the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.job import Job, Split

WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class RowData(Job):
    """``folder``: of the parquet files. ``work``: rounds of hashing for each row. ``hidden``: of the model."""

    folder: str
    work: int = 0
    hidden: int = 16

    def model(self) -> nn.Module:
        layers = [nn.Linear(WIDTH, self.hidden), nn.ReLU(), nn.Linear(self.hidden, self.hidden), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.hidden, 2))

    def dataset(self, split: Split) -> Any:
        if split != "train":
            return None
        import ray

        return ray.data.read_parquet(self.folder).map_batches(prepared, fn_args=(self.work,))

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs["x"])

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output, target["y"])

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)


def prepared(batch: dict[str, Any], work: int) -> dict[str, Any]:
    """Return inputs and targets that are computed from the numbers of the rows."""
    x = np.outer(batch["n"] % 1009, np.arange(1, WIDTH + 1)).astype(np.float32)
    for _ in range(work):
        x = np.sin(x)
    return {"x": np.sin(x), "y": batch["n"] % 2}


def write_files(folder: str, *, rows: int, files: int) -> None:
    """Write the numbers from 0 on into parquet files with row groups of 5,000."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(files):
        part = np.arange(rows // files * number, rows // files * (number + 1))
        pq.write_table(pa.table({"n": part}), f"{folder}/{number:03}.parquet", row_group_size=5000)
