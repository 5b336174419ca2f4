"""The metrics that `checkpoint.best` and `display.metrics` name are where a person looks, each with its best value."""

import io
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from helpers.files.golden import Golden, sections
from helpers.records.console_events import FINISHED, FORMED, KILLED, START, STARTED, Terminal, point, printed
from orchestrator.config.compose import compose
from orchestrator.display.chosen_metrics import ChosenMetrics
from orchestrator.display.panel import RunView, draw
from orchestrator.protocol.events import BestFound, Continued, Event
from orchestrator.strategies import registry

FOUND = BestFound(time=START + 5, step=200, metric="val/f1", value=0.913)
EVALUATED = [
    point(100, 3, val__loss=0.5, val__f1=0.8, val__recall=0.7, val__accuracy=0.9),
    point(200, 5, val__loss=0.4, val__f1=0.913, val__recall=0.75, val__accuracy=0.9),
    FOUND,
    point(210, 7, train__loss=0.3, train__grad_norm=1.25),
    point(300, 9, val__loss=0.45, val__f1=0.9, val__recall=0.72, val__accuracy=0.9),
]


def chosen(*named: str, best: str | None = None, splits: Sequence[str] = ("val",)) -> ChosenMetrics:
    return ChosenMetrics(named, best=best, splits=splits)


def panel(of: ChosenMetrics, *events: Event, width: int = 100, height: int = 24) -> str:
    view = RunView(steps=500, world_size=2, chosen=of)
    for event in (STARTED, FORMED, *events):
        view.update(event, event.time)
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(draw(view, width=width, height=height, now=START + 30))
    return out.getvalue()


def test_lines_and_verdicts(golden: Golden) -> None:
    """What is chosen, and how it ended."""
    begun = (STARTED, FORMED, *EVALUATED)
    two = ("val/recall", "val/loss")
    texts = {
        "the best by checkpoint.best": printed(*begun, FINISHED, chosen=chosen(best="val/f1")),
        "chosen by display.metrics": printed(*begun, FINISHED, chosen=chosen(*two)),
        "both, and one twice": printed(*begun, FINISHED, chosen=chosen("val/f1", "train/grad_norm", best="val/f1")),
        "stopped": printed(*begun, KILLED, chosen=chosen(*two, best="val/f1")),
        "unknown names": printed(*begun, FINISHED, chosen=chosen("val/f2", "train/f3")),
        "another split": printed(
            STARTED, point(9, 1, test__f1=0.5, val__f1=0.4), FINISHED, chosen=chosen("test/f1", splits=("val", "test"))
        ),
        "evaluation": printed(
            replace(STARTED, resumed_from_step=200, source="/runs/0", evaluates=True),
            *EVALUATED[1:2],
            FINISHED,
            chosen=chosen("val/f1"),
        ),
        "panel": panel(chosen("val/recall", "train/grad_norm", best="val/f1"), *EVALUATED).splitlines(),
    }
    golden("console/chosen", sections(texts))


def test_steps_that_are_repeated_do_not_count_twice() -> None:
    """An evaluation that a recovery discards is no best one."""
    back = Continued(time=START + 10, step=150)
    lines = printed(STARTED, *EVALUATED, back, KILLED, chosen=chosen("val/recall", best="val/f1"))
    assert "val/recall 0.7200 (highest 0.7000 at step 100)" in lines
    assert not any("0.913 at step" in line for line in lines)
    again = [replace(e, time=e.time + 20) for e in EVALUATED[1:]]
    lines = printed(STARTED, *EVALUATED, back, *again, KILLED, chosen=chosen("val/recall", best="val/f1"))
    assert "best val/f1 0.9130 at step 200; val/recall 0.7200 (highest 0.7500 at step 200)" in lines


def test_a_resumed_run_knows_the_evaluations_before() -> None:
    of = chosen("val/recall")
    of.look_back([(100, 0.0, {"val/recall": 0.9}), (200, 0.0, {"val/recall": 0.99})], up_to_step=150)
    lines = printed(STARTED, *EVALUATED[-1:], FINISHED, chosen=of)
    assert "val/recall 0.7200 (highest 0.9000 at step 100)" in lines


def test_a_small_terminal_shows_them_too() -> None:
    for width, height in ((100, 8), (40, 24)):
        assert "val/f1" in panel(chosen(best="val/f1"), *EVALUATED, width=width, height=height)


def test_a_name_that_is_not_there_is_a_warning_once_with_a_panel_too() -> None:
    terminal = Terminal()
    printed(STARTED, *EVALUATED, *(point(n, n / 20, train__loss=1.0) for n in range(310, 400)), FINISHED,
            stream=terminal, chosen=chosen("val/f2"))  # fmt: skip
    text = " ".join("\n".join(terminal.screen()).split())
    assert text.count("display.metrics") == 1
    assert "no evaluation has val/f2; there are val/accuracy, val/f1, val/loss, val/recall" in text


def test_values_that_are_not_finite_are_never_the_best() -> None:
    values = (point(n, n, val__f1=value) for n, value in ((1, float("nan")), (2, 0.5), (3, float("inf"))))
    assert "val/f1 inf (highest 0.5000 at step 2)" in printed(STARTED, *values, FINISHED, chosen=chosen("val/f1"))


def test_the_configuration_says_which() -> None:
    words = ["display.metrics=[val/f1,val/loss]", "checkpoint.best=val/loss", "train.eval_splits=[val,test]"]
    errors: list[str] = []
    config, _ = compose(words, errors, registry.config_class)
    assert config is not None, errors
    of = ChosenMetrics.of(config)
    assert of.names == ["val/loss", "val/f1"]
