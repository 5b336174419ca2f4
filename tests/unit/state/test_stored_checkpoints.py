"""Checkpoints on a store: uploaded behind the training, complete with their manifest, fetched and verified."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.records.runs import wait_for
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.checkpoint import load, save
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.checkpoint_uploader import WriteFailed, Written
from orchestrator.state.checkpoint_writer import CheckpointWriter
from orchestrator.state.fence import Fence
from orchestrator.state.manifest import CheckpointError, read_manifest
from orchestrator.state.train_state import TrainState
from orchestrator.storage.remote import Remote

pytestmark = pytest.mark.slow  # a store that is away is waited for


def make_state(step: int, value: float = 1.0, best: int | None = None) -> TrainState:
    """A state, with the step of the best evaluation so far if there is one."""
    found = {} if best is None else {BEST: BestSoFar(metric="a", direction="minimize", step=best, value=1.0).to_json()}
    return TrainState(
        model={"w": torch.full((1000,), value)},
        optimizer={"w/step": torch.tensor(float(step))},
        meta={"step": step, "samples_consumed": step * 10, **found},
    )


class Host:
    """A staging directory and the store, as one host sees them."""

    def __init__(self, folder: Path, name: str):
        self.root = folder / name
        self.stored = folder / "store"
        self.run = Remote(f"file://{self.stored}", timeout_s=5)
        self.remote = self.run.child("checkpoints")
        self.store = CheckpointStore(self.root, self.remote)

    def save(self, step: int, value: float = 1.0, fence: Fence | None = None) -> None:
        self.store.upload(save(self.root, make_state(step, value), run_uid="run").name, fence=fence)

    def path(self, name: str) -> Path:
        return self.stored / "checkpoints" / name

    def newest(self) -> tuple[int | None, list[str]]:
        """The step of the newest checkpoint, and what is said about damaged ones."""
        damaged: list[CheckpointError] = []
        found = self.store.find_newest(damaged.append)
        return None if found is None else int(read_manifest(found)["step"]), [str(e) for e in damaged]


@pytest.fixture
def here(tmp_path: Path) -> Host:
    return Host(tmp_path, "here")


@pytest.fixture
def there(tmp_path: Path) -> Host:
    return Host(tmp_path, "there")


@pytest.fixture
def writer(here: Host) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(here.root, keep=2, run_uid="run", remote=here.remote)
    yield made
    made.close(10)


def results(writer: CheckpointWriter) -> list[Written | WriteFailed]:
    assert writer.drain(10) is None
    return writer.results()


def test_the_model_is_copied_without_the_optimizer(here: Host, there: Host, tmp_path: Path) -> None:
    here.save(1, value=7.0)
    (name,) = there.store.list()
    copies = tmp_path / "copies"
    copies.mkdir()
    assert torch.equal(there.store.model(name, copies)["w"], torch.full((1000,), 7.0))
    assert [p.name for p in copies.iterdir()] == ["model.safetensors"]
    assert there.store.model_size(name) == (copies / "model.safetensors").stat().st_size
    assert there.store.read_manifest(name) == read_manifest(here.root / name)
    assert not there.root.exists()
    (here.path(name) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint file://.*: manifest.json is unreadable"):
        there.store.model(name, copies)


def test_what_is_written_is_uploaded_and_pruned(writer: CheckpointWriter, here: Host, there: Host) -> None:
    for step in (1, 2, 3):
        writer.submit(make_state(step, value=step))
        (result,) = results(writer)
        assert isinstance(result, Written)
        assert there.newest() == (step, [])
    assert here.store.list() == ["step-00000002", "step-00000003"]
    assert sorted(p.name for p in here.path("").iterdir()) == here.store.list()
    assert [p.name for p in here.root.iterdir()] == ["step-00000003"]
    assert load(there.store.fetch("step-00000003")).model["w"][0] == 3


@pytest.mark.parametrize(
    ("bests", "replaced", "kept"),
    [
        ({1: 1, 2: 2, 3: 2, 4: 2}, [1, 3], [2, 4]),
        ({1: 1, 2: 2, 4: 3, 5: 3}, [1, 4], [2, 5]),
        ({1: None, 3: None}, [1], [3]),
    ],
    ids=["the best", "the best that was written", "none"],
)
def test_a_store_that_is_away_delays_no_write_and_gets_the_best_and_the_newest(
    bests: dict[int, int | None], replaced: list[int], kept: list[int], writer: CheckpointWriter, here: Host
) -> None:
    here.stored.write_text("not a directory")
    for step, best in bests.items():
        writer.submit(make_state(step, best=best))
        wait_for((here.root / f"step-{step:08d}").is_dir)
    assert "cannot write" in wait_for(writer.upload_problem)
    assert writer.pending() is not None
    here.stored.unlink()
    ended = wait_for(lambda: writer.drain(10) is None and writer.results())
    expected = [*((step, WriteFailed) for step in replaced), *((step, Written) for step in kept)]
    assert [(r.step, type(r)) for r in ended] == expected
    assert here.store.list() == [f"step-{step:08d}" for step in kept]


def test_a_checkpoint_without_its_manifest_does_not_exist(here: Host, there: Host) -> None:
    for step in (1, 2, 3):
        here.save(step)
    (here.path("step-00000003") / "manifest.json").unlink()
    (here.path("step-00000001") / "manifest.json").unlink()
    assert there.store.list() == ["step-00000002"]
    assert there.newest() == (2, [])
    here.save(4)
    here.store.prune(2, saved_step=4)
    assert sorted(p.name for p in here.path("").iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_damaged_one_is_named_by_its_url_and_the_one_before_it_used(here: Host, there: Host) -> None:
    for step in (1, 2, 3):
        here.save(step)
    (model,) = here.path("step-00000003").glob("model.*")
    model.write_bytes(bytes(model.stat().st_size))
    (optimizer,) = here.path("step-00000002").glob("optimizer.*")
    optimizer.unlink()
    step, damaged = there.newest()
    assert step == 1
    assert damaged[0].startswith(f"checkpoint {there.remote}/step-00000003: model.safetensors")
    assert damaged[1].startswith(f"checkpoint {there.remote}/step-00000002: missing file")


def test_a_reader_takes_the_newer_one_if_the_run_replaces_a_checkpoint_meanwhile(here: Host, there: Host) -> None:
    here.save(1)
    tried: list[str] = []

    def use(name: str) -> Path:
        tried.append(name)
        if len(tried) == 1:
            here.save(2)
            here.store.prune(1, saved_step=2)
        return there.store.fetch(name)

    found = there.store.choose(lambda names: names[-1], use)
    assert [*tried, found.name] == ["step-00000001", "step-00000002", "step-00000002"]
    here.save(3)
    here.store.prune(1, saved_step=3)
    assert there.store.fetch("step-00000002") == found, "a whole copy is used although the store has it no more"
    with pytest.raises(CheckpointError, match="step-00000001"):
        there.store.choose(lambda names: "step-00000001", there.store.fetch)


def test_a_damaged_copy_is_fetched_again(here: Host, there: Host) -> None:
    here.save(1)
    path = there.store.fetch("step-00000001")
    (path / "model.safetensors").write_bytes(b"")
    assert load(there.store.fetch("step-00000001")).meta["step"] == 1


def test_a_worker_that_was_replaced_changes_no_checkpoint(here: Host, there: Host) -> None:
    here.run.write("fence", json.dumps({"generation": "new"}).encode())
    here.save(1, value=1.0, fence=Fence(Path("fence"), "new", remote=here.run))
    old = CheckpointWriter(
        there.root, keep=1, run_uid="run", fence=Fence(Path("fence"), "old", remote=here.run), remote=there.remote
    )
    for step in (1, 2):
        old.submit(make_state(step, value=2.0))
        (result,) = results(old)
        assert isinstance(result, WriteFailed)
        assert "a later generation" in result.reason
    old.close(10)
    shutil.rmtree(there.root)
    assert there.newest() == (1, [])
    assert load(there.store.fetch("step-00000001")).model["w"][0] == 1


def test_an_upload_that_stands_still_is_given_up(writer: CheckpointWriter, here: Host) -> None:
    here.stored.write_text("not a directory")
    writer.submit(make_state(1))
    stalled = writer.drain(0.5)
    assert stalled.step == 1
    assert writer.close(0.1) is not None
    here.stored.unlink()
