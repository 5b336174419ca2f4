"""A new dimension of the mesh trains, saves and loads without a line in the rooms that do so."""

from __future__ import annotations

from pathlib import Path

from helpers.conformance.cases import Case, having
from helpers.conformance.idle import IdleConfig
from helpers.conformance.layouts import ADAMW, LAYOUTS, assert_as_alone, layout
from helpers.conformance.training import restored, saved_piece
from helpers.jobs.stage_toys import ScheduledChain, plain
from helpers.ranks.gang import Gang
from orchestrator.state.checkpoint import path_of

IDLE = layout(
    IdleConfig(
        name="idle",
        num_workers=4,
        tensor=1,
        tensor_pairs="auto",
        sequence=False,
        context=2,
        wrap="auto",
        reshard_after_forward=True,
        prefetch=1,
    ),
    4,
)
CASE = Case(job=ScheduledChain(build=plain), train=having(steps=6, global_batch_size=32, clip_norm=0.5))


def test_it_trains_as_one_worker_alone(gang: Gang) -> None:
    assert_as_alone(gang, CASE, IDLE, rtol=ADAMW, want_grad_norm=True)


def test_it_writes_each_part_once_and_reads_what_others_have_written(gang: Gang, tmp_path: Path) -> None:
    paths = {}
    for name, of in {"idle": IDLE, "single": LAYOUTS["single"]}.items():
        gang.run(saved_piece, of.of(CASE), 3, tmp_path / name, world_size=of.world_size)
        paths[name] = path_of(tmp_path / name, 3)
    for of in (IDLE, LAYOUTS["single"]):
        found, *_ = gang.run(restored, of.of(CASE), paths, world_size=of.world_size)
        assert found == {"idle": [], "single": []}
