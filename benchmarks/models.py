"""Models of others and odd ones of one's own under every synchronous strategy, beside a plain loop.

python benchmarks/models.py [--continue] [--only PATTERN ...] [--layouts NAMES] [--report]

A cell is a model under a strategy with an optimizer, SGD or AdamW: three steps of 8 samples and an evaluation. Losses,
gradient norms, evaluation and weights are compared with those of a loop of plain torch. Each cell is appended to
outputs/models.jsonl; with --continue, those that the file has are not run again, so that the table can be made in
sittings. A whole table is written to docs/models.md and results/models.md. Needs the extras ``test`` and ``hf``, and
timm and torchvision.
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
from collections.abc import Iterator, Sequence
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

from helpers.models.catalogue import MODELS  # noqa: E402
from helpers.models.zoo_cells import SYNCHRONOUS, cell  # noqa: E402
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="models, such as 'timm/*'")
    parser.add_argument("--layouts", default=";".join(SYNCHRONOUS), help="strategies, separated by semicolons")
    parser.add_argument("--continue", dest="continued", action="store_true", help="keep the cells of the record")
    parser.add_argument("--report", action="store_true", help="run nothing; write the tables from the record")
    arguments = parser.parse_args()
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        parser.error(f"not installed: pip install {' '.join(missing)}")
    names = [name for name in MODELS if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.only)]
    known = {row.id: row for row in read_record()} if arguments.continued or arguments.report else {}
    planned = list(in_turn(names, arguments.layouts.split(";")))
    if not arguments.report:
        for row in run([cell_id for cell_id in planned if cell_id not in known], keep=arguments.continued):
            known[row.id] = row
            print(f"{row.model:32} {row.layout:24} {'AdamW' if row.adamw else 'SGD':6} {row.outcome:10}", flush=True)
            if row.outcome in FAULTS:
                print(row.detail.strip()[-1500:], flush=True)
    rows = sorted(
        (known[cell_id] for cell_id in planned if cell_id in known),
        key=lambda row: (list(MODELS).index(row.model), SYNCHRONOUS.index(row.layout), row.adamw),
    )
    if arguments.report or (names == list(MODELS) and arguments.layouts == ";".join(SYNCHRONOUS)):
        PAGE.write_text(with_part(PAGE.read_text(), "models", "the following", counts(rows)))
        (RESULTS / "models.md").write_text(f"# models\n\n{date.today()}, {versions()}.\n\n{cells(rows)}\n")
    return int(any(row.outcome in FAULTS for row in rows))


def in_turn(names: Sequence[str], layouts: Sequence[str]) -> Iterator[CellId]:
    """Every cell; in the first half, each model and each layout meets both optimizers."""
    for half in range(2):
        for j, layout in enumerate(layouts):
            for i, name in enumerate(names):
                yield CellId(model=name, layout=layout, adamw=(i + j + half) % 2 == 1)


def read_record() -> list[Row]:
    return [Row(**json.loads(line)) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def run(planned: Sequence[CellId], *, keep: bool) -> Iterator[Row]:
    """Run cells in one gang of ranks, and append each to the record."""
    RECORD.parent.mkdir(exist_ok=True)
    gang = Gang(imports=("helpers.models.zoo_cells", *PACKAGES))
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


def counts(rows: Sequence[Row]) -> str:
    """The counts by strategy and by package, the faults, and the reasons of refusals and differences, as Markdown."""
    outcomes = list(SIGNS)
    size = f"{len(MODELS)} models, {len(SYNCHRONOUS)} strategies and 2 optimizers"
    return "\n\n".join(
        [
            f"{len(rows)} of {len(MODELS) * len(SYNCHRONOUS) * 2} cells have been run, of {size}.",
            counted("strategy", outcomes, [(row.layout, row.outcome) for row in rows]),
            counted("models", outcomes, [(MODELS[row.model].package, row.outcome) for row in rows], models=rows),
            *(f"Not mended: {row.model} under {row.layout} ({row.outcome})." for row in rows if row.outcome in FAULTS),
            "Reasons of refusals, with the number of cells and some of the models:",
            reasons([row for row in rows if row.outcome == "refused"]),
            "What is different by nature, and a warning says so:",
            reasons([row for row in rows if row.outcome == "by nature"]),
            f"Versions: {versions()}.",
        ]
    )


def counted(title: str, outcomes: Sequence[str], pairs: Sequence[tuple[str, str]], models: Sequence[Row] = ()) -> str:
    """A table with a row for each first element, and the number of each outcome."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for what, outcome in pairs:
        found[what][outcome] += 1
    sizes = Counter(MODELS[name].package for name in {row.model for row in models if row.outcome in SIGNS})
    lines = [
        [f"{sizes[what]} {what}" if sizes else what, *(str(found[what][outcome]) for outcome in outcomes)]
        for what in found
    ]
    total = Counter(outcome for _, outcome in pairs)
    lines.append([f"{sum(sizes.values())} in all" if sizes else "all", *(str(total[outcome]) for outcome in outcomes)])
    return table([title, *outcomes], lines)


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


def cells(rows: Sequence[Row]) -> str:
    """A row for each model, with the outcome under each strategy: that of both optimizers if they differ."""
    layouts = list(dict.fromkeys(row.layout for row in rows))
    found: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for row in rows:
        found[row.model, row.layout][SIGNS.get(row.outcome, "")] = None
    names = [name for name in dict.fromkeys(row.model for row in rows) if "" not in found[name, layouts[0]]]
    signs = [[name, *(" ".join(found[name, layout]) for layout in layouts)] for name in names]
    return "`=` equal, `~` different by nature, `no` refused.\n\n" + table(["model", *layouts], signs)


def versions() -> str:
    return ", ".join(f"{package} {version(package)}" for package in ("torch", *PACKAGES))


if __name__ == "__main__":
    sys.exit(main())
