"""The choice of ``strategy=auto``, and its record in the directory of the run."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import Config
from orchestrator.driver.result import RunResult
from orchestrator.planning.plan import Plan
from orchestrator.policy.elastic import Sizes
from orchestrator.records.json_file import read_json, write_atomically, write_json
from orchestrator.records.run_dir import RunDir
from orchestrator.tuning.choose import Contender
from orchestrator.tuning.report import record, table, verdict

RECORD, REPORT = "auto.json", "auto.md"
"""The files in the directory of a run whose strategy was chosen."""


class NotMeasuredError(Exception):
    """The run that measures the job did not finish. ``result``: how it ended."""

    def __init__(self, result: RunResult):
        super().__init__(result.reason)
        self.result = result


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The chosen strategy: its overrides, its configuration and its plan, and the contenders that it was among.

    ``planning_s`` is how long the predictions took, with the run for the profile, and ``measuring_s`` what followed.
    """

    overrides: tuple[str, ...]
    config: Config
    plan: Plan
    contenders: tuple[Contender, ...]
    planning_s: float
    measuring_s: float

    @property
    def sizes(self) -> Sizes:
        """The plan, as that of a run which keeps its size."""
        return Sizes.of(self.plan)

    @property
    def text(self) -> str:
        """The table and the choice."""
        return f"{table(self.contenders)}\n\n{verdict(self.contenders)}"

    def write_to(self, run_dir: RunDir) -> None:
        """Keep the table and the choice in the directory of the run, and mark its record."""
        durations = {"planning_s": self.planning_s, "measuring_s": self.measuring_s}
        write_json(run_dir.path / RECORD, {"overrides": self.overrides, **durations, **record(self.contenders)})
        write_atomically(run_dir.path / REPORT, f"{self.text}\n".encode())
        tags = run_dir.read_record().get("tags", {})
        run_dir.update_record(tags={**tags, "strategy.chosen_by": "auto"})


def chosen_before(run_dir: RunDir) -> tuple[str, ...] | None:
    """Return the overrides of the strategy that was chosen for a run; None if it was not chosen by ``auto``."""
    overrides = read_json(run_dir.path / RECORD).get("overrides")
    return None if overrides is None else tuple(overrides)
