"""Histograms are those of the whole model, wherever its parts are."""

import json
from pathlib import Path
from typing import Any

import pytest

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.jobs.toys import Tokens
from helpers.ranks.gang import Gang
from helpers.ranks.loops import Ran, run_loop
from helpers.records.runs import in_campaign
from orchestrator.protocol.events import SampleSaved
from orchestrator.worker.reports.histograms import ZERO

CASE = Case(
    job=Tokens(build=of.tied_ends),
    train=having(
        steps=3, global_batch_size=16, grad_accumulation=2, clip_norm=1e-3, histograms_every=2, eval_every=0
    ),
)  # fmt: skip


def histograms(gang: Gang, layout: str, folder: Path) -> tuple[list[Ran], dict[str, Any]]:
    of_ranks = LAYOUTS[layout]
    ranks = gang.run(run_loop, of_ranks.of(CASE), folder, world_size=of_ranks.world_size)
    return ranks, json.loads((folder / "samples" / "step-000002-histograms.json").read_text())


@pytest.mark.parametrize(
    "layout", ["ddp-2", "fsdp-1F1B-2x2", *in_campaign("sharded-ddp-2", "fsdp-3", "hsdp-2x2", "1F1B-2x2")]
)
def test_every_entry_of_the_model_and_of_its_gradient_is_counted_once(gang: Gang, layout: str, tmp_path: Path) -> None:
    _, alone = histograms(gang, "single", tmp_path / "alone")
    ranks, found = histograms(gang, layout, tmp_path / "divided")
    for kind in ("parameters", "gradients"):
        assert found[kind].keys() == alone[kind].keys()
        for name, counts in alone[kind].items():
            moved = sum(abs(a - b) for a, b in zip(found[kind][name], counts, strict=True)) / 2
            assert sum(found[kind][name]) == sum(counts)
            assert moved <= 0.02 * sum(counts) + 1, f"{kind} of {name}: rounding moves few entries to another bin"
    steps = [event.step for ran in ranks for event in ran.events if isinstance(event, SampleSaved)]
    assert steps == [2, 2], "the numbers and the picture, of one rank"


def test_gradients_are_counted_before_they_are_clipped(gang: Gang, tmp_path: Path) -> None:
    """Clipped to a norm of 0.001, no entry would be above it."""
    _, found = histograms(gang, "single", tmp_path)
    tenth = ZERO + 1 - 4 - found["lowest_exponent"]  # 2^-4
    assert any(sum(counts[tenth:-1]) for counts in found["gradients"].values())
