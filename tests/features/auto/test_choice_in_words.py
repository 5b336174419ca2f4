"""The answer of ``strategy=auto`` in words."""

import json
from pathlib import Path
from typing import Any

from orchestrator.features.auto.run_words import describe_choice, in_words
from orchestrator.records.run_dir import RunDir


def contender(name: str, predicted_ms: float | None, measured_ms: float | None, refused: str = "") -> Any:
    return {
        "name": name,
        "overrides": [f"strategy={name}"],
        "prediction": None if predicted_ms is None else {"step_ms": predicted_ms},
        "measured_ms": measured_ms,
        "refused": refused,
    }


CHOSEN = {"overrides": ["strategy=ddp"]}


def test_the_choice_names_the_next_best_and_what_is_known_of_both() -> None:
    ddp, single = contender("ddp", 17.94, 18.21), contender("single", 32.0, 33.333)
    unmeasured, refused = contender("pipeline", 17.0, None), contender("dp", None, None, refused="too large")
    assert describe_choice({**CHOSEN, "contenders": [unmeasured, single, refused, ddp]}) == (
        "`strategy=auto` chose **ddp** (predicted 17.9 ms a step, measured 18.2 ms); "
        "the next best is **single** (predicted 32 ms a step, measured 33.3 ms)."
    )
    unpredicted = [contender("ddp", None, 18.0), contender("single", None, 33.0)]
    assert "**ddp** (measured 18 ms)" in describe_choice({**CHOSEN, "contenders": unpredicted})
    alone = [contender("ddp", None, None), refused]
    assert describe_choice({**CHOSEN, "contenders": alone}) == "`strategy=auto` chose **ddp**, the only one that fits."


def test_a_run_has_the_choice_with_its_report(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert in_words(run_dir) == ""
    run_dir.choice_record.write_text(json.dumps({**CHOSEN, "contenders": [contender("ddp", 1.5, None)]}))
    run_dir.choice_report.write_text("| ddp |\n")
    words = "`strategy=auto` chose **ddp** (predicted 1.5 ms a step), the only one that fits."
    assert in_words(run_dir) == f"{words}\n\n| ddp |"
