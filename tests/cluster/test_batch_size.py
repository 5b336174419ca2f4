"""``orchestrator batch-size``: real runs until memory runs out, of which nothing stays."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_the_largest_batch_that_fits_is_found(tmp_path: Path) -> None:
    words = ["job=helpers.jobs.greedy_job.Greedy", "strategy=ddp", "strategy.num_workers=2"]
    ran = subprocess.run(
        [sys.executable, "-m", "orchestrator.batch_size", "--steps", "4", *words, "train.global_batch_size=16"],
        cwd=tmp_path,
        env={"PATH": str(Path(sys.executable).parent), "HOME": str(tmp_path), "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [
        line.split(maxsplit=2) for line in ran.stdout.splitlines() if line[:1] == " " and line.split()[0].isdecimal()
    ]
    assert [row[:2] for row in rows] == [["16", "8"], ["32", "16"]]
    assert rows[0][2].endswith(" MB")
    assert "out of memory" in rows[1][2]
    assert "largest that was tried and fits: 16 (8 per worker); the next one does not fit" in ran.stdout
    assert f"next: python -m orchestrator.launch {' '.join(words)} " in ran.stdout
    assert "train.global_batch_size=16" in ran.stdout
    assert not list(tmp_path.rglob("run.json"))
    assert not list(tmp_path.rglob("*.db"))
