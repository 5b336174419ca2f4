"""Models of transformers, diffusers and peft under every strategy: equal to one worker, refused, or asynchronous.

python benchmarks/model_zoo.py [--models bert,gpt2]

Writes the table of docs/models.md, unless it was asked for some of the models only. Needs the extras ``test`` and
``hf``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # for tests/helpers, whose models and comparison these are

from harness.pages import with_part  # noqa: E402

from helpers.models.zoo import ZOO  # noqa: E402
from helpers.models.zoo_cells import STRATEGIES, Cell, cell  # noqa: E402
from helpers.ranks.gang import Gang  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
SIGNS = {"equal": "=", "asynchronous": "~", "refused": "no", "wrong": "WRONG"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(ZOO), help="names in tests/helpers/models/zoo.py")
    names = parser.parse_args().models.split(",")
    gang = Gang()
    cells: dict[tuple[str, str], Cell] = {}
    try:
        for name in names:
            for strategy in STRATEGIES:
                found = cells[name, strategy] = cell(gang, name, strategy)
                print(f"{name:18} {strategy:24} {found.outcome:14} {found.detail}", flush=True)
    finally:
        gang.close()
    if names == list(ZOO):
        PAGE.write_text(with_part(PAGE.read_text(), "model_zoo", "the following", document(cells)))
    return int(any(found.outcome == "wrong" for found in cells.values()))


def document(cells: Mapping[tuple[str, str], Cell]) -> str:
    """Return the table and the reasons of the refusals as Markdown."""
    packages = ("torch", *dict.fromkeys(exhibit.package for exhibit in ZOO.values()))
    reasons = list(dict.fromkeys(_reason(found) for found in cells.values() if found.outcome == "refused"))
    rows = [["model", "package", *STRATEGIES], ["---"] * (2 + len(STRATEGIES))]
    for name, exhibit in ZOO.items():
        signs = [_sign(cells[name, strategy], reasons) for strategy in STRATEGIES]
        rows.append([exhibit.title, exhibit.package, *signs])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    listed = "\n".join(f"{number}. `{reason}`" for number, reason in enumerate(reasons, start=1))
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{table}\n\nReasons, in the words of the error message:\n\n{listed}\n\nVersions: {versions}."


def _sign(found: Cell, reasons: list[str]) -> str:
    sign = SIGNS[found.outcome]
    return f"{sign} ({reasons.index(_reason(found)) + 1})" if found.outcome == "refused" else sign


def _reason(found: Cell) -> str:
    return re.sub(r"^strategy=\w+: ", "", found.detail)


if __name__ == "__main__":
    sys.exit(main())
