"""Jobs whose samples are rows of parquet files, read by Ray Data, as a stream, or by a function of the epoch."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from helpers.jobs.quick_jobs import TinyGPT
from orchestrator.features.feeding.window import shuffled
from orchestrator.job import Job, Split

ROWS, FILES, WIDTH = 400, 4, 6


def columns() -> dict[str, Any]:
    random = np.random.default_rng(0)
    found: dict[str, Any] = {f"x{i}": random.normal(size=ROWS).astype(np.float32) for i in range(WIDTH)}
    return {**found, "y": (found["x0"] > 0).astype(np.int64)}


def write_files(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    each = ROWS // FILES
    for number in range(FILES):
        part = {name: column[number * each : (number + 1) * each] for name, column in columns().items()}
        pq.write_table(pa.table(part), folder / f"{number}.parquet", row_group_size=each // 4)


def write_texts(folder: Path) -> None:
    """The same rows, each as a text of its numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    texts = [" ".join(f"{value:.9g}" for value in row) for row in joined(columns())["x"]]
    for number, part in enumerate(np.split(np.array(texts), FILES)):
        pq.write_table(pa.table({"text": part}), folder / f"{number}.parquet", row_group_size=len(part) // 4)


def tokenized(batch: dict[str, Any]) -> dict[str, Any]:
    x = np.array([text.split() for text in batch["text"]], dtype=np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}


def joined(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.stack([batch[f"x{i}"] for i in range(WIDTH)], axis=1), "y": batch["y"]}


class InOrder(IterableDataset[Any]):
    """The rows one after the other; ``kept`` chooses some of them."""

    def __init__(self, kept: slice = slice(None), rows: dict[str, Any] | None = None):
        self.rows = {name: column[kept] for name, column in (rows or joined(columns())).items()}

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(next(iter(self.rows.values())))):
            yield {name: column[i] for name, column in self.rows.items()}


class Told(InOrder):
    """Leaves a file in a folder for each process that reads more than the first samples."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder = Path(folder)

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            if number == ROWS // 2:
                (self.folder / str(os.getpid())).touch()
            yield row


def pixels() -> dict[str, Any]:
    """A hundred images of two pixels."""
    images = np.random.default_rng(1).integers(0, 256, size=(100, 1, 2, 3), dtype=np.uint8)
    return {"image": images}


def write_images(folder: Path) -> None:
    from PIL import Image

    folder.mkdir()
    for number, image in enumerate(pixels()["image"]):
        Image.fromarray(image).save(folder / f"{number:03}.png")


def seen(batch: dict[str, Any]) -> dict[str, Any]:
    x = batch["image"].reshape(-1, WIDTH).astype(np.float32) / 255
    return {"x": x, "y": (x[:, 0] > 0.5).astype(np.int64)}


class InWindows(InOrder):
    """The rows as ``data.shuffle_window=64`` orders them, epoch by epoch."""

    def set_epoch(self, epoch: int) -> None:
        starts = range(0, ROWS, 64)
        orders = [shuffled(min(64, ROWS - at), seed=0, epoch=epoch, window=at // 64) + at for at in starts]
        self.rows = {name: column[np.concatenate(orders)] for name, column in joined(columns()).items()}


@dataclass(frozen=True, kw_only=True)
class RowJob(Job):
    """``folder``: of the files. ``kind``: how they are read. ``mark``: a file that a task makes before it dies.

    ``pause_ms``: before each loss of training, until there is a file ``until``.
    """

    folder: str = ""
    kind: str = "stream"
    mark: str = ""
    pause_ms: float = 0.0
    until: str = ""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2))

    def dataset(self, split: Split) -> Any:
        if self.kind == "stream":
            return InOrder() if split == "train" else InOrder(slice(0, ROWS // FILES))
        if self.kind == "told":
            return Told(self.mark) if split == "train" else None
        if self.kind == "windows":
            return InWindows()
        if self.kind == "pixels":
            return InOrder(rows=seen(pixels()))
        if self.kind == "images":
            return ray_data().read_images(self.folder).map_batches(seen)
        if self.kind == "texts":
            texts = ray_data().read_parquet(self.folder)
            return texts.map_batches(tokenized).map_batches(dying_once, fn_args=(self.mark,))
        if split == "val":
            return made(f"{self.folder}/0.parquet")
        if self.kind == "sieved":
            return made(self.folder).filter(lambda row: True)
        if self.kind == "range":
            return ray_data().range(100)
        if self.kind == "narrowed":
            return narrowed(self.folder)
        if self.kind == "arrow":
            return ray_data().from_arrow(tables(self.folder)).map_batches(joined)
        if self.kind == "schemas":
            return ray_data().from_arrow(tables(self.folder)).map_batches(of_two_types)
        if self.kind == "types":
            return ray_data().from_arrow([table[:30] for table in other_types(self.folder)])
        if self.kind == "function":
            return lambda epoch: made(self.folder)
        if self.kind == "dying":
            return made(self.folder).map_batches(dying_once, fn_args=(self.mark,))
        if self.kind == "failing":
            return made(self.folder).map_batches(failing)
        if self.kind == "wrong":
            return made(self.folder).map_batches(no_batch)
        if self.kind == "unmade":
            return made(self.folder).map_batches(Unmade, concurrency=1)
        if self.kind == "crowded":
            return made(self.folder).map_batches(Unmade, concurrency=5)
        if self.kind == "iterator":
            return made(self.folder).iterator()
        if self.kind == "two":
            return lambda epoch, more: made(self.folder)
        if self.kind == "unseeded":
            return made(self.folder).random_shuffle()
        if self.kind == "halved":
            return made(self.folder).map_batches(even_rows)
        if self.kind == "drawn":
            return made(self.folder).map_batches(noisy)
        if self.kind == "empty":
            return made(self.folder).filter(lambda row: False)
        if self.kind == "filtered":
            return made(self.folder).filter(lambda row: row["y"] > 0)
        if self.kind == "endless":
            return ray_data().read_datasource(endless(), override_num_blocks=1)
        if self.kind == "missing":
            return ray_data().from_items([{"x": 1.5, "y": number if number else None} for number in range(3)])
        assert self.kind == "rows"
        return made(self.folder)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs["x"])

    def loss(self, output: Tensor, target: Any) -> Tensor:
        if self.pause_ms and torch.is_grad_enabled() and not (self.until and Path(self.until).exists()):
            time.sleep(self.pause_ms / 1e3)
        return F.cross_entropy(output, target["y"])

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


def windows_of_tokens() -> dict[str, Any]:
    return {"tokens": np.random.default_rng(2).integers(0, 64, size=(100, 17))}


def write_tokens(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for number, part in enumerate(np.split(windows_of_tokens()["tokens"], FILES)):
        pq.write_table(pa.table({"tokens": list(part)}), folder / f"{number}.parquet", row_group_size=7)


@dataclass(frozen=True, kw_only=True)
class TokenRows(TinyGPT):
    """``folder``: of files of windows of tokens; empty for a stream of the same rows."""

    folder: str = ""
    layers: int = 2

    def dataset(self, split: Split) -> Any:
        kept = slice(None) if split == "train" else slice(0, 25)
        if not self.folder:
            return InOrder(kept, windows_of_tokens())
        rows = ray_data().read_parquet(self.folder)
        return rows if split == "train" else rows.limit(25)

    @property
    def collate(self) -> Any:
        return shifted


def shifted(rows: list[Any]) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(np.stack([row["tokens"] for row in rows]))
    return tokens[:, :-1], tokens[:, 1:]


def ray_data() -> Any:
    import ray.data

    return ray.data


def made(path: str) -> Any:
    return ray_data().read_parquet(path).map_batches(joined)


def narrowed(path: str) -> Any:
    """The rows with ``y`` above 0, chosen by the reader of parquet."""
    from pyarrow import compute

    return ray_data().read_parquet(path, filter=compute.field("y") > 0)


def tables(folder: str) -> list[Any]:
    from pyarrow import parquet

    return [parquet.read_table(file) for file in sorted(Path(folder).glob("*.parquet"))]


def other_types(folder: str) -> list[Any]:
    first, second, *_ = tables(folder)
    return [first, second.set_column(0, "x0", second["x1"].cast("float64"))]


def endless() -> Any:
    """A source with one task, which never ends."""
    import pyarrow as pa
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask

    def read() -> Iterator[Any]:
        while True:
            yield pa.table({"x": np.zeros((1000,)), "y": np.zeros((1000,))})

    class Endless(Datasource):
        def estimate_inmemory_data_size(self) -> None:
            return None

        def get_read_tasks(self, parallelism: int, *args: Any, **options: Any) -> list[Any]:
            return [ReadTask(read, BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None))]

    return Endless()


def dying_once(batch: dict[str, Any], mark: str) -> dict[str, Any]:
    """Ray Data calls this in a process of its own, which dies the first time."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def of_two_types(batch: dict[str, Any]) -> dict[str, Any]:
    """The first block has numbers, and the others have words."""
    return {"x0": batch["x0"] if batch["x0"][0] == columns()["x0"][0] else batch["x0"].astype(str)}


def failing(batch: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("this row is broken")


def no_batch(batch: dict[str, Any]) -> int:
    return 3


class Unmade:
    """What an actor of Ray Data fails to make."""

    def __init__(self) -> None:
        raise RuntimeError("no vocabulary")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def noisy(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": batch["x"] + np.random.default_rng().normal(size=batch["x"].shape)}


def even_rows(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: column[::2] for name, column in batch.items()}
