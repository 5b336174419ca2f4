"""What a person writes: a job, as plain PyTorch.

A job is a frozen dataclass; its fields are its configuration (``job.hidden=1024``).
"""

from __future__ import annotations

import abc
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.config.build import build, did_you_mean, under
from orchestrator.config.redact import redact_text, secret_values
from orchestrator.config.schema import JobSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

Split = Literal["train", "val"]


@dataclass(frozen=True, kw_only=True)
class Job(abc.ABC):
    """One training job. Four methods are required, the others have sensible answers.

    A dataset item is ``(input, target)`` unless :meth:`collate` says otherwise; a batch is always the pair
    ``(input, target)``, of tensors or of nested tuples, lists and dicts of them.
    """

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The model. An ``nn.Sequential`` of named layers can be cut between any two."""

    @abc.abstractmethod
    def dataset(self, split: Split) -> Dataset[Any]:
        """A map-style dataset: ``__len__`` and ``__getitem__``."""

    @abc.abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """The MEAN loss of a batch, a scalar, over the units that :meth:`weight` counts."""

    @abc.abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer of these parameters."""

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """A learning-rate schedule over ``steps`` updates, stepped after each; None: constant."""
        return None

    @property
    def collate(self) -> Callable[[list[Any]], tuple[Any, Any]] | None:
        """Joins dataset items to a batch; None: torch's default."""
        return None

    def weight(self, target: Any) -> int | Tensor | None:
        """Units that the loss of this batch is a mean over, where samples differ in it: valid tokens.

        None: every sample weighs the same, and no rank has to ask the others.
        """
        return None

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        """Further figures of an evaluation batch as SUMS over the units of :meth:`weight`.

        ``{"accuracy": number_correct}`` is logged as ``val/accuracy``, divided by the total weight.
        """
        return {}

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens in a sample, to log tokens per second as well."""
        return None

    def sample(self, model: nn.Module, generator: torch.Generator) -> str | None:
        """Text to show after training, e.g. what a language model writes."""
        return None

    def check(self) -> None:  # noqa: B027 - a job without demands of its own has nothing to check
        """Called on the driver before anything starts.

        Raises:
            ValueError: this job cannot run; the text names the field and the remedy.
        """


def load_job(spec: JobSpec, faults: list[str]) -> Job | None:
    """Import the job's class and build it from its fields; None after appending to ``faults``."""
    own: list[str] = []
    job = _load(spec, own)
    secrets = secret_values(spec.fields)
    faults += [redact_text(fault, secrets) for fault in own]
    return job


def _load(spec: JobSpec, faults: list[str]) -> Job | None:
    cls = _find(spec.target, faults)
    job = None if cls is None else build(cls, spec.fields, "job", faults)
    if job is None:
        return None
    try:
        job.check()
    except (ValueError, OSError) as e:
        faults.append(under("job", e))
        return None
    return job


def _find(target: str, faults: list[str]) -> type[Job] | None:
    if not re.fullmatch(r"\w+(\.\w+)+", target):
        faults.append(f"job._target_={target}: expected package.module.Class")
        return None
    module_name, _, class_name = target.rpartition(".")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # A console script does not put the working directory on the path; `python -m` does.
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not (module_name + ".").startswith(e.name + "."):
            faults.append(f"job._target_={target}: importing {module_name} failed: {e}")
        else:
            faults.append(
                f"job._target_={target}: no module {e.name}; it must be installed or lie in the working directory"
            )
        return None
    except (Exception, SystemExit) as e:
        faults.append(f"job._target_={target}: importing {module_name} failed: {type(e).__name__}: {e}")
        return None
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        found = [n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Job) and c is not Job]
        hint = did_you_mean(class_name, found) if found else "expected package.module.Class"
        faults.append(f"job._target_={target}: {module_name} has no class {class_name}; {hint}")
    elif not issubclass(cls, Job):
        faults.append(f"job._target_={target}: is not a subclass of orchestrator.Job")
    elif missing := sorted(getattr(cls, "__abstractmethods__", ())):
        faults.append(f"job._target_={target}: lacks {', '.join(m + '()' for m in missing)}")
    elif "__annotations__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
        faults.append(
            f"job._target_={target}: its fields are not declared as a dataclass's; "
            "write @dataclass(frozen=True, kw_only=True) above the class"
        )
    else:
        return cls
    return None
