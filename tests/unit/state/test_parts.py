"""A checkpoint that several ranks wrote: put together, read in part, and refused with a sentence if it is not whole."""

import ctypes
import gc
import itertools
import json
import multiprocessing
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim

from helpers.records.runs import in_campaign
from orchestrator.planning.placement import AxisCut, Box
from orchestrator.state import manifest
from orchestrator.state.checkpoint import commit, load, staging, verify, write_part
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CHUNK_BYTES, CheckpointError, Kind
from orchestrator.state.train_state import TrainState, capture, restore

CHUNK = 256
W = torch.arange(64 * 12, dtype=torch.float32).view(64, 12)
B = torch.arange(12.0)


def part(name: str, tensor: Tensor, *ranges: tuple[int, int]) -> tuple[str, Tensor, Box]:
    """A part of a tensor, as a rank has it."""
    box = Box.at(full=tuple(tensor.shape), offset=tuple(a for a, _ in ranges), shape=tuple(b - a for a, b in ranges))
    return name, tensor[box.slices_in(Box.whole(tensor.shape))].contiguous(), box


def save_parts(root: Path, ranks: Sequence[Sequence[tuple[str, Tensor, Box]]], step: int = 1, run: str = "r") -> Path:
    """A checkpoint whose writers have these parts of the model, and of a moment that is twice each parameter."""
    meta = {"step": step, "samples_consumed": 2 * step}
    files = {}
    with staging(root, step) as directory:
        for rank, own in enumerate(ranks):
            state = TrainState(
                model={name: tensor for name, tensor, _ in own},
                optimizer={f"{name}/m": 2 * tensor for name, tensor, _ in own},
                meta=meta,
                boxes={"model": {n: box for n, _, box in own}, "optimizer": {f"{n}/m": box for n, _, box in own}},
            )
            files |= write_part(directory, state, part=rank, parts=len(ranks), chunk_bytes=CHUNK)
        return commit(directory, meta, files, run_uid=run, parts=len(ranks))


def packed(index: int) -> tuple[str, Tensor, Box]:
    """The part that one of two writers has of rows of which three kinds follow one another."""
    box = AxisCut(over="tensor", packed=(32, 24, 8)).box((64, 12), index=index, count=2)
    return "w", W[box.slices_in(Box.whole(W.shape))], box


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


QUARTERS = [
    [part("w", W, (0, 32), (0, 5)), part("b", B, (0, 12))],
    [part("w", W, (0, 32), (5, 12))],
    [part("w", W, (32, 64), (0, 5))],
    [part("w", W, (32, 64), (5, 12))],
]


@pytest.mark.parametrize("writers", [QUARTERS, [[packed(0), part("b", B, (0, 12))], [packed(1)]]], ids=["", "packed"])
def test_the_parts_of_all_writers_are_one_state(tmp_path: Path, writers: Any) -> None:
    path = save_parts(tmp_path, writers)
    verify(path)
    state = load(path)
    assert torch.equal(state.model["w"], W)
    assert torch.equal(state.optimizer["w/m"], 2 * W)
    assert {name: list(t.shape) for name, t in state.model.items()} == {"w": [64, 12], "b": [12]}
    (_, own, _), *_ = writers[1]
    assert torch.equal(load_file(path / f"model-00002-of-{len(writers):05}.safetensors")["w"], own)
    for rows in ((0, 64), (3, 7), (30, 34), (63, 64)):
        for columns in ((0, 12), (4, 6), (5, 12)):
            _, expected, box = part("w", W, rows, columns)
            assert torch.equal(state.part("model", "w", box), expected)
    for index in range(2):
        _, expected, box = packed(index)
        assert torch.equal(state.part("model", "w", box), expected)


def test_a_rank_loads_its_parts_from_any_others_and_writes_them_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(6, 8)
    trained = optim.AdamW(whole.parameters())
    whole(torch.randn(3, 6)).sum().backward()
    trained.step()
    full = capture(whole, trained, None, step=1, samples_consumed=3)
    source = full
    for cuts in ([(0, 3), (3, 8)], [(0, 1), (1, 2), (2, 7), (7, 8)], [(0, 8)]):
        files = {}
        with staging(tmp_path / "after", len(cuts)) as directory:
            for rank, rows in enumerate(cuts):
                own = nn.Linear(6, rows[1] - rows[0])
                boxes = {
                    "weight": part("weight", whole.weight, rows, (0, 6))[2],
                    "bias": part("bias", whole.bias, rows)[2],
                }
                optimizer = optim.AdamW(own.parameters())
                restore(source, own, optimizer, None, boxes=boxes)
                assert torch.equal(own.weight, whole.weight[slice(*rows)])
                mine = capture(own, optimizer, None, step=len(cuts), samples_consumed=3, boxes=boxes)
                if rank:  # the first one writes the counters of the steps
                    mine.optimizer.pop("weight/step"), mine.optimizer.pop("bias/step")
                files |= write_part(directory, mine, part=rank, parts=len(cuts), chunk_bytes=CHUNK)
            source = load(commit(directory, mine.meta, files, run_uid="r", parts=len(cuts)))
        assert same(source.model, full.model)
        assert same(source.optimizer, full.optimizer)


def test_a_reader_of_a_part_reads_and_holds_little_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 4096
    tensors = {f"w{i}": torch.full((rows, 16), float(i)) for i in range(8)}
    path = save_parts(tmp_path, [[part(n, t, (0, rows), (0, 16)) for n, t in tensors.items()]])
    read_bytes, allocated = [], []
    preadv, empty = manifest.os.preadv, torch.empty
    monkeypatch.setattr(manifest.os, "preadv", lambda f, b, at: (read_bytes.append(len(b[0])), preadv(f, b, at))[1])

    def counted(*shape: object, **more: object) -> Tensor:
        made: Tensor = empty(*shape, **more)  # type: ignore[call-overload]
        if made.device.type != "meta":
            allocated.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    state = load(path)
    headers = sum(read_bytes)
    read_bytes.clear()
    quarter = [state.part("model", n, part(n, t, (rows // 4, rows // 2), (0, 16))[2]) for n, t in tensors.items()]
    own = sum(t.nbytes for t in quarter)
    assert all(torch.equal(found, tensors[f"w{i}"][: rows // 4]) for i, found in enumerate(quarter))
    assert headers < 16 * CHUNK
    assert own <= sum(read_bytes) < 1.1 * own
    assert sum(allocated) == own


def memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


@pytest.mark.slow  # the imports of a new process
@pytest.mark.parametrize("size_mib", [64, *in_campaign(4096)])
def test_a_rank_that_loads_its_part_holds_that_and_a_tensor_more(tmp_path: Path, size_mib: int) -> None:
    # In a process of its own, because the heap that other tests leave behind changes what a process takes.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        grown, held = process.submit(loads_a_part, tmp_path, size_mib, shards=4).result(200)
    part_bytes, tensor_bytes = size_mib * 2**20 / 4, 4 * rows_of(size_mib) * WIDTH
    assert grown < part_bytes + tensor_bytes + 2 * CHUNK_BYTES
    assert held > 0.6 * part_bytes


LAYERS, WIDTH = 8, 1024
M_MMAP_THRESHOLD = -3  # of malloc.h


def rows_of(size_mib: int) -> int:
    """The rows of each layer of a model whose float32 parameters and two moments have this size."""
    return size_mib * 2**20 // (3 * 4 * LAYERS * WIDTH)


def loads_a_part(tmp_path: Path, size_mib: int, shards: int) -> tuple[int, int]:
    """By how many bytes this process grows as it loads a part from two of four writers, and how many moments have."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)  # so that no heap keeps what is freed
    writers, layers, width, rows = 4, LAYERS, WIDTH, rows_of(size_mib)
    cuts = [rows * i // writers for i in range(writers + 1)]
    full = (rows, width)
    group = {**optim.AdamW([torch.zeros(1)]).param_groups[0], "params": [f"{i}.weight" for i in range(layers)]}
    meta = {"step": 1, "samples_consumed": 1, "optimizer": "AdamW", "param_groups": [group], "optimizer_scalars": {}}
    files = {}
    with staging(tmp_path, 1) as directory:
        for rank, (first, last) in enumerate(itertools.pairwise(cuts)):
            own = torch.zeros(last - first, width)
            box = Box.at(full=full, offset=(first, 0), shape=tuple(own.shape))
            model = {f"{i}.weight": own for i in range(layers)}
            moments = {f"{name}/{key}": own for name in model for key in ("exp_avg", "exp_avg_sq")}
            counters = {f"{name}/step": torch.tensor(1.0) for name in model} if rank == 0 else {}
            boxes: dict[Kind, dict[str, Box]] = {
                "model": dict.fromkeys(model, box),
                "optimizer": dict.fromkeys(moments, box),
            }
            state = TrainState(model=model, optimizer={**moments, **counters}, meta=meta, boxes=boxes)
            files |= write_part(directory, state, part=rank, parts=writers)
        path = commit(directory, {**meta, "scheduler": None, "tied": {}}, files, run_uid="r", parts=writers)
    del own, model, moments, state
    gc.collect()
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    mine = nn.Sequential(*(nn.Linear(width, rows // shards, bias=False) for _ in range(layers)))
    optimizer = optim.AdamW(mine.parameters())
    where = Box.at(full=full, offset=(rows // shards // 2, 0), shape=(rows // shards, width))  # of two writers
    restore(load(path), mine, optimizer, None, consume=True, boxes={f"{i}.weight": where for i in range(layers)})
    grown = memory_bytes("VmHWM") - before
    return grown, sum(t.nbytes for values in optimizer.state.values() for t in values.values())


def missing(path: Path) -> str:
    (path / "model-00003-of-00004.safetensors").unlink()
    return "missing file model-00003-of-00004.safetensors"


def truncated(path: Path) -> str:
    file = path / "optimizer-00002-of-00004.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-5])
    return f"optimizer-00002-of-00004.safetensors is truncated: has {size - 5} of {size} bytes"


def swapped(path: Path) -> str:
    one, other = (path / f"model-0000{i}-of-00004.safetensors" for i in (2, 4))
    one.rename(path / "x"), other.rename(one), (path / "x").rename(other)
    return "model-00002-of-00004.safetensors changed since it was written: its sha256 differs from the manifest's"


def of_another_run(path: Path) -> str:
    others = [[(n, t + 1, box) for n, t, box in own] for own in QUARTERS]
    shutil.copy(save_parts(path.parent / "other", others, step=2, run="s") / "manifest.json", path)
    return "model-00001-of-00004.safetensors changed since it was written: its sha256 differs from the manifest's"


def digest_changed(path: Path) -> str:
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["model-00001-of-00004.safetensors"]["sha256"][-1] = "0" * 64
    file.write_text(json.dumps(manifest))
    return "manifest.json changed: its own sha256 differs"


def without_a_writer(path: Path) -> str:
    save_parts(path.parent, QUARTERS[:3], step=2)
    return (
        "no file has all of w, of shape [64, 12]: there is only [0:32, 0:5] in model-00001-of-00003.safetensors, "
        "[0:32, 5:12] in model-00002-of-00003.safetensors, [32:64, 0:5] in model-00003-of-00003.safetensors"
    )


def overlapping(path: Path) -> str:
    save_parts(path.parent, [[part("w", W, (0, 40), (0, 12))], [part("w", W, (39, 64), (0, 12))]], step=2)
    return (
        "model-00002-of-00002.safetensors has [39:64, 0:12] of w, which overlaps [0:40, 0:12] in "
        "model-00001-of-00002.safetensors"
    )


def outside(path: Path) -> str:
    name, tensor, box = part("w", W, (32, 64), (0, 12))
    moved = Box.at(full=box.full, offset=(40, 0), shape=box.shape)
    save_parts(path.parent, [[part("w", W, (0, 32), (0, 12))], [(name, tensor, moved)]], step=2)
    return (
        "model-00002-of-00002.safetensors has no place for w: its box [40:72, 0:12] is outside of its tensor of shape "
        "[64, 12]"
    )


def of_another_tensor(path: Path) -> str:
    save_parts(path.parent, [[part("w", W, (0, 32), (0, 12))], [part("w", W[:, :6], (32, 64), (0, 6))]], step=2)
    return (
        "model-00002-of-00002.safetensors has a part of w, torch.float32 of shape [64, 6], which is torch.float32 of "
        "shape [64, 12] in model-00001-of-00002.safetensors"
    )


@pytest.mark.parametrize(
    "damage",
    [
        *(missing, truncated, swapped, of_another_run, digest_changed),
        *(without_a_writer, overlapping, outside, of_another_tensor),
    ],
)
def test_what_is_wrong_is_named_and_the_checkpoint_before_it_used(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    before, path = save_parts(tmp_path, QUARTERS, step=1), save_parts(tmp_path, QUARTERS, step=2)
    reason = damage(path)
    found: list[CheckpointError] = []
    assert CheckpointStore(tmp_path, None).find_newest(found.append) == before
    assert [str(e) for e in found] == [f"checkpoint {path}: {reason}"]
