"""Names of runs that mean something to what compares them: Markdown, formulas of matplotlib."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.records.recorded_sweep import recorded_sweep
from orchestrator.display.comparison import read_run
from orchestrator.features.sweep.comparison_analysis import Comparison
from orchestrator.features.sweep.comparison_report import draw, markdown

NAMES = (
    "$_a$",
    "<script>alert(1)</script>",
    r"a|b `c` *d* [e](f) <b> \ &amp;",
    r"_$\frac$ [red]x[/blue] :smile: {} %s \1",
)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Runs that differ in a setting with these values, and whose directories have these names."""
    runs = [read_run(run.path) for run in recorded_sweep(tmp_path, "http://127.0.0.1:9")]
    named = zip(runs, NAMES, strict=True)
    return Comparison([replace(run, name=name, strategy=name, params={"job.text": name}) for run, name in named])


def test_a_report_in_markdown_shows_names_as_they_are(comparison: Comparison) -> None:
    head, *rest = markdown(comparison, title=NAMES[2]).splitlines()
    assert head == r"# a\|b \`c\` \*d\* \[e\](f) \<b> \\ \&amp;"
    table = [line for line in rest if line.startswith("|")]
    assert {line.replace(r"\\", "").replace(r"\|", "").count("|") for line in table} == {table[0].count("|")}


@pytest.mark.slow
def test_pictures_show_names_as_they_are(comparison: Comparison, tmp_path: Path) -> None:
    draw(comparison, tmp_path / "compare.png")
