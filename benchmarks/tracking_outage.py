"""Training speed while the MLflow server is well, dead, or takes requests and never answers.

python benchmarks/tracking_outage.py
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from common import (
    Claim,
    Work,
    ceiling,
    child_environment,
    end_tree,
    free_port,
    interleave,
    median_of,
    ours,
    ratios,
    report,
    running_ray,
    table,
)

WORK = Work(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=400, log_every=1)
GIVE_UP = ("tracking.flush_timeout_s=2", "tracking.request_timeout_s=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    c = ceiling()
    with running_ray() as address, healthy_server() as healthy, stalling_server() as stalling:
        here = f"cluster.address='{address}'"
        dead = f"http://127.0.0.1:{free_port()}"
        arms = {
            "healthy": ours(WORK, here, f"tracking.uri='{healthy}'", *GIVE_UP),
            "dead": ours(WORK, here, f"tracking.uri='{dead}'", *GIVE_UP),
            "stalling": ours(WORK, here, f"tracking.uri='{stalling}'", *GIVE_UP),
            "no tracking": ours(WORK, here),
        }
        results = interleave(arms, rounds=rounds)
    claims = [
        Claim(name=f"samples/s, {arm} / healthy", values=ratios(results, arm, "healthy", "samples_per_s"), goal=0.98)
        for arm in ("dead", "stalling")
    ]
    rows = [
        [arm, f"{median_of(results, arm, 'samples_per_s'):,.0f}", f"{median_of(results, arm, 'step_ms_p50'):.2f}"]
        for arm in arms
    ]
    notes = table(["server", "samples/s", "median step, ms"], rows)
    details = [{arm: asdict(t) for arm, t in r.items()} for r in results]
    report("tracking-outage", claims=claims, ceiling=c, notes=notes, details=details)


@contextmanager
def healthy_server() -> Iterator[str]:
    """An MLflow server on SQLite; yields its address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="bench-mlflow-", ignore_cleanup_errors=True) as folder:
        store = f"sqlite:///{Path(folder) / 'mlflow.db'}"
        flags = ["--host=127.0.0.1", f"--port={port}", f"--backend-store-uri={store}", "--workers=1"]
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *flags],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
        )
        try:
            _wait_until_well(address)
            yield address
        finally:
            end_tree(server.pid)
            server.wait(timeout=10)


def _wait_until_well(address: str) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"no MLflow server came up at {address}")


@contextmanager
def stalling_server() -> Iterator[str]:
    """Accepts every connection and never says a word; yields its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        held: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    held.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for connection in held:
            connection.close()


if __name__ == "__main__":
    main()
