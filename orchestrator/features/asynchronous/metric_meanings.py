"""What each metric of these strategies means; see :mod:`orchestrator.protocol.metric_meanings`."""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "Asynchronous strategies, and `dp`": {
        "parameter_server/updates_per_s": "updates per second",
        "parameter_server/wait_pct": "share of the time that workers wait for servers",
        "parameter_server/worker_<n>_wait_pct": "the same of each worker",
        "parameter_server/bytes_sent_per_step": "bytes that a worker sends in a step",
        "parameter_server/bytes_received_per_step": "bytes that a worker receives in a step",
        "parameter_server/pulled_pct": "share of the parameters that a worker receives in a step",
        "async/staleness_<name>": "updates that other workers made while a gradient was computed: p50, p95 and max",
        "async/steps_ahead_max": "how far the fastest worker is ahead of the slowest, in steps",
        "hogwild/lost_updates_pct": "share of updates that another worker overwrote, as estimated by a probe",
        "dp/gathered_bytes": "bytes that `dp` gathers on the first device in a step",
    },
}
