"""A dimension of the mesh is a size, a key, a class and an entry: one that divides nothing trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.conformance.dimension import PRESETS, copied_with_nothing
from helpers.records.runs import in_campaign
from orchestrator.strategies.keys import PRESETS as PRODUCTS


@pytest.mark.parametrize("presets", [("fsdp", "pipeline"), *in_campaign((tuple(PRESETS),))])
def test_a_dimension_that_divides_nothing_trains_under_every_name_and_in_a_random_product(
    tmp_path: Path, presets: tuple[str, ...]
) -> None:
    assert {*PRESETS} == {*PRODUCTS} - {"single"}
    copied_with_nothing(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(tmp_path / "tests")])}
    command = [sys.executable, "-m", "helpers.conformance.dimension", *presets]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [*presets, "mesh"]
