"""What must hold of the layouts that `orchestrator plan` finds on any cluster, tried on random ones."""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Sequence

import pytest

from helpers.jobs.toys import Toy
from jobs.gpt import GPT
from orchestrator.config.compose import compose
from orchestrator.config.schema import Config
from orchestrator.features.plan.forecasts import usual_batch
from orchestrator.features.plan.layouts import Layouts, best_of_each
from orchestrator.features.plan.prediction.cost import Stack
from orchestrator.features.plan.prediction.devices import Cluster, Device, Link
from orchestrator.features.plan.prediction.forecast import DEVICE_HOURS, Forecast, Question
from orchestrator.features.plan.traced_job import TracedJob
from orchestrator.job import Job
from orchestrator.strategies import registry

pytestmark = pytest.mark.slow

JOBS: dict[str, Job] = {
    "llama": GPT(
        variant="llama", context=256, layers=12, width=1024, heads=16, kv_heads=8, hidden=2816, vocabulary=999
    ),
    "gpt2": GPT(variant="gpt2", context=64, layers=7, width=768, heads=12, vocabulary=300),
    "toy": Toy(),
}
SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 60))]
MARGIN = 1 + 1e-9


@functools.cache
def traced(name: str) -> tuple[Config, TracedJob]:
    errors: list[str] = []
    config, _ = compose(["job=gpt", "strategy=mesh", "train.precision=bf16"], errors, registry.config_class)
    assert config is not None, errors
    return config, TracedJob(config, JOBS[name], on_gpus=True)


class Drawn:
    """A random job on a random cluster, for one seed."""

    def __init__(self, seed: int):
        self.draw = draw = random.Random(seed)
        self.name = draw.choice([*JOBS])
        per_node = draw.choice([1, 2, 3, 4, 5, 6, 8])
        device = Device(
            bf16=draw.choice([10, 100, 1000, 2500]),
            memory_gib=draw.choice([1.2, 1.6, 2.2, 3, 5, 40]),
            memory_gb_s=draw.choice([100, 1000, 8000]),
            inside="a",
            between="b",
            node=72,
            domain=draw.choice([None, None, 12, 72]),
            source="drawn",
        )
        inside = draw.choice([30, 450, 900])
        self.cluster = Cluster(
            nodes=draw.choice([1, 1, 2, 3, 5]),
            per_node=per_node,
            name="Z",
            device=device,
            inside=Link(gb_s=inside, source="drawn"),
            between=Link(gb_s=draw.choice([1, 25, inside]), source="drawn"),
        )

    def question(self, cluster: Cluster | None = None) -> Question:
        _, job = traced(self.name)
        return Question(
            work=job.work,
            cluster=cluster or self.cluster,
            stack=Stack(products=0.5, attention=0.5),
            tokens=1e9,
            price=2.0,
            device_hours=DEVICE_HOURS,
        )

    def every(self, cluster: Cluster | None = None, *, batch: int | None = None) -> list[Forecast]:
        """All layouts on a cluster; ``batch``: the samples of a step, as usual by default."""
        question = self.question(cluster)
        config, job = traced(self.name)
        batch = batch or usual_batch(config, JOBS[self.name], question.cluster.devices)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=batch))
        return [question.answered(f) for f in Layouts.elsewhere(config, job, question.cluster, ()).forecasts()]

    def device(self, **changes: float) -> Cluster:
        return dataclasses.replace(self.cluster, device=dataclasses.replace(self.cluster.device, **changes))


def fitting(forecasts: Sequence[Forecast]) -> list[Forecast]:
    return [f for f in forecasts if not f.refused]


def fastest(forecasts: Sequence[Forecast]) -> float:
    return min((f.seconds for f in forecasts), default=math.inf)


@pytest.fixture(params=SEEDS)
def drawn(request: pytest.FixtureRequest) -> Drawn:
    return Drawn(request.param)


def test_no_share_is_above_one_and_nothing_is_negative(drawn: Drawn) -> None:
    found, question = drawn.every(), drawn.question()
    assert found
    for forecast in found:
        memory = forecast.memory
        assert memory is not None
        assert min(memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.casts) >= 0
        assert forecast.step.samples == found[0].step.samples
    for forecast in fitting(found):
        assert forecast.time is not None
        assert forecast.goodput is not None
        assert min(dataclasses.astuple(forecast.time)) >= 0
        assert 0 < forecast.seconds < math.inf
        assert 0 < question.mfu(forecast) <= 1
        assert 0 < forecast.goodput.share <= 1
        record = question.record(forecast)
        assert record["tokens_s_device"] * forecast.mesh.num_workers == pytest.approx(record["tokens_s"])
        assert record["bubble"] < 1


def test_what_fits_fewer_devices_fits_more(drawn: Drawn) -> None:
    one_node = dataclasses.replace(drawn.cluster, nodes=1)
    numbers = sorted(drawn.draw.sample(range(1, 25), 5))
    fits = [any(fitting(drawn.every(dataclasses.replace(one_node, per_node=n)))) for n in numbers]
    assert fits == sorted(fits), dict(zip(numbers, fits, strict=True))


def test_twice_as_many_devices_of_a_domain_take_no_longer(drawn: Drawn) -> None:
    device = dataclasses.replace(drawn.cluster.device, domain=72)
    few = dataclasses.replace(drawn.cluster, nodes=1, device=device, inside=Link(gb_s=900, source="drawn"))
    more = dataclasses.replace(few, per_node=2 * few.per_node)
    batch = 960 * 8
    assert fastest(drawn.every(more, batch=batch)) <= fastest(drawn.every(few, batch=batch)) * MARGIN


def test_more_shards_need_less_memory(drawn: Drawn) -> None:
    by_rest: dict[object, list[Forecast]] = {}
    for f in drawn.every():
        mesh, step = f.mesh, f.step
        key = (mesh.pipeline, mesh.tensor, mesh.context, step.chunks, step.recompute, step.rows, step.divides_update)
        by_rest.setdefault(key, []).append(f)
    for alike in by_rest.values():
        memories = [(f.mesh.shard, f.memory) for f in sorted(alike, key=lambda f: f.mesh.shard) if f.step.shards > 1]
        for (_, few), (_, more) in itertools.pairwise(memories):
            assert few is not None
            assert more is not None
            assert more.state <= few.state * MARGIN


@pytest.mark.parametrize("faster", ["bf16", "memory_gb_s", "memory_gib"])
def test_a_better_device_is_not_slower(drawn: Drawn, faster: str) -> None:
    better = drawn.device(**{faster: 2 * getattr(drawn.cluster.device, faster)})
    before, after = drawn.every(), drawn.every(better)
    assert len(before) == len(after)
    for was, now in zip(before, after, strict=True):
        assert now.seconds <= was.seconds * MARGIN


@pytest.mark.parametrize("link", ["inside", "between"])
def test_a_faster_link_is_not_slower(drawn: Drawn, link: str) -> None:
    twice = Link(gb_s=2 * getattr(drawn.cluster, link).gb_s, source="drawn")
    for was, now in zip(drawn.every(), drawn.every(dataclasses.replace(drawn.cluster, **{link: twice})), strict=True):
        assert now.seconds <= was.seconds * MARGIN


def test_the_link_between_nodes_does_not_matter_on_one(drawn: Drawn) -> None:
    one = dataclasses.replace(drawn.cluster, nodes=1)
    slow = dataclasses.replace(one, between=Link(gb_s=0.01, source="drawn"))
    assert [f.seconds for f in drawn.every(one)] == [f.seconds for f in drawn.every(slow)]


def test_money_and_days_are_in_proportion(drawn: Drawn) -> None:
    question = drawn.question()
    twice = dataclasses.replace(question, tokens=2e9)
    dearer = dataclasses.replace(question, price=4.0)
    safer = dataclasses.replace(question, device_hours=10 * DEVICE_HOURS)
    for forecast in best_of_each(drawn.every())[:5]:
        if forecast.refused:
            continue
        days, money = question.days(forecast), question.money(forecast)
        assert days is not None
        assert money is not None
        assert twice.days(forecast) == pytest.approx(2 * days)
        assert dearer.money(forecast) == pytest.approx(2 * money)
        assert money == pytest.approx(days * 24 * forecast.mesh.num_workers * 2.0)
        better = safer.answered(forecast).goodput
        assert better is not None
        assert forecast.goodput is not None
        assert better.share >= forecast.goodput.share
