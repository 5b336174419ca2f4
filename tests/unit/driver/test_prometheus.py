"""What the Prometheus sink records, and when."""

import re

import pytest

from helpers.records.runs import ROOT
from orchestrator.driver import reporting
from orchestrator.driver.reporting import GAUGES, LABELS, NAMESPACE, PrometheusSink
from orchestrator.protocol.events import GenerationStarted, MetricsLogged, RankProgress, RunStarted

STARTED = RunStarted(name="a", run_dir="/runs/a", strategy="ddp", job="Toy", world_size=2, steps=10)
TRAINING = GenerationStarted(generation=3, backend="gloo", device="cpu", precision="fp32", workers=("node_0", "node_0"))
PROGRESS = RankProgress(rank=0, step=1, phase="train")


class GaugeWithoutRay:
    """Keeps what is recorded with any gauge in ``recorded``."""

    recorded: dict[str, float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]):
        assert description == GAUGES[name]
        assert tag_keys == LABELS
        self.name = name

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tags == {"run": "a", "strategy": "ddp", "job_name": "Toy"}
        self.recorded[self.name] = value

    @classmethod
    def take(cls) -> dict[str, float]:
        taken, cls.recorded = cls.recorded, {}
        return taken


@pytest.fixture(autouse=True)
def gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "Gauge", GaugeWithoutRay)
    GaugeWithoutRay.recorded = {}


def test_every_gauge_gets_its_value() -> None:
    sink = PrometheusSink()
    for event in (STARTED, TRAINING, MetricsLogged(step=4, metrics={"train/loss": 0.5, "perf/samples_per_s": 80.0})):
        sink.emit(event)
    assert GaugeWithoutRay.take() == {
        "orchestrator_workers": 2,
        "orchestrator_restarts": 2,
        "orchestrator_loss": 0.5,
        "orchestrator_step": 4,
        "orchestrator_samples_per_s": 80.0,
    }


@pytest.mark.parametrize(("refresh_s", "recorded"), [(0.0, 2), (3600.0, 0)])
def test_values_are_recorded_again_with_progress(
    monkeypatch: pytest.MonkeyPatch, refresh_s: float, recorded: int
) -> None:
    monkeypatch.setattr(reporting, "REFRESH_S", refresh_s)
    sink = PrometheusSink()
    for event in (STARTED, TRAINING):
        sink.emit(event)
    GaugeWithoutRay.take()
    sink.emit(PROGRESS)
    assert len(GaugeWithoutRay.take()) == recorded


def test_an_evaluation_changes_no_value() -> None:
    sink = PrometheusSink()
    for event in (STARTED, MetricsLogged(step=4, metrics={"val/loss": 0.5})):
        sink.emit(event)
    assert GaugeWithoutRay.take() == {}


def test_an_export_that_fails_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no export")

    monkeypatch.setattr(GaugeWithoutRay, "set", fail)
    sink = PrometheusSink()
    for event in (STARTED, TRAINING, TRAINING):
        sink.emit(event)
    assert [r.levelname for r in caplog.records] == ["ERROR"]


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "tracking.md").read_text()
    assert dict(re.findall(rf"^\| `{NAMESPACE}_(orchestrator_\w+)` \| (.+) \|$", page, re.MULTILINE)) == GAUGES
