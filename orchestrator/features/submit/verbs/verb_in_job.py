"""Run a verb in a job on its cluster, with marked output: ``python -m orchestrator.verb_in_job runs --last 5``."""

from __future__ import annotations

import os
import sys

from orchestrator import cli
from orchestrator.features.submit.marked_output import marked_output


def main() -> int:
    """Run the verb in the arguments on the cluster of this job; returns its exit code."""
    verb, *words = sys.argv[1:]
    with marked_output():
        return cli.main([verb, "--address", os.environ["RAY_ADDRESS"], *words])


if __name__ == "__main__":
    sys.exit(main())
