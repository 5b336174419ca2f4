"""The pictures of a run: where the time of its steps went, and the memory of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from helpers.recorded_sweep import recorded_sweep
from helpers.tracked_runs import ended_run
from orchestrator.display.run_pictures import draw_pictures, memory_lines, usual_maximum


def test_a_run_has_a_picture_of_its_steps_and_one_of_its_memory(tmp_path: Path) -> None:
    run_dir = recorded_sweep(tmp_path, "sqlite:///unused.db")[2]
    pictures = draw_pictures(run_dir)
    assert [picture.name for picture in pictures] == ["step-time.png", "memory.png"]
    for picture in pictures:
        with Image.open(picture) as image:
            assert image.size == (1200, 504)
            assert len(image.convert("RGB").getcolors(1 << 20)) > 2, "not blank"


def test_a_run_without_measured_steps_has_no_pictures(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path, None)
    assert draw_pictures(run_dir) == []
    assert not run_dir.plots.exists()


def test_the_memory_is_that_of_each_rank_or_else_of_the_largest() -> None:
    alone = [(1, {"perf/peak_memory_mb": 5.0}), (2, {"train/loss": 0.5}), (3, {"perf/peak_memory_mb": 6.0})]
    assert memory_lines(alone) == {"largest worker": [(1, 5.0), (3, 6.0)]}
    names = [f"memory/rank_{rank}_peak_mb" for rank in (10, 2)]
    elastic = [(1, dict.fromkeys([*names, "perf/peak_memory_mb"], 7.0)), (2, {names[1]: 8.0})]
    assert list(memory_lines(elastic).items()) == [("rank 2", [(1, 7.0), (2, 8.0)]), ("rank 10", [(1, 7.0)])]


def test_one_slow_step_does_not_flatten_the_others() -> None:
    assert usual_maximum([10.0] * 99 + [1000.0]) == pytest.approx(13.0)
    assert usual_maximum([10.0, 10.0, 10.0]) == pytest.approx(10.5)
    assert usual_maximum([0.0, 0.0]) == 1.0
