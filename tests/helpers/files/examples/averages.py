"""The averaged weights of a checkpoint."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from helpers.conformance.cases import Case, having
from helpers.jobs.toys import Toy
from helpers.ranks.loops import run_loop

__all__ = ["check"]


def check() -> None:
    model = Toy().model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        case = Case(job=Toy(), train=replace(having(steps=2, global_batch_size=16), ema_decay=0.9))
        run_loop(0, case, folder)
        (checkpoint,) = Path("checkpoints").glob("step-*2")
        checkpoint.rename("step-00000500")
        # the example
    assert not any(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
