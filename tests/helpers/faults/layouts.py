"""How the runs of the tests of faults and of ``benchmarks/campaign.py`` are laid out, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Tolerance(NamedTuple):
    """How far two runs may differ: in their losses, relatively, and in their weights."""

    losses: float
    rtol: float
    atol: float


EXACT = Tolerance(losses=1e-6, rtol=0, atol=0)
"""The same arithmetic: weights are equal bit for bit."""
SAME = Tolerance(losses=1e-5, rtol=1e-5, atol=1e-7)
CLOSE = Tolerance(losses=1e-5, rtol=1e-3, atol=1e-4)
"""Another order of the same sums."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A strategy with its settings.

    Attributes:
        words: the overrides.
        ranks: the most ranks at once, without spares.
        tolerance: between two runs of the campaign; None if even undisturbed runs differ.
    """

    words: tuple[str, ...]
    ranks: int = 2
    spares: int = 0
    tolerance: Tolerance | None = SAME


def of(strategy: str, *words: str, ranks: int = 2, workers: str = "", **more: Any) -> Layout:
    """Return the layout of a strategy with ``workers``, as many as there are ranks if that is empty."""
    words = (f"strategy={strategy}", f"strategy.num_workers={workers or ranks}", *words)
    return Layout(words=words, ranks=ranks, **more)


def served(*words: str, **more: Any) -> Layout:
    """Return the layout of two workers and two servers, which have the last ranks."""
    return of("parameter_server", "strategy.num_shards=2", SLOWLY, *words, workers="2", ranks=4, **more)


COPIES = "recovery.peer_copy_every=4"
SHARDED_UPDATE = "strategy.shard_optimizer=true"
STAGES = "strategy.pipeline_parallel_size=2"
SHARDS = "strategy.shard_size=2"
SLOWLY = "job.lr=0.02"
LAYOUTS = {
    "single": of("single", ranks=1),
    "ddp": of("ddp"),
    "ddp with a spare": of("ddp", "recovery.spares=1", spares=1),
    "ddp, 1 to 3 workers": of("ddp", workers="[1,3]", ranks=3, tolerance=Tolerance(1e-4, 1e-4, 1e-6)),
    "pipeline": of("pipeline"),
    "pipeline with copies": of("pipeline", COPIES),
    "ddp_pipeline": of("ddp_pipeline", STAGES, ranks=4),
    "ddp, divided optimizer": of("ddp", SHARDED_UPDATE, COPIES),
    "fsdp": of("fsdp"),
    "fsdp with copies": of("fsdp", COPIES),
    "hsdp": of("hsdp", SHARDS, ranks=4),
    "fsdp_pipeline with copies": of("fsdp_pipeline", COPIES, ranks=4),
    "hogwild": of("hogwild", SLOWLY, tolerance=None),
    "parameter_server": served("strategy.consistency=sync"),
    "parameter_server, async": served("strategy.consistency=async", tolerance=None),
}
"""Those of the campaign."""
ALL_LAYOUTS = LAYOUTS | {
    "fsdp_pipeline": of("fsdp_pipeline", ranks=4),
    "locked_sgd": of("locked_sgd", SLOWLY, tolerance=None),
}
