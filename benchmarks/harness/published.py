"""The tables of docs/benchmarks.md, written from the results, and the check that they say what was measured.

A part of the page names the results whose claims it shows, for example
``<!-- benchmarks/all.py writes startup shared-cluster -->``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.pages import parts, with_part
from harness.rounds import table

WRITER = "all"
HEAD = ["what", "median", "spread", "goal", "command"]
_FIGURE = re.compile(r"\*{0,2}([\d,.]+)\*{0,2}")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A claim as ``results/<name>.md`` has it: the value of each round, the goal (empty if none) and if it was met."""

    what: str
    rounds: Sequence[float]
    median: float
    goal: str
    missed: bool

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.rounds), max(self.rounds)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The claims of one file of ``results/``, and when and where they were measured."""

    where: str
    claims: Sequence[Measured]


def read_result(text: str) -> Result:
    """Parse what ``rounds.report`` has written."""
    lines = text.splitlines()
    where = lines[2].partition(". Compare")[0]
    start = next((i for i, line in enumerate(lines) if line.startswith("| claim |")), len(lines))
    head = [cell.strip() for cell in lines[start].strip("|").split("|")] if start < len(lines) else []
    claims = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = dict(zip(head, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        claims.append(
            Measured(
                what=cells["claim"],
                rounds=[float(value) for value in cells["each round"].split()],
                median=float(cells["median"].strip("*")),
                goal=cells["goal"],
                missed=cells["reached"] == "no",
            )
        )
    return Result(where=where, claims=claims)


def document(names: Sequence[str], results: Mapping[str, Result], commands: Mapping[str, str]) -> str:
    """Return the table of the claims of some results; ``commands`` has the command line of each result.

    Raises:
        KeyError: a command is missing.
    """
    rows = []
    for name in filter(results.__contains__, names):
        for number, claim in enumerate(results[name].claims):
            median = shown(claim.median, claim.median)
            low, high = (shown(value, claim.median) for value in claim.spread)
            rows.append(
                [
                    claim.what,
                    f"**{median}**" if claim.missed else median,
                    f"{low} to {high}" if len(claim.rounds) > 1 else "",
                    claim.goal,
                    "" if number else f"`{commands[name]}`",
                ]
            )
    lacking = "not measured; run `{}`"
    where: dict[str, list[str]] = {}
    for name in names:
        text = results[name].where if name in results else lacking.format(commands[name])
        where.setdefault(text, []).append(f"`{name}`")
    return f"{table(HEAD, rows)}\n\n" + "\n".join(f"- {', '.join(named)}: {text}" for text, named in where.items())


def shown(value: float, median: float) -> str:
    """Return a value as the tables show it: with three decimals if the median is below 0.1, without from 20 on."""
    return f"{value:.3f}" if median < 0.1 else f"{value:.2f}" if median < 20 else f"{value:,.0f}"


def names(page: str) -> list[str]:
    """Return the names of the results that ``page`` shows."""
    return [name for part in parts(page, WRITER) for name in part.split()]


def written(page: str, results: Mapping[str, Result], commands: Mapping[str, str]) -> str:
    """Return ``page`` with all tables written from the results."""
    for part in parts(page, WRITER):
        page = with_part(page, WRITER, part, document(part.split(), results, commands))
    return page


def differences(page: str, results: Mapping[str, Result]) -> list[str]:
    """Return a sentence for each published figure that the results do not support.

    A figure must lie in the spread of its rounds, and every claim must be published under its name.
    """
    found = []
    for part, text in parts(page, WRITER).items():
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
        published = {row[0]: figure[1] for row in rows if len(row) > 1 and (figure := _FIGURE.fullmatch(row[1]))}
        claims = {claim.what: claim for name in part.split() if name in results for claim in results[name].claims}
        found += [f"{what}: published, but not among the results" for what in published if what not in claims]
        for what, claim in claims.items():
            if what not in published:
                found.append(f"{what}: measured, but not published")
                continue
            low, high = (float(shown(value, claim.median).replace(",", "")) for value in claim.spread)
            if not low <= float(published[what].replace(",", "")) <= high:
                found.append(f"{what}: {published[what]} is published, and {low:g} to {high:g} was measured")
    return found
