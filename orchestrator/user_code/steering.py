"""What the evaluations of a run may change: the argument and the result of ``Job.on_evaluation``."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.user_code.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation that has ended.

    Attributes:
        step: the step after which it was made.
        metrics: its metrics over all ranks, under the names that are logged, such as ``val/loss``.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Steering:
    """What holds from the next step on; what is not given is as without evaluations.

    Attributes:
        lr_factor: what every learning rate is multiplied by, of what :meth:`Job.scheduler` or the optimizer says.
        stop: why the run ends, which is shown at its end; None to go on.
        fields: values of fields of the job, by name; only those in :attr:`Job.steerable`.

    Raises:
        JobError: a value cannot be used.
    """

    lr_factor: float = 1.0
    stop: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        factor = self.lr_factor
        if not isinstance(factor, numbers.Real) or isinstance(factor, bool) or not 0 <= float(factor) < math.inf:
            raise JobError(f"Steering(lr_factor={factor!r}): give a number of at least 0")
        if not (self.stop is None or (isinstance(self.stop, str) and self.stop)):
            raise JobError(f"Steering(stop={self.stop!r}): give a text that says why the run ends, or None")
        try:
            json.dumps(dict(self.fields))
        except (TypeError, ValueError) as e:
            raise JobError(
                f"Steering(fields=...): {e}; give numbers, texts, lists and dicts by the names of fields"
            ) from e
