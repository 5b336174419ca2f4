"""The choice of ``strategy=auto``, and its record in the directory of the run."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass

from orchestrator.config.schema import Config
from orchestrator.display.plain_text import TableColumn, takes_unicode, text_lines, without_least, writable
from orchestrator.features.auto import choice
from orchestrator.features.auto.choice import Contender
from orchestrator.planning.plan import Plan
from orchestrator.policy.elastic import Sizes
from orchestrator.records.json_file import read_json, write_atomically, write_json
from orchestrator.records.run_dir import RunDir

_WIDTH_WITHOUT_TERMINAL = 160


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The chosen strategy.

    Attributes:
        overrides: the overrides of the strategy.
        contenders: the strategies that it was chosen from.
        planning_s: how long the predictions took.
        measuring_s: how long the measurements after the predictions took.
    """

    overrides: tuple[str, ...]
    config: Config
    plan: Plan
    contenders: tuple[Contender, ...]
    planning_s: float
    measuring_s: float

    @property
    def sizes(self) -> Sizes:
        """The plan of a run which keeps its size."""
        return Sizes.of(self.plan)

    @property
    def text(self) -> str:
        """The table and the choice, for the terminal."""
        columns = [
            TableColumn(
                heading=heading,
                cells=cells,
                justify="right" if place else "left",
                priority=choice.DISPENSABLE.index(heading) if heading in choice.DISPENSABLE else None,
            )
            for place, (heading, *cells) in enumerate(choice.columns(self.contenders))
        ]
        width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
        table = text_lines(without_least(columns, width), unicode=takes_unicode(sys.stdout))
        return writable(choice.with_table(self.contenders, table), sys.stdout)

    def write_to(self, run_dir: RunDir) -> None:
        """Keep the table and the choice in the directory of the run, and mark its record."""
        durations = {"planning_s": self.planning_s, "measuring_s": self.measuring_s}
        write_json(run_dir.choice_record, {"overrides": self.overrides, **durations, **choice.record(self.contenders)})
        write_atomically(run_dir.choice_report, f"{choice.markdown(self.contenders)}\n".encode())
        tags = run_dir.read_record().get("tags", {})
        run_dir.update_record(tags={**tags, "strategy.chosen_by": "auto"})


def chosen_before(run_dir: RunDir) -> tuple[str, ...] | None:
    """Return the overrides of the strategy that was chosen for a run; None if it was not chosen by ``auto``."""
    overrides = read_json(run_dir.choice_record).get("overrides")
    return None if overrides is None else tuple(overrides)
