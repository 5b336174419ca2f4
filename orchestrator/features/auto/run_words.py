"""The choice of ``strategy=auto`` in words, for the description of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.records.json_file import read_json
from orchestrator.records.run_dir import RunDir


def in_words(run_dir: RunDir) -> str:
    """Return in Markdown which strategy was chosen for a run, with the report; empty if it was not chosen by ``auto``.

    Raises:
        OSError: the report cannot be read.
        ValueError: the record of the choice is damaged.
    """
    choice = read_json(run_dir.choice_record)
    return f"{describe_choice(choice)}\n\n{run_dir.choice_report.read_text().strip()}" if choice else ""


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Return in Markdown which strategy ``strategy=auto`` chose, which was the next best, and the step times of both.

    Args:
        choice: the contents of ``auto.json``.
    """
    able = [contender for contender in choice["contenders"] if not contender["refused"]]
    (winner,) = (contender for contender in able if contender["overrides"] == choice["overrides"])
    rivals = sorted((contender for contender in able if contender is not winner), key=_known_step_ms)
    text = f"`strategy=auto` chose {_contender(winner)}"
    return f"{text}; the next best is {_contender(rivals[0])}." if rivals else f"{text}, the only one that fits."


def _known_step_ms(contender: Mapping[str, Any]) -> tuple[bool, float]:
    """A sort key: measured times before predicted ones, which a measurement may have refuted."""
    measured_ms, prediction = contender["measured_ms"], contender["prediction"]
    if measured_ms is not None:
        return False, measured_ms
    return True, math.inf if prediction is None else prediction["step_ms"]


def _contender(contender: Mapping[str, Any]) -> str:
    times = []
    if (prediction := contender["prediction"]) is not None:
        times.append(f"predicted {prediction['step_ms']:.3g} ms a step")
    if (measured_ms := contender["measured_ms"]) is not None:
        times.append(f"measured {measured_ms:.3g} ms")
    return f"**{contender['name']}**" + (f" ({', '.join(times)})" if times else "")
