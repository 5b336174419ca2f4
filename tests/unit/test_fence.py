"""A worker of an earlier generation cannot save."""

from __future__ import annotations

from pathlib import Path

from orchestrator.records.run_dir import write_json
from orchestrator.state.fence import Fence


def test_only_the_latest_generation_may_save(tmp_path: Path) -> None:
    file = tmp_path / "fence"
    fence = Fence(file, "first")
    assert fence.may_save(), "a full disk can keep the driver from writing the file"
    write_json(file, {"generation": "second"})
    assert not fence.may_save()
    fence.token = "second"
    assert fence.may_save()
