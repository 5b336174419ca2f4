"""The live panel of the console."""

import io
import re
import threading
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from helpers.records.console_events import FINISHED, FORMED, SAVED, START, STARTED, Terminal, point, printed, progress
from orchestrator.display.panel import RunView, draw
from orchestrator.protocol.events import Continued, Event, Warned


def drawn(view: RunView, *, width: int = 80, height: int = 24, unicode: bool = True) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(draw(view, width=width, height=height, now=START + 30, unicode=unicode))
    return out.getvalue().splitlines()


def view_of(*events: Event, world_size: int = 2) -> RunView:
    view = RunView(steps=500, world_size=world_size)
    formed = replace(FORMED, workers=tuple(f"node-{rank}" for rank in range(world_size)))
    for event in (STARTED, formed, *events):
        view.update(event, event.time)
    return view


def busy_view(world_size: int, slow_rank: int) -> RunView:
    points = [
        point(n, n / 10, train__loss=2.3 / n, perf__samples_per_s=8000.0 + n, val__accuracy=0.9, train__epoch=n / 200)
        for n in range(1, 301)
    ]
    ranks = [
        progress(r, 300, 11.4 if r == slow_rank else 6.1, node=f"a-node-with-a-long-name-{r}")
        for r in range(world_size)
    ]
    return view_of(*points, *ranks, SAVED, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 8, 9, 64])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (120, 40), (80, 24), (60, 14), (48, 9), (30, 24), (80, 4)])
def test_the_panel_fits_its_terminal(width: int, height: int, world_size: int) -> None:
    lines = drawn(busy_view(world_size, 0), width=width, height=height)
    assert max(cell_len(line) for line in lines) <= width
    assert len(lines) < height
    assert "300/500" in "\n".join(lines)
    if world_size > 1 and any("rank  " in line for line in lines):
        assert any("◀ slowest" in line for line in lines)


@pytest.mark.parametrize("height", range(5, 16))
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_a_low_panel_fits_its_terminal(height: int, world_size: int) -> None:
    assert len(drawn(busy_view(world_size, slow_rank=1), height=height)) < height
    few_figures = view_of(*(progress(r, 300) for r in range(world_size)), world_size=world_size)
    assert len(drawn(few_figures, height=height)) < height


def test_the_panel_shows_figures_and_every_rank() -> None:
    text = "\n".join(drawn(busy_view(4, slow_rank=2), width=120))
    for words in (
        *("digits-ddp (ddp, digits, 4 workers)", "60%", "30s", "eta 20s  epoch 2 50%", "0.007667"),
        *("8,300", "accuracy 0.9000"),
    ):
        assert words in text
    assert "▁" in text
    assert [line for line in text.splitlines() if "slowest" in line] == [
        line for line in text.splitlines() if "a-node-with-a-long-name-2" in line
    ]


def test_the_slowest_of_many_ranks_is_among_those_shown() -> None:
    lines = drawn(busy_view(64, slow_rank=61))
    assert [line.split()[1] for line in lines if "slowest" in line] == ["61"]
    assert any("and 56 more" in line for line in lines)


def test_ranks_that_are_about_as_fast_are_not_marked() -> None:
    assert view_of(progress(0, 5, 6.0), progress(1, 5, 7.0)).slowest() is None
    assert view_of(progress(0, 5, 6.0), progress(1, 5, 8.0)).slowest() == 1
    assert view_of(progress(0, 5, 6.0), progress(1, 5, None)).slowest() is None


def test_the_panel_in_ascii() -> None:
    view = busy_view(4, slow_rank=1)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    console.print(draw(view, width=80, height=24, now=START + 30, unicode=False))  # raises if it cannot be encoded
    assert "< slowest" in "\n".join(drawn(view, unicode=False))


def test_eta_is_right_when_points_come_in_batches() -> None:
    view = view_of(*(point(n, 2 + n / 1e6) for n in range(1, 101)))
    assert view.eta_s() is None
    for second in (1, 2):
        for n in range(1, 101):
            logged = point(100 * second + n, 2 + second + n / 1e6)
            view.update(logged, logged.time)
    assert view.eta_s() == pytest.approx(2.0, rel=1e-3)


def test_a_recovery_may_go_back() -> None:
    view = view_of(point(200, 20, train__loss=2.0), point(300, 30, train__loss=1.0))
    view.update(Continued(step=280), START + 5)
    assert [loss for _, loss in view.losses] == [2.0]
    view.update(replace(FORMED, generation=2), START + 5)
    for rank in range(2):
        view.update(progress(rank, 280), START + 5)
    assert view.step == 280


@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal_the_panel_goes_and_the_verdict_stays(no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    printed(STARTED, FORMED, point(1, 2, train__loss=2.0), Warned(message="slow"), FINISHED, stream=stream)
    text = stream.getvalue()
    assert bool(re.search(r"\x1b\[([0-9]+;)*3[0-9]", text)) != no_color
    assert "1/500" in text  # in the panel
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
    shown = [line.split(":")[0] for line in stream.screen() if line]
    assert shown == [
        *("digits-ddp", "run directory", "gloo on cpu in fp32", "warning", "finished", "run directory"),
        *("next", "next"),
    ]
    assert not [t for t in threading.enumerate() if type(t).__name__ == "_RefreshThread" and not t.done.is_set()]
