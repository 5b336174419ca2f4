"""Checkpoints that somebody has made up, with hashes that agree: refused as damaged, whatever they contain."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.state import checkpoint
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import HASH, MANIFEST, CheckpointError
from orchestrator.state.train_state import TrainState

TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def saved(root: Path) -> Path:
    state = TrainState(model={"w": torch.ones(2, 2)}, optimizer={}, meta={"step": 1, "samples_consumed": 2})
    return checkpoint.save(root, state, run_uid="r")


def with_manifest(path: Path, **changes: Any) -> Path:
    """Change keys of the manifest; None removes one."""
    file = path / MANIFEST
    manifest = {**json.loads(file.read_text()), **changes}
    manifest = {k: v for k, v in manifest.items() if v is not None and k != HASH}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({**manifest, HASH: digest}))
    return path


def with_model(path: Path, content: bytes) -> Path:
    (path / "model.safetensors").write_bytes(content)
    files = json.loads((path / MANIFEST).read_text())["files"]
    entry = {HASH: [hashlib.sha256(content).hexdigest()], "bytes": len(content)}
    return with_manifest(path, files={**files, "model.safetensors": entry})


def safetensors(header: bytes, *, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + bytes(16)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path)
    found: list[CheckpointError] = []
    try:
        checkpoint.verify(path)
    except CheckpointError:
        assert CheckpointStore(path.parent, None).find_newest(found.append) is None
        assert len(found) == 1
    return error.value.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"files": None}, {"files": ["model.safetensors"]}, {"files": {"model.safetensors": 7}},
        {"files": {"model.safetensors": {"sha256": 7, "bytes": 8}}},
        {"files": {"model.safetensors": {"sha256": "", "bytes": "8"}}},
        {"files": {"model.safetensors": {"sha256": "", "bytes": -8}}},
        {"step": None}, {"step": "1"}, {"samples_consumed": None}, {"meta": None}, {"meta": [1]},
    ],
)  # fmt: skip
def test_a_manifest_without_what_it_must_have(changes: dict[str, Any], tmp_path: Path) -> None:
    assert refusal(with_manifest(saved(tmp_path), **changes)).startswith("manifest.json is unreadable: ")


def test_a_manifest_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / MANIFEST).write_text("[" * 100_000)
    assert refusal(path).startswith("manifest.json is unreadable: ")


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [-2, -2]}, {"shape": [2.0, 2.0]}, {"shape": "22"}, {"shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"data_offsets": [-16, 0]}, {"data_offsets": [16, 32]}, {"data_offsets": [0.0, 16.0]}, {"data_offsets": [0]},
        {"dtype": "F33"}, {"dtype": ["F32"]},
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_be_in_the_file(entry: dict[str, Any], tmp_path: Path) -> None:
    header = json.dumps({"w": {**TENSOR, **entry}}).encode()
    assert refusal(with_model(saved(tmp_path), safetensors(header))).startswith(
        "model.safetensors is not a safetensors file: "
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        safetensors(b"{}", length=1 << 62),
        safetensors(b"{}", length=(1 << 64) - 1),
        safetensors(b"[" * 100_000),
        safetensors(b"[]"),
        safetensors(b"cos\nsystem\n(S'touch pwned'\ntR."),  # a pickle
    ],
)
def test_a_header_that_is_none(content: bytes, tmp_path: Path) -> None:
    assert refusal(with_model(saved(tmp_path), content)).startswith("model.safetensors is not a safetensors file: ")


def test_the_file_that_the_others_are_made_of_is_accepted(tmp_path: Path) -> None:
    path = with_model(saved(tmp_path), safetensors(json.dumps({"w": TENSOR}).encode()))
    assert torch.equal(checkpoint.load(path).model["w"], torch.zeros(2, 2))
