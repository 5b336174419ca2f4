"""What limited a run, from its summary."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.display.limits import larger_microbatches, what_limited

FAST = {"samples_per_s": 4000.0, "data_wait_pct": 1.0}


def record(
    strategy: str, *, device: str = "cpu", microbatches: int | None = None, loaders: int = 0, **params: Any
) -> dict[str, Any]:
    """The part of run.json with the settings; ``params`` with ``__`` for the dot of a key."""
    given = {"train.global_batch_size": 64, "train.grad_accumulation": 1, "strategy.name": strategy}
    pipeline = None if microbatches is None else {"num_microbatches": microbatches}
    return {
        "params": given | {key.replace("__", "."): value for key, value in params.items()},
        "plan": {
            "device": device,
            "pipeline": pipeline,
            "mesh": {"data_parallel_size": 1},
            "loader_processes": loaders,
        },
    }


@pytest.mark.parametrize(
    ("summary", "settings", "sentence"),
    [
        (
            {"data_wait_pct": 35.2, "comm_pct": 12.0},
            record("ddp", loaders=2),
            "limited by waiting for samples, 35% of a step; try data.num_workers=4",
        ),
        (
            {"data_wait_pct": 46.0, "step_ms_p50": 1.2},
            record("single"),
            "limited by waiting for samples, 46% of a step; try train.global_batch_size=128",
        ),
        (
            {"comm_pct": 45.0},
            record("ddp"),
            "limited by waiting for other ranks, 45% of a step; try train.global_batch_size=128",
        ),
        (
            {"comm_pct": 45.0},
            record("ddp", device="cuda", strategy__comm_hook="none"),
            "limited by waiting for other ranks, 45% of a step; try strategy.comm_hook=bf16",
        ),
        (
            {"comm_pct": 45.0},
            record("parameter_server", strategy__consistency="sync"),
            "limited by waiting for other ranks, 45% of a step; try strategy.consistency=stale",
        ),
        (
            {"bubble_pct": 52.0, "bubble_theory_pct": 50.0},
            record("model_parallel", microbatches=1),
            "limited by idle stages, 52% of a step; try strategy=pipeline",
        ),
        (
            {"bubble_pct": 24.0, "bubble_theory_pct": 20.0},
            record("pipeline", microbatches=4),
            "limited by idle stages, 24% of a step (20% in theory); try strategy.num_microbatches=8",
        ),
        (
            {"bubble_pct": 24.0, "bubble_theory_pct": 20.0},
            record("pipeline", microbatches=64),
            "limited by idle stages, 24% of a step (20% in theory); try train.global_batch_size=128",
        ),
        (
            {"bubble_pct": 68.0, "bubble_theory_pct": 20.0, "busiest_worker_pct": 40.0},
            record("pipeline", microbatches=4),
            "limited by idle stages, 68% of a step (20% in theory), because its micro-batches are small; "
            "try train.global_batch_size=1024, or a larger model",
        ),
        (
            {"bubble_pct": 91.0, "bubble_theory_pct": 20.0, "busiest_worker_pct": 10.0},
            record("pipeline", microbatches=4),
            "limited by idle stages, 91% of a step (20% in theory), because its micro-batches are small; "
            "try a larger model",
        ),
        (
            {"comm_pct": 2.0, "effective_time_pct": 60.0, "restarts": 3},
            record("ddp", recovery__spares=0),
            "limited by failures, 40% of the time; try recovery.spares=1",
        ),
        ({}, record("single"), "limited by computation; try strategy=ddp"),
        ({"comm_pct": 4.0}, record("ddp"), "limited by computation"),
        (
            {"comm_pct": 4.0, "mfu_pct": 31.4},
            record("ddp", device="cuda", train__precision="fp32"),
            "limited by computation at 31% MFU; try train.precision=bf16",
        ),
        (
            {"comm_pct": 45.0},
            None,
            "limited by waiting for other ranks, 45% of a step; try a larger train.global_batch_size",
        ),
    ],
)
def test_the_largest_loss_of_time_is_named_with_a_key(
    summary: dict[str, Any], settings: dict[str, Any] | None, sentence: str
) -> None:
    assert what_limited({**FAST, **summary}, settings) == sentence


@pytest.mark.parametrize(
    ("busiest_pct", "factor"),
    [
        (80.0, 1),  # as in theory
        (72.0, 1),  # messages take 0.14 of the computation
        (60.0, 8),  # 0.42, of which an eighth is 0.05
        (20.0, 64),  # 3.75, of which a 64th is 0.06
        (0.0, 1),
    ],
)
def test_micro_batches_are_to_grow_until_messages_are_cheap(busiest_pct: float, factor: int) -> None:
    assert larger_microbatches(busiest_pct=busiest_pct, theory_pct=20.0) == factor


@pytest.mark.parametrize(
    ("summary", "strategy"),
    [({}, "ddp"), ({"data_wait_pct": 1.0, "comm_pct": 40.0}, "ddp"), (FAST, "hogwild")],
    ids=["nothing measured", "no speed after warm-up", "no measured waits between workers"],
)
def test_nothing_is_guessed(summary: dict[str, Any], strategy: str) -> None:
    assert what_limited(summary, record(strategy)) is None
