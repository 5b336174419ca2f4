"""In a copy of the project without a feature, what is left trains, and answers as if the feature had never been."""

import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from helpers.machines.commands import environment, run
from orchestrator import cli

ROOT = Path(__file__).resolve().parents[2]
FEATURES = {
    folder.name: {name for file in folder.glob("verbs/[!_]*.py") if (name := file.stem.replace("_", "-")) in cli.VERBS}
    for folder in sorted(ROOT.glob("orchestrator/features/[!_]*/"))
}
"""The verbs of each."""
ASKED = {
    "auto": ("strategy=auto", "strategy=auto: "),
    "asynchronous": ("strategy=hogwild", "strategy=hogwild: unknown; "),
    "scripts": ("strategy=script job.script=train.py", "strategy=script: unknown; "),
    "plan": ("strategy=auto", "strategy=auto: "),
    "submit": (
        "runs --address http://127.0.0.1:1",
        "runs: --address=http://127.0.0.1:1: no job can be sent there; ",
    ),
    "sweep": ("-m seed=1,2", "-m: this installation executes one run at a time; "),
    "tracking": ("tracking.uri=http://127.0.0.1:1", "tracking.uri: this installation uploads nothing; "),
}
"""What else is asked of a feature, and the answer without it."""


@pytest.mark.parametrize("without", ["*", *(pytest.param(name, marks=pytest.mark.campaign) for name in FEATURES)])
def test_the_rest_trains_and_does_not_know_it(without: str, tmp_path: Path) -> None:
    removed = [name for name in FEATURES if without in (name, "*")]
    _copy(tmp_path, removed)
    verbs = {verb for name in removed for verb in FEATURES[name]}

    lines = cli.help_text().splitlines()
    left = [line for line in lines if not (line.startswith("  ") and line.split()[0] in verbs)]
    assert len(left) == len(lines) - len(verbs)
    assert _command("--help", copy=tmp_path) == (0, [line.split() for line in left])
    for verb in verbs:
        code, said = _command(verb, "a-run", copy=tmp_path)
        assert (code, len(said), said[0][:4]) == (2, 1, ["orchestrator", f"{verb}:", "unknown", "verb;"])
        assert verb not in " ".join(said[0][4:])
    for words, answer in (ASKED[name] for name in removed if name in ASKED):
        code, said = _command(*words.split(), copy=tmp_path)
        text = "\n".join(" ".join(line) for line in said)
        assert (code, answer in text, "Traceback" in text) == (2, True, False), text

    words = ("strategy=ddp", "strategy.num_workers=2", "train.steps=3", f"output_dir={tmp_path / 'runs'}")
    trained = run(*words, cwd=tmp_path, timeout_s=300, PYTHONPATH=str(tmp_path))
    assert trained.returncode == 0, trained.stdout
    assert "Traceback" not in trained.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("tests/unit", "--collect-only"),
        ("tests/unit/config/test_config.py", "tests/unit/verbs/test_cli.py", "tests/unit/repo/test_import_rules.py"),
        pytest.param(("tests/unit", "tests/unit/repo/test_import_rules.py"), marks=pytest.mark.campaign),
    ],
    ids=" ".join,
)
@pytest.mark.timeout(1800)
def test_the_fast_tests_of_the_core_pass_without_any_feature(words: tuple[str, ...], tmp_path: Path) -> None:
    """Not those of the repository, whose pages are about the features too."""
    _copy(tmp_path, FEATURES, "tests", "docs", "benchmarks", "cluster", "README.md", "pyproject.toml")
    options = ("-q", "-m", "fast", "-n", "0", "-p", "no:cacheprovider", "--ignore-glob=*/repo/test_[!i]*")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-5000:]


def _copy(target: Path, without: Collection[str], *more: str) -> None:
    for name in ("orchestrator", "conf", "jobs", *more):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    for name in without:
        shutil.rmtree(target / "orchestrator/features" / name)


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
