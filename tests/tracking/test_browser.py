"""What a browser shows of a sweep over four strategies: the pages behind the links that a run prints.

To renew the pictures of the documentation: ``SCREENSHOTS=docs/images pytest tests/tracking/test_browser.py``.
"""

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

from helpers.records.recorded_sweep import recorded_sweep
from helpers.records.tracked_runs import client_of
from helpers.servers.browser import CHROMIUM, Page, browser
from jobs.digits import Digits
from orchestrator import sync
from orchestrator.display.comparison import read_run
from orchestrator.features.sweep.comparison_analysis import Comparison
from orchestrator.features.sweep.comparison_report import draw
from orchestrator.features.tracking.transfer import read_cursor
from orchestrator.records.run_dir import RunDir
from orchestrator.state import checkpoint
from orchestrator.state.train_state import TrainState

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome in PATH"),
    pytest.mark.timeout(300),
]

REPORT = """\
**ddp** is the fastest of 4 strategies.

| strategy | workers | samples/s |
| --- | --- | --- |
| ddp | 2 | 9,016 |
| single | 1 | 7,185 |
"""
SETTINGS = {"mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true", "mlflow.workflowType_v1": '"machine_learning"'}
"""What a browser remembers after *Model training* was chosen and the assistant was closed."""

SCREENSHOTS = os.environ.get("SCREENSHOTS")


@dataclass(frozen=True)
class Uploaded:
    """A sweep on a server; the runs are in the order of their speed."""

    server: str
    runs: list[RunDir]

    @property
    def names(self) -> list[str]:
        return [run.read_record()["name"] for run in self.runs]


@pytest.fixture(scope="module")
def uploaded(server_port: int, tmp_path_factory: pytest.TempPathFactory) -> Uploaded:
    server = f"http://127.0.0.1:{server_port}"
    runs = recorded_sweep(tmp_path_factory.mktemp("sweep"), server)
    by_speed = sorted(runs, key=lambda run: run.read_record()["summary"]["samples_per_s"], reverse=True)
    fastest = by_speed[0]
    folder = fastest.path.parents[1] / "sweeps" / fastest.read_record()["sweep"]["id"]
    folder.mkdir(parents=True)
    (folder / "report.md").write_text(REPORT)
    draw(Comparison([read_run(run.path) for run in runs]), folder / "compare.png")
    for run in runs:
        assert sync.main([str(run.path)]) == 0
    return Uploaded(server, by_speed)


@pytest.fixture
def page(uploaded: Uploaded, tmp_path: Path) -> Iterator[Page]:
    """The page of a browser of its own: one that crashes takes no other test along."""
    with browser(tmp_path / "profile") as page:
        page.open(f"{uploaded.server}/health")
        page.wait_for("document.readyState == 'complete' && location.port != ''")
        for name, value in SETTINGS.items():
            page.evaluate(f"localStorage.setItem({name!r}, {value!r})")
        yield page


def keep(page: Page, name: str) -> None:
    """Save a screenshot with few colors for the documentation, if these are to be renewed."""
    if SCREENSHOTS is not None:
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        image.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            Path(SCREENSHOTS) / name, optimize=True
        )


def link_of(run: RunDir) -> str:
    page = read_cursor(run).page
    assert page is not None
    return page


def test_the_link_of_a_run_shows_which_strategy_is_fastest(page: Page, uploaded: Uploaded) -> None:
    page.resize(1500, 1400)
    page.open(link_of(uploaded.runs[-1]))
    page.wait_for("document.querySelectorAll('.barlayer').length >= 3")
    page.wait_for("document.querySelector('.barlayer').querySelectorAll('.point').length == 4")
    page.wait_for("document.querySelectorAll('.scatterlayer .trace').length >= 8")  # two charts of the loss
    text = page.text()
    for metric in ("summary/samples_per_s", "train/loss", "summary/step_ms_p50", "summary/peak_memory_mb"):
        assert metric in text, "a chart of the view"
    assert "train/lr" not in text, "the groups of all other metrics are closed"
    places = [text.index(name) for name in uploaded.names]
    assert places == sorted(places), "the fastest first"
    bars = page.evaluate(
        "[...document.querySelector('.barlayer').querySelectorAll('.point path')]"
        ".map(bar => bar.getBoundingClientRect()).sort((a, b) => a.top - b.top).map(box => box.width)"
    )
    assert len(bars) == 4
    assert bars == sorted(bars, reverse=True), "the longest on top"
    fills = page.evaluate(
        "[...document.querySelector('.barlayer').querySelectorAll('.point path')].map(bar => bar.style.fill)"
    )
    assert len(set(fills)) == 4, "a color for each strategy"
    page.evaluate(
        "document.querySelector('[role=alert] button:last-of-type, .du-bois-light-alert-close-icon')?.click()"
    )
    keep(page, "mlflow-charts.png")


@pytest.mark.campaign
def test_a_browser_that_knows_nothing_finds_the_charts(uploaded: Uploaded, tmp_path: Path) -> None:
    """The link of a run chooses model training."""
    with browser(tmp_path / "profile") as page:
        page.resize(1500, 1400)
        page.open(link_of(uploaded.runs[0]))
        page.wait_for("document.querySelectorAll('.barlayer').length >= 3", timeout_s=60)
        assert "Evaluation runs" not in page.text(), "those belong to the other mode"


@pytest.mark.campaign
def test_the_table_has_the_figures_of_the_runs(page: Page, uploaded: Uploaded) -> None:
    page.resize(1700, 520)
    page.open("about:blank")
    page.open(link_of(uploaded.runs[0]).replace("&compareRunsMode=CHART", ""))
    page.wait_for("document.querySelectorAll('[role=row]').length >= 5")
    heads = ["strategy", "workers"]
    heads += [f"summary/{key}" for key in ("samples_per_s", "final_loss", "val_accuracy", "startup_s")]
    page.wait_for(  # their order is MLflow's: a page that loads slowly was seen to have another one
        f"{heads}.every(head => [...document.querySelectorAll('[role=columnheader]')]"
        ".some(shown => shown.innerText.trim() == head))"
    )
    text = page.text()
    for run in uploaded.runs:
        assert f"{run.read_record()['summary']['samples_per_s']:.5g}" in text
    keep(page, "mlflow-table.png")


@pytest.mark.campaign
def test_the_page_of_a_run_says_what_it_was(page: Page, uploaded: Uploaded) -> None:
    run = uploaded.runs[0]
    weights = Digits().model().state_dict()
    state = TrainState(model=weights, optimizer={}, meta={"step": 200, "samples_consumed": 12800})
    checkpoint.save(run.checkpoints, state, run_uid="")
    with run.edit_record() as record:
        record["tracking"] |= {"log_model": True, "log_dataset": True}
    assert sync.main([str(run.path)]) == 0
    experiment = urlsplit(link_of(run)).fragment.split("/")[2]
    page.resize(1500, 900)
    page.open(f"{uploaded.server}/#/experiments/{experiment}/runs/{read_cursor(run).run_id}")
    page.wait_for("/Logged models \\(1\\)|Logged models[^]*model/.test(document.body.innerText)")
    text = page.wait_for("document.body.innerText.includes('Digits') && document.body.innerText")
    for shown in ("with strategy", "samples/s", "digits.py", record["source"]["user"], "Digits"):
        assert shown in text
    assert record["source"]["source.git.commit"][:6] in text
    keep(page, "mlflow-run.png")


def test_the_page_of_the_sweep_has_the_report(page: Page, uploaded: Uploaded) -> None:
    client = client_of(uploaded.server)
    sweep_id = uploaded.runs[0].read_record()["sweep"]["id"]
    experiment = urlsplit(link_of(uploaded.runs[0])).fragment.split("/")[2]
    (own,) = client.search_runs([experiment], f"tags.`orchestrator.sweep_id` = '{sweep_id}'")
    page.resize(1500, 900)
    page.open(f"{uploaded.server}/#/experiments/{experiment}/runs/{own.info.run_id}")
    page.wait_for("document.body.innerText.includes('is the fastest of 4 strategies')")
    assert page.evaluate("document.querySelectorAll('table td').length") >= 6, "Markdown became a table"
    assert page.evaluate("!!document.querySelector('a[href*=\"compare.png\"]')")
