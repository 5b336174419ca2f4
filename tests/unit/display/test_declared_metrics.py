"""A metric is declared in one place, and the progress line, the panel, the summary and `compare` show it."""

import io
import json

import pytest
from rich.console import Console

from orchestrator.display.console import make_console
from orchestrator.display.panel import RunView, draw
from orchestrator.planning.mesh import Mesh
from orchestrator.policy.aggregate import Aggregator
from orchestrator.protocol.core_metrics import CORE_METRICS
from orchestrator.protocol.events import MetricsLogged
from orchestrator.protocol.messages import TrainPoint
from orchestrator.protocol.metrics import Column, MetricSpec, Summary, from_record, measured, to_record

STALENESS = MetricSpec(
    name="async/staleness",
    reduce="max",
    format="{:.1f}",
    progress="staleness {}",
    summaries=(Summary(key="staleness_p50", derive="median", column=Column(heading="staleness")),),
)


def logged(aggregator: Aggregator, step: int, *values: float) -> MetricsLogged:
    """A point at which each rank has measured one of the values."""

    def point(value: float) -> TrainPoint:
        return TrainPoint(
            step=step, time=step, loss_sum=1.0, weight=2.0, step_ms=(), data_wait_ms=0.0, comm_share=None,
            metrics=measured({STALENESS: value}),
        )  # fmt: skip

    events = [aggregator.add(rank, point(value)) for rank, value in enumerate(values)]
    assert events[-1] is not None
    return events[-1]


@pytest.fixture
def aggregator() -> Aggregator:
    return Aggregator(mesh=Mesh(replicate=2), global_batch_size=64, tokens_per_sample=None)


def test_a_declared_metric_is_reduced_and_summarised_as_its_spec_says(aggregator: Aggregator) -> None:
    points = [logged(aggregator, step, 1.0 * step, 2.0 * step) for step in (1, 2, 3)]
    assert [event.metrics["async/staleness"] for event in points] == [2.0, 4.0, 6.0]
    assert aggregator.summary()["staleness_p50"] == 4.0
    assert STALENESS in aggregator.specs()


def test_a_declared_metric_is_on_the_progress_line_and_in_the_panel(aggregator: Aggregator) -> None:
    event = logged(aggregator, 10, 3.0, 4.25)
    out = io.StringIO()
    console = make_console(steps=500, world_size=2, stream=out)
    console.emit(event)
    console.close()
    assert out.getvalue() == "step 10/500  loss 0.5000  staleness 4.2\n"
    view = RunView(steps=500, world_size=2)
    view.update(event, 10.0)
    panel = Console(file=io.StringIO(), width=80, height=24)
    with panel.capture() as captured:
        panel.print(draw(view, width=80, height=24, now=20.0))
    assert "metrics    staleness 4.2" in captured.get()


@pytest.mark.parametrize("spec", [STALENESS, *CORE_METRICS], ids=lambda spec: str(spec.name))
def test_a_spec_survives_json(spec: MetricSpec) -> None:
    assert from_record(json.loads(json.dumps(to_record(spec)))) == spec


@pytest.mark.parametrize(
    "record", [None, [], "a", {}, {"name": 1}, {"name": "a", "x": 1}, {"name": "a", "summaries": 3}]
)
def test_a_record_that_is_no_spec_is_ignored(record: object) -> None:
    assert from_record(record) is None
