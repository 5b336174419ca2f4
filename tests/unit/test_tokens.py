"""A Ray that asks for a token gets the user's, and another one gets none, although the user has one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

TOKEN = "a" * 40
PROBE = """
import os, sys
from orchestrator.compat.ray.connection import probe_gcs
from orchestrator.driver.cluster import address_error
for address in sys.argv[1:]:
    os.environ.pop("RAY_AUTH_MODE", None)
    asks = probe_gcs(address, timeout_s=30, with_token=False)
    print(asks, address_error(address), os.environ.get("RAY_AUTH_MODE"))
"""


class Gcs(grpc.GenericRpcHandler):
    """The GCS server of a Ray, as far as it is asked before a connection."""

    def __init__(self, token: str | None):
        self._token = token

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        known = self._token is None or f"Bearer {self._token}" in [text for _, text in call.invocation_metadata]

        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            if not known:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    """Of a server without a token, and of one with the token of the user."""
    servers: list[Any] = []
    ports = []
    for token in (None, TOKEN):
        server = grpc.server(ThreadPoolExecutor(2), handlers=[Gcs(token)])
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        server.start()
        servers.append(server)
    yield [f"127.0.0.1:{port}" for port in ports]
    for server in servers:
        server.stop(None).wait(10)


def test_a_token_is_presented_only_where_one_is_asked_for(addresses: list[str], tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = [sys.executable, "-c", PROBE, *addresses]
    done = subprocess.run(words, env={**env, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    opened, closed = done.stdout.splitlines()
    machine = "this machine is no node of that cluster"
    assert (opened.split()[0], opened.split()[-1]) == ("None", "None"), done.stdout + done.stderr
    assert (closed.split()[0], closed.split()[-1]) == ("unauthenticated", "token")
    assert all(machine in line for line in (opened, closed)), done.stdout
