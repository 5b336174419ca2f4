"""What `cluster/start.sh` asks of Ray, and of what it warns. A script that prints its arguments stands in for Ray."""

import os
import subprocess
from pathlib import Path

import pytest

from helpers.records.runs import ROOT

NO_TOKEN = "warning: no token: everybody who reaches the ports of this Ray can run code on it"
DASHBOARD = "warning: the dashboard listens beyond this machine, and is not encrypted"


def start(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    ray = folder / "ray"
    ray.write_text('#!/bin/sh\necho ray "$@" mode=$RAY_AUTH_MODE\n')
    ray.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [str(ROOT / "cluster" / "start.sh"), *words],
        env={**kept, "PATH": f"{folder}:{kept['PATH']}", **env},
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_a_head_has_a_token_and_its_dashboard_is_on_loopback(tmp_path: Path) -> None:
    done = start(tmp_path, "--num-cpus=2")
    started, _, hint = done.stdout.splitlines()
    assert started == "ray start --head --disable-usage-stats --num-cpus=2 mode=token"
    assert hint.endswith("present the token only after: export RAY_AUTH_MODE=token")
    assert done.stderr == ""
    assert len(start(tmp_path, RAY_AUTH_MODE="disabled").stdout.splitlines()) == 1
    assert len(start(tmp_path, "--block").stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "env", "warnings"),
    [
        (["--dashboard-host=0.0.0.0"], {}, [DASHBOARD]),
        (["--dashboard-host", "0.0.0.0"], {}, [DASHBOARD]),
        (["--dashboard-host=127.0.0.1"], {}, []),
        (["head:6379"], {"RAY_AUTH_MODE": "disabled"}, [NO_TOKEN]),
    ],
)
def test_what_others_can_reach_is_a_warning(
    tmp_path: Path, words: list[str], env: dict[str, str], warnings: list[str]
) -> None:
    assert start(tmp_path, *words, **env).stderr == "".join(f"cluster/start.sh: {w}\n" for w in warnings)
