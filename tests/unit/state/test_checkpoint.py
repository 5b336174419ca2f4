import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim

from helpers.files.checkpoints import best_at, make_state, never
from helpers.files.golden import Golden
from orchestrator.state.checkpoint import list_checkpoints, load, prune, save, verify
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.checkpoint_writer import CheckpointWriter
from orchestrator.state.manifest import CheckpointError, read_manifest
from orchestrator.state.train_state import TrainState, capture
from orchestrator.storage.remote import Remote

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def save_all(root: Path, *steps: int) -> list[Path]:
    return [save(root, make_state(step), run_uid="run") for step in steps]


OTHER_DTYPES = (torch.complex128, torch.float8_e8m0fnu)


def run_python(code: str, *args: object, timeout_s: float = 60) -> str:
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_dtype_and_shape_comes_back_and_plain_safetensors_reads_it(tmp_path: Path) -> None:
    model = {
        str(dtype): torch.randint(0, 2, (3, 5)).to(dtype)
        if not dtype.is_floating_point
        else torch.randn(3, 5).to(dtype)
        for dtype in DTYPES
    }
    model |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(7.5), "ü/ \"'": torch.ones(1)}
    state = TrainState(model=model, optimizer={}, meta={"step": 3, "samples_consumed": 9})
    path = save(tmp_path, state, run_uid="abc")
    assert path.name == "step-00000003"
    for found in (load(path).model, load_file(path / "model.safetensors")):
        assert found.keys() == model.keys()
        for name, tensor in model.items():
            assert found[name].dtype == tensor.dtype, name
            assert found[name].shape == tensor.shape, name
            assert found[name].tolist() == tensor.tolist(), name
    assert load(path).meta == state.meta
    assert read_manifest(path)["run_uid"] == "abc"


def test_a_dtype_that_safetensors_lacks_is_kept_as_bytes(tmp_path: Path) -> None:
    model = {str(dtype): torch.randint(1, 4, (3, 5)).float().to(dtype) for dtype in OTHER_DTYPES}
    model |= {"empty": torch.empty(0, 4, dtype=torch.complex128), "scalar": torch.tensor(2j, dtype=torch.complex128)}
    path = save(tmp_path, TrainState(model=model, optimizer={}, meta=make_state(3).meta), run_uid="abc")
    verify(path)
    found, plain = load(path).model, load_file(path / "model.safetensors")
    for name, tensor in model.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
        assert plain[name].shape == (*tensor.shape, tensor.dtype.itemsize), name


def test_a_tensor_that_cannot_be_written_is_named(tmp_path: Path, golden: Golden) -> None:
    state = TrainState(model={"layer.w": torch.eye(3).to_sparse()}, optimizer={}, meta=make_state(3).meta)
    with golden.raises(ValueError):
        save(tmp_path, state, run_uid="abc")
    assert list_checkpoints(tmp_path) == []


def test_the_model_file_goes_straight_into_a_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = optim.SGD(model.parameters())
    state = capture(model, optimizer, None, step=1, samples_consumed=1)
    path = save(tmp_path, state, run_uid="run")
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other.load_state_dict(load_file(path / "model.safetensors"))
    assert torch.equal(other[0].weight, model[0].weight)


def flipped(data: bytes, position: int) -> bytes:
    return bytes([*data[:position], data[position] ^ 1, *data[position + 1 :]])


def read_all(path: Path) -> None:
    state = load(path)
    for tensors in (state.model, state.optimizer):
        dict(tensors)


MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "truncate": (MODEL, lambda data: data[:1000], r"model\.safetensors is truncated: has 1000 of 100\d\d\d bytes"),
    "grow": (MODEL, lambda data: data + b"x", r"model\.safetensors has grown: has 100\d\d\d of 100\d\d\d bytes"),
    "data": (
        MODEL,
        lambda data: flipped(data, len(data) // 2),
        r"model\.safetensors changed since it was written: its sha256 differs",
    ),
    "header": (MODEL, lambda data: flipped(data, 20), r"model\.safetensors changed"),
    "optimizer": (OPTIMIZER, lambda data: flipped(data, len(data) - 1), r"optimizer\.safetensors changed"),
    "remove optimizer": (OPTIMIZER, None, r"missing file optimizer\.safetensors"),
    "remove manifest": (MANIFEST, None, r"missing file manifest\.json"),
    "cut manifest": (MANIFEST, lambda data: data[:50], r"manifest\.json is unreadable"),
    "binary manifest": (MANIFEST, lambda data: bytes(range(128, 256)), r"manifest\.json is unreadable"),
    "edit manifest": (
        MANIFEST,
        lambda data: data.replace(b'_consumed": 20', b'_consumed": 21'),
        r"manifest\.json changed",
    ),
    "later format": (
        MANIFEST,
        lambda data: data.replace(b'"format": 2', b'"format": 3'),
        r"its format is 3, this version reads 1 and 2",
    ),
    "remove all": ("", None, r"no such directory"),
}
"""A file, what is written in place of its bytes (None: it is removed), and the reason."""


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_it_taken(tmp_path: Path, kind: str) -> None:
    file, change, message = DAMAGES[kind]
    older, newer = save_all(tmp_path, 1, 2)
    verify(newer)
    damaged = newer / file
    if change is not None:
        damaged.write_bytes(change(damaged.read_bytes()))
    elif damaged.is_dir():
        shutil.rmtree(damaged)
    else:
        damaged.unlink()
    for read in (verify, read_all):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(newer)
        assert caught.value.path == newer
        assert str(newer) in str(caught.value)
    reported: list[CheckpointError] = []
    assert CheckpointStore(tmp_path, None).find_newest(reported.append) == older
    assert [e.path for e in reported] == ([newer] if newer.exists() else [])


def test_a_directory_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path, None).find_newest(never) is None
    assert CheckpointStore(tmp_path / "absent", None).find_newest(never) is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    paths = save_all(tmp_path, 9, 10, 20_000_000, 100_000_000)
    assert list_checkpoints(tmp_path) == paths
    prune(tmp_path, 2, saved_step=100_000_000)
    assert sorted(tmp_path.iterdir()) == sorted(paths[2:])


@pytest.mark.parametrize(("best", "kept"), [(1, [1, 3, 4]), (3, [3, 4]), (None, [3, 4]), (7, [3, 4])])
def test_the_best_is_kept_besides(tmp_path: Path, best: int | None, kept: list[int]) -> None:
    save_all(tmp_path, 1, 2, 3, 4)
    prune(tmp_path, 2, saved_step=4, best=None if best is None else best_at(best))
    assert [load(path).step for path in list_checkpoints(tmp_path)] == kept


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    paths = save_all(tmp_path, 1, 2, 3, 4, 5)
    (paths[1] / "model.safetensors").write_bytes(b"")
    (paths[3] / "manifest.json").unlink()
    prune(tmp_path, 2, saved_step=5, best=best_at(2))
    assert list_checkpoints(tmp_path) == paths[2:]


@pytest.mark.parametrize(("keep", "stored"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_a_damaged_one_takes_the_place_of_none_that_is_saved_after_the_run_fell_back(
    keep: int, stored: bool, tmp_path: Path
) -> None:
    remote = Remote(f"file://{tmp_path}/store", timeout_s=5) if stored else None
    store = CheckpointStore(tmp_path / "here", remote)
    for path in save_all(tmp_path / "here", 30, 40, 50):
        if stored:
            store.upload(path.name, fence=None)
    damaged = tmp_path / "store" / "step-00000050" if stored else path
    next(damaged.glob("model.*")).write_bytes(b"")
    writer = CheckpointWriter(tmp_path / "here", keep=keep, run_uid="run", remote=remote)
    for step in (43, 46):
        writer.submit(make_state(step))
        assert writer.drain(10) is None
        newest = store.find_newest(never)
        assert newest is not None
        assert load(newest).step == step
    assert writer.close(10) is None
    assert store.list() == ["step-00000043", "step-00000046"][-keep:]


def test_a_checkpoint_is_whole_from_the_moment_it_is_seen(tmp_path: Path) -> None:
    steps = range(1, 7)
    states = [make_state(step, megabytes=20) for step in steps]
    writer = threading.Thread(target=lambda: [save(tmp_path, s, run_uid="run") for s in states])
    writer.start()
    seen: set[Path] = set()
    while writer.is_alive() or len(seen) < len(steps):
        for path in set(list_checkpoints(tmp_path)) - seen:
            for name, entry in read_manifest(path)["files"].items():
                assert (path / name).stat().st_size == entry["bytes"]
            seen.add(path)
    writer.join(timeout=60)


def test_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save_all(tmp_path, 5)
    state = make_state(5, megabytes=0.2)
    path = save(tmp_path, state, run_uid="later")
    assert read_manifest(path)["run_uid"] == "later"
    assert torch.equal(load(path).model["w"], state.model["w"])
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    host = socket.gethostname()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=30)
    leftovers = {
        f".step-00000001.{host}.{dead.pid}-0": False,
        f".step-00000002.{host}.{os.getpid()}-7": True,
        f".step-00000003.{host}.{os.getppid()}": False,  # older than that process: number reused
        f".step-00000004.elsewhere.{dead.pid}": True,
        ".step-00000005.elsewhere.1": False,
    }
    for name in leftovers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    for name in list(leftovers)[2::2]:
        for path in (tmp_path / name / "model.safetensors", tmp_path / name):
            os.utime(path, (1e6, 1e6))
    prune(tmp_path, 1, saved_step=1)
    assert {name: (tmp_path / name).exists() for name in leftovers} == leftovers


def save_for_ever(root: Path) -> None:
    state = TrainState(model={"w": torch.ones(75_000_000)}, optimizer={}, meta=make_state(2).meta)
    while True:
        save(root, state, run_uid="killed")


def test_a_writer_killed_in_the_middle_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    (first,) = save_all(tmp_path, 1)
    writer = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(tmp_path,))
    writer.start()
    try:
        half_written = f".step-00000002.*.{writer.pid}-*/model.safetensors"
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size > 50e6 for p in tmp_path.glob(half_written)):
            assert time.monotonic() < deadline
            assert writer.is_alive()
            time.sleep(0.002)
    finally:
        writer.kill()
        writer.join(30)
    (leftover,) = tmp_path.glob(".step-*")
    assert not (leftover / "manifest.json").exists(), "killed too late to show anything"
    assert CheckpointStore(tmp_path, None).find_newest(never) == first
    assert load(first).step == 1
    prune(tmp_path, 1, saved_step=1)
    assert list(tmp_path.iterdir()) == [first]


FILL_UP = """
import resource, sys, torch
from pathlib import Path
from orchestrator.state.checkpoint_writer import CheckpointWriter
from orchestrator.state.train_state import TrainState
for root, limit in zip(map(Path, sys.argv[1::2]), map(int, sys.argv[2::2])):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    writer = CheckpointWriter(root, keep=1, run_uid="run")
    for step, numbers in ((1, 1_000), (2, 8_000_000), (3, 2_000)):
        writer.submit(TrainState(model={"w": torch.ones(numbers)}, optimizer={},
                                 meta={"step": step, "samples_consumed": step}))
        assert writer.drain(30) is None
        print(writer.results()[0])
        print(sorted(p.name for p in root.iterdir()))
    assert writer.close(30) is None
"""


@pytest.mark.slow  # the imports of two new processes
def test_a_full_disk_costs_one_checkpoint_and_leaves_no_trace(tmp_path: Path) -> None:
    """A limit on the size of a file, and a small disk that vanishes with the process: a mount of its namespace."""
    limited, disk = (tmp_path / name for name in ("limited", "disk"))
    limited.mkdir(), disk.mkdir()
    reasons = ["file too large for this file system or its limit", "disk full: the checkpoint takes 32 MB"]
    command: list[str | Path] = [sys.executable, "-c", FILL_UP, limited, "8000000"]
    has_disk = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
    if has_disk:
        mount = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, disk, *command, disk, "-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6 * (1 + has_disk)
    for reason, at in zip(reasons, range(0, len(lines), 6), strict=False):
        first, listed, failed, listed_after, third, listed_last = lines[at : at + 6]
        assert first.startswith("Written(step=1,")
        assert failed.startswith(f"WriteFailed(step=2, reason='{reason}")
        assert third.startswith("Written(step=3,")
        assert listed == listed_after == "['step-00000001']"
        assert listed_last == "['step-00000003']"
    if not has_disk:
        pytest.skip("no right to a mount namespace: no real full disk to be had")


LOAD_WITHOUT_PICKLE = """
import sys
from pathlib import Path
import torch
from torch import nn, optim
from orchestrator.state import checkpoint
from orchestrator.state import train_state as state
from orchestrator.state.checkpoint_store import CheckpointStore
import _pickle, pickle

model = nn.Linear(3, 4)
optimizer = optim.Adam(model.parameters())
scheduler = optim.lr_scheduler.StepLR(optimizer, 2)

def refuse(*args, **kwargs):
    raise AssertionError("unpickled")

for module in (pickle, _pickle):
    for name in ("load", "loads", "Unpickler"):
        setattr(module, name, refuse)
pickle._Unpickler = torch.load = refuse
path = CheckpointStore(Path(sys.argv[1]), None).find_newest(print)
state.restore(checkpoint.load(path), model, optimizer, scheduler)
print(model.weight.sum().item(), optimizer.state[model.weight]["step"].item())
"""


@pytest.mark.slow
def test_nothing_is_unpickled_to_load(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = optim.Adam(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    path = save(tmp_path, capture(model, optimizer, scheduler, step=1, samples_consumed=2), run_uid="r")
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".safetensors", ".safetensors"]
    assert run_python(LOAD_WITHOUT_PICKLE, tmp_path).split() == [f"{model.weight.sum().item()}", "1.0"]
