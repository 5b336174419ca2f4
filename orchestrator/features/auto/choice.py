"""The choice among layouts by their predicted and measured times, and its table and record. Pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.planning.memory import GIB

StrategyName = Literal[
    "single",
    "ddp",
    "dp",
    "fsdp",
    "hsdp",
    "model_parallel",
    "pipeline",
    "ddp_pipeline",
    "fsdp_pipeline",
    "mesh",
    "parameter_server",
]


def worker_counts(num_workers: int) -> tuple[int, ...]:
    """Return the numbers of workers to consider, in ascending order: the powers of two, and ``num_workers``."""
    powers = [2**i for i in range(num_workers.bit_length()) if 2**i < num_workers]
    return (*powers, num_workers)


def server_counts(num_workers: int) -> tuple[int, ...]:
    """Return the numbers of parameter servers to consider for ``num_workers``, in ascending order."""
    return worker_counts(num_workers // 2)


ALONE, MOST_ALONE = ("strategy=single",), 2.0
"""One worker, which is measured if its step is not predicted to be so many times as long as the best one."""
WORTH_A_WORKER = 0.05
"""More workers have to shorten a step by more than this share: less is within the noise of a short measurement."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A layout and what is known about it.

    Attributes:
        overrides: the strategy and its keys, as typed on the command line.
        world_size: the number of its workers and servers.
        predicted_ms: the predicted time of a step; None if it is unknown.
        memory_bytes: what a worker needs; None if it is unknown.
        refused: why it cannot be trained; empty if nothing is known against it.
        measured_ms: the median time of its steps; None if it was not measured.
    """

    overrides: tuple[str, ...]
    world_size: int = 0
    predicted_ms: float | None = None
    memory_bytes: float | None = None
    refused: str = ""
    measured_ms: float | None = None

    @property
    def name(self) -> str:
        """The overrides without the name of their section."""
        return " ".join(o.removeprefix("strategy=").removeprefix("strategy.") for o in self.overrides)

    @property
    def expected_ms(self) -> float:
        """The predicted time of a step; infinite if there is no prediction."""
        return math.inf if self.predicted_ms is None else self.predicted_ms

    @property
    def error(self) -> float | None:
        """The relative error of the prediction; None if it was not made, or not put to the test."""
        if self.predicted_ms is None or self.measured_ms is None:
            return None
        return self.predicted_ms / self.measured_ms - 1


def next_to_measure(contenders: Sequence[Contender], least: int) -> int | None:
    """Return the index of the contender to measure next; None if enough are measured, or none is left.

    They are in the order of their predictions. At least ``least`` are measured, and then each whose prediction would
    make it the best of those, and one worker alone unless it is far slower: it needs no communication, which is
    predicted worst. If there are no predictions, and ``least`` is not 0, all are measured.
    """
    valid = [c for c in contenders if not c.refused]
    left = [c for c in valid if c.measured_ms is None]
    measured = _measured(valid)
    if not least:
        return None
    if len(measured) >= least and any(c.predicted_ms is not None for c in valid):
        fastest_ms = min(ms for ms, _ in measured)
        left = [
            c
            for c in left
            if _best([*measured, (c.expected_ms, c)]) is c
            or (c.overrides == ALONE and c.expected_ms < MOST_ALONE * fastest_ms)
        ]
    return contenders.index(min(left, key=lambda c: c.expected_ms)) if left else None


def best(contenders: Sequence[Contender]) -> Contender | None:
    """Return the contender with the shortest measured step, or else the shortest predicted one; None if all refused.

    One with fewer workers is better if its step is longer by no more than :data:`WORTH_A_WORKER`.
    """
    valid = [c for c in contenders if not c.refused]
    return _best(_measured(valid) or [(c.expected_ms, c) for c in valid])


def _measured(contenders: Sequence[Contender]) -> list[tuple[float, Contender]]:
    return [(c.measured_ms, c) for c in contenders if c.measured_ms is not None]


def _best(times: Sequence[tuple[float, Contender]]) -> Contender | None:
    limit_ms = min((step_ms for step_ms, _ in times), default=0.0) * (1 + WORTH_A_WORKER)
    close = [(c.world_size, step_ms, place) for place, (step_ms, c) in enumerate(times) if step_ms <= limit_ms]
    return times[min(close)[-1]][1] if close else None


def reason(contenders: Sequence[Contender]) -> str:
    """Return why the best contender is the best, in one sentence."""
    winner = best(contenders)
    assert winner is not None
    others = [c for c in contenders if not c.refused and c is not winner]
    if not others:
        return "no other strategy can train this job here"
    rivals = [c for c in others if c.measured_ms is not None]
    if winner.measured_ms is None or not rivals:
        rival = min(others, key=lambda c: c.expected_ms)
        own_ms, rival_ms, how = winner.expected_ms, rival.expected_ms, "predicted"
    else:
        rival = min(rivals, key=lambda c: c.measured_ms or math.inf)
        own_ms, rival_ms, how = winner.measured_ms, rival.measured_ms or math.inf, "measured"
    if own_ms == math.inf:
        return "no strategy that fits has fewer workers; this job cannot be predicted, and nothing was measured"
    if rival_ms <= own_ms and winner.world_size < rival.world_size:
        more = rival.world_size - winner.world_size
        extra = f"the other worker of {rival.name} gains" if more == 1 else f"{more} more workers of {rival.name} gain"
        return f"{own_ms:.4g} ms per step ({how}); {extra} {1 - rival_ms / own_ms:.0%}"
    return f"{own_ms:.4g} ms per step ({how}), {rival_ms / own_ms:.2f} times as fast as {rival.name}"


_HEADS = ("strategy", "predicted ms", "memory GiB", "measured ms", "error")
DISPENSABLE = ("memory GiB", "error")
"""The columns that a narrow terminal leaves out, the first ones first."""
SHOWN = 12
"""The contenders in a table, beside those that were measured, and the refused ones below it."""


def columns(contenders: Sequence[Contender]) -> list[tuple[str, ...]]:
    """Return the columns of a table of the contenders; each is its heading and its cells.

    The fastest comes first, and those that were measured before all others. Those refused have no row, nor have slow
    ones of many, and columns without values are left out.
    """
    found = zip(_HEADS, *map(_row, _ranked(contenders)[: _shown(contenders)]), strict=True)
    return [column for column in found if any(column[1:])]


def _ranked(contenders: Sequence[Contender]) -> list[Contender]:
    return sorted(
        (c for c in contenders if not c.refused),
        key=lambda c: (c.measured_ms is None, c.measured_ms or c.expected_ms),
    )


def _shown(contenders: Sequence[Contender]) -> int:
    return max(SHOWN, sum(c.measured_ms is not None for c in contenders))


def markdown(contenders: Sequence[Contender]) -> str:
    """Return a report in Markdown."""
    first, *others = columns(contenders)
    head, *rows = (_line(row) for row in zip(first, *others, strict=True))
    return with_table(contenders, [head, _line(["---", *("---:" for _ in others)]), *rows])


def with_table(contenders: Sequence[Contender], table: Sequence[str]) -> str:
    """Return a report with the lines of a table of the columns: what was refused, and the choice."""
    slower = len(_ranked(contenders)) - _shown(contenders)
    more = [f"and {slower} more, which are predicted to be slower (auto.json)"] if slower > 0 else []
    refused = [f"- {text}" for text in refusals(contenders)]
    parts = (table, more, refused, [verdict(contenders)])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def refusals(contenders: Sequence[Contender]) -> list[str]:
    """Return the contenders that are refused, with the reasons, but only the number of the last ones of many."""
    found = [f"{c.name}: refused: {c.refused}" for c in contenders if c.refused]
    more = len(found) - SHOWN
    return [*found[:SHOWN], *([f"and {more} more are refused (auto.json)"] if more > 0 else [])]


def verdict(contenders: Sequence[Contender]) -> str:
    """Return the choice, as typed on the command line, and its reason."""
    winner = best(contenders)
    assert winner is not None
    return f"auto chooses {' '.join(winner.overrides)}: {reason(contenders)}"


def record(contenders: Sequence[Contender]) -> dict[str, Any]:
    """Return the contenders as values of JSON."""
    return {"contenders": [_as_json(c) for c in contenders]}


def _as_json(contender: Contender) -> dict[str, Any]:
    values = dataclasses.asdict(contender)
    step_ms, memory_bytes = values.pop("predicted_ms"), values.pop("memory_bytes")
    prediction = None if step_ms is None else {"step_ms": step_ms, "memory_bytes": memory_bytes}
    return {"name": contender.name, **values, "prediction": prediction}


def _row(contender: Contender) -> tuple[str, ...]:
    predicted, measured, error = contender.predicted_ms, contender.measured_ms, contender.error
    return (
        contender.name,
        "" if predicted is None else f"{predicted:.4g}",
        "" if contender.memory_bytes is None else f"{contender.memory_bytes / GIB:.3g}",
        "" if measured is None else f"{measured:.4g}",
        "" if error is None else f"{error:+.0%}",
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
