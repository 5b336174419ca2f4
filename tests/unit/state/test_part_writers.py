"""Several writers of one checkpoint: each on its own thread, with a real store between them."""

import itertools
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from helpers.files.golden import Golden
from helpers.records.runs import wait_for
from orchestrator.planning.placement import Box
from orchestrator.state.checkpoint import list_checkpoints, load, verify
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.checkpoint_uploader import WriteFailed, Written
from orchestrator.state.checkpoint_writer import CheckpointWriter
from orchestrator.state.fence import Fence
from orchestrator.state.merge import without_copies
from orchestrator.state.part_writers import Writers
from orchestrator.state.train_state import TrainState, capture, restore
from orchestrator.storage.remote import Remote

RANKS = (0, 2, 5)
NAMES = ("first", "second", "third")


def part_of(part: int, step: int, *, megabytes: float = 0.0) -> TrainState:
    """The state of a stage with one parameter; the last stage's is first in the optimizer's group."""
    name, group = NAMES[part], {"lr": 0.1, "params": [NAMES[part]]}
    return TrainState(
        model={name: torch.full((10 + int(megabytes * 250_000),), float(10 * step + part))},
        optimizer={f"{name}/m": torch.full((3,), float(part))},
        meta={
            "step": step,
            "samples_consumed": step,
            "param_groups": [group],
            "optimizer_scalars": {},
            "tied": {},
            "data": f"of rank {RANKS[part]}",
        },
    )


class Ranks:
    """The writers of a generation, each as its process would have it.

    They share the directory ``root``; with stores, each has a directory of its own instead.
    """

    def __init__(
        self,
        root: Path,
        fence: Fence | None = None,
        *,
        stall_timeout_s: float = 20.0,
        lost_timeout_s: float = 20.0,
        stores: Sequence[Remote] | None = None,
        ranks: Sequence[int] = RANKS,
        names: Sequence[str] = NAMES,
    ):
        self.root, self.stores = root, stores or ()
        self.ended = threading.Event()
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in ranks[1:]]
        self.writers = [
            CheckpointWriter(
                root if stores is None else root / str(p),
                keep=2,
                run_uid="run",
                fence=fence if p == 0 else None,
                remote=None if stores is None else stores[p],
            )
            for p in range(len(ranks))
        ]
        self.joint = [
            Writers(
                store=store,
                ranks=ranks,
                rank=rank,
                names=names,
                stall_timeout_s=stall_timeout_s,
                lost_timeout_s=lost_timeout_s,
                ended=self.ended,
            )
            for rank, store in zip(ranks, (server, *clients), strict=True)
        ]

    def submit(self, step: int, parts: Sequence[int] = (0, 1, 2), *, megabytes: float = 0.0) -> None:
        for part in parts:
            self.submit_part(part, part_of(part, step, megabytes=megabytes))

    def submit_part(self, part: int, state: TrainState) -> None:
        jointly = self.joint[part].joint_save(f"checkpoint-{state.step}")
        assert self.writers[part].submit(state, jointly=jointly) is None

    def results(self) -> list[Written | WriteFailed]:
        """The results of the first one; the others have none."""
        for writer in self.writers:
            assert writer.drain(30) is None
        assert not any(writer.results() for writer in self.writers[1:])
        return self.writers[0].results()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path / "checkpoints")
    yield made
    made.ended.set()
    for writer in made.writers:
        writer.close(20)


def test_each_writes_its_part_and_the_first_commits_them_all(ranks: Ranks) -> None:
    for step in (1, 2, 3):
        ranks.submit(step, (2, 0, 1), megabytes=1.0)
        (written,) = ranks.results()
        assert isinstance(written, Written)
        assert written.path == ranks.root / f"step-0000000{step}"
        sizes = [p.stat().st_size for p in written.path.glob("*.safetensors")]
        assert (len(sizes), sum(sizes)) == (6, written.size_bytes)
    verify(written.path)
    state = load(written.path)
    assert {name: float(tensor[0]) for name, tensor in state.model.items()} == {"first": 30, "second": 31, "third": 32}
    assert {path: float(tensor[0]) for path, tensor in state.optimizer.items()} == {
        f"{n}/m": i for i, n in enumerate(NAMES)
    }
    assert state.meta["param_groups"] == [{"lr": 0.1, "params": list(NAMES)}]
    assert state.meta["data"] == "of rank 0"
    assert sorted(p.name for p in ranks.root.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Ranks]:
    """Writers on nodes of their own, whose checkpoints go to a store in ``tmp_path / "store"``."""
    made = Ranks(tmp_path / "nodes", stores=[Remote(f"file://{tmp_path}/store", timeout_s=5)] * 3)
    yield made
    made.ended.set()
    for writer in made.writers:
        writer.close(20)


@pytest.mark.slow
def test_each_uploads_its_part_and_the_manifest_is_the_last(stored: Ranks, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path / "reader", stored.stores[0])
    for step in (1, 2, 3):
        stored.submit(step, (0, 2))
        wait_for(lambda step=step: len(list((tmp_path / "store" / f"step-0000000{step}").glob("[mo]*"))) == 4)
        assert f"step-0000000{step}" not in checkpoints.list()
        stored.submit(step, (1,))
        (written,) = stored.results()
        assert isinstance(written, Written)
        folder = tmp_path / "store" / f"step-0000000{step}"
        assert written.path.name == folder.name
        sizes = [p.stat().st_size for p in folder.glob("*.safetensors")]
        assert (len(sizes), sum(sizes)) == (6, written.size_bytes)
        assert [list(node.iterdir()) for node in stored.root.iterdir()] == [[], [], []]
    assert checkpoints.list() == ["step-00000002", "step-00000003"]
    state = load(checkpoints.fetch("step-00000003"))
    assert {name: float(tensor[0]) for name, tensor in state.model.items()} == {"first": 30, "second": 31, "third": 32}
    assert state.meta["param_groups"] == [{"lr": 0.1, "params": list(NAMES)}]


@pytest.mark.slow
def test_a_store_that_is_away_from_one_writer_costs_the_checkpoints_that_a_newer_one_replaces(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("not a directory")
    reached = Remote(f"file://{tmp_path}/store", timeout_s=5)
    stored = Ranks(tmp_path / "nodes", stores=[reached, reached, Remote(f"file://{blocked}/..//store", timeout_s=5)])
    stored.submit(1)
    wait_for(stored.writers[2].upload_problem)
    stored.submit(2)
    (failed,) = wait_for(stored.writers[0].results)
    assert isinstance(failed, WriteFailed)
    assert failed.reason.startswith("rank 5: it was not uploaded before the one of step 2 was written (")
    blocked.unlink()
    blocked.mkdir()
    (written,) = stored.results()
    assert (type(written), written.step) == (Written, 2)
    for writer in stored.writers:
        assert writer.close(20) is None


def rows_of(model: nn.Linear, first: int, last: int) -> tuple[nn.Linear, optim.AdamW, dict[str, Box]]:
    """What a rank has of a sharded layer: rows, perhaps none, an optimizer that has not begun, and their boxes."""
    own = nn.Linear(model.in_features, last - first)
    boxes = {
        name: Box.at(
            full=tuple(p.shape), offset=(first, *(0,) * (p.dim() - 1)), shape=tuple(own.get_parameter(name).shape)
        )
        for name, p in model.named_parameters()
    }
    return own, optim.AdamW(own.parameters()), boxes


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_shards_of_uneven_rows_are_one_model_for_any_number_of_ranks(tmp_path: Path) -> None:
    whole = nn.Linear(3, 7)
    trained = optim.AdamW(whole.parameters())
    whole(torch.randn(4, 3)).sum().backward()
    trained.step()
    full = capture(whole, trained, None, step=1, samples_consumed=4)
    source = full
    for step, cuts in ((1, (0, 2, 4, 6, 7, 7)), (2, (0, 3, 6, 7))):  # of the five, the last one has no row
        count = len(cuts) - 1
        ranks = Ranks(tmp_path / "checkpoints", ranks=range(count), names=tuple(full.model))
        for part, (first, last) in enumerate(itertools.pairwise(cuts)):
            model, optimizer, boxes = rows_of(whole, first, last)
            restore(source, model, optimizer, None, boxes=boxes)
            assert torch.equal(model.weight, whole.weight[first:last])
            state = capture(model, optimizer, None, step=step, samples_consumed=4, boxes=boxes)
            ranks.submit_part(part, without_copies(state, boxes) if part else state)
        (written,) = ranks.results()
        assert isinstance(written, Written), written
        source = load(written.path)
        assert {**source.meta, "step": 1} == full.meta
        for found, expected in ((source.model, full.model), (source.optimizer, full.optimizer)):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        for writer in ranks.writers:
            assert writer.close(20) is None


def test_nothing_is_visible_until_the_last_part_is_written(ranks: Ranks) -> None:
    ranks.submit(1, (0, 1))
    wait_for(lambda: list(ranks.root.glob(".step-*/model-00002-of-00003.safetensors")))
    assert list_checkpoints(ranks.root) == []
    assert ranks.writers[0].pending() is not None
    ranks.submit(1, (2,))
    (written,) = ranks.results()
    assert isinstance(written, Written)


def test_a_part_that_is_declined_costs_the_checkpoint_and_leaves_no_trace(ranks: Ranks) -> None:
    ranks.submit(1, (0, 1))
    ranks.joint[2].joint_save("checkpoint-1").decline("step 0 is still being written after 2 s")
    assert ranks.results() == [WriteFailed(step=1, reason="rank 5: step 0 is still being written after 2 s")]
    assert list(ranks.root.iterdir()) == []
    ranks.submit(2)
    assert isinstance(ranks.results()[0], Written)


def test_a_writer_whose_store_is_gone_declines_without_an_error(ranks: Ranks) -> None:
    class Gone:
        def set(self, key: str, value: str, /) -> None:
            raise dist.DistNetworkError("connection reset by peer")

    replace(ranks.joint[1], store=Gone()).joint_save("checkpoint-1").decline("busy")


def test_the_others_drop_what_the_first_declines(ranks: Ranks) -> None:
    ranks.joint[0].joint_save("checkpoint-1").decline("step 0 is still being written after 2 s")
    ranks.submit(1, (1, 2))
    assert ranks.results() == []
    assert not ranks.root.exists()


def test_an_error_of_a_writer_is_reported_by_the_first(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(28, "No space left on device")
    fsync = os.fsync

    def fail(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "optimizer-00002-of-00003.safetensors":
            raise full
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    ranks.submit(1)
    (failed,) = ranks.results()
    assert isinstance(failed, WriteFailed)
    assert failed.reason.startswith("rank 2: disk full: the checkpoint takes 0 MB, ")
    assert list(ranks.root.iterdir()) == []


def test_groups_that_differ_between_stages_are_named(ranks: Ranks, golden: Golden) -> None:
    ranks.submit(1, (0, 1))
    other = part_of(2, 1)
    other.meta["param_groups"][0]["lr"] = 0.2
    ranks.writers[2].submit(other, jointly=ranks.joint[2].joint_save("checkpoint-1"))
    (failed,) = ranks.results()
    assert isinstance(failed, WriteFailed)
    golden.says(failed.reason)


@pytest.mark.parametrize("how", ["no progress", "the generation ends"])
def test_a_writer_that_is_lost_is_not_waited_for(tmp_path: Path, how: str) -> None:
    stall = how == "no progress"
    limits = {"stall_timeout_s": 0.3 if stall else 60.0, "lost_timeout_s": 0.1}
    ranks = Ranks(tmp_path / "checkpoints", **limits, ranks=(0, 5), names=NAMES[:2])
    ranks.submit(1, (0,))
    if not stall:
        ranks.ended.set()
    (failed,) = ranks.results()
    limit = "0.3" if stall else "0.1"
    assert failed == WriteFailed(step=1, reason=f"rank 5 has written nothing of its part for {limit} s")
    assert list(ranks.root.iterdir()) == []
    for writer in ranks.writers:
        assert writer.close(20) is None


def test_the_first_alone_asks_the_fence(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "fence").write_text(json.dumps({"generation": "later"}))
    ranks = Ranks(tmp_path / "checkpoints", Fence(tmp_path / "fence", token="earlier"))
    ranks.submit(1)
    (failed,) = ranks.results()
    assert isinstance(failed, WriteFailed)
    golden.says(failed.reason)
    assert list(ranks.root.iterdir()) == []
    for writer in ranks.writers:
        assert writer.close(20) is None
