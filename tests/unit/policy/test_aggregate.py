"""The figures of a run from the points of its ranks."""

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.planning.mesh import Mesh
from orchestrator.policy.aggregate import Aggregator
from orchestrator.protocol.events import MetricsLogged
from orchestrator.protocol.messages import EvalPoint, TrainPoint
from orchestrator.protocol.metrics import Metric, MetricSpec, Reduce
from orchestrator.timeline import ActionKind, Span


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
    assert (logged.step, logged.time) == (10, 100.0)
    assert logged.metrics["train/loss"] == pytest.approx(97 / 65)


def test_points_wait_for_every_rank_and_do_not_mix() -> None:
    parts = aggregator()
    assert parts.add(0, point(step=10)) is None
    assert parts.add(0, point(step=20)) is None
    logged = parts.add(1, point(step=10))
    assert logged.step == 10


def test_perf_figures() -> None:
    parts = aggregator()
    parts.add(0, point())
    logged = parts.add(1, point(comm_share=0.2, data_wait_ms=2.0))
    assert logged.metrics["perf/step_ms"] == 10
    assert logged.metrics["perf/samples_per_s"] == 6400
    assert logged.metrics["perf/samples_per_s_per_worker"] == 3200
    assert logged.metrics["perf/comm_pct"] == pytest.approx(30)
    assert logged.metrics["perf/data_wait_pct"] == pytest.approx(15)
    assert parts.summary()["samples_per_s_per_worker"] == pytest.approx(3200)


def test_the_parts_of_a_step_add_up_to_it_under_every_strategy() -> None:
    def parts_of(logged: MetricsLogged | None) -> dict[str, float]:
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
        return {name: value for name, value in points[-1].metrics.items() if name.startswith("memory/")}

    assert memory(1) == memory(17) == {}
    assert memory(2) == {"memory/rank_0_peak_mb": 100.0, "memory/rank_1_peak_mb": 101.0}


def test_shards_count_neither_as_workers_nor_in_their_wait_for_data() -> None:
    parts = Aggregator(mesh=Mesh(replicate=2, num_servers=1), global_batch_size=64, tokens_per_sample=None)
    parts.add(0, point())
    parts.add(1, point())
    logged = parts.add(2, point(loss_sum=0.0, weight=0.0, data_wait_ms=0.0, comm_share=None))
    assert logged.metrics["train/loss"] == pytest.approx(2)
    assert logged.metrics["perf/samples_per_s_per_worker"] == 3200
    assert logged.metrics["perf/data_wait_pct"] == pytest.approx(10)


def test_unknown_metrics_are_left_out() -> None:
    logged = aggregator(1).add(0, point(step_ms=(), comm_share=None, weight=0.0))
    assert not logged.metrics
    assert "samples_per_s" not in aggregator().summary()


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 5.0), ("mean", 2.5), ("max", 3.0), ("lead", 2.0)])
def test_a_metric_says_how_it_is_reduced_over_the_ranks(reduce: Reduce, expected: float) -> None:
    parts = aggregator()
    parts.add(1, point(metrics={"a/b": Metric(3.0, reduce)}))
    logged = parts.add(0, point(metrics={"a/b": Metric(2.0, reduce)}))
    assert logged.metrics["a/b"] == expected
    assert MetricSpec(name="a/b", reduce=reduce) in parts.specs()


def test_only_rank_0_gives_the_value_of_a_lead_metric() -> None:
    parts = aggregator()
    parts.add(0, point())
    logged = parts.add(1, point(metrics={"a/b": Metric(3.0, "lead"), "a/c": Metric(4.0, "max")}))
    assert "a/b" not in logged.metrics
    assert logged.metrics["a/c"] == 4.0


def test_evaluation_counts_each_sample_once() -> None:
    parts = aggregator()
    parts.add(0, EvalPoint(step=5, time=1.0, loss_sum=30.0, weight=10.0, sums={"accuracy": 9.0}))
    logged = parts.add(1, EvalPoint(step=5, time=1.0, loss_sum=2.0, weight=1.0, sums={"accuracy": 1.0}))
    assert logged.metrics == {"val/loss": pytest.approx(32 / 11), "val/accuracy": pytest.approx(10 / 11)}


def test_the_perplexity_is_that_of_the_mean_loss_of_all_ranks() -> None:
    parts = aggregator()

    def part(step: int, loss_sum: float, weight: float, *others: EvalPoint, split: str = "val") -> EvalPoint:
        kept = {"step": step, "time": 1.0, "sums": {}, "perplexity": True, "others": others, "split": split}
        return EvalPoint(**kept, loss_sum=loss_sum, weight=weight)  # type: ignore[arg-type]

    parts.add(0, part(5, 30.0, 10.0, part(5, 1.0, 1.0, split="test")))
    logged = parts.add(1, part(5, 2.0, 1.0, part(5, 3.0, 1.0, split="test")))
    assert logged.metrics["val/perplexity"] == pytest.approx(math.exp(32 / 11))
    assert logged.metrics["test/perplexity"] == pytest.approx(math.exp(2.0))
    assert [parts.summary()[key] for key in ("val_perplexity", "test_perplexity")] == [
        logged.metrics["val/perplexity"],
        logged.metrics["test/perplexity"],
    ]
    parts.add(0, part(6, 8000.0, 10.0))
    diverged = parts.add(1, part(6, 800.0, 1.0))
    assert diverged.metrics["val/perplexity"] == math.inf


def test_each_split_has_metrics_and_results_of_its_own() -> None:
    def part(split: str, loss: float, accuracy: float, *others: EvalPoint) -> EvalPoint:
        sums = {"accuracy": accuracy}
        return EvalPoint(step=5, time=1.0, loss_sum=loss, weight=2.0, sums=sums, split=split, others=others)

    parts = aggregator()
    assert parts.add(0, part("val", 2.0, 1.0, part("test", 4.0, 0.0), part("train", 1.0, 2.0))) is None
    logged = parts.add(1, part("val", 4.0, 2.0, part("test", 8.0, 1.0), part("train", 3.0, 2.0)))
    values = {"val/loss": 1.5, "val/accuracy": 0.75, "test/loss": 3.0, "test/accuracy": 0.25}
    assert logged.metrics == {**values, "train_eval/loss": 1.0, "train_eval/accuracy": 1.0}
    keys = ("val_loss", "test_loss", "test_accuracy", "train_eval_loss")
    assert [parts.summary()[key] for key in keys] == [1.5, 3.0, 0.25, 1.0]


def test_the_evaluation_of_the_averaged_weights_has_names_of_its_own() -> None:
    parts = aggregator(1)
    averaged = EvalPoint(step=5, time=1.0, loss_sum=4.0, weight=8.0, sums={"accuracy": 6.0})
    logged = parts.add(0, EvalPoint(step=5, time=1.0, loss_sum=16.0, weight=8.0, sums={"accuracy": 4.0}, ema=averaged))
    assert logged.metrics == {"val/loss": 2.0, "val/accuracy": 0.5, "val/ema_loss": 0.5, "val/ema_accuracy": 0.75}
    assert (parts.summary()["val_loss"], parts.summary()["val_ema_loss"]) == (2.0, 0.5)


def test_utilization_is_the_time_at_the_peak_by_the_time_of_the_step() -> None:
    parts = aggregator()
    parts.add(0, point(step_ms=(10.0, 30.0), flops=64e9, flops_at_peak_ms=4.0))
    logged = parts.add(1, point(step_ms=(10.0, 30.0), flops=64e9, flops_at_peak_ms=6.0))
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
        assert {"perf/flops_per_sample", "perf/mfu_pct"} & logged.metrics.keys() == expected


def test_shards_have_no_part_in_the_utilization() -> None:
    parts = Aggregator(mesh=Mesh(replicate=1, num_servers=1), global_batch_size=64, tokens_per_sample=None)
    parts.add(1, point(flops=0.0))
    logged = parts.add(0, point(flops=64.0, flops_at_peak_ms=1.0))
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
    assert (parts.timeline.step, len(parts.timeline.replicas)) == (10, 2)


def test_bubble_of_stages_on_hosts_whose_clocks_differ() -> None:
    parts = Aggregator(mesh=Mesh(pipeline=2), global_batch_size=64, tokens_per_sample=None)
    parts.add(0, staged(0))
    ahead = tuple(replace(s, start=s.start + 60, end=s.end + 60) for s in staged(1).spans)
    logged = parts.add(1, point(spans=ahead))
    assert logged.metrics["pipeline/bubble_pct"] == pytest.approx(50)
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


def reported(step: int, **changes: Any) -> TrainPoint:
    """A point as a script reports it."""
    return point(
        **{"step": step, "samples": 32.0, "step_ms": (10.0,), "data_wait_ms": 0.0, "comm_share": None} | changes
    )


def test_samples_that_ranks_report_are_added() -> None:
    parts = aggregator()
    parts.add(0, reported(1))
    logged = parts.add(1, reported(1, samples=8.0))
    assert logged.metrics["perf/samples_per_s"] == pytest.approx(4000)
    assert not {"perf/data_wait_pct", "perf/compute_ms"} & logged.metrics.keys()
    without = aggregator(1).add(0, reported(1, samples=0.0))
    assert "perf/samples_per_s" not in without.metrics


def test_a_rank_that_never_reports_is_not_waited_for() -> None:
    parts = aggregator()
    parts.add(1, reported(1))
    parts.add(1, reported(2))
    assert parts.incomplete() == []  # rank 0 may follow
    assert [logged.step for logged in parts.incomplete()] == [1, 2]
    parts.add(1, reported(3))
    parts.add(0, reported(1))
    parts.incomplete()
    assert parts.incomplete() == [], "rank 0 reports too, and is on its way to step 3"
    assert parts.add(0, reported(3)) is not None
    parts.add(0, reported(4))
    assert [logged.step for logged in parts.incomplete(final=True)] == [4]
