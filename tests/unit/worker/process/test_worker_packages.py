"""What pip installs for the workers of a node: once, beside the environment that they run in, and with its reasons."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from helpers.files.wheels import make_wheel
from orchestrator.worker.process import pip_packages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_packages_come_beside_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "own_code"), *sys.path])
    make_wheel(tmp_path, "wheel_of_test")
    requirements = ("--no-index", f"--find-links={tmp_path}", "wheel_of_test", "torch")
    for _ in range(2):
        pip_packages.use(requirements, timeout_s=200)
    installed = importlib.import_module("wheel_of_test")
    monkeypatch.delitem(sys.modules, "wheel_of_test")
    assert Path(str(installed.__file__)).is_relative_to(tmp_path / "temporary")
    assert importlib.util.find_spec("torch").origin == torch.__file__, "torch is there already"
    assert sys.path[0] == str(tmp_path / "own_code"), "the user's code comes first"


def test_pip_says_why_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(
        pip_packages.InstallError, match=r"cluster.pip cannot be installed on \S+: ERROR: No matching .* absent$"
    ):
        pip_packages.use(["--no-index", "absent"], timeout_s=200)
