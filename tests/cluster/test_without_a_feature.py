"""In a copy of the project without a feature, what is left trains, and answers as if the feature had never been."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.machines.commands import environment, run
from orchestrator import cli

ROOT = Path(__file__).resolve().parents[2]
FEATURES = {
    folder.name: {file.stem.replace("_", "-") for file in folder.glob("verbs/[!_]*.py")}
    for folder in sorted(ROOT.glob("orchestrator/features/[!_]*/"))
}
"""The verbs of each."""


@pytest.mark.parametrize("without", ["*", *(pytest.param(name, marks=pytest.mark.campaign) for name in FEATURES)])
def test_the_rest_trains_and_does_not_know_it(without: str, tmp_path: Path) -> None:
    for name in ("orchestrator", "conf", "jobs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    removed = [name for name in FEATURES if without in (name, "*")]
    for name in removed:
        shutil.rmtree(tmp_path / "orchestrator/features" / name)
    verbs = {verb for name in removed for verb in FEATURES[name]}

    lines = cli.help_text().splitlines()
    left = [line for line in lines if not (line.startswith("  ") and line.split()[0] in verbs)]
    assert len(left) == len(lines) - len(verbs)
    assert _command("--help", copy=tmp_path) == (0, [line.split() for line in left])
    for verb in verbs:
        code, said = _command(verb, "a-run", copy=tmp_path)
        assert (code, len(said), said[0][:4]) == (2, 1, ["orchestrator", f"{verb}:", "unknown", "verb;"])
        assert verb not in " ".join(said[0][4:])

    words = ("strategy=ddp", "strategy.num_workers=2", "train.steps=3", f"output_dir={tmp_path / 'runs'}")
    trained = run(*words, cwd=tmp_path, timeout_s=300, PYTHONPATH=str(tmp_path))
    assert trained.returncode == 0, trained.stdout
    assert "Traceback" not in trained.stdout


def _command(*words: str, copy: Path) -> tuple[int, list[list[str]]]:
    """Return the exit code and the words of each line."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *words],
        cwd=copy,
        env=environment(PYTHONPATH=str(copy)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, [line.split() for line in done.stdout.splitlines()]
