"""A model that no worker may hold trains in parts, with the losses that one worker without a limit has."""

from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch

from helpers.conformance.reference import plain_losses
from helpers.jobs.limited_job import LimitedGPT
from helpers.records.runs import events, losses
from orchestrator.export import main as export

STEPS = 4
MODEL = (
    "job._target_=helpers.jobs.limited_job.LimitedGPT",
    "job.layers=12",
    "job.width=512",
    "job.heads=8",
    "job.context=16",
    "job.sample_tokens=0",
)
"""38 million parameters, which take 605 MB with their gradients and the state of AdamW."""
WORDS = (
    *MODEL,
    "train.global_batch_size=8",
    "train.log_every=1",
    "train.eval_splits=[]",
    "recovery.backoff_s=0.1",
    "cluster.cpus_per_worker=0.5",
)
TO_END = f"train.steps={STEPS}"
LIMITED = ("job.limit_mb=560",)
STRATEGIES = {
    "fsdp": (("strategy=fsdp", "strategy.num_workers=4"), False),
    "hsdp": (("strategy=hsdp", "strategy.num_workers=8", "strategy.shard_size=4"), True),
    "fsdp_pipeline": (("strategy=fsdp_pipeline", "strategy.num_workers=4", "strategy.num_microbatches=2"), False),
}
"""By name, and whether a lost worker gets its state from another one."""


@pytest.fixture(scope="module")
def expected() -> Any:
    job = LimitedGPT(layers=12, width=512, heads=8, context=16, sample_tokens=0)
    return pytest.approx(plain_losses(job, batch=8, steps=STEPS), rel=1e-4)


@pytest.mark.campaign
def test_a_model_that_does_not_fit_into_a_worker_ends_the_run_with_what_to_change(run: Callable[..., Any]) -> None:
    """Of few large tensors: without memory for one of them, there is still enough for Ray, which would crash."""
    words = [word for word in WORDS if not word.startswith(("job.layers=", "job.width="))]
    wide = ("job.layers=1", "job.width=2048", "job.limit_mb=345")
    result = run(*words, TO_END, *wide, "strategy=single", "recovery.max_failures=0")
    assert result.status == "FAILED"
    assert "CPU out of memory: tried to allocate " in result.reason
    assert "divide the model with strategy=fsdp or strategy=pipeline" in result.reason


@pytest.mark.campaign  # ``tests/distributed/strategies/test_fsdp.py`` has what a worker holds
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_trains_heals_resumes_and_is_exported_in_parts(
    run: Callable[..., Any], expected: Any, strategy: str
) -> None:
    words, in_place = STRATEGIES[strategy]
    words = (*words, "checkpoint.every=2")
    result = run(*WORDS, TO_END, *LIMITED, *words, "recovery.chaos=[kill@4:1]")
    assert result.exit_code == 0, result.reason
    assert losses(result.run_dir) == expected
    (recovered,) = events(result.run_dir, "recovered")
    assert recovered["in_place"] == in_place
    pipeline = ("strategy=pipeline", "strategy.num_workers=4", f"resume={result.run_dir}", f"train.steps={STEPS + 1}")
    resumed = run(*WORDS, *LIMITED, *pipeline, "checkpoint.every=2")
    assert resumed.exit_code == 0, resumed.reason
    assert [*losses(resumed.run_dir)] == [*range(1, STEPS + 2)], "it goes on in the same directory"
    assert export([str(resumed.run_dir), "--to", "model"]) == 0
    names = safetensors.torch.load_file("model/model.safetensors").keys()
    assert {f"transformer.h.{block}.mlp.c_fc.weight" for block in range(12)} <= names
