"""Comparisons with the whole model that have found no difference, remembered so that equal runs need none.

A file of the user's cache stands for each, on the node of the first rank. Its name is a hash of all that a comparison
depends on: the job, the code, the layout, the device, and what the model is made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from orchestrator.protocol.messages import Assignment
from orchestrator.worker.process.node_facts import code_hash

_INSTALLED = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib"))
_OF_TRAINING = (
    "global_batch_size",
    "grad_accumulation",
    "precision",
    "activation_checkpointing",
    "compile",
    "init",
    "deterministic",
)
"""The keys of ``train`` that a comparison depends on."""


class Remembered:
    """The comparisons that a run of ``assignment`` may leave out."""

    def __init__(self, assignment: Assignment, device: torch.device):
        config, plan = assignment.config, assignment.plan
        given = assignment.environment.pickled_job
        self._known: dict[str, Any] = {
            "job": [config.job.target, config.job.fields, "" if given is None else _digest(given)],
            "code": [code_hash(), _sources(), _versions()],
            "train": {name: getattr(config.train, name) for name in _OF_TRAINING},
            "layout": [asdict(of) for of in (config.strategy, plan.mesh, plan.pipeline) if of is not None],
            "device": [device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else ""],
        }

    def has(self, model: str) -> bool:
        """Return whether no difference was found. ``model``: what it is made of."""
        return self._file(model).exists()

    def add(self, model: str) -> None:
        """Remember that no difference was found. Disk errors are ignored."""
        file = self._file(model)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def _file(self, model: str) -> Path:
        name = _digest(json.dumps({**self._known, "model": model}, sort_keys=True, default=str).encode())
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(cache).expanduser() / "orchestrator" / "compared" / name


def _sources() -> dict[str, str]:
    """Return the hash of each loaded module that is neither installed nor of this package, by name."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = vars(module).get("__file__") if hasattr(module, "__dict__") else None
        if not isinstance(file, str) or name.startswith("orchestrator.") or any(part in file for part in _INSTALLED):
            continue
        with contextlib.suppress(OSError):
            found[name] = _digest(Path(file).read_bytes())
    return found


def _versions() -> dict[str, str]:
    """Return the version of each loaded package that says it."""
    top = [name for name, module in sorted(sys.modules.items()) if "." not in name and hasattr(module, "__dict__")]
    versions = {name: vars(sys.modules[name]).get("__version__") for name in top}
    return {"python": sys.version, **{name: v for name, v in versions.items() if isinstance(v, str)}}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
