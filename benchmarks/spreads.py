"""How far off ``orchestrator plan`` is for published runs, by what is known: the table that ships with the package.

python benchmarks/spreads.py
"""

from __future__ import annotations

import csv
import dataclasses
import math

from orchestrator.features.plan.prediction.calibration import (
    CASES,
    SPREADS,
    Case,
    Spread,
    fitted,
    groups,
    on_one_node,
    published,
)
from orchestrator.features.plan.prediction.published import Setup, published_runs

MOST_IN_TURN = 8
"""The runs of a setup that calibrate the others in turn, at most."""


def main() -> None:
    with SPREADS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "sparse", *(field.name for field in dataclasses.fields(Spread))])
        for sparse in (False, True):
            for case in CASES:
                figures = dataclasses.astuple(measured(case, sparse=sparse))
                writer.writerow([case, int(sparse), *(f"{figure:.6g}" for figure in figures)])
                print(case, "with experts" if sparse else "dense", *(f"{figure:.3g}" for figure in figures))


def measured(case: Case, *, sparse: bool) -> Spread:
    """Return the errors of a case: of published runs, predicted without what is not known in it.

    Args:
        case: what is known; of a calibrated setup, one run of several on a node in turn.
        sparse: whether the models have experts.
    """
    known, found = published(), []
    for group in groups(run for run in published_runs() if run.is_sparse == sparse):
        setup, family = group[0].setup, group[0].family
        if case == "calibrated":
            prior, choices = known.prior(setup, family), on_one_node(group)
            for one in choices[:: math.ceil(len(choices) / MOST_IN_TURN)]:
                stack = fitted(one.time, one.seconds, prior)
                found += [(setup, run.error(stack)) for run in group if run is not one]
            continue
        for run in group:
            shares = known.shares(setup, family, of=run, without=lambda other, own=setup: left_out(case, own, other))
            if shares.case == case:
                found.append((setup, run.error(shares.stack)))
    return Spread.of(found)


def left_out(case: Case, own: Setup, other: Setup) -> bool:
    """Return whether a setup must not know the other one to be a case."""
    match case:
        case "new device":
            return other == own
        case "new software":
            return other.software == own.software
    return other.software == own.software or other.device == own.device


if __name__ == "__main__":
    main()
