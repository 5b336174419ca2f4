"""Whether the micro-batches of a pipeline are large enough for it to pay. Pure."""

from __future__ import annotations

import math

from orchestrator.planning.plan import Plan

LARGE_OVERHEAD = 0.25
SMALL_OVERHEAD = 0.1
"""Time besides computation, relative to computation: larger micro-batches are worth it above the first, and the size is
chosen for the second."""

MOST_GROWTH = 64
"""Only a larger model helps micro-batches that would have to grow more."""

PASS_OVERHEAD_MS = 1.0
CORE_FLOPS_PER_S = 60e9
"""What a pass of a stage over a micro-batch costs besides its arithmetic, and the arithmetic of a core in a second.

Both are orders of magnitude. The step times of ``benchmarks/results/auto.md`` give 0.9 to 1.3 ms for the small models,
and from 28 (``resnet50``) to 98 GFLOP/s (the larger ``gpt``).
"""

FORWARDS_PER_PASS = 1.5
"""The mean of a forward pass and of a backward pass, which takes twice as long."""


def growth(overhead: float) -> int:
    """Return how many times larger micro-batches should be for their overhead to be small; 1 if they are large enough.

    The overhead stays for a larger micro-batch, and computation grows with it.

    Args:
        overhead: the time that is no computation, relative to computation.

    Returns:
        A power of two.
    """
    return 1 if overhead < LARGE_OVERHEAD else 2 ** math.ceil(math.log2(overhead / SMALL_OVERHEAD))


def remedy(factor: int, larger_batch: str) -> str:
    """Return what makes micro-batches ``factor`` times larger. ``larger_batch``: the override that does."""
    return f"{larger_batch}, or a larger model" if factor <= MOST_GROWTH else "a larger model"


def note_on_size(plan: Plan, forward_flops: float) -> str | None:
    """Return a note if the micro-batches of a pipeline on CPUs are likely too small.

    Args:
        plan: the plan of the run.
        forward_flops: the floating-point operations of the whole model's forward pass over one micro-batch.

    Returns:
        None if they are large enough, or if it cannot be estimated.
    """
    layout = plan.pipeline
    if plan.device != "cpu" or layout is None or layout.num_microbatches == 1 or not forward_flops:
        return None
    flops_per_s = CORE_FLOPS_PER_S * plan.threads_per_worker
    pass_ms = FORWARDS_PER_PASS * forward_flops / layout.num_stages / flops_per_s * 1e3
    factor = growth(PASS_OVERHEAD_MS / pass_ms)
    if factor == 1:
        return None
    rows = plan.microbatch_rows
    return (
        f"micro-batches of {rows} {'sample' if rows == 1 else 'samples'} are likely too small: a pass of a stage takes "
        f"about {pass_ms:.1g} ms of computation and {PASS_OVERHEAD_MS:g} ms of overhead; "
        f"try {remedy(factor, f'train.global_batch_size={factor * plan.global_batch_size}')}"
    )
