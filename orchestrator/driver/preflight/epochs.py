"""Steps in place of epochs: how many an epoch has is known once the job and its training set are."""

from __future__ import annotations

import dataclasses
import importlib
import math
from dataclasses import replace
from typing import Any

from orchestrator.config.build import ConfigError
from orchestrator.config.epochs import Epochs
from orchestrator.config.schema import Config
from orchestrator.config.text import format_override
from orchestrator.driver.preflight.child_process import ChildDiedError, beside_ray, in_child
from orchestrator.job import Job
from orchestrator.strategies.data.datasets import FEEDING, NeedsFeederError, opened_dataset, steps_per_epoch
from orchestrator.user_code.errors import error_text
from orchestrator.user_code.own_errors import own_error_in

COUNT_S = 600.0
"""How long rows are counted whose number no file tells."""


def in_steps(config: Config, job: Job) -> Config:
    """Return ``config`` with steps in place of epochs: the fewest that reach the end of the last one.

    Raises:
        ConfigError: the training set does not tell how long an epoch is.
    """
    given = _numbers(config)
    if not given:
        return config
    length = _steps_per_epoch(config, job, *next(iter(given.items())))

    def section(name: str) -> Any:
        steps = {key: max(1, math.ceil(n.number * length - 1e-6)) for (of, key), n in given.items() if of == name}
        return replace(getattr(config, name), **{"steps" if key == "epochs" else key: n for key, n in steps.items()})

    return replace(config, train=section("train"), checkpoint=section("checkpoint"))


def few_evaluations(config: Config) -> str | None:
    """Return a remark for a run that looks for its best evaluation among one; None if there are several.

    ``train.eval_every=0``, which asks for one, passes.
    """
    train, best = config.train, config.checkpoint.best
    if best is None or config.evaluate is not None or train.steps < 2 or train.eval_every < train.steps:
        return None
    every = "'1 epoch'" if train.epochs is not None and train.epochs > 1 else str(max(1, train.steps // 10))
    return (
        f"checkpoint.best={best} has one evaluation to choose from, after the last step, because "
        f"train.eval_every={train.eval_every} is no less than the {train.steps} steps; set train.eval_every={every}"
    )


def _numbers(config: Config) -> dict[tuple[str, str], Epochs]:
    """Return the numbers of epochs by section and key."""
    found = {}
    for section in ("train", "checkpoint"):
        values = getattr(config, section)
        for field in dataclasses.fields(values):
            if isinstance(value := getattr(values, field.name), Epochs):
                found[section, field.name] = value
    if config.train.epochs is not None:
        found["train", "epochs"] = Epochs(config.train.epochs)
    return found


def _steps_per_epoch(config: Config, job: Job, name: tuple[str, str], value: Epochs) -> float:
    key = format_override(".".join(name), f"{value.number:g}" if name == ("train", "epochs") else value)

    def length() -> float | None:
        return steps_per_epoch(job, opened_dataset(job, "train", config.seed), config.train)

    def counted() -> float | str:
        count = importlib.import_module(FEEDING).length(
            job, "train", config.seed, up_to=config.train.limit_samples, limit_s=COUNT_S
        )
        return count if isinstance(count, str) else count / config.train.global_batch_size

    timeout_s = config.recovery.build_max_s
    try:
        try:
            found = in_child(length, timeout_s=timeout_s)
        except NeedsFeederError:
            rows = beside_ray(counted, cluster=config.cluster, timeout_s=timeout_s)
            if isinstance(rows, str):
                raise ConfigError([f"{key}: job.dataset('train') {rows}; give a number of steps"]) from None
            return rows
    except ChildDiedError as e:
        raise ConfigError([f"{key}: a process that opened job.dataset('train') {e}; give a number of steps"]) from e
    except ConfigError:
        raise
    except Exception as e:
        own = own_error_in("\n".join(getattr(e, "__notes__", ())))
        reason = " ".join(error_text(e).split())[:300] + ("" if own is None else f" ({own.place})")
        unknown = f"job.dataset('train') cannot be opened here: {reason}; so the length of an epoch is not known"
        raise ConfigError([f"{key}: {unknown}; mend that, or give a number of steps if only workers have it"]) from e
    if found is None:
        raise ConfigError([f"{key}: the training set is a stream of unknown length; give a number of steps"])
    return found
