"""What ``debug=true`` makes of a run: one worker in this process, and nothing beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.config.schema import Config
from orchestrator.policy.elastic import Sizes

ALONE = "single"
"""The strategy in place of one whose least layout has several ranks."""

PlanSizes = Callable[[Config, list[str]], Sizes | None]


def in_one_process(config: Config) -> Config:
    """Return ``config`` without loader processes, uploads, a cluster, spares and injected faults."""
    return replace(
        config,
        data=replace(config.data, num_workers=0),
        tracking=replace(config.tracking, uri=None, sinks=(), tensorboard=False),
        recovery=replace(config.recovery, max_failures=0, spares=0, chaos=()),
        cluster=replace(config.cluster, address=None, queue=False),
    )


def with_one_rank(config: Config, plan_sizes: PlanSizes) -> Config | None:
    """Return ``config`` with as many workers as make one rank; None if its strategy has no such layout.

    Args:
        plan_sizes: returns the sizes of a run; receives a list for errors.
    """
    for num_workers in (config.strategy.num_workers, 1):  # the workers of dp are devices of one process
        changed = replace(config, strategy=replace(config.strategy, num_workers=num_workers))
        errors: list[str] = []
        sizes = None if isinstance(num_workers, tuple) else plan_sizes(changed, errors)
        if sizes is not None and not errors and sizes.initial.world_size == 1:
            return changed
    return None


def note_of(config: Config, *, asked: str) -> str:
    """Return what the user has to know of a run that debugs; ``asked``: the strategy that was asked for."""
    if config.strategy.name != asked:
        what = f"strategy={asked} needs other processes, so that this run trains with strategy={config.strategy.name}"
    elif asked == "script":
        what = "the script runs in this process as its only rank"
    else:
        what = f"strategy={asked} has one worker here, which trains on the whole batch"
    return f"debug=true: {what}; nothing is uploaded, and what only happens between ranks cannot be seen"
