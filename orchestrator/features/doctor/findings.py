"""What the doctor has found, as text, as JSON and as an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.config.text import first_few
from orchestrator.display.plain_text import count
from orchestrator.protocol.node_report import Finding, Level

_EXIT_CODES: Mapping[Level, int] = {"ok": 0, "warning": 1, "fault": 2}
_LEVEL_WIDTH, _CHECK_WIDTH = 9, 12


def finding_text(finding: Finding) -> str:
    """Return a finding as a line, and its remedy as another one."""
    level = "OK" if finding.level == "ok" else finding.level
    where = f"{first_few(finding.where)}: " if finding.where else ""
    remedy = f"\n{'':<{_LEVEL_WIDTH + _CHECK_WIDTH}}-> {finding.remedy}" if finding.remedy else ""
    return f"{level:<{_LEVEL_WIDTH}}{finding.check:<{_CHECK_WIDTH}}{where}{finding.text}{remedy}"


def verdict_text(findings: Sequence[Finding]) -> str:
    """Return the last line: the number of faults and warnings."""
    faults, warnings = (sum(f.level == level for f in findings) for level in ("fault", "warning"))
    if not faults and not warnings:
        return "everything is in order"
    return f"{count(faults, 'fault')}, {count(warnings, 'warning')}"


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the findings as values that JSON has."""
    return [asdict(finding) for finding in findings]


def exit_code(findings: Sequence[Finding]) -> int:
    """Return the exit code of the worst finding."""
    return max((_EXIT_CODES[finding.level] for finding in findings), default=0)
