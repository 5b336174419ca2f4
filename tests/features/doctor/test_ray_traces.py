"""What earlier Rays have left on this machine: processes, files and ports are real, but are those of stand-ins."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from helpers.servers.ports import free_port
from orchestrator.features.doctor.checks import GCS_PORT, RayTraces, check_traces, ray_traces

NOTHING = RayTraces(
    folder="/tmp/ray", recorded=None, recorded_answers=False, dead_heads=(), ended_sessions=(), taken_ports={}
)


def test_what_a_dead_head_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    ended, running = "session_2026-11-20_10-00-00_123456_7", "session_2026-11-23_10-00-00_123456_8"
    for name in (ended, running):
        (tmp_path / "ray" / name).mkdir(parents=True)
    (tmp_path / "ray" / "session_latest").symlink_to(running)
    dead = f"127.0.0.1:{free_port()}"
    (tmp_path / "ray" / "ray_current_cluster").write_text(dead)
    words = ["raylet", "-c", "input()", f"--gcs-address={dead}", f"--session-dir={tmp_path}/ray/{running}"]
    raylet = subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE)
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            traces = ray_traces([port])
    finally:
        raylet.communicate(timeout=60)
    assert (traces.recorded, traces.recorded_answers) == (dead, False)
    assert dead in traces.dead_heads
    assert traces.ended_sessions == [ended]
    assert traces.taken_ports[port].endswith(f"(pid {os.getpid()})")


def test_each_trace_that_hinders_a_start_is_a_warning_with_a_remedy(golden: Golden) -> None:
    assert list(check_traces(NOTHING)) == []
    traces = replace(
        NOTHING,
        recorded="10.0.0.1:6379",
        dead_heads=["10.0.0.1:6379"],
        ended_sessions=["session_a", "session_b", "session_c"],
        taken_ports={GCS_PORT: "redis-server (pid 12)"},
    )
    head, nodes, port, sessions = check_traces(traces)
    golden.says(f"{f.text}: {f.remedy}" for f in (head, nodes, port, sessions))
    assert [f.level for f in (head, nodes, port, sessions)] == ["warning"] * 3 + ["ok"]


def test_a_ray_that_runs_may_use_its_ports() -> None:
    traces = replace(NOTHING, recorded="10.0.0.1:6379", recorded_answers=True, taken_ports={GCS_PORT: "gcs_server"})
    assert list(check_traces(traces)) == []
