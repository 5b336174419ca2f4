"""Stands in for the agent of Ray's dashboard, which takes most of a second of CPU time to start.

A raylet starts this file as a script, and waits until it has said on which ports it serves: on none, as the agent of a
Ray that is installed without a dashboard says. It needs nothing but the standard library, and ends with the raylet.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_POLL_S = 0.5


def main() -> None:
    """Write down that there are no ports, and wait until the parent has ended."""
    raylet = int(os.environ["RAY_RAYLET_PID"])
    options = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
    for name in _PORTS:
        path = Path(options["session-dir"], f"{name}_{options['node-id']}")
        unfinished = path.with_suffix(".new")
        unfinished.write_text("-1")
        unfinished.replace(path)
    while os.getppid() == raylet:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
