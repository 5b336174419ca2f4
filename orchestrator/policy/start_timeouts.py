"""How long workers that share cores may take to start."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.config.schema import Config


def with_shared_cores(config: Config, *, processes_per_core: float) -> Config:
    """Return ``config`` with as much more time to start as there are processes of the run for each core.

    The processes import the same libraries at the same time, so each takes as many times longer as share its core.
    """
    factor = max(1.0, processes_per_core)
    cluster = config.cluster
    return replace(
        config,
        cluster=replace(
            cluster,
            start_timeout_s=factor * cluster.start_timeout_s,
            rendezvous_timeout_s=factor * cluster.rendezvous_timeout_s,
        ),
    )
