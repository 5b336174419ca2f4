"""A dimension of the mesh that divides nothing, and what it takes to add it to a copy of this project."""

import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import orchestrator
from helpers.conformance.cases import Case, config_of, having, options_of, plan_of
from helpers.conformance.layouts import SGD, layout
from helpers.conformance.reference import trained_plainly
from helpers.conformance.training import losses, train
from helpers.jobs.quick_jobs import TinyGPT, digits
from helpers.ranks.gang import GLOO, close_gangs, gang_on
from helpers.ranks.job_trials import one_thread
from orchestrator.planning.mesh import DIMENSIONS

SEED = 58
ROOT = Path(__file__).parents[3]
FILE = "orchestrator/strategies/transforms/nothing.py"
TEXT = '''"""``nothing``: every worker of a group computes everything."""

from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.transforms.part import Part


class NothingPart(Part):
    """The whole."""

    dimension = "nothing"

    def __init__(self, waits):
        self.waits = waits

    @classmethod
    def find(cls, context, job, train_set):
        return cls(WaitTimer(context.device, counts=False))
'''
LINES = {
    "orchestrator/planning/mesh.py": [
        ("    tensor: int = 0\n", "    nothing: int = 0\n"),  # a place of a rank
        ("    tensor: int = 1\n", "    nothing: int = 1\n"),  # a size
    ],
    "orchestrator/strategies/keys.py": [
        (
            '    context: int = option("workers that the tokens of each sample are divided over", minimum=1)\n',
            '    nothing: int = option("workers that compute everything together", minimum=1)\n',
        ),
    ],
    "orchestrator/strategies/transforms/every.py": [
        (
            "from orchestrator.strategies.transforms.part import Part, Parts\n",
            "from orchestrator.strategies.transforms.nothing import NothingPart\n",
        ),
    ],
    "conf/mesh/layers.yaml": [("tensor: 1\n", "nothing: 1\n")],
}
"""Lines after others, by file."""
ENTRY = ("(TensorPart, TokenPart)", "(TensorPart, TokenPart, NothingPart)")
"""What :data:`TRANSFORMS` becomes."""

PRESETS: dict[str, dict[str, Any]] = {
    "ddp": {"num_workers": 4},
    "fsdp": {"num_workers": 4},
    "hsdp": {"num_workers": 8, "shard_size": 2},
    "model_parallel": {"num_workers": 4},
    "pipeline": {"num_workers": 4, "num_microbatches": 4},
    "ddp_pipeline": {"num_workers": 8, "num_microbatches": 2},
    "fsdp_pipeline": {"num_workers": 8, "num_microbatches": 2},
    "mesh": {"num_workers": 8, "replicate": 2, "shard": 2, "shard_optimizer": True},
}
"""Every name for a product, with two workers along the new dimension."""


def copied_with_nothing(to: Path) -> None:
    """Copy the project, and add the dimension."""
    for name in ("orchestrator", "conf", "jobs", "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("golden"))
    (to / FILE).write_text(TEXT)
    for file, lines in LINES.items():
        for before, added in lines:
            _replace(to / file, before, before + added)
    _replace(to / "orchestrator/strategies/transforms/every.py", *ENTRY)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} has no {old!r}"
    path.write_text(text.replace(old, new))


def train_in(presets: Sequence[str]) -> None:
    """Train with two workers along ``nothing``, and compare with plain torch; in the copy."""
    case = Case(job=digits(depth=4, hidden=16, lr=0.3), train=having(steps=3, global_batch_size=32, clip_norm=0.2))
    for preset in presets:
        _train(preset, PRESETS[preset], case)
    _train("mesh", random_product(), Case(job=TinyGPT(layers=2), train=having(steps=3, global_batch_size=8)))
    close_gangs()


def random_product() -> dict[str, Any]:
    """The keys of a product of two workers along a dimension that a seed draws, beside ``nothing``."""
    drawn = random.Random(SEED).choice([dimension for dimension in DIMENSIONS if dimension != "nothing"])
    return {"num_workers": 4, "replicate": 1, drawn: 2}


def _train(preset: str, keys: Mapping[str, Any], case: Case) -> None:
    of = layout(options_of(preset, **keys, nothing=2), keys["num_workers"])
    assert plan_of(config_of(of.of(case), of.world_size)).mesh.size("nothing") == 2
    with one_thread():
        expected = losses([trained_plainly(case).steps])
    ranks = gang_on(GLOO).run(train, replace(of.of(case), alone=None), True, world_size=of.world_size)
    torch.testing.assert_close(losses(ranks), expected, rtol=SGD, atol=0, msg=lambda m: f"{preset} {keys}: {m}")
    print(preset)


if __name__ == "__main__":
    assert orchestrator.__file__ == str(ROOT / "orchestrator" / "__init__.py")
    train_in(sys.argv[1:])
