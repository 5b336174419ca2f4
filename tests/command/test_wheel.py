"""What is installed from the built wheel works from any directory, without the checkout."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("orchestrator", "jobs", "conf", "pyproject.toml", "README.md", "LICENSE")
LEAST_SETUPTOOLS = 77  # pyproject.toml asks for it; older ones cannot build without an isolated environment


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout gets no ``build/`` and lends no leftovers."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    words = ["wheel", "--no-deps", "--disable-pip-version-check", "--quiet", "--wheel-dir", str(out), str(copy)]
    if int(importlib.metadata.version("setuptools").split(".")[0]) >= LEAST_SETUPTOOLS:
        words.append("--no-build-isolation")
    pip(*words)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--disable-pip-version-check", "--quiet", "--target", str(target), str(wheel))
    return target


def pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def run(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_wheel_has_the_code_the_configuration_and_the_types(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"orchestrator/{p.relative_to(ROOT)}" for p in (ROOT / "conf").rglob("*.yaml")}
    for package in ("orchestrator", "jobs"):
        expected |= {str(p.relative_to(ROOT)) for kind in ("py", "yaml") for p in (ROOT / package).rglob(f"*.{kind}")}
    expected.add("orchestrator/py.typed")
    assert expected <= inside, sorted(expected - inside)
    strange = [n for n in inside if n.split("/")[0] not in ("orchestrator", "jobs") and ".dist-info/" not in n]
    assert not strange


def test_it_is_the_installed_copy_that_runs(installed: Path, tmp_path: Path) -> None:
    code = "import orchestrator, jobs.digits; print(orchestrator.__file__); print(jobs.digits.__file__)"
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(installed)) for line in done.stdout.splitlines())


@pytest.mark.parametrize(("how", "strategy"), [("module", "ddp"), ("script", "hogwild")])
def test_a_plan_from_another_directory(how: str, strategy: str, installed: Path, tmp_path: Path) -> None:
    words = ["-m", "orchestrator.launch"] if how == "module" else [str(installed / "bin" / "orchestrator")]
    done = run(installed, tmp_path, *words, "plan=true", "job=digits", f"strategy={strategy}", "strategy.num_workers=2")
    assert done.returncode == 0, done.stderr
    assert "2 workers" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["module", "script"])
def test_help_from_another_directory(how: str, installed: Path, tmp_path: Path) -> None:
    words = ["-m", "orchestrator.launch"] if how == "module" else [str(installed / "bin" / "orchestrator")]
    done = run(installed, tmp_path, *words, "--help", "strategy=ddp")
    assert done.returncode == 0, done.stderr
    assert "strategy.comm_hook=none" in done.stdout
    assert "job.hidden=512" in done.stdout
