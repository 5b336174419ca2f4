"""What the driver decides without Ray: figures of the run, the culprit, the order of the ranks."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.cases import having
from orchestrator.planning.mesh import Mesh
from orchestrator.policy.aggregate import Aggregator
from orchestrator.policy.devices import can_join, shared_gpu, unusable_gpus, with_common_precision
from orchestrator.policy.failure import cannot_leave_nccl, death, first_failure, standstill, unreachable_addresses
from orchestrator.policy.rank_order import groups_on_one_node, placement_note, rank_order, shards_last
from orchestrator.protocol.events import MetricsLogged
from orchestrator.protocol.messages import EvalPoint, Failure, Outcome, Phase, TrainPoint, WorkerInfo
from orchestrator.protocol.metrics import Metric, MetricSpec, Reduce
from orchestrator.timeline.spans import ActionKind, Span
from orchestrator.worker.process.gpu import gpu_error, has_bf16


def point(**changes: Any) -> TrainPoint:
    values: dict[str, Any] = {
        "step": 10, "time": 100.0, "loss_sum": 64.0, "weight": 32.0,
        "step_ms": (10.0, 10.0), "data_wait_ms": 1.0, "comm_share": 0.4,
    }  # fmt: skip
    return TrainPoint(**{**values, **changes})


def aggregator(world_size: int = 2) -> Aggregator:
    return Aggregator(mesh=Mesh(replicate=world_size), global_batch_size=64, tokens_per_sample=None)


def test_loss_is_global_sum_over_global_weight() -> None:
    parts = aggregator()
    assert parts.add(0, point(loss_sum=33.0, weight=33.0)) is None
    logged = parts.add(1, point(loss_sum=64.0, weight=32.0))
    assert logged is not None
    assert (logged.step, logged.time) == (10, 100.0)
    assert logged.metrics["train/loss"] == pytest.approx(97 / 65)


def test_points_wait_for_every_rank_and_do_not_mix() -> None:
    parts = aggregator()
    assert parts.add(0, point(step=10)) is None
    assert parts.add(0, point(step=20)) is None
    logged = parts.add(1, point(step=10))
    assert logged is not None
    assert logged.step == 10


def test_perf_figures() -> None:
    parts = aggregator()
    parts.add(0, point())
    logged = parts.add(1, point(comm_share=0.2, data_wait_ms=2.0))
    assert logged is not None
    assert logged.metrics["perf/step_ms"] == 10
    assert logged.metrics["perf/samples_per_s"] == 6400
    assert logged.metrics["perf/samples_per_s_per_worker"] == 3200
    assert logged.metrics["perf/comm_pct"] == pytest.approx(30)
    assert logged.metrics["perf/data_wait_pct"] == pytest.approx(15)
    assert parts.summary()["samples_per_s_per_worker"] == pytest.approx(3200)


def test_the_parts_of_a_step_add_up_to_it_under_every_strategy() -> None:
    def parts_of(logged: MetricsLogged | None) -> dict[str, float]:
        assert logged is not None
        names = ("compute", "comm", "data_wait", "idle")
        parts = {name: logged.metrics[f"perf/{name}_ms"] for name in names}
        assert math.fsum(parts.values()) == pytest.approx(logged.metrics["perf/step_ms"])
        return parts

    replicas = aggregator()
    replicas.add(0, point())
    assert parts_of(replicas.add(1, point(comm_share=0.2))) == pytest.approx(
        {"compute": 6.0, "comm": 3.0, "data_wait": 1.0, "idle": 0.0}
    )
    assert replicas.summary()["comm_ms"] == pytest.approx(3.0)
    alone = parts_of(aggregator(1).add(0, point(comm_share=None)))
    assert alone == pytest.approx({"compute": 9.0, "comm": 0.0, "data_wait": 1.0, "idle": 0.0})
    stages = Aggregator(mesh=Mesh(pipeline=2), global_batch_size=64, tokens_per_sample=None)
    step = {"step_ms": (10_000.0,), "comm_share": None, "data_wait_ms": 1000.0}
    stages.add(0, staged(0, **step))
    assert parts_of(stages.add(1, staged(1, **step))) == pytest.approx(
        {"compute": 6000.0, "comm": 0.0, "data_wait": 1000.0, "idle": 3000.0}
    )


def test_the_memory_of_each_rank_is_logged_unless_there_are_many() -> None:
    def memory(world_size: int) -> dict[str, float]:
        parts = aggregator(world_size)
        points = [parts.add(rank, point(peak_memory_mb=100.0 + rank)) for rank in range(world_size)]
        assert points[-1] is not None
        return {name: value for name, value in points[-1].metrics.items() if name.startswith("memory/")}

    assert memory(1) == memory(17) == {}
    assert memory(2) == {"memory/rank_0_peak_mb": 100.0, "memory/rank_1_peak_mb": 101.0}


def test_shards_count_neither_as_workers_nor_in_their_wait_for_data() -> None:
    parts = Aggregator(mesh=Mesh(replicate=2, num_servers=1), global_batch_size=64, tokens_per_sample=None)
    parts.add(0, point())
    parts.add(1, point())
    logged = parts.add(2, point(loss_sum=0.0, weight=0.0, data_wait_ms=0.0, comm_share=None))
    assert logged is not None
    assert logged.metrics["train/loss"] == pytest.approx(2)
    assert logged.metrics["perf/samples_per_s_per_worker"] == 3200
    assert logged.metrics["perf/data_wait_pct"] == pytest.approx(10)


def test_unknown_metrics_are_left_out() -> None:
    logged = aggregator(1).add(0, point(step_ms=(), comm_share=None, weight=0.0))
    assert logged is not None
    assert not logged.metrics
    assert "samples_per_s" not in aggregator().summary()


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 5.0), ("mean", 2.5), ("max", 3.0), ("lead", 2.0)])
def test_a_metric_says_how_it_is_reduced_over_the_ranks(reduce: Reduce, expected: float) -> None:
    parts = aggregator()
    parts.add(1, point(metrics={"a/b": Metric(3.0, reduce)}))
    logged = parts.add(0, point(metrics={"a/b": Metric(2.0, reduce)}))
    assert logged is not None
    assert logged.metrics["a/b"] == expected
    assert MetricSpec(name="a/b", reduce=reduce) in parts.specs()


def test_only_rank_0_gives_the_value_of_a_lead_metric() -> None:
    parts = aggregator()
    parts.add(0, point())
    logged = parts.add(1, point(metrics={"a/b": Metric(3.0, "lead"), "a/c": Metric(4.0, "max")}))
    assert logged is not None
    assert "a/b" not in logged.metrics
    assert logged.metrics["a/c"] == 4.0


def test_evaluation_counts_each_sample_once() -> None:
    parts = aggregator()
    parts.add(0, EvalPoint(step=5, time=1.0, loss_sum=30.0, weight=10.0, sums={"accuracy": 9.0}))
    logged = parts.add(1, EvalPoint(step=5, time=1.0, loss_sum=2.0, weight=1.0, sums={"accuracy": 1.0}))
    assert logged is not None
    assert logged.metrics == {"val/loss": pytest.approx(32 / 11), "val/accuracy": pytest.approx(10 / 11)}


def test_the_perplexity_is_that_of_the_mean_loss_of_all_ranks() -> None:
    parts = aggregator()

    def part(step: int, loss_sum: float, weight: float, *others: EvalPoint, split: str = "val") -> EvalPoint:
        kept = {"step": step, "time": 1.0, "sums": {}, "perplexity": True, "others": others, "split": split}
        return EvalPoint(**kept, loss_sum=loss_sum, weight=weight)  # type: ignore[arg-type]

    parts.add(0, part(5, 30.0, 10.0, part(5, 1.0, 1.0, split="test")))
    logged = parts.add(1, part(5, 2.0, 1.0, part(5, 3.0, 1.0, split="test")))
    assert logged is not None
    assert logged.metrics["val/perplexity"] == pytest.approx(math.exp(32 / 11))
    assert logged.metrics["test/perplexity"] == pytest.approx(math.exp(2.0))
    assert [parts.summary()[key] for key in ("val_perplexity", "test_perplexity")] == [
        logged.metrics["val/perplexity"],
        logged.metrics["test/perplexity"],
    ]
    parts.add(0, part(6, 8000.0, 10.0))
    diverged = parts.add(1, part(6, 800.0, 1.0))
    assert diverged is not None
    assert diverged.metrics["val/perplexity"] == math.inf


def test_each_split_has_metrics_and_results_of_its_own() -> None:
    def part(split: str, loss: float, accuracy: float, *others: EvalPoint) -> EvalPoint:
        sums = {"accuracy": accuracy}
        return EvalPoint(step=5, time=1.0, loss_sum=loss, weight=2.0, sums=sums, split=split, others=others)

    parts = aggregator()
    assert parts.add(0, part("val", 2.0, 1.0, part("test", 4.0, 0.0), part("train", 1.0, 2.0))) is None
    logged = parts.add(1, part("val", 4.0, 2.0, part("test", 8.0, 1.0), part("train", 3.0, 2.0)))
    assert logged is not None
    values = {"val/loss": 1.5, "val/accuracy": 0.75, "test/loss": 3.0, "test/accuracy": 0.25}
    assert logged.metrics == {**values, "train_eval/loss": 1.0, "train_eval/accuracy": 1.0}
    keys = ("val_loss", "test_loss", "test_accuracy", "train_eval_loss")
    assert [parts.summary()[key] for key in keys] == [1.5, 3.0, 0.25, 1.0]


def test_the_evaluation_of_the_averaged_weights_has_names_of_its_own() -> None:
    parts = aggregator(1)
    averaged = EvalPoint(step=5, time=1.0, loss_sum=4.0, weight=8.0, sums={"accuracy": 6.0})
    logged = parts.add(0, EvalPoint(step=5, time=1.0, loss_sum=16.0, weight=8.0, sums={"accuracy": 4.0}, ema=averaged))
    assert logged is not None
    assert logged.metrics == {"val/loss": 2.0, "val/accuracy": 0.5, "val/ema_loss": 0.5, "val/ema_accuracy": 0.75}
    assert (parts.summary()["val_loss"], parts.summary()["val_ema_loss"]) == (2.0, 0.5)


def test_utilization_is_the_time_at_the_peak_by_the_time_of_the_step() -> None:
    parts = aggregator()
    parts.add(0, point(step_ms=(10.0, 30.0), flops=64e9, flops_at_peak_ms=4.0))
    logged = parts.add(1, point(step_ms=(10.0, 30.0), flops=64e9, flops_at_peak_ms=6.0))
    assert logged is not None
    assert logged.metrics["perf/flops_per_sample"] == 2e9
    assert logged.metrics["perf/mfu_pct"] == pytest.approx(25)
    assert parts.summary()["mfu_pct"] == pytest.approx((50 + 100 * 5 / 30) / 2)


@pytest.mark.parametrize(
    ("known", "logged_names"),
    [({"flops": 1e9}, {"perf/flops_per_sample"}), ({"flops_at_peak_ms": 1.0}, {"perf/mfu_pct"}), ({}, set())],
)
def test_utilization_is_left_out_unless_every_worker_knows_its_part(
    known: dict[str, float], logged_names: set[str]
) -> None:
    for other, expected in ((known, logged_names), ({}, set())):
        parts = aggregator()
        parts.add(0, point(**known))
        logged = parts.add(1, point(**other))
        assert logged is not None
        assert {"perf/flops_per_sample", "perf/mfu_pct"} & logged.metrics.keys() == expected


def test_shards_have_no_part_in_the_utilization() -> None:
    parts = Aggregator(mesh=Mesh(replicate=1, num_servers=1), global_batch_size=64, tokens_per_sample=None)
    parts.add(1, point(flops=0.0))
    logged = parts.add(0, point(flops=64.0, flops_at_peak_ms=1.0))
    assert logged is not None
    assert (logged.metrics["perf/flops_per_sample"], logged.metrics["perf/mfu_pct"]) == (1, pytest.approx(10))


def test_summary_is_over_warm_steps() -> None:
    parts = aggregator(1)
    parts.add(0, point(step=10, step_ms=(10.0,) * 9))
    parts.add(0, point(step=20, step_ms=(30.0,), loss_sum=8.0, weight=4.0))
    summary = parts.summary()
    assert summary["samples_per_s"] == pytest.approx(64 * 10 / 0.12)
    assert (summary["step_ms_p50"], summary["step_ms_p95"]) == (10.0, 30.0)
    assert summary["final_loss"] == 2.0


def span(kind: ActionKind, stage: int, start: float, end: float) -> Span:
    return Span(kind=kind, stage=stage, microbatch=0, start=start, end=end)


def staged(pp_rank: int, later_s: float = 0.0, **changes: Any) -> TrainPoint:
    """A stage of two, one micro-batch: F 1 s and B 2 s on each, ``later_s`` of waiting before each B."""
    b = 2.0 + later_s
    spans = [
        (span("F", 0, 0.0, 1.0), span("B", 0, b + 2 + later_s, b + 4 + later_s)),
        (span("F", 1, 1.0, 2.0), span("B", 1, b, b + 2)),
    ][pp_rank]
    return point(spans=spans, **changes)


def test_bubble_of_replicas_beside_that_of_theory() -> None:
    parts = Aggregator(mesh=Mesh(replicate=2, pipeline=2), global_batch_size=64, tokens_per_sample=None)
    parts.add(0, staged(0, peak_memory_mb=100.0))
    parts.add(1, staged(1, peak_memory_mb=300.0))
    parts.add(2, staged(0, 1.0, peak_memory_mb=200.0))
    logged = parts.add(3, staged(1, 1.0, peak_memory_mb=250.0))
    assert logged is not None
    pipeline = {name: value for name, value in logged.metrics.items() if name.startswith("pipeline/")}
    assert pipeline == {
        "pipeline/bubble_pct": pytest.approx((50 + 62.5) / 2),
        "pipeline/bubble_theory_pct": pytest.approx(50),
        "pipeline/busiest_worker_pct": pytest.approx(50),
        "pipeline/stage_0_busy_pct": pytest.approx((50 + 37.5) / 2),
        "pipeline/stage_1_busy_pct": pytest.approx((50 + 37.5) / 2),
        "pipeline/stage_0_peak_memory_mb": 200.0,
        "pipeline/stage_1_peak_memory_mb": 300.0,
    }
    assert logged.metrics["perf/peak_memory_mb"] == 300.0
    assert parts.timeline is not None
    assert (parts.timeline.step, len(parts.timeline.replicas)) == (10, 2)


def test_bubble_of_stages_on_hosts_whose_clocks_differ() -> None:
    parts = Aggregator(mesh=Mesh(pipeline=2), global_batch_size=64, tokens_per_sample=None)
    parts.add(0, staged(0))
    ahead = tuple(replace(s, start=s.start + 60, end=s.end + 60) for s in staged(1).spans)
    logged = parts.add(1, point(spans=ahead))
    assert logged is not None
    assert logged.metrics["pipeline/bubble_pct"] == pytest.approx(50)
    assert parts.timeline is not None
    assert parts.timeline.replicas == [[[*staged(0).spans], [*staged(1).spans]]]


def test_summary_has_the_median_bubble_and_the_largest_memory() -> None:
    parts = Aggregator(mesh=Mesh(pipeline=2), global_batch_size=64, tokens_per_sample=None)
    for step, later_s in ((10, 9.0), (20, 1.0), (30, 0.0)):
        parts.add(0, staged(0, later_s, step=step, peak_memory_mb=100.0 + step))
        parts.add(1, staged(1, later_s, step=step, peak_memory_mb=50.0))
    summary = parts.summary()
    assert summary["bubble_pct"] == pytest.approx(62.5)
    assert summary["bubble_theory_pct"] == pytest.approx(50)
    assert summary["peak_memory_mb"] == 130.0


def test_no_bubble_before_every_rank_is_warm_or_where_nothing_is_cut() -> None:
    parts = Aggregator(mesh=Mesh(pipeline=2), global_batch_size=64, tokens_per_sample=None)
    parts.add(0, point())
    logged = parts.add(1, staged(1))
    assert logged is not None
    assert not any(name.startswith("pipeline/") for name in logged.metrics)
    assert (parts.timeline, parts.summary().get("bubble_pct")) == (None, None)


def test_the_memory_of_a_summary_does_not_grow_with_the_steps() -> None:
    def train(parts: Aggregator, steps: range) -> None:
        for step in steps:
            parts.add(0, point(step=step, step_ms=tuple(float(step + n) for n in range(100))))

    parts = aggregator(1)
    train(parts, range(200))
    tracemalloc.start()
    train(parts, range(200, 400))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 100_000, "20,000 more steps"


def failed(time: float, *, collateral: bool, step: int = 3) -> Outcome:
    failure = Failure(message="x", traceback="", time=time, collateral=collateral, log_tail="")
    return Outcome(status="failed", step=step, failure=failure)


def test_culprit_is_the_first_that_is_not_collateral() -> None:
    outcomes = {
        0: failed(1.0, collateral=True),
        1: failed(3.0, collateral=False),
        2: failed(2.0, collateral=False),
        3: Outcome(status="done", step=9),
    }
    assert first_failure(outcomes) == 2
    assert first_failure({0: outcomes[0]}) == 0
    assert first_failure({3: outcomes[3]}) is None


def test_a_error_at_an_earlier_step_comes_first_whenever_it_was_noticed() -> None:
    spread = {0: failed(1.0, collateral=False, step=5), 1: failed(2.0, collateral=False, step=4)}
    assert first_failure(spread) == 1


def test_death_says_what_ray_knows() -> None:
    out_of_memory = death("out of memory", pid=7, hostname="a", time=0.0)
    assert "7 on a" in out_of_memory.message
    assert "out of memory" in out_of_memory.message
    assert not out_of_memory.collateral


@pytest.mark.parametrize(
    ("phase", "key", "timeout_s"),
    [
        ("join", "rendezvous_timeout_s", 60),
        ("start", "rendezvous_timeout_s", 60),
        ("train", "collective_timeout_s", 30),
    ],
)
def test_a_standstill_names_the_limit_of_those_who_waited(phase: Phase, key: str, timeout_s: float) -> None:
    config: Any = SimpleNamespace(rendezvous_timeout_s=60, collective_timeout_s=30)
    failure = standstill(config, phase, time=1.0)
    assert failure.message == f"no progress while the others waited {timeout_s} s for it (cluster.{key})"
    assert not failure.collateral


def test_an_address_is_unreachable_once_no_living_node_has_it() -> None:
    workers = [
        WorkerInfo(node_id=node_id, node_ip=ip, hostname=node_id, pid=1)
        for node_id, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3"), ("d", "10.0.0.3"))
    ]
    assert unreachable_addresses(workers, {"b", "c"}) == ("10.0.0.2",)
    assert unreachable_addresses(workers, {"a", "c", "d"}) == ("10.0.0.1", "10.0.0.3")


def place(ip: str, gpu: int | None = None, uuid: str | None = None) -> WorkerInfo:
    return WorkerInfo(node_id=ip, node_ip=ip, hostname=ip, pid=1, gpu_index=gpu, gpu_uuid=uuid)


def test_ranks_follow_nodes_and_gpu_numbers() -> None:
    """As numbers: GPU 10 after 2, node .10 after .9."""
    places = [place("10.0.0.10", 0), place("10.0.0.9", 10), place("10.0.0.9", 2)]
    assert rank_order(places) == [2, 1, 0]


def test_two_workers_on_one_gpu_are_refused() -> None:
    assert shared_gpu([place("10.0.0.1", 0, "a"), place("10.0.0.1", 1, "b"), place("10.0.0.1")]) is None
    error = shared_gpu([place("10.0.0.1", 0, "a"), place("10.0.0.1", 1, "a")])
    assert error is not None
    assert "workers 0 and 1 share one GPU" in error


def broken(ip: str) -> WorkerInfo:
    return WorkerInfo(node_id=ip, node_ip=ip, hostname="box", pid=1, gpu_error="GPU 3: no kernel image")


def test_a_run_that_asks_for_gpus_is_refused_if_one_cannot_be_used() -> None:
    usable = place("10.0.0.1", 0, "a")
    assert unusable_gpus([usable, place("10.0.0.1", 1, "b")], "cuda") is None
    for requested in ("auto", "cuda"):
        error = unusable_gpus([usable, broken("10.0.0.2")], requested)
        assert error is not None
        assert error.startswith(
            f"cluster.device={requested}: 1 of 2 workers cannot use their GPU: box (10.0.0.2), GPU 3: no kernel image. "
        )
        assert "cluster.device=cpu" in error


def test_a_run_on_any_device_trains_on_cpus_if_no_gpu_can_be_used() -> None:
    assert unusable_gpus([broken("10.0.0.1"), broken("10.0.0.2")], "auto") is None
    assert unusable_gpus([place("10.0.0.1"), place("10.0.0.2")], "cpu") is None
    assert unusable_gpus([broken("10.0.0.1"), broken("10.0.0.2")], "cuda") is not None


def test_a_spare_joins_if_it_can_use_what_the_members_use() -> None:
    on_gpu, on_cpu = place("10.0.0.1", 0, "a"), place("10.0.0.1")
    assert can_join(place("10.0.0.2", 0, "b"), [on_gpu])
    assert not can_join(broken("10.0.0.2"), [on_gpu])
    assert can_join(broken("10.0.0.2"), [on_cpu])


def with_bf16(ip: str) -> WorkerInfo:
    return replace(place(ip, 0, ip), has_bf16=True)


@pytest.mark.parametrize(
    ("requested", "workers", "refused", "expected"),
    [
        ("auto", [with_bf16("10.0.0.1"), with_bf16("10.0.0.2")], (), "bf16"),
        ("auto", [with_bf16("10.0.0.1"), place("10.0.0.2", 0, "old")], (), "fp32"),
        ("auto", [place("10.0.0.1")], (), "fp32"),
        ("auto", [with_bf16("10.0.0.1")], ("bf16",), "fp32"),
        ("fp16", [with_bf16("10.0.0.1")], (), "fp16"),
        ("bf16", [place("10.0.0.1")], (), "bf16"),
    ],
    ids=["every GPU has it", "one GPU lacks it", "CPUs", "refused", "given", "given on CPUs"],
)
def test_auto_is_the_precision_that_every_device_has(
    requested: str, workers: list[WorkerInfo], refused: tuple[str, ...], expected: str
) -> None:
    train = with_common_precision(having(precision=requested), workers, refused=refused)
    assert train.precision == expected


@pytest.mark.parametrize(("capabilities", "expected"), [([8, 9], True), ([9, 7], False), ([], False)])
def test_a_worker_has_bfloat16_if_all_its_gpus_have_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[int], expected: bool
) -> None:
    current: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: capabilities[current[-1]] >= 8)
    assert has_bf16(len(capabilities)) == expected


def test_a_long_list_of_unusable_gpus_is_cut() -> None:
    error = unusable_gpus([broken(f"10.0.0.{n}") for n in range(9)], "cuda")
    assert error is not None
    assert "10.0.0.3" in error
    assert "10.0.0.4" not in error
    assert "; and 5 more. " in error


def test_a_gpu_that_torch_cannot_compute_on_is_named_with_the_reason() -> None:
    number = torch.cuda.device_count()  # one more than there are
    error = gpu_error([f"id{n}" for n in range(number + 1)])
    assert error is not None
    assert error.startswith(f"GPU id{number}: ")
    assert "\n" not in error
    assert gpu_error([]) is None


@pytest.mark.parametrize(
    ("nodes", "num_shards", "expected"),
    [
        ("aaaa", 0, [0, 1, 2, 3]),
        ("aaaa", 2, [0, 1, 3, 2]),
        ("aabb", 1, [0, 1, 2, 3]),
        ("aabb", 2, [0, 2, 3, 1]),
        ("aaab", 1, [0, 1, 3, 2]),
        ("aaab", 2, [0, 1, 2, 3]),
        ("aabbcc", 3, [0, 2, 4, 5, 3, 1]),
    ],
)
def test_shards_come_last_and_spread_over_the_nodes(nodes: str, num_shards: int, expected: list[int]) -> None:
    places = [WorkerInfo(node_id=n, node_ip=f"10.0.0.{ord(n)}", hostname=n, pid=1) for n in nodes]
    assert shards_last(places, range(len(nodes)), num_shards=num_shards) == expected


def on_nodes(nodes: str) -> list[WorkerInfo]:
    return [WorkerInfo(node_id=n, node_ip=f"10.0.0.{ord(n)}", hostname=f"gpu-{n}", pid=1) for n in nodes]


@pytest.mark.parametrize(
    ("nodes", "group_size", "expected"),
    [
        ("aaabbb", 1, [0, 1, 2, 3, 4, 5]),
        ("aaaabb", 2, [0, 1, 2, 3, 4, 5]),
        ("aaabbb", 2, [0, 1, 3, 4, 2, 5]),
        ("aaabbc", 2, [0, 1, 3, 4, 2, 5]),
        ("abbcc", 2, [1, 2, 3, 4, 0]),
        ("aabb", 4, [0, 1, 2, 3]),
    ],
)
def test_groups_of_ranks_share_a_node_where_one_has_room(nodes: str, group_size: int, expected: list[int]) -> None:
    assert groups_on_one_node(on_nodes(nodes), range(len(nodes)), group_size=group_size) == expected


def test_what_crosses_nodes_is_named_after_the_start() -> None:
    pipelines = Mesh(replicate=3, pipeline=2)
    assert placement_note(pipelines, on_nodes("aabbcc")) is None
    assert placement_note(pipelines, on_nodes("aabbac")) == (
        "activations go through the network in 1 of 3 pipelines: 2 (gpu-a, gpu-c)"
    )
    stages = Mesh(replicate=2, pipeline=2, replicas_close=True)
    assert placement_note(stages, on_nodes("aabb")) is None
    assert placement_note(stages, on_nodes("abab")) == (
        "gradients go through the network in 2 of 2 stages: 0 (gpu-a, gpu-b), 1 (gpu-a, gpu-b)"
    )
    parts = Mesh(replicate=2, shard=2)
    assert placement_note(parts, on_nodes("aabb")) is None
    assert placement_note(parts, on_nodes("aabc")) == (
        "parameters go through the network in 1 of 2 replicas: 1 (gpu-b, gpu-c)"
    )
    assert placement_note(Mesh(replicate=4), on_nodes("abab")) is None
    for one in (Mesh(pipeline=4), Mesh(shard=4)):
        assert placement_note(one, on_nodes("abab")) is None, "it is where it can be"
    many = placement_note(Mesh(replicate=99, pipeline=2), on_nodes("ab" * 99))
    assert many is not None
    assert many.endswith("3 (gpu-a, gpu-b), and 95 more")


def test_ranks_that_cannot_leave_nccl_are_said_to_be_lost_too() -> None:
    note = cannot_leave_nccl({2: "connect", 0: "connect", 3: "train"}, lost=1)
    assert note is not None
    assert note.startswith("ranks [0, 2] were connecting with NCCL when rank 1 was lost")
    assert cannot_leave_nccl({0: "train", 2: None}, lost=1) is None
