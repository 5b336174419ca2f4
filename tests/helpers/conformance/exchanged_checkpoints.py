"""Two layouts that go on from each other's checkpoints."""

from pathlib import Path
from typing import Any

import torch

from helpers.conformance.cases import Case
from helpers.conformance.layouts import Layout
from helpers.conformance.reference import averages
from helpers.conformance.training import piece, restored, saved_piece
from helpers.ranks.gang import Gang
from orchestrator.state.checkpoint import path_of


def assert_checkpoints_exchanged(gang: Gang, own: Layout, other: Layout, case: Case, folder: Path) -> None:
    """Both read both checkpoints, and train to the same weights and averages from those of the other."""
    ends: dict[str, Any] = {}
    both = {"own": own, "other": other}
    for name, of in both.items():
        ((_, ends[name]), *_) = gang.run(saved_piece, of.of(case), 2, folder / name, world_size=of.world_size)
    saved = {name: path_of(folder / name, 2) for name in both}
    for of in both.values():
        first, *_ = gang.run(restored, of.of(case), saved, world_size=of.world_size)
        assert first == {name: [] for name in saved}
    continued: dict[str, Any] = {
        name: gang.run(piece, of.of(case), ends[name], 4, world_size=of.world_size)[0][1]
        for name, of in (("own", other), ("other", own))
    }
    found, wanted = ({**state.model, "averages": averages(state.optimizer)} for state in continued.values())
    assert found["averages"]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
