"""The page that ``compare`` writes, in a browser that has nothing but this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.browser import CHROMIUM, Page, browser
from helpers.recorded_sweep import recorded_sweep
from orchestrator.display.comparison import read_run
from orchestrator.display.comparison_analysis import Comparison
from orchestrator.display.comparison_page import write_page

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome in PATH"),
    pytest.mark.timeout(120),
]

NAMES = ["single x1", "ddp x2", "pipeline x2", "parameter_server x2"]
COUNTS = "['#samples .curve', '#seconds .curve', '#rates rect'].map(s => document.querySelectorAll(s).length)"
CELLS = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].innerText)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.record("Network", "Runtime", "Log")
        page.resize(1400, 1300)
        yield page


@pytest.fixture
def page(chromium: Page, tmp_path: Path) -> Iterator[Page]:
    """The page, which has asked for nothing but itself and has no error at the end of the test."""
    file = tmp_path / "report.html"
    runs = recorded_sweep(tmp_path, "http://127.0.0.1:9")
    write_page(Comparison([read_run(run.path) for run in runs]), file, title="Four strategies")
    chromium.open(file.as_uri())
    chromium.wait_for("document.querySelectorAll('#rates rect').length > 0")
    yield chromium
    urls = [event["request"]["url"] for event in chromium.events("Network.requestWillBeSent")]
    assert [url for url in urls if not url.startswith(("data:", tmp_path.parent.as_uri()))] == []
    for method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
        assert chromium.events(method) == []


def test_the_page_draws_every_run_and_asks_the_network_for_nothing(page: Page) -> None:
    assert page.evaluate(COUNTS) == [4, 4, 4]
    assert page.evaluate(CELLS) == NAMES
    assert "fastest: single x1 with 31,423 samples/s" in page.text()
    drawn = page.evaluate("[...document.querySelectorAll('svg')].map(svg => svg.outerHTML).join()")
    for wrong in ("NaN", "undefined", "Infinity"):
        assert wrong not in drawn


def test_rows_hide_curves_headings_sort_and_the_pointer_reads_values(page: Page) -> None:
    page.click("tbody tr:nth-child(2)")
    assert page.evaluate(COUNTS) == [3, 3, 3]
    assert page.evaluate("document.querySelector('tbody tr:nth-child(2)').ariaPressed") == "false"

    page.point_at("#samples svg")
    page.wait_for("document.querySelector('#samples .tip').checkVisibility()")
    tip = page.evaluate("document.querySelector('#samples .tip').innerText")
    assert [name for name in NAMES if f"{name}: " in tip] == ["single x1", "pipeline x2", "parameter_server x2"]

    linear = page.evaluate("document.querySelector('#samples .curve').getAttribute('d')")
    page.click("#log")
    assert page.evaluate("document.querySelector('#samples .curve').getAttribute('d')") != linear

    page.evaluate("[...document.querySelectorAll('th button')].find(b => b.innerText == 'samples/s').id = 'rate'")
    page.click("#rate")
    slowest_first = page.evaluate(CELLS)
    page.click("#rate")
    assert page.evaluate(CELLS) == slowest_first[::-1] != NAMES
