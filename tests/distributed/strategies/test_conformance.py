"""Every strategy in every scenario; ``helpers/conformance/matrix.py`` declares them."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import Case, config_of, having, plan_of
from helpers.conformance.exact_evaluation import assert_scored_exactly
from helpers.conformance.layouts import EVERY, SGD, taking_turns, whole_model
from helpers.conformance.layouts import mesh as mesh_layout
from helpers.conformance.matrix import EXCEPTIONS, PLAIN, SCENARIOS, SYNCHRONOUS, VARIANTS, WITHOUT, case_of, cells
from helpers.conformance.reference import Seen, trained, trained_plainly
from helpers.conformance.training import Steps, assert_same, losses, metrics_of, snapshot, train
from helpers.jobs.quick_jobs import PredictedDigits, ScoredDigits
from helpers.jobs.toys import Tokens, Toy
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.config.compose import compose
from orchestrator.config.files import choices
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies import registry


@cache
def reference_of(scenario: str) -> Seen:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reference = trained_plainly(SCENARIOS[scenario].case)
    torch.set_num_threads(threads)
    expected = losses([reference.steps])
    assert expected[-3:].mean() < expected[:3].mean(), "nothing was learned, so nothing is compared"
    return reference


@pytest.mark.parametrize(("scenario", "layout"), cells())  # some are marked: pytest.mark.fast
def test_a_layout_trains_as_plain_torch(gang: Gang, scenario: str, layout: str) -> None:
    declared, reference, case = SCENARIOS[scenario], reference_of(scenario), case_of(scenario, layout)
    rtol, expected = declared.rtol, reference.steps
    world_size = SYNCHRONOUS[layout].world_size
    found: list[Seen] = gang.run(trained, case, declared.want_grad_norm, world_size=world_size)
    ranks = [seen.steps for seen in found]
    assert_equal_curves(ranks, expected, rtol=rtol)
    for rank in ranks:
        assert rank.skipped == expected.skipped
        if declared.want_grad_norm:
            torch.testing.assert_close(rank.norms, expected.norms, rtol=100 * rtol, atol=0, equal_nan=True)
    torch.testing.assert_close(whole_model(ranks), expected.model, rtol=100 * rtol, atol=max(10 * rtol, declared.atol))
    averages = {} if case.train.ema_decay is None else reference.averages
    torch.testing.assert_close(found[0].averages, averages, rtol=100 * rtol, atol=max(10 * rtol, declared.atol))
    assert layout != "ddp-2" or declared.happened(ranks, reference), "nothing was compared"


@pytest.mark.parametrize("seed", [5, 7, *in_campaign(*range(5))])
def test_a_random_mesh_trains_as_plain_torch(gang: Gang, seed: int) -> None:
    draw = random.Random(seed)
    every = [Mesh(pipeline=p, replicate=r, shard=s) for p, r, s in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3))]
    sizes = draw.choice([mesh for mesh in every if 4 <= mesh.num_workers <= 8])
    divides_optimizer = sizes.shard > 1 and draw.random() < 0.5
    schedule = draw.choice(("1F1B", "GPipe", "ZBVZeroBubble")) if sizes.pipeline == 2 else "1F1B"
    rows = 8 * sizes.data_parallel_size  # two slices of four micro-batches of one sample
    declared = SCENARIOS[PLAIN[0]]
    case = Case(job=declared.job, train=having(declared.case.train, steps=4, global_batch_size=rows))
    of_stages = {"num_microbatches": 4} if sizes.pipeline > 1 else {}
    layout = mesh_layout(sizes, schedule, shard_optimizer=divides_optimizer, **of_stages)
    ranks = gang.run(train, layout.of(case), True, world_size=layout.world_size)
    expected = trained_plainly(case).steps
    assert_equal_curves(ranks, expected, rtol=declared.rtol)
    for rank in ranks:
        torch.testing.assert_close(rank.norms, expected.norms, rtol=100 * declared.rtol, atol=0)
    torch.testing.assert_close(whole_model(ranks), expected.model, rtol=100 * declared.rtol, atol=10 * declared.rtol)


def mean_of_nothing(output: torch.Tensor) -> torch.Tensor:
    return (output.sum() * 0 + 1) / 0


class LossInside(torch.nn.Module):
    forward = staticmethod(mean_of_nothing)


def with_loss() -> torch.nn.Module:
    return torch.nn.Sequential(*of.plain(), LossInside())


@dataclass(frozen=True, kw_only=True)
class Unlabelled(Toy):
    """The loss is a mean over labels, of which there are none; ``counts`` makes their number a weight."""

    counts: Callable[[int], Any] = torch.tensor

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        return mean_of_nothing(output) if output.ndim == 2 else output

    def weight(self, target: Any) -> Any:
        return self.counts(0)


@pytest.mark.parametrize("job", [ScoredDigits(depth=3, val_size=75), PredictedDigits(depth=3, val_size=75)])
@pytest.mark.parametrize("layout", taking_turns((n for n in EVERY if n not in VARIANTS), fast=("ddp-2", "fsdp-3")))
def test_metrics_of_the_whole_set_are_those_of_one_worker(gang: Gang, layout: str, job: Job) -> None:
    expected = assert_scored_exactly(gang, job, EVERY[layout])
    assert expected["val/counted"] == (9 if isinstance(job, PredictedDigits) else 75)


@pytest.mark.parametrize(
    ("layout", "build"),
    [
        *((name, of.plain) for name in ("dp-2-replicas", "fsdp-2", "parameter_server-2+2", "hogwild-2", "1F1B-2")),
        *((name, with_loss) for name in ("ddp-2", "dp-2", "ZBVZeroBubble-2")),
        *in_campaign(*((name, of.plain) for name in ("single", "ddp-2", "dp-2", "ZBVZeroBubble-2"))),
        *in_campaign(*((name, with_loss) for name in ("single", "fsdp-2", "1F1B-2"))),
    ],
)
def test_batches_without_weight_change_nothing(gang: Gang, layout: str, build: Callable[[], Any]) -> None:
    of_layout, changes = EVERY[layout.removesuffix("-replicas")], {"loss_on": "replicas"}
    case = Case(job=Unlabelled(build=build), train=having(steps=2, global_batch_size=32, grad_accumulation=2))
    case = of_layout.of(case, **(changes if "replicas" in layout else {}))
    ranks = gang.run(train, case, True, world_size=of_layout.world_size)
    torch.manual_seed(case.seed)
    assert_same(whole_model(ranks), snapshot(case.job.model()))
    for rank in ranks:
        assert {*rank.loss_sums, *rank.weights, *rank.norms} == {0.0}


class Faint(Tokens):
    """Its gradients are finite in float16."""

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        return super().loss(output, target) / 100


def test_parts_without_weight_do_not_skip_a_step_in_fp16(gang: Gang) -> None:
    job = Faint(build=of.tied_ends, empty=6, lr=50)
    case = Case(job=job, train=having(steps=6, precision="fp16", global_batch_size=16))
    (whole,) = gang.run(train, case, world_size=1)
    (parts,) = gang.run(train, replace(case, train=having(case.train, grad_accumulation=8)), world_size=1)
    assert not any(whole.skipped + parts.skipped)
    torch.testing.assert_close(losses([parts]), losses([whole]), rtol=1e-3, atol=0)


def test_a_count_of_zero_that_is_no_tensor(gang: Gang) -> None:
    case = Case(job=Unlabelled(build=of.plain, counts=int), train=having(steps=1, global_batch_size=8))
    (alone,) = gang.run(train, case, True, world_size=1)
    assert alone.norms == [0.0]


def assert_equal_curves(ranks: list[Steps], expected: Steps, *, rtol: float) -> None:
    torch.testing.assert_close(losses(ranks), losses([expected]), rtol=rtol, atol=0)
    weights = torch.tensor([rank.weights for rank in ranks]).sum(0)
    torch.testing.assert_close(weights, torch.tensor(expected.weights), rtol=0, atol=0, check_dtype=False)
    torch.testing.assert_close(metrics_of(ranks), metrics_of([expected]), rtol=rtol, atol=1e-6)


def test_what_the_matrix_leaves_out_is_in_it() -> None:
    assert {scenario for scenario, _ in EXCEPTIONS} <= {*SCENARIOS}
    assert {*WITHOUT, *VARIANTS, *(layout for _, layout in EXCEPTIONS)} <= {*SYNCHRONOUS}


def default_options(name: str) -> StrategyConfig:
    errors: list[str] = []
    config, _ = compose([f"strategy={name}"], errors, registry.config_class)
    assert config is not None, errors
    return config.strategy


NAMES = dict.fromkeys(layout.options.name for layout in SYNCHRONOUS.values())


def test_every_registered_strategy_is_in_the_matrix() -> None:
    names = {n for n in choices("strategy") if registry.load(n).is_synchronous(default_options(n))}
    assert names - {"auto"} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_with_its_default_keys(gang: Gang, name: str) -> None:
    options, scenario = default_options(name), "metrics and clipped values"
    case = replace(SCENARIOS[scenario].case, options=options, alone=options)
    # "auto" is what a machine without GPUs gets.
    workers = registry.load(name).default_num_workers(options, gpus=(), spares=0)
    plan = plan_of(config_of(case, workers + getattr(options, "num_shards", 0)))
    ranks = gang.run(train, case, world_size=plan.world_size)
    assert_equal_curves(ranks, reference_of(scenario).steps, rtol=SGD)
