"""Stores and servers of MLflow."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.records.runs import wait_for
from helpers.servers.ports import free_port
from helpers.servers.proxy import Proxy
from orchestrator.features.tracking.mlflow import connect


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables. Making them takes seconds: once, and every test copies them."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    connect(f"sqlite:///{path}", request_timeout_s=10).search_experiments()
    return path


@pytest.fixture
def uri(empty_database: Path, tmp_path: Path) -> str:
    """A store of the test's own."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(scope="session")
def server_port(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real MLflow server."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    port = free_port()
    command = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=log,
            stderr=log,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
            start_new_session=True,
        )
    try:
        wait_for(lambda: _answers(f"http://127.0.0.1:{port}/health"), "MLflow's server")
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=20)


@pytest.fixture
def proxy(server_port: int) -> Iterator[Proxy]:
    proxy = Proxy(server_port)
    yield proxy
    proxy.close()


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(url, timeout=1).status == 200)
    return False
