"""The exit codes that several verbs return. Those of a run are in ``policy/run_state.py``."""

from __future__ import annotations

FAILED = 1
"""Training failed, or there is an error in the orchestrator or in the code of the job."""
BAD_INPUT = 2
"""Wrong arguments or a wrong configuration."""
CONNECTION_LOST = 4
"""A cluster does not answer any more."""
INTERRUPTED = 130
"""Ctrl-C."""
