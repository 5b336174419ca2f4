"""A real S3 server (moto) on this machine, and what a run has left on it."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from helpers.records.runs import wait_for
from helpers.servers.ports import free_port
from orchestrator.storage.remote import Remote

BUCKET = "training"
OUTPUT = f"s3://{BUCKET}/runs"
TIMEOUT_S = 30.0


class S3Server:
    """The server process, which keeps its objects in memory: SIGSTOP makes it unreachable without losing them."""

    def __init__(self) -> None:
        self.port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test-access",
            "AWS_SECRET_ACCESS_KEY": "test-secret-of-nobody",
            "AWS_REGION": "us-east-1",
        }

    def require_credentials(self) -> None:
        """Refuse requests from now on that no user of the server has signed."""
        url = f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
        urlopen(Request(url, data=b"0", headers={"Content-Type": "text/plain"}), timeout=10).close()

    def requests(self) -> list[str]:
        """The requests so far, such as ``GET /training/runs/a HTTP/1.1``."""
        text = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode()
        return re.findall(r'"([A-Z]+ /[^"]*)"', re.sub(r"\x1b\[\d+m", "", text))  # the server colours some lines

    def accepts(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with an empty bucket, which this process and its children use."""
    from pyarrow.fs import S3FileSystem

    server = S3Server()
    try:
        wait_for(server.accepts, "the S3 server")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        endpoint = server.environment["AWS_ENDPOINT_URL"]
        S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True).create_dir(BUCKET)
        yield server
    finally:
        server.process.kill()
        server.process.wait(10)


def stored(url: str = OUTPUT) -> list[str]:
    """The names of all files below ``url``."""
    return sorted(e.name for e in Remote(url, TIMEOUT_S).list(recursive=True) if e.is_file)


def stored_lines(run: Remote, name: str) -> list[dict[str, Any]]:
    """The lines of a journal that a run has on the store."""
    return [json.loads(line) for line in run.read(name).decode().splitlines()]


def the_run(url: str = OUTPUT) -> Remote | None:
    """The only run on the store; None if there is none yet."""
    records = [name for name in stored(url) if name.endswith("/run.json")]
    assert len(records) <= 1, records
    return Remote(url, TIMEOUT_S).child(str(Path(records[0]).parent)) if records else None
