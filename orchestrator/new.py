"""Begin a project: ``orchestrator new my_project`` writes a job, its configuration, its test and a README.

Exit codes: 0 done; 2 a wrong name, or a directory that cannot be made.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.config.files import SHIPPED
from orchestrator.display.plain_text import refuse, writable

_JOB = '''\
"""What is trained. Each part is plain PyTorch: there is no loop, no device and no rank."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from orchestrator import Job


@dataclass(frozen=True, kw_only=True)
class CLASS(Job):
    """Tell points of two spirals apart. The fields are keys, as in job.width=64."""

    width: int = 32
    lr: float = 0.01

    def model(self):
        return nn.Sequential(
            nn.Linear(2, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, 2)
        )

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        labels = torch.arange(1000 if split == "train" else 200) % 2
        distance = 0.2 + 0.8 * torch.rand(len(labels), generator=generator)
        angle = 6 * distance + torch.pi * labels
        return TensorDataset(torch.stack([distance * angle.cos(), distance * angle.sin()], dim=1), labels)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(dim=1) == target).sum()}  # a sum over samples; the run takes the mean

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.lr)
'''
_CONF = """\
# job=NAME is this class with these values; job.width=64 on the command line comes last.
_target_: NAME.CLASS
width: 32
lr: 0.01
"""
_TEST = '''\
"""The job learns: `pytest`. Runs in this process, without Ray, where breakpoint() works."""

import orchestrator

QUIET = {"debug": True, "strategy": "single", "tracking": "none"}


def test_one_batch_is_learned_by_heart(tmp_path):
    result = orchestrator.run(QUIET, "job=NAME", "experiment=overfit", output_dir=str(tmp_path))
    assert result.status == "FINISHED"
    assert result.summary["final_loss"] < 0.1


def test_points_that_were_held_out_are_told_apart(tmp_path):
    result = orchestrator.run(QUIET, "job=NAME", output_dir=str(tmp_path), train={"steps": 300, "eval_every": 0})
    assert result.summary["val_accuracy"] > 0.9
'''
_README = """\
# NAME

    pip install pytest
    pytest                                                      # the job learns
    python -m orchestrator.launch job=NAME strategy=ddp         # train on all GPUs, or on two CPU cores
    orchestrator show last                                      # what came out of it

| file | what it is |
| --- | --- |
| `NAME.py` | the job: model, data, loss, optimizer |
| `conf/job/NAME.yaml` | its values; other files below `conf/` join those of the orchestrator |
| `test_NAME.py` | its test |

What to try next:

    python -m orchestrator.launch job=NAME debug=true strategy=single      # breakpoint() works
    python -m orchestrator.launch job=NAME experiment=rate_finder          # a learning rate, with a picture
    orchestrator batch-size job=NAME strategy=ddp                          # the largest batch that fits
    python -m orchestrator.launch -m job=NAME job.lr=1e-3,1e-2             # compare settings
"""
FILES: Mapping[str, str] = {
    "NAME.py": _JOB,
    "conf/job/NAME.yaml": _CONF,
    "test_NAME.py": _TEST,
    "README.md": _README,
}
"""The contents of a project by its files; NAME and CLASS stand for those of its job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="orchestrator new",
        description="Begin a project: a job, its configuration, its test and a README, which work at once.",
    )
    parser.add_argument("directory", type=Path, help="the new directory, whose name is that of the job: my_project")
    directory = parser.parse_args(argv).directory
    try:
        write(directory)
    except FileExistsError:
        return refuse("new", f"{directory} exists; choose another name")
    except OSError as e:
        return refuse("new", f"{directory}: cannot be made ({e.strerror})")
    except ValueError as e:
        return refuse("new", e)
    name = directory.name
    print(writable(f"{directory}: a job ({name}.py), its configuration, its test and a README", sys.stdout))
    print(writable(f"next: cd {directory} && pytest", sys.stdout))
    print(f"next: python -m orchestrator.launch job={name} strategy=ddp")
    return 0


def write(directory: Path) -> None:
    """Write a new project.

    Raises:
        ValueError: its name cannot be that of a module and a job.
        OSError: the directory exists, or cannot be made.
    """
    name = directory.name
    if directory.exists():
        raise FileExistsError
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        what = "the job is a module of this name"
        raise ValueError(f"{name}: {what}; use small letters, digits and '_', as in my_project")
    if importlib.util.find_spec(name) is not None or SHIPPED.find("job", name) is not None:
        raise ValueError(f"{name}: there is a module or a job of this name; choose another one")
    directory.mkdir(parents=True)
    for file, text in FILES.items():
        path = directory / file.replace("NAME", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NAME", name).replace("CLASS", name.title().replace("_", "")))


if __name__ == "__main__":
    sys.exit(main())
