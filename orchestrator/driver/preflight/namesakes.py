"""Other runs of the same name that have not ended. Names need not be unique, so they are warned of and not refused."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from typing import Any

from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import LEASE_S, RunDir


def active_namesakes(run_dir: RunDir) -> Mapping[str, str]:
    """Return the locations of the other active runs of this name in the same local ``output_dir``, by their uids.

    Runs of the same sweep are left out, which share a name. Only records of runs whose lease is fresh are read, because
    a directory may have thousands of runs of one name. On a store, even that would take too long.
    """
    if run_dir.remote is not None:
        return {}
    record, now = run_dir.read_record(), run_dir.renewed_at()  # this run has just been recorded
    found = {}
    for other in OutputDir.containing(run_dir).runs():
        if other == run_dir or str(record["name"]) not in other.path.name:
            continue
        with contextlib.suppress(OSError, ValueError):  # an unreadable run is left alone
            if now - other.renewed_at() > LEASE_S:
                continue
            there = other.read_record()
            same_sweep = record.get("sweep") is not None and _sweep_id(record) == _sweep_id(there)
            if there.get("name") == record["name"] and not same_sweep and other.driver_if_running() is not None:
                found[str(there.get("uid"))] = other.location
    return found


def namesake_warning(name: str, location: str) -> str:
    """Return what the user of a run should know about another one of its name, at ``location``."""
    return (
        f"another run named {name} has not ended: {location}; name=... tells them apart, and `orchestrator stop "
        f"{shlex.quote(location)}` ends the other one"
    )


def _sweep_id(record: Mapping[str, Any]) -> str | None:
    return (record.get("sweep") or {}).get("id")
