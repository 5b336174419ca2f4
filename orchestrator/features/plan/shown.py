"""Predicted layouts as a table, as JSON and as a picture, and the errors of predictions of published runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.text import first_few
from orchestrator.display.plain_text import TableColumn, text_lines
from orchestrator.features.plan.prediction.calibration import CASES, Case, Compared, Spread, spread
from orchestrator.features.plan.prediction.devices import CPU
from orchestrator.features.plan.prediction.forecast import Answer, Forecast, Question
from orchestrator.planning.memory import GIB
from orchestrator.planning.mesh import DIMENSIONS, Mesh

_DRAWN = 10
LARGE = 128
"""The devices of a large run."""
# From Okabe and Ito's colours, and greys for waiting.
_COLOURS = (
    *("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7"),
    *("#882255", "#999999", "#000000", "#bbbbbb", "#dddddd"),
)
UNLIKE = "no published run is like this model, and a step of small operations takes longer than predicted"


def text(answer: Answer, *, rows: int) -> str:
    """Return the answer for a terminal: the fastest layouts, the best ones, what does not fit, and the errors."""
    question = answer.question
    work, cluster = question.work, question.cluster
    billions = work.parameters / 1e9
    size = f"{billions:.3g} B parameters" if billions >= 0.01 else f"{work.parameters:,.0f} parameters"
    size += f", {work.active_parameters / 1e9:.3g} B of them for a token" if work.layer.experts else ""
    size += f", {work.tokens} tokens a sample" if work.tokens > 1 else ""
    lines = [f"{cluster}: {cluster.devices} devices; {size}", f"assumed: {' '.join(answer.assumed) or 'nothing'}"]
    if answer.measured:
        shares = f"products {question.stack.products:.0%}, attention {question.stack.attention:.0%}"
        lines.append(f"shares of the peak rate by the steps of {answer.measured}: {shares}")
    lines += [f"note: {note}" for note in answer.notes]
    lines.append("")
    shown = answer.fitting[:rows] or answer.refused[:rows]
    lines += _table(question, shown)
    if more := len(answer.fitting) - len(shown):
        lines.append(f"and {more} slower layouts that fit (--rows, --json)" if more > 0 else "none of them fits")
    lines.append("")
    lines += _best(answer)
    if answer.refused and answer.fitting:
        nearest = answer.refused[-1] if len(answer.refused) == 1 else min(answer.refused, key=lambda f: f.memory_bytes)
        lines.append(f"{len(answer.refused)} layouts do not fit; the nearest: {name(nearest)}: {nearest.refused}")
    if answer.pruned:
        reasons = [f"{reason} ({times})" for reason, times in sorted(answer.pruned.items(), key=lambda p: -p[1])]
        lines.append(f"refused by this version: {first_few(reasons, 3, separator='; ', noun='reasons')}")
    lines.append(f"{_speed(answer)}; memory and goodput have assumptions: docs/plan.md")
    return "\n".join(lines)


def speed_text(question: Question, forecast: Forecast, case: Case) -> str:
    """Return the speed of one layout with the errors of such predictions, in a line."""
    seconds, rate, share = forecast.seconds, question.tokens_s(forecast), question.mfu(forecast)
    error = _error(case, sparse=question.work.layer.experts > 0) if question.work.tokens > 1 else UNLIKE
    return (
        f"predicted for {question.cluster}: {seconds:.3g} s a step, {rate:,.0f} {question.unit}/s, MFU {share:.0%}; "
        f"{error}; `orchestrator plan --cluster {question.cluster}` with these keys compares layouts"
    )


def _error(case: Case, *, sparse: bool) -> str:
    """Return the errors of a case, with experts as a range."""
    found = spread(case, sparse=sparse)
    of = f"of {found.count:,} predictions of published runs {CASES[case]} (orchestrator plan --published)"
    if sparse:
        return f"{found.low:.0%} to {found.high:.0%} of that in nine of ten {of.replace(' runs', ' runs with experts')}"
    return f"± {found.median:.0%} in the median and ± {found.ninth:.0%} in nine of ten {of}"


def _speed(answer: Answer) -> str:
    question = answer.question
    if question.cluster.name == CPU:
        return f"speed with rates that were {question.cluster.device.source}; no published run tells its error"
    if question.work.tokens == 1:
        return f"speed: {UNLIKE}"
    text = f"speed {_error(answer.case, sparse=question.work.layer.experts > 0)}"
    if question.work.layer.experts and answer.fitting:
        found, most = spread(answer.case, sparse=True), question.tokens_s(answer.fitting[0])
        text += f": {found.low * most:,.0f} to {found.high * most:,.0f} tokens/s for the fastest"
    return text


def _best(answer: Answer) -> list[str]:
    if not answer.fitting:
        return []
    fastest, cheapest = answer.fitting[0], answer.cheapest
    assert cheapest is not None
    lines = [f"fastest: {name(fastest)}"]
    if cheapest is not fastest:
        lines.append(f"cheapest for equal {answer.question.unit}, with failures: {name(cheapest)}")
    days, money = answer.question.days(cheapest), answer.question.money(cheapest)
    if days is not None:
        lines[-1] += f": {days:,.1f} days" + ("" if money is None else f", a price of {money:,.0f}")
    return [
        *lines,
        f"to launch it: python -m orchestrator.launch {' '.join((*answer.command, *cheapest.overrides))}",
        "",
    ]


def name(forecast: Forecast) -> str:
    """Return a short name of a layout."""
    step = forecast.step
    parts = [_sizes(forecast.mesh), f"{step.rows:g} x {step.passes:g}"]
    parts += ["recompute"] if step.recompute else []
    parts += [f"{step.chunks} stages each"] if step.chunks > 1 else []
    parts += ["optimizer divided"] if step.divides_update else []
    return ", ".join(parts)


def _sizes(mesh: Mesh) -> str:
    return " ".join(f"{d} {mesh.size(d)}" for d in DIMENSIONS if mesh.size(d) > 1) or "one device"


def _table(question: Question, forecasts: Sequence[Forecast]) -> list[str]:
    rows = [_cells(question, forecast) for forecast in forecasts]
    columns = [
        TableColumn(heading=heading, cells=[row[heading] for row in rows], justify="left" if first else "right")
        for first, heading in zip([True] + [False] * 99, rows[0] if rows else [], strict=False)
    ]
    return text_lines([c for c in columns if any(c.cells)], unicode=True) if rows else ["no layout is possible"]


def _cells(question: Question, forecast: Forecast) -> dict[str, str]:
    memory, time = forecast.memory, forecast.time
    cells = {"layout": name(forecast)}
    if memory is not None:
        kinds = {
            "weights": memory.parameters,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "gathered": memory.gathered + memory.casts,
            "kept": memory.activations or 0.0,
            "other": forecast.communicators + forecast.reserve,
            "GiB": forecast.memory_bytes,
        }
        cells |= {kind: f"{size / GIB:.1f}" for kind, size in kinds.items()}
    if time is None or forecast.goodput is None:
        return {**cells, "why not": forecast.refused}
    total = time.total
    exposed = {d: getattr(time, d) for d in ("shard", "replicate", "tensor", "context", "expert", "sends")}
    days, money = question.days(forecast), question.money(forecast)
    return {
        **cells,
        "step s": f"{total:.3g}",
        f"{question.unit}/s": f"{question.tokens_s(forecast):,.0f}",
        "each": f"{question.tokens_s_device(forecast):,.0f}",
        "MFU": f"{question.mfu(forecast):.0%}",
        "bubble": f"{time.bubble / total:.0%}" if time.bubble else "",
        "exposed": ", ".join(f"{d} {s / total:.0%}" for d, s in exposed.items() if s / total >= 0.005),
        "steps/day": f"{86_400 / total:,.0f}",
        "goodput": f"{forecast.goodput.share:.1%}",
        "days": "" if days is None else f"{days:,.1f}",
        "money": "" if money is None else f"{money:,.0f}",
    }


def as_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as values of JSON."""
    record = answer.question.record
    return {
        "cluster": str(answer.question.cluster),
        "parameters": answer.question.work.parameters,
        "tokens_per_sample": answer.question.work.tokens,
        "assumed": list(answer.assumed),
        "command": list(answer.command),
        "shares": dataclasses.asdict(answer.question.stack),
        "layouts": [record(f) for f in (*answer.fitting, *answer.refused)],
        "refused_by_this_version": dict(answer.pruned),
        "notes": list(answer.notes),
        "spread": {
            "case": answer.case,
            **dataclasses.asdict(spread(answer.case, sparse=answer.question.work.layer.experts > 0)),
        },
    }


def draw(answer: Answer, path: Path) -> None:
    """Draw a PNG: a bar for each of the fastest layouts, of the time of a step by what takes it.

    Raises:
        OSError: ``path`` cannot be written.
    """
    from matplotlib.figure import Figure

    shown = answer.fitting[:_DRAWN][::-1]
    figure = Figure(figsize=(12, 1.5 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    before = [0.0] * len(shown)
    kinds = [field.name for field in dataclasses.fields(shown[0].time)] if shown[0].time else []
    for kind, colour in zip(kinds, _COLOURS, strict=True):
        seconds = [getattr(forecast.time, kind) for forecast in shown]
        if any(seconds):
            axes.barh([name(f) for f in shown], seconds, left=before, color=colour, label=kind)
            before = [b + s for b, s in zip(before, seconds, strict=True)]
    axes.set_xlabel("seconds of a step, predicted")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=150)


_CASE_HEADS = (
    "what is known",
    "predictions",
    "setups",
    "median",
    "90 %",
    "speeds of nine of ten",
    "here",
    "median",
    "90 %",
)
_PUBLISHED_HEADS = ("runs", "predicted", "median", "90 %", "worst", "all new: median", "90 %", "calibrated by")


def published_table(compared: Sequence[Compared]) -> str:
    """Return the errors by what is known, and those of these runs by setup and by size, as lines of text."""
    known = sum(c.is_known for c in compared)
    return "\n".join(
        [
            *_cases(compared),
            "",
            "absolute errors of tokens per second and device, those of each setup (software, precision and device)",
            "together as much as those of any other; on the left of published runs, on the right of this file",
            "",
            *_setups(compared),
            "",
            f"{known} runs that calibrate others do not count; all new: without all runs of their software or device",
        ]
    )


def _cases(compared: Sequence[Compared]) -> list[str]:
    rows = []
    for sparse in (False, True):
        for case in CASES:
            found = spread(case, sparse=sparse)
            own = [c for c in compared if c.shares.case == case and c.run.is_sparse == sparse and not c.is_known]
            here = _spread_of(own) if own else None
            rows.append(
                (
                    f"{case}{', with experts' if sparse else ''}",
                    *(f"{found.count}", f"{found.setups}", f"{found.median:.1%}", f"{found.ninth:.1%}"),
                    f"{found.low:.0%} to {found.high:.0%}",
                    *((f"{here.count}", f"{here.median:.1%}", f"{here.ninth:.1%}") if here else ("", "", "")),
                )
            )
    return _lines(_CASE_HEADS, rows)


def _setups(compared: Sequence[Compared]) -> list[str]:
    groups: dict[str, Callable[[Compared], bool]] = {
        **{name: functools.partial(_is_of, name) for name in sorted({_group(c) for c in compared})},
        "dense": lambda c: not c.run.is_sparse,
        f"dense, {LARGE} devices and more": lambda c: not c.run.is_sparse and c.run.devices >= LARGE,
        "with experts": lambda c: c.run.is_sparse,
    }
    rows = []
    for name, belongs in groups.items():
        if own := [c for c in compared if belongs(c)]:
            unseen = Spread.of([(c.run.setup, c.unseen_error) for c in own])
            of_all = (f"{unseen.median:.1%}", f"{unseen.ninth:.1%}")
            counted = [c for c in own if not c.is_known]
            found = _spread_of(counted) if counted else None
            cells = (f"{found.median:.1%}", f"{found.ninth:.1%}", f"{found.worst:.1%}") if found else ("", "", "")
            by = {c.shares.known.row["model"] for c in counted if c.shares.known} if _is_of(name, own[0]) else set()
            rows.append((name, f"{len(counted)}", *cells, *of_all, ", ".join(sorted(by))))
    return _lines(_PUBLISHED_HEADS, rows)


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    columns = [
        TableColumn(heading=head, cells=cells, justify="left" if head in (heads[0], "calibrated by") else "right")
        for head, cells in zip(heads, zip(*rows, strict=True), strict=True)
    ]
    return text_lines([column for column in columns if any(column.cells)], unicode=True)


def _spread_of(compared: Sequence[Compared]) -> Spread:
    return Spread.of([(c.run.setup, c.error) for c in compared])


def published_json(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return a row for each run."""
    return [
        {
            **{key: c.run.row[key] for key in ("source", "framework", "model", "gpu", "gpus", "seq", "precision")},
            "setup": str(c.run.setup),
            "case": c.shares.case,
            "calibrated_by": c.shares.known and c.shares.known.row["source"],
            "measured": c.run.measured,
            "predicted": c.run.predicted(c.shares.stack),
            "error": c.error,
            "known": c.is_known,
            "error_all_new": c.unseen_error,
            "spread": dataclasses.asdict(spread(c.shares.case, sparse=c.run.is_sparse)),
        }
        for c in compared
    ]


def _group(compared: Compared) -> str:
    return f"{compared.run.setup}{', with experts' if compared.run.is_sparse else ''}"


def _is_of(name: str, compared: Compared) -> bool:
    return _group(compared) == name
