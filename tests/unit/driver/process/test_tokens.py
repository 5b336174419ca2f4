"""A Ray that asks for a token gets the user's, and another one gets none, although the user has one."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from helpers.files.golden import Golden
from helpers.records.runs import wait_for
from orchestrator.compat.ray.connection import addresses_here
from orchestrator.driver.process.cluster import EMBEDDED_ENVIRONMENT, address_error, gcs_address

pytestmark = pytest.mark.slow  # servers that answer late

TOKEN = "a" * 40
PROBE = """
import os, sys
from orchestrator.compat.ray.connection import probe_gcs
from orchestrator.driver.process.cluster import address_error
for address in sys.argv[1:]:
    os.environ.pop("RAY_AUTH_MODE", None)
    asks = probe_gcs(address, timeout_s=30, with_token=False)
    print(asks, address_error(address), os.environ.get("RAY_AUTH_MODE"))
"""


class Gcs(grpc.GenericRpcHandler):
    """The GCS server of a Ray, as far as it is asked before a connection. ``delays_s``: of its first answers."""

    def __init__(self, token: str | None, delays_s: Sequence[float]):
        self._token = token
        self._delays_s = iter(delays_s)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        known = self._token is None or f"Bearer {self._token}" in [text for _, text in call.invocation_metadata]

        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            time.sleep(next(self._delays_s, 0.0))
            if not known:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.contextmanager
def gcs(token: str | None, host: str = "127.0.0.1", delays_s: Sequence[float] = ()) -> Iterator[str]:
    """The address of a GCS server that asks for this token, if for any."""
    server: Any = grpc.server(ThreadPoolExecutor(2), handlers=[Gcs(token, delays_s)])
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    yield f"{host}:{port}"
    server.stop(None).wait(10)


@contextlib.contextmanager
def raylet(gcs_address: str, **environment: str) -> Iterator[None]:
    """A process that looks as one of a node which has joined the cluster of this server."""
    words = ["raylet", "-c", "import time; time.sleep(100)", f"--gcs-address={gcs_address}"]
    process = subprocess.Popen(words, executable=sys.executable, env={**os.environ, **environment})
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


def test_auto_is_what_ray_itself_would_take_unless_it_is_embedded_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    first, second, embedded = (f"127.0.0.1:{port}" for port in (61001, 61002, 61003))
    with raylet(first), raylet(embedded, **EMBEDDED_ENVIRONMENT), contextlib.ExitStack() as later:
        time.sleep(0.1)  # the kernel counts in hundredths of a second when a process starts
        later.enter_context(raylet(second))
        wait_for(lambda: {first, second} <= set(found := addresses()) and embedded not in found)
        assert [address for address in addresses() if address in (first, second)] == [second, first]
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(first)
        assert gcs_address("auto") == first
        monkeypatch.setenv("RAY_ADDRESS", second)
        assert gcs_address("auto") == second
        assert gcs_address(first) == first
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert gcs_address("auto") == first


def addresses() -> list[str]:
    return addresses_here(leave_out="ORCHESTRATOR_EMBEDDED_RAY")


@pytest.mark.parametrize("key", [None, "--address"])
def test_an_address_of_the_environment_that_does_not_answer_is_named(
    key: str | None, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    golden.says(address_error("auto", key=key))


AGAIN = """
import os, sys
from pathlib import Path
from orchestrator.driver.process.cluster import address_error
from orchestrator.driver.process.host_process import unchanged
from ray._private.authentication.authentication_utils import is_token_auth_enabled
before = dict(os.environ)
for token in ("a" * 40, "b" * 40, "b" * 40):
    file = Path.home() / ".ray" / "auth_token"
    file.parent.mkdir(exist_ok=True)
    file.write_text(token)
    with unchanged():
        print(address_error(sys.argv[1]))
    assert (dict(os.environ), is_token_auth_enabled()) == (before, False)
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 40)
print(address_error(sys.argv[1]))
"""


def test_each_run_of_a_process_presents_the_token_that_is_there_then(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with gcs("b" * 40) as there:
        done = subprocess.run(
            [sys.executable, "-c", AGAIN, there], env={**env, "HOME": str(tmp_path)}, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted = ["requires a token", "is no node", "is no node", "requires a token"]
    assert all(text in line for text, line in zip(wanted, done.stdout.splitlines(), strict=True)), done.stdout


def probe(folder: Path, *addresses: str) -> list[str]:
    """What a user with a token gets at each address: the answer without it, what is wrong, and the mode that is set."""
    (folder / ".ray").mkdir(exist_ok=True)
    (folder / ".ray" / "auth_token").write_text(TOKEN)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = [sys.executable, "-c", PROBE, *addresses]
    done = subprocess.run(words, env={**env, "HOME": str(folder)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_token_is_presented_on_a_node_that_is_not_the_head(tmp_path: Path) -> None:
    """The server is at an address which this machine does not have, as far as its interfaces say."""
    with gcs(TOKEN, host="127.0.0.2") as there:
        (before,) = probe(tmp_path, there)
        with raylet(there.replace("127.0.0.2", "127.0.0.3")):
            (other,) = probe(tmp_path, there)
        with raylet(there):
            (after,) = probe(tmp_path, there)
    assert before == other
    assert "requires a token, and yours is missing" in before
    assert after.split()[-1] == "token"
    assert "requires a token" not in after


def test_a_token_is_presented_only_where_one_is_asked_for(tmp_path: Path) -> None:
    with gcs(None) as without, gcs(TOKEN) as with_token:
        opened, closed = probe(tmp_path, without, with_token)
    machine = "this machine is no node of that cluster"
    assert (opened.split()[0], opened.split()[-1]) == ("None", "None")
    assert (closed.split()[0], closed.split()[-1]) == ("unauthenticated", "token")
    assert all(machine in line for line in (opened, closed))


def test_a_server_that_is_slow_to_answer_is_no_missing_one(tmp_path: Path) -> None:
    with gcs(None, delays_s=[0, 3]) as busy:
        (answered,) = probe(tmp_path, busy)
    assert "this machine is no node of that cluster" in answered
