"""Whether the micro-batches of a plan are large enough, and the size that would be."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers.machines.plans import GPU_BOX, LAPTOP, config_of, plan_of
from jobs.gpt import GPT
from jobs.resnet50 import ResNet50
from orchestrator.job import Job
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages.own_stages import sequence_of
from orchestrator.planning.schedules import MOST_GROWTH, growth, note_on_size, remedy
from orchestrator.strategies import registry
from orchestrator.strategies.checks.stage_checks import forward_flops
from orchestrator.strategies.data.datasets import example_batch

PIPELINE = ("strategy=pipeline", "strategy.num_microbatches=8")
"""Two stages of one thread each: with 80 MFLOP in a forward pass of the model, the mean pass of a stage takes 1 ms."""


@pytest.mark.parametrize(("overhead", "factor"), [(0.05, 1), (0.24, 1), (0.25, 4), (0.4, 4), (0.41, 8), (3.2, 32)])
def test_micro_batches_grow_by_a_power_of_two_until_their_overhead_is_a_tenth(overhead: float, factor: int) -> None:
    assert growth(overhead) == factor
    assert factor == 1 or overhead / factor <= 0.1 < 2 * overhead / factor


def test_a_batch_that_nobody_would_use_is_not_proposed() -> None:
    assert remedy(MOST_GROWTH, "batch=8") == "batch=8, or a larger model"
    assert remedy(2 * MOST_GROWTH, "batch=16") == "a larger model"


@pytest.mark.parametrize(
    ("words", "mflop", "expected"),
    [
        (
            PIPELINE,
            80,
            "micro-batches of 8 samples are likely too small: a pass of a stage takes about 1 ms of computation and "
            "1 ms of overhead; try train.global_batch_size=1024, or a larger model",
        ),
        (
            (*PIPELINE, "train.global_batch_size=8"),
            1,
            "micro-batches of 1 sample are likely too small: a pass of a stage takes about 0.01 ms of computation and "
            "1 ms of overhead; try a larger model",
        ),
        (PIPELINE, 400, None),
        (PIPELINE, 0, None),
        (("strategy=model_parallel",), 80, None),
        (("strategy=ddp",), 80, None),
    ],
    ids=["small", "one sample", "large enough", "no known operation", "the naive split", "no pipeline"],
)
def test_small_micro_batches_are_noted_with_the_batch_that_pays(
    words: tuple[str, ...], mflop: float, expected: str | None
) -> None:
    assert note_on_size(plan_of(LAPTOP, *words, embedded=True), mflop * 1e6) == expected


def test_nothing_is_estimated_for_gpus() -> None:
    assert note_on_size(plan_of(GPU_BOX, *PIPELINE), 80e6) is None


@pytest.mark.slow
@pytest.mark.parametrize("job", [GPT(layers=1, width=8, heads=1, context=4), ResNet50(width=4)], ids=["gpt", "resnet"])
def test_operations_are_counted_without_running_the_model(job: Job) -> None:
    precision = Precision.named("fp32", "cpu")
    inputs = example_batch(job, job.dataset("train"), 2)[0]
    sequence = sequence_of(build_fake(job.model, torch.device("cpu")), inputs, split=(), num_stages=2, job=job)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as torchs:
        job.model()(inputs)
        expected = torchs.get_total_flops()
        assert forward_flops(sequence, inputs, precision=precision) == expected > 0


@pytest.mark.parametrize("asked", [True, False])
def test_the_plan_of_small_micro_batches_says_so_where_it_was_asked_for(asked: bool) -> None:
    config = config_of(*PIPELINE, "job=gpt", *(["plan=true"] if asked else []))
    plan, errors = plan_of(LAPTOP, *PIPELINE, embedded=True), list[str]()
    notes = registry.load("pipeline").check(config, GPT(), plan, errors)
    assert errors == []
    assert any("try train.global_batch_size=256, or a larger model" in note for note in notes) == asked
