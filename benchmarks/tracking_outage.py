"""Training speed while the MLflow server is healthy, is down, dies after a quarter of the run, or never answers.

python benchmarks/tracking_outage.py
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.arms import Arm, Timing, Workload, environment, free_port, kill_tree, ours, running_ray
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report

ROUNDS = 3
WORKLOAD = Workload(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=450, log_every=1)
SERVER_START_TIMEOUT_S = 90
Server = tuple[subprocess.Popen[bytes], str]


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    with running_ray() as address, silent_server() as silent:
        arms = {
            "healthy": with_server(address, dies_at=None),
            "down": tracked(address, f"http://127.0.0.1:{free_port()}"),
            "dies": with_server(address, dies_at=WORKLOAD.steps // 4),
            "never answers": tracked(address, silent),
        }
        results = interleave(arms, rounds=1 if arguments.quick else ROUNDS)
    report(
        "tracking-outage",
        [
            Claim(
                name=f"samples/s, server {how} / healthy",
                ratios=ratios(results, how, "healthy", "samples_per_s"),
                at_least=0.98,
            )
            for how in ("down", "dies", "never answers")
        ],
        ceiling=None,
        rounds={"digits": results},
        notes=rates_table(results),
        keep=not arguments.quick,
    )


def tracked(address: str, uri: str) -> Arm:
    """Return the arm that logs to the server at ``uri`` once a second, so that the training feels its state."""
    tracking = (
        f"tracking.uri={uri}",
        "tracking.upload_every_s=1",
        "tracking.flush_timeout_s=2",
        "tracking.background_timeout_s=0",
        "tracking.log_model=false",
    )
    return ours(WORKLOAD, address=address, tracking=tracking)


def with_server(address: str, *, dies_at: int | None) -> Arm:
    """Return the arm that starts a server of its own, and kills it once the run has logged step ``dies_at``."""

    def run(folder: Path) -> Timing:
        with mlflow_server() as (server, uri):
            if dies_at is not None:
                threading.Thread(target=_kill_at, args=(server, folder, dies_at), daemon=True).start()
            return tracked(address, uri)(folder)

    return run


def _kill_at(server: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    while server.poll() is None:
        files = list(folder.glob("outputs/*/*/metrics.jsonl"))
        if files and len(files[0].read_bytes().splitlines()) >= step:
            kill_tree(server)
        time.sleep(0.1)


@contextmanager
def mlflow_server() -> Iterator[Server]:
    """Run an MLflow server on SQLite; yields its process and its address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="bench-mlflow-", ignore_cleanup_errors=True) as folder:
        store = f"sqlite:///{Path(folder) / 'mlflow.db'}"
        flags = ["--host=127.0.0.1", f"--port={port}", f"--backend-store-uri={store}", "--workers=1"]
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *flags],
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_until_healthy(address)
            yield server, address
        finally:
            kill_tree(server)


def _wait_until_healthy(address: str) -> None:
    deadline = time.monotonic() + SERVER_START_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the MLflow server at {address} was not healthy within {SERVER_START_TIMEOUT_S} s")


@contextmanager
def silent_server() -> Iterator[str]:
    """Run a server that accepts every connection and never answers; yields its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        connections: list[Any] = []  # kept open

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connections.append(listener.accept())

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


if __name__ == "__main__":
    main()
