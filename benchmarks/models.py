"""Models of others and odd ones of one's own under every synchronous strategy, beside a plain loop.

python benchmarks/models.py [--continue] [--only PATTERN ...] [--layouts NAMES] [--report]

A cell is a model under a strategy with an optimizer, SGD or AdamW: the checks of a run before its first step, three
steps of 8 samples and an evaluation. Losses, gradient norms, evaluation and weights are compared with those of a loop
of plain torch. There are two tables: models of others and by hand under strategies with whole layers and samples; and
all these and generated ones, ``features/*`` and ``tokens/*``, with SGD where layers or samples are divided. Each cell
is appended to outputs/models.jsonl; with --continue, those that the file has are not run again, so that a table can be
made in sittings. --report writes the tables of which the file has cells to docs/models.md and results/models.md. Needs
the extras ``test`` and ``hf``, and timm and torchvision.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # for tests/helpers, whose models and comparison these are
os.environ |= {"HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

from harness.arms import RESULTS  # noqa: E402
from harness.pages import with_part  # noqa: E402
from harness.rounds import table  # noqa: E402

from helpers.models.catalogue import GENERATED, MODELS, package_of  # noqa: E402
from helpers.models.zoo_cells import DIVIDED, SYNCHRONOUS, cell  # noqa: E402
from helpers.ranks.gang import Gang  # noqa: E402

PAGE, RECORD = ROOT / "docs" / "models.md", ROOT / "outputs" / "models.jsonl"
SIGNS = {"equal": "=", "by nature": "~", "refused": "no", "wrong": "WRONG", "crash": "CRASH", "hang": "HANG"}
PACKAGES = ("transformers", "timm", "torchvision", "diffusers", "peft")
FAULTS = ("wrong", "crash", "hang")


@dataclass(frozen=True, order=True, kw_only=True)
class CellId:
    model: str
    layout: str
    adamw: bool


@dataclass(frozen=True, kw_only=True)
class Row(CellId):
    """A line of the record: a cell, what became of it, and the seconds that it took."""

    outcome: str
    detail: str
    seconds: float

    @property
    def id(self) -> CellId:
        return CellId(model=self.model, layout=self.layout, adamw=self.adamw)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Some models under some strategies. ``part`` is that of the pages that has it."""

    part: str
    models: tuple[str, ...]
    layouts: tuple[str, ...]
    optimizers: tuple[bool, ...]

    @property
    def size(self) -> int:
        return len(self.models) * len(self.layouts) * len(self.optimizers)

    def in_turn(self, patterns: Sequence[str], layouts: Collection[str]) -> Iterator[CellId]:
        """Every cell of these models and layouts; any part of them has many models, layouts and optimizers."""
        names = [name for name in self.models if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        chosen = [layout for layout in self.layouts if layout in layouts]
        count = len(self.optimizers)
        for turn in range(len(chosen) * count):
            for i, name in enumerate(names):
                layout, optimizer = chosen[(turn + i) % len(chosen)], self.optimizers[(turn // len(chosen) + i) % count]
                yield CellId(model=name, layout=layout, adamw=optimizer)


TABLES = (
    Table(part="the following", models=tuple(MODELS), layouts=tuple(SYNCHRONOUS), optimizers=(False, True)),
    Table(part="what is divided", models=(*GENERATED, *MODELS), layouts=tuple(DIVIDED), optimizers=(False,)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="models, such as 'timm/*'")
    known_layouts = ";".join(layout for of in TABLES for layout in of.layouts)
    parser.add_argument("--layouts", default=known_layouts, help="strategies, separated by semicolons")
    parser.add_argument("--continue", dest="continued", action="store_true", help="keep the cells of the record")
    parser.add_argument("--report", action="store_true", help="run nothing; write the tables from the record")
    arguments = parser.parse_args()
    layouts = arguments.layouts.split(";")
    planned = [cell_id for of in TABLES for cell_id in of.in_turn(arguments.only, layouts)]
    needed = {package_of(cell_id.model) for cell_id in planned}.intersection(PACKAGES)
    if not arguments.report and (missing := sorted(name for name in needed if find_spec(name) is None)):
        parser.error(f"not installed: pip install {' '.join(missing)}")
    known = {row.id: row for row in read_record()} if arguments.continued or arguments.report else {}
    if arguments.report:
        report(known)
    else:
        for row in run([cell_id for cell_id in planned if cell_id not in known], keep=arguments.continued):
            known[row.id] = row
            print(f"{row.model:32} {row.layout:24} {'AdamW' if row.adamw else 'SGD':6} {row.outcome:10}", flush=True)
            if row.outcome in FAULTS:
                print(row.detail.strip()[-1500:], flush=True)
    return int(any(known[cell_id].outcome in FAULTS for cell_id in planned if cell_id in known))


def report(known: dict[CellId, Row]) -> None:
    """Write each table of which there are cells."""
    results = RESULTS / "models.md"
    for of in TABLES:
        if rows := sorted(
            (row for row in known.values() if row.layout in of.layouts and row.model in of.models),
            key=lambda row: (of.models.index(row.model), of.layouts.index(row.layout), row.adamw),
        ):
            PAGE.write_text(with_part(PAGE.read_text(), "models", of.part, counts(of, rows)))
            text = f"{date.today()}, {versions()}.\n\n{cells(of, rows)}"
            results.write_text(with_part(results.read_text(), "models", of.part, text))


def read_record() -> list[Row]:
    return [Row(**json.loads(line)) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def run(planned: Sequence[CellId], *, keep: bool) -> Iterator[Row]:
    """Run cells in one gang of ranks, and append each to the record."""
    RECORD.parent.mkdir(exist_ok=True)
    gang = Gang(imports=("helpers.models.zoo_cells", *filter(find_spec, PACKAGES)))
    try:
        with RECORD.open("a" if keep else "w") as file:
            for cell_id in planned:
                began = time.monotonic()
                found = cell(gang, cell_id.model, cell_id.layout, adamw=cell_id.adamw)
                row = Row(**asdict(cell_id), **asdict(found), seconds=round(time.monotonic() - began, 1))
                file.write(json.dumps(asdict(row)) + "\n")
                file.flush()
                yield row
    finally:
        gang.close()


def counts(of: Table, rows: Sequence[Row]) -> str:
    """The counts by strategy and by package, the faults, and the reasons of refusals and differences, as Markdown."""
    packages, layouts = [Counter(map(package_of, of.models)), Counter(of.layouts)]
    each = {name: n * len(of.layouts) * len(of.optimizers) for name, n in packages.items()}
    optimizers = " and ".join("AdamW" if adamw else "SGD" for adamw in of.optimizers)
    return "\n\n".join(
        [
            f"{len(rows)} of {of.size} cells have been run, of {len(of.models)} models, {len(of.layouts)} strategies "
            f"and {optimizers}; nothing is known of the others. "
            f"{sum(row.outcome in FAULTS for row in rows)} of these cells are wrong, crash or hang.",
            *met(of, rows),
            counted(
                "strategy", [(row.layout, row.outcome) for row in rows], dict.fromkeys(layouts, of.size // len(layouts))
            ),
            counted("models", [(package_of(row.model), row.outcome) for row in rows], each),
            *(f"Not mended: {row.model} under {row.layout} ({row.outcome})." for row in rows if row.outcome in FAULTS),
            "Reasons of refusals, with the number of cells and some of the models:",
            reasons([row for row in rows if row.outcome == "refused"]),
            "What is different by nature, and a warning says so:",
            reasons([row for row in rows if row.outcome == "by nature"]) or "- nothing",
            f"Versions: {versions()}.",
        ]
    )


def met(of: Table, rows: Sequence[Row]) -> Iterator[str]:
    """How many of the tricks of generated models each strategy has met, at one place at least."""
    if every := {trick_of(name) for name in of.models if name in GENERATED}:
        found = {layout: {trick_of(row.model) for row in rows if row.layout == layout} & every for layout in of.layouts}
        numbers = "; ".join(f"{len(tricks)} under `{layout}`" for layout, tricks in found.items())
        yield f"Of the {len(every)} tricks, these have been met at one place at least: {numbers}."


def trick_of(name: str) -> str:
    return name.partition(" at ")[0]


def counted(title: str, pairs: Sequence[tuple[str, str]], sizes: dict[str, int]) -> str:
    """A table with a row for each of ``sizes``: the number of each outcome, and of the cells that were not run."""
    found: dict[str, Counter[str]] = {name: Counter() for name in sizes}
    for what, outcome in pairs:
        found[what][outcome] += 1
    found["all"] = sum(found.values(), Counter())
    sizes = {**sizes, "all": sum(sizes.values())}
    lines = [
        [what, *(str(of[outcome]) for outcome in SIGNS), str(sizes[what] - of.total())] for what, of in found.items()
    ]
    return table([title, *SIGNS, "not run"], lines)


def reasons(rows: Sequence[Row]) -> str:
    """A list of the details, without names of modules and numbers, with the number of cells and some models."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[kind_of(row.detail)].append(row)
    ordered = sorted(found.values(), key=len, reverse=True)
    return "\n".join(
        f"- {len(cells)}: {', '.join(list(dict.fromkeys(row.model for row in cells))[:4])}: `{shown(cells[0].detail)}`"
        for cells in ordered
    )


def kind_of(detail: str) -> str:
    """The first sentence of a reason, without names and numbers: what several models have in common."""
    words = [word for word in re.split(r"[\s:;,()]+", shown(detail)) if re.fullmatch(r"[A-Za-z']+", word)]
    return " ".join(words[:8])


def shown(detail: str) -> str:
    return re.sub(r"^strategy=\w+( strategy\.num_workers=\d+)?: ", "", detail).replace("`", "'")


def cells(of: Table, rows: Sequence[Row]) -> str:
    """A row for each model, with the outcome under each strategy: that of all optimizers if they differ."""
    found: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for row in rows:
        found[row.model, row.layout][SIGNS.get(row.outcome, "")] = None
    names = dict.fromkeys(row.model for row in rows if row.outcome in SIGNS)
    signs = [[name, *(" ".join(found[name, layout]) for layout in of.layouts)] for name in names]
    return "`=` equal, `~` different by nature, `no` refused, nothing: not run.\n\n" + table(
        ["model", *of.layouts], signs
    )


def versions() -> str:
    return ", ".join(f"{package} {version(package)}" for package in ("torch", *PACKAGES) if find_spec(package))


if __name__ == "__main__":
    sys.exit(main())
