"""What limited a run, from its summary."""

from typing import Any

import pytest

from helpers.files.golden import Golden, sections
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


IDLE = {"bubble_pct": 24.0, "bubble_theory_pct": 20.0}
SMALL = {"bubble_pct": 68.0, "bubble_theory_pct": 20.0, "busiest_worker_pct": 40.0}
TINY = {"bubble_pct": 91.0, "bubble_theory_pct": 20.0, "busiest_worker_pct": 10.0}
NAIVE = {"bubble_pct": 52.0, "bubble_theory_pct": 50.0}
CASES = {
    "data with loaders": ({"data_wait_pct": 35.2, "comm_pct": 12.0}, record("ddp", loaders=2)),
    "data without": ({"data_wait_pct": 46.0, "step_ms_p50": 1.2}, record("single")),
    "ranks on CPUs": ({"comm_pct": 45.0}, record("ddp")),
    "ranks on GPUs": ({"comm_pct": 45.0}, record("ddp", device="cuda", strategy__comm_hook="none")),
    "synchronous servers": ({"comm_pct": 45.0}, record("parameter_server", strategy__consistency="sync")),
    "one micro-batch": (NAIVE, record("model_parallel", microbatches=1)),
    "4 micro-batches": (IDLE, record("pipeline", microbatches=4)),
    "64 micro-batches": (IDLE, record("pipeline", microbatches=64)),
    "small micro-batches": (SMALL, record("pipeline", microbatches=4)),
    "tiny micro-batches": (TINY, record("pipeline", microbatches=4)),
    "failures": ({"comm_pct": 2.0, "effective_time_pct": 60.0, "restarts": 3}, record("ddp", recovery__spares=0)),
    "one worker": ({}, record("single")),
    "two workers": ({"comm_pct": 4.0}, record("ddp")),
    "GPUs": ({"comm_pct": 4.0, "mfu_pct": 31.4}, record("ddp", device="cuda", train__precision="fp32")),
    "ranks of a run without settings": ({"comm_pct": 45.0}, None),
}


def test_the_largest_loss_of_time_is_named_with_a_key(golden: Golden) -> None:
    said = {case: [f"{what_limited(FAST | summary, settings)}"] for case, (summary, settings) in CASES.items()}
    golden("report/limits", sections(said))


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
