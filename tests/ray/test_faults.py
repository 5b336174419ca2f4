"""The table of faults: workers die, hang and raise at some moment in some layout, and the run continues as promised."""

from collections.abc import Callable
from typing import Any

import pytest

from helpers.faults.check import WITH_REPORTS, checked
from helpers.faults.layouts import ALL_LAYOUTS
from helpers.faults.table import ROWS, Row, grouped

MARKS: dict[str, Any] = {"fast": pytest.mark.fast, "ci": (), "": pytest.mark.campaign}


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row), marks=MARKS[row.tier]) for row in ROWS])
def test_a_run_recovers(run: Callable[..., Any], row: Row) -> None:
    checked(run, row)


@pytest.mark.campaign
def test_a_resumed_run_that_loses_a_worker_as_it_builds_begins_from_its_checkpoint(run: Callable[..., Any]) -> None:
    """A worker that has built a model and not loaded the checkpoint yet has no state to recover."""
    first = run(*WITH_REPORTS, *ALL_LAYOUTS["ddp"].words, "recovery.chaos=[kill@13:1]", "recovery.max_failures=0")
    assert first.exit_code == 1
    resumed = Row(
        layout="ddp",
        faults=grouped("kill@0:1:build"),
        source="checkpoint",
        steps=((8,),),
        words=(f"resume={first.run_dir}",),
    )
    checked(run, resumed)
