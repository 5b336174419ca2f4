"""The rows of :mod:`row_jobs` as the files of WebDataset, LitData and MosaicML Streaming, and jobs that stream them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.files.documents import ROOT, examples
from helpers.jobs.row_jobs import ROWS, WIDTH, RowJob, columns, joined
from orchestrator.job import Split

SHARDS = 8


def rows() -> list[dict[str, Any]]:
    table = joined(columns())
    return [{name: column[i] for name, column in table.items()} for i in range(ROWS)]


def counted() -> Any:
    """The class of the page about data."""
    (found,) = (e.source for e in examples(ROOT / "docs/data.md") if "class Counted" in e.source)
    module: dict[str, Any] = {}
    exec(found, module)
    return module["Counted"]


def write_webdataset(folder: Path) -> None:
    wds = pytest.importorskip("webdataset", reason="the optional package is missing: pip install webdataset")
    folder.mkdir()
    for shard, part in enumerate(np.array_split(np.arange(ROWS), SHARDS)):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for i in part:
                row = rows()[i]
                writer.write({"__key__": f"{i:04}", "x.bin": row["x"].tobytes(), "y.bin": row["y"].tobytes()})


def webdataset(folder: Path) -> Any:
    import webdataset as wds

    shards = sorted(map(str, folder.glob("*.tar")))
    return wds.WebDataset(shards, shardshuffle=SHARDS, detshuffle=True, seed=1).shuffle(50, seed=1).map(decoded)


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.frombuffer(sample["x.bin"], np.float32).copy(), "y": np.frombuffer(sample["y.bin"], np.int64)[0]}


def write_litdata(folder: Path) -> None:
    litdata = pytest.importorskip("litdata", reason="the optional package is missing: pip install litdata")
    cache = litdata.streaming.Cache(str(folder), chunk_size=ROWS // SHARDS)
    for i, row in enumerate(rows()):
        cache[i] = row
    cache.done()
    cache.merge()


def litdata(folder: Path) -> Any:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder), shuffle=True, seed=1)
    return counted()(dataset, lambda epoch, done: {**dataset.state_dict(done, 1, 1), "current_epoch": epoch + 1})


def write_mosaic(folder: Path) -> None:
    reason = "the optional package is missing: pip install mosaicml-streaming"
    streaming = pytest.importorskip("streaming", reason=reason)
    kinds = {"x": f"ndarray:float32:{WIDTH}", "y": "int64"}
    with streaming.MDSWriter(out=str(folder), columns=kinds, size_limit=2000) as writer:
        for row in rows():
            writer.write(row)


def mosaic(folder: Path) -> Any:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=1, num_canonical_nodes=1)
    always = {"num_canonical_nodes": 1, "shuffle_seed": 1, "initial_physical_nodes": 1}
    return counted()(dataset, lambda epoch, done: {"epoch": epoch, "sample_in_epoch": done, **always})


LIBRARIES: Mapping[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "webdataset": (write_webdataset, webdataset),
    "litdata": (write_litdata, litdata),
    "mosaic": (write_mosaic, mosaic),
}


@dataclass(frozen=True, kw_only=True)
class LibraryRows(RowJob):
    """``kind``: the library."""

    def dataset(self, split: Split) -> Any:
        _, opened = LIBRARIES[self.kind]
        return opened(Path(self.folder)) if split == "train" else None
