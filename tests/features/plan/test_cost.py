"""Times of a step, and goodput, against what must hold and what others have published."""

import dataclasses
import math

import pytest

from orchestrator.features.plan.prediction.cost import Host, Stack, Step, step_time
from orchestrator.features.plan.prediction.devices import parse_cluster, read_tables
from orchestrator.features.plan.prediction.forecast import DEVICE_HOURS, Reliability, goodput
from orchestrator.features.plan.prediction.work import Transformer
from orchestrator.planning.mesh import Mesh

CLUSTER = parse_cluster("8x8xH100", read_tables())
STACK = Stack(products=0.5, attention=0.5)
LLAMA = Transformer(
    layers=32, hidden=4096, inner=14_336, heads=32, kv_heads=8, head=128, vocabulary=128_256, gated=True
).work(8192)
STEP = Step(mesh=Mesh(shard=64), rows=1, passes=1)


def test_the_work_of_llama_is_the_published_one() -> None:
    assert LLAMA.parameters == pytest.approx(8.03e9, rel=1e-3)
    by_hand = 6 * (8.03e9 - 128_256 * 4096) * 8192  # the embedding multiplies nothing
    assert LLAMA.step_flops == pytest.approx(by_hand + 3 * 32 * 4 * 8192**2 * 4096 / 2, rel=1e-3)


def test_no_step_is_faster_than_the_peak_rate() -> None:
    time = step_time(LLAMA, STEP, CLUSTER, Stack(products=1.0, attention=1.0))
    assert time.total > STEP.samples * LLAMA.step_flops / CLUSTER.devices / CLUSTER.device.peak_flops_s("bf16")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"recompute": 1.0}, "products"),
        ({"recompute_attention": 1.0}, "attention"),
        ({"mesh": Mesh(shard=32, pipeline=2), "bubble": 0.2}, "bubble"),
        ({"mesh": Mesh(shard=8, tensor=8), "rows": 8}, "tensor"),
        ({"mesh": Mesh(shard=8, tensor=8), "rows": 8}, "products"),  # whose inputs each of them reads
        ({"mesh": Mesh(shard=32, pipeline=2)}, "sends"),
        ({"mesh": Mesh(replicate=64), "gathers": False, "rows": 0.01}, "replicate"),
    ],
)
def test_what_is_added_takes_time(change: dict[str, object], kind: str) -> None:
    before = step_time(LLAMA, STEP, CLUSTER, STACK)
    after = step_time(LLAMA, dataclasses.replace(STEP, **change), CLUSTER, STACK)
    assert getattr(after, kind) > getattr(before, kind)


def test_operators_take_the_time_of_the_host_in_each_pass_of_any_size() -> None:
    work = dataclasses.replace(LLAMA, layer=dataclasses.replace(LLAMA.layer, operators=50))
    slow = dataclasses.replace(STACK, operator_s=1e-5)
    few, many = (dataclasses.replace(STEP, rows=rows, passes=8 / rows) for rows in (4, 1))
    assert step_time(work, few, CLUSTER, STACK).host == 0
    assert step_time(work, few, CLUSTER, slow).host == pytest.approx(2 * 3 * 32 * 50 * 1e-5)
    assert step_time(work, many, CLUSTER, slow).host == 4 * step_time(work, few, CLUSTER, slow).host


@pytest.mark.parametrize(
    ("change", "of_host", "kind"),
    [
        ({"passes": 4}, {"accumulated_bytes": 12.0}, "moved"),
        ({"mesh": Mesh(shard=32, pipeline=2)}, {"stage_s": 1e-3}, "sends"),
        ({"mesh": Mesh(shard=8)}, {"collective_s": 1e-3}, "shard"),
        ({"mesh": Mesh(shard=8)}, {"shard_factor": 2.0}, "shard"),
        ({}, {"tensor_operators": 6.0}, "update"),
    ],
)
def test_what_a_cpu_does_beside_the_operators_takes_time(
    change: dict[str, object], of_host: dict[str, float], kind: str
) -> None:
    work, step = dataclasses.replace(LLAMA, tensors=300), dataclasses.replace(STEP, **change)
    on_cpus = dataclasses.replace(STACK, operator_s=1e-5, host=Host())
    slower = dataclasses.replace(on_cpus, host=Host(**of_host))
    before, after = (dataclasses.asdict(step_time(work, step, CLUSTER, stack)) for stack in (on_cpus, slower))
    assert [name for name in before if after[name] > before[name]] == [kind]


def test_on_cpus_no_communication_hides_behind_computation() -> None:
    on_cpus, on_gpus = (
        [
            getattr(step_time(LLAMA, dataclasses.replace(STEP, **change), CLUSTER, stack), kind)
            for change, kind in (
                ({"mesh": Mesh(shard=8)}, "shard"),
                ({"mesh": Mesh(replicate=8), "gathers": False}, "replicate"),
            )
        ]
        for stack in (dataclasses.replace(STACK, host=Host()), STACK)
    )
    assert on_gpus[1] == 0
    assert all(cpu > 2 * gpu for cpu, gpu in zip(on_cpus, on_gpus, strict=True))


def test_slow_links_show() -> None:
    slow = parse_cluster("8x8xH100", read_tables(), link="Ethernet-100G")
    assert step_time(LLAMA, STEP, slow, STACK).shard > 5 * step_time(LLAMA, STEP, CLUSTER, STACK).shard


def test_goodput_of_llama_3() -> None:
    """arXiv:2407.21783: 419 interruptions in 54 days on 16,384 GPUs, and more than 90 % of the time trained."""
    slow = Reliability(recovery_s=600, stall_s=10)  # a restart in ten minutes
    found = goodput(16_384, slow)
    assert 54 * 86_400 / found.failure_s == pytest.approx(419, rel=0.02)
    assert 0.90 < found.share < 0.95


def test_goodput_of_byte_robust() -> None:
    """arXiv:2509.16293: 97 % over three months on 9,600 GPUs, whose states have copies in memory."""
    found = goodput(9_600, Reliability(recovery_s=480, stall_s=1, copied_s=20))
    assert found.share == pytest.approx(0.97, abs=0.01)


@pytest.mark.parametrize("factor", [0.5, 2])
def test_no_other_interval_is_better(factor: float) -> None:
    best = goodput(1024, Reliability(recovery_s=60, stall_s=5))
    other = goodput(1024, Reliability(recovery_s=60, stall_s=5, interval_s=factor * best.interval_s))
    assert other.share < best.share


def test_one_device_fails_seldom() -> None:
    assert goodput(1, Reliability(recovery_s=60, stall_s=1)).failure_s == DEVICE_HOURS * 3600
    assert math.isclose(goodput(1, Reliability(recovery_s=0, stall_s=0.0, interval_s=1)).share, 1, abs_tol=1e-6)
