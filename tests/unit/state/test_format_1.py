"""A checkpoint of the first format, as version 1 of the writer left it, is read for ever."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from helpers.files.golden import Golden
from orchestrator.state.checkpoint import load, save, verify
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CheckpointError, read_manifest
from orchestrator.state.train_state import restore
from orchestrator.storage.remote import Remote

SAMPLE = Path(__file__).parent / "format_1" / "step-00000003"
SUMS = {"0.weight": 0.19427836686372757, "1.running_var": 3.152375102043152, "2.bias": 2.578125}


def test_the_sample_continues_a_run_and_is_saved_in_the_present_format(tmp_path: Path) -> None:
    verify(SAMPLE)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    optimizer = optim.AdamW(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    state = load(SAMPLE)
    restore(state, model, optimizer, scheduler)
    own = model.state_dict()
    assert {name: own[name].double().sum().item() for name in SUMS} == SUMS
    assert own["2.weight"].dtype == torch.bfloat16
    assert optimizer.state[model[0].weight]["exp_avg_sq"].double().sum().item() == 0.17862734685695614
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch, state.meta["seed"]) == (0.010000000000000002, 3, 7)
    again = load(save(tmp_path, state, run_uid="again"))
    assert again.meta == state.meta
    for kind in ("model", "optimizer"):
        before, after = dict(getattr(state, kind)), dict(getattr(again, kind))
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_one_on_a_store_is_found_by_the_names_that_it_has_there(tmp_path: Path) -> None:
    stored = tmp_path / "store" / SAMPLE.name
    stored.mkdir(parents=True)
    for name, entry in read_manifest(SAMPLE)["files"].items():
        stem, suffix = name.split(".")
        shutil.copy(SAMPLE / name, stored / f"{stem}.{entry['sha256'][:16]}.{suffix}")
    shutil.copy(SAMPLE / "manifest.json", stored)
    store = CheckpointStore(tmp_path / "here", Remote(f"file://{tmp_path}/store", timeout_s=5))
    assert load(store.fetch(SAMPLE.name)).step == 3


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_damage_of_one_is_noticed(tmp_path: Path, file: str, golden: Golden) -> None:
    path = shutil.copytree(SAMPLE, tmp_path / SAMPLE.name)
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1
    (path / file).write_bytes(data)
    found: list[CheckpointError] = []
    assert CheckpointStore(tmp_path, None).find_newest(found.append) is None
    golden.says([e.reason for e in found])
    assert json.loads((path / "manifest.json").read_text())["format"] == 1
