"""A head that does not answer is lost after a while, before Ray would end the process."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from helpers.records.runs import wait_for
from orchestrator.compat.ray.connection import RECONNECT_TIMEOUT
from orchestrator.driver.process.calls import LOST_AFTER, GangError, check_ray, watched_head


@pytest.fixture
def serve() -> Iterator[Callable[[str], tuple[grpc.Server, str]]]:
    """``serve(address)`` starts a server that answers; with port 0, the system chooses a port. Returns its address."""
    servers = []

    def start(address: str) -> tuple[grpc.Server, str]:
        server = grpc.server(ThreadPoolExecutor(1))
        port = server.add_insecure_port(address)
        server.start()
        servers.append(server)
        return server, f"{address.rpartition(':')[0]}:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def is_lost() -> bool:
    try:
        check_ray()
    except GangError:
        return True
    return False


@pytest.mark.slow
def test_a_head_is_lost_that_has_not_answered_for_most_of_the_time_that_ray_gives_it(
    serve: Callable[[str], tuple[grpc.Server, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECONNECT_TIMEOUT, "1")
    server, address = serve("127.0.0.1:0")
    with watched_head(address):
        server.stop(None).wait()
        wait_for(is_lost, timeout_s=20)
        with pytest.raises(GangError, match=rf"the head of the Ray cluster \({address}\) has not answered for \d+ s"):
            check_ray()
        serve(address)
        wait_for(lambda: not is_lost(), timeout_s=20)
    assert LOST_AFTER < 1, "the nodes, and with them the workers, end after the whole time"
