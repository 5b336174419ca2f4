"""The traces of a run with ``profile=true``, merged into one when it has ended."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping

from orchestrator.records.run_dir import RunDir
from orchestrator.timeline.traces import merged, step_parts

MERGED = "all-ranks.json.gz"
MAX_BYTES = 300_000_000
"""Larger traces are left as they are: merging them would take minutes, and a browser could not show them."""
_RANK = re.compile(r"rank-(\d+)\.json")


def report_profile(run_dir: RunDir) -> Mapping[str, str]:
    """Merge the traces that are on this machine, and say where the time of a step goes, for the summary of the run.

    Raises:
        OSError, ValueError, KeyError: a trace cannot be read, or the merged one cannot be written.
    """
    files = {int(m[1]): path for path in run_dir.profile.glob("rank-*.json") if (m := _RANK.fullmatch(path.name))}
    if not files or sum(path.stat().st_size for path in files.values()) > MAX_BYTES:
        return {"profile": run_dir.location_of(run_dir.profile)}
    traces = {rank: json.loads(path.read_text()) for rank, path in files.items()}
    together = run_dir.profile / MERGED
    with gzip.open(together, "wt", compresslevel=3) as file:
        json.dump(merged(traces), file)
    parts = step_parts(traces.values())
    return {"profile": run_dir.location_of(together), **({} if parts is None else {"profiled": str(parts)})}
