"""The strategies and grids among which to choose, as overrides, the choice, and its table and record. Pure functions.

Planning refuses proposals that are impossible.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.planning.schedules import SCHEDULES
from orchestrator.tuning.predict import Prediction

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

MICROBATCHES_PER_STAGE = (1, 2, 4)
MOST_PER_SAMPLE = 8
"""The most workers that compute a sample together in a proposal: those of a node, as they exchange in every layer."""


def worker_counts(num_workers: int) -> tuple[int, ...]:
    """Return the numbers of workers to consider, in ascending order: the powers of two, and ``num_workers``."""
    powers = [2**i for i in range(num_workers.bit_length()) if 2**i < num_workers]
    return (*powers, num_workers)


def server_counts(num_workers: int) -> tuple[int, ...]:
    """Return the numbers of parameter servers to consider for ``num_workers``, in ascending order."""
    return worker_counts(num_workers // 2)


def stage_counts(num_workers: int, schedules: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of stages that the proposals have, in ascending order."""
    per_worker = {1, *(SCHEDULES[schedule].stages_per_rank for schedule in schedules)}
    return tuple(sorted({n * each for n in worker_counts(num_workers) if n > 1 for each in per_worker}))


def proposals(
    num_workers: int, strategies: Sequence[StrategyName], schedules: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each proposal: the strategy, its workers, and its shards, micro-batches or servers.

    Args:
        num_workers: the largest number of workers. Servers come in addition, one for two workers at most.
        schedules: the schedules of pipelines to propose.
    """
    several = [n for n in worker_counts(num_workers) if n > 1]
    grids = [(n, p) for n in several for p in several if p < n and n % p == 0]
    for strategy in strategies:
        if strategy == "single":
            yield ("strategy=single",)
        elif strategy in ("ddp", "fsdp", "model_parallel"):
            yield from ((f"strategy={strategy}", f"strategy.num_workers={n}") for n in several)
        elif strategy == "dp" and several:
            yield ("strategy=dp", f"strategy.num_workers={num_workers}")
        elif strategy == "pipeline":
            for n in several:
                yield from (
                    ("strategy=pipeline", f"strategy.num_workers={n}", *stages) for stages in _stages(n, schedules)
                )
        elif strategy == "hsdp":
            for n, p in grids:
                yield "strategy=hsdp", f"strategy.num_workers={n}", f"strategy.shard_size={p}"
        elif strategy in ("ddp_pipeline", "fsdp_pipeline"):
            for n, p in grids:
                grid = (f"strategy={strategy}", f"strategy.num_workers={n}", f"strategy.pipeline_parallel_size={p}")
                yield from ((*grid, *stages) for stages in _stages(p, schedules))
        elif strategy == "mesh":
            for n in several:
                yield from (("strategy=mesh", f"strategy.num_workers={n}", *sizes) for sizes in _within_samples(n))
        elif strategy == "parameter_server":
            for n in several:
                servers = ("strategy=parameter_server", f"strategy.num_workers={n}")
                yield from ((*servers, f"strategy.num_shards={count}") for count in server_counts(n))


def _within_samples(workers: int) -> Iterator[tuple[str, ...]]:
    """Yield each number of workers that divide layers or tokens; the others have replicas, or shards."""
    for dimension in ("tensor", "context"):
        for size in (n for n in worker_counts(workers) if 1 < n <= MOST_PER_SAMPLE and workers % n == 0):
            yield (f"strategy.{dimension}={size}",)
            if size < workers:
                yield f"strategy.{dimension}={size}", f"strategy.shard={workers // size}"


def _stages(workers: int, schedules: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each schedule with each number of micro-batches, from one for each stage upward."""
    for schedule in schedules:
        num_stages = workers * SCHEDULES[schedule].stages_per_rank
        for factor in MICROBATCHES_PER_STAGE:
            yield f"strategy.schedule={schedule}", f"strategy.num_microbatches={factor * num_stages}"


WORTH_A_WORKER = 0.05
"""More workers have to shorten a step by more than this share: less is within the noise of a short measurement."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A proposal and what is known about it.

    Attributes:
        overrides: the strategy and its keys, as typed on the command line.
        world_size: the number of its workers; 0 if it could not be planned.
        prediction: None if the proposal was refused, or the job cannot be predicted.
        refused: why it cannot be trained; empty if it can.
        measured_ms: the median time of its steps; None if it was not measured.
        past_errors: the relative errors of earlier predictions of this strategy, for any job, on this hardware.
    """

    overrides: tuple[str, ...]
    world_size: int = 0
    prediction: Prediction | None = None
    refused: str = ""
    measured_ms: float | None = None
    past_errors: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The overrides without the name of their section."""
        return " ".join(o.removeprefix("strategy=").removeprefix("strategy.") for o in self.overrides)

    @property
    def predicted_ms(self) -> float:
        """The predicted time of a step; infinite if there is no prediction."""
        return math.inf if self.prediction is None else self.prediction.step_ms

    @property
    def error(self) -> float | None:
        """The relative error of the prediction; None if it was not made, or not put to the test."""
        if self.prediction is None or self.measured_ms is None:
            return None
        return self.predicted_ms / self.measured_ms - 1


def next_to_measure(contenders: Sequence[Contender], least: int) -> int | None:
    """Return the index of the contender to measure next; None if enough are measured, or none is left.

    They are in the order of their predictions. At least ``least`` are measured, and then each whose prediction would
    make it the best of those. If there are no predictions, and ``least`` is not 0, all are measured.
    """
    valid = [c for c in contenders if not c.refused]
    left = [c for c in valid if c.measured_ms is None]
    measured = _measured(valid)
    if not least:
        return None
    if len(measured) >= least:
        left = [c for c in left if c.prediction is None or _best([*measured, (c.predicted_ms, c)]) is c]
    return contenders.index(min(left, key=lambda c: c.predicted_ms)) if left else None


def best(contenders: Sequence[Contender]) -> Contender | None:
    """Return the contender with the shortest measured step, or else the shortest predicted one; None if all refused.

    One with fewer workers is better if its step is longer by no more than :data:`WORTH_A_WORKER`.
    """
    valid = [c for c in contenders if not c.refused]
    return _best(_measured(valid) or [(c.predicted_ms, c) for c in valid])


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
        rival = min(others, key=lambda c: c.predicted_ms)
        own_ms, rival_ms, how = winner.predicted_ms, rival.predicted_ms, "predicted"
    else:
        rival = min(rivals, key=lambda c: c.measured_ms or math.inf)
        own_ms, rival_ms, how = winner.measured_ms, rival.measured_ms or math.inf, "measured"
    if own_ms == math.inf:
        return "no strategy that fits has fewer workers; this job cannot be predicted, and nothing was measured"
    if rival_ms <= own_ms and winner.world_size < rival.world_size:
        more = rival.world_size - winner.world_size
        extra = f"the other worker of {rival.name} gains" if more == 1 else f"{more} more workers of {rival.name} gain"
        return f"{own_ms:.4g} ms per step ({how}); {extra} {1 - rival_ms / own_ms:.0%}"
    gain = f"{own_ms:.4g} ms per step ({how}), {rival_ms / own_ms:.2f} times as fast as {rival.name}"
    if rival.prediction is None:
        return gain
    parts = {
        "compute": rival.prediction.compute_ms,
        "exchanges": rival.prediction.exchange_ms,
        "waiting for other stages": rival.prediction.idle_ms,
    }
    largest = max(parts, key=lambda part: parts[part])
    return f"{gain}, which spends {parts[largest] / rival.prediction.step_ms:.0%} of a step on {largest}"


_HEADS = (
    *("strategy", "predicted ms", "compute", "exchange", "idle", "input", "memory MB"),
    *("measured ms", "error", "past error"),
)
DISPENSABLE = ("input", "memory MB", "exchange", "idle", "compute", "error", "past error")
"""The columns that a narrow terminal leaves out, the first ones first."""

_LEGEND = "step times in ms: predicted = compute + exchange + idle (waiting for other stages) + input"
_LEGEND_OF_PAST = "past error: the median of earlier predictions for any job on this hardware, and their number"


def columns(contenders: Sequence[Contender]) -> list[tuple[str, ...]]:
    """Return the columns of a table of the contenders; each is its heading and its cells.

    The fastest comes first, and those that were measured before all others. Those refused have no row, and columns
    without values are left out.
    """
    valid = sorted(
        (c for c in contenders if not c.refused),
        key=lambda c: (c.measured_ms is None, c.measured_ms or c.predicted_ms),
    )
    found = zip(_HEADS, *map(_row, valid), strict=True)
    return [column for column in found if any(column[1:])]


def markdown(contenders: Sequence[Contender]) -> str:
    """Return a report in Markdown."""
    first, *others = columns(contenders)
    head, *rows = (_line(row) for row in zip(first, *others, strict=True))
    return with_table(contenders, [head, _line(["---", *("---:" for _ in others)]), *rows])


def with_table(contenders: Sequence[Contender], table: Sequence[str]) -> str:
    """Return a report with the lines of a table of the columns: how to read it, what was refused, and the choice."""
    legend = [_LEGEND] if any(c.prediction for c in contenders) else []
    legend += [_LEGEND_OF_PAST] if any(c.past_errors for c in contenders) else []
    refused = [f"- {c.name}: refused: {c.refused}" for c in contenders if c.refused]
    parts = (legend, table, refused, [verdict(contenders)])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


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
    if contender.prediction is not None:
        values["prediction"]["step_ms"] = contender.prediction.step_ms
    return {"name": contender.name, **values}


def _row(contender: Contender) -> tuple[str, ...]:
    prediction, error = contender.prediction, contender.error
    predicted: tuple[str, ...] = ("",) * 6
    if prediction is not None:
        times = (prediction.step_ms, prediction.compute_ms, prediction.exchange_ms, prediction.idle_ms)
        predicted = (
            *(f"{ms:.4g}" for ms in (*times, prediction.input_ms)),
            f"{prediction.memory_bytes / 1e6:.4g}",
        )
    measured = "" if contender.measured_ms is None else f"{contender.measured_ms:.4g}"
    past = contender.past_errors
    past_error = f"{statistics.median(past):+.0%} ({len(past)})" if past else ""
    return (contender.name, *predicted, measured, "" if error is None else f"{error:+.0%}", past_error)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
