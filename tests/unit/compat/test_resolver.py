"""While torch connects, its thread asks no name server."""

import ctypes
import socket
import threading

import pytest

from orchestrator.compat.resolver import without_name_servers


def attempts() -> int:
    """How often this thread asks a name server, once it has begun to ask."""
    state = ctypes.CDLL(None)["__res_state"]
    state.restype = ctypes.POINTER(ctypes.c_int * 2)
    return int(state().contents[1])


def test_the_thread_asks_no_name_server_and_later_asks_again() -> None:
    with without_name_servers():
        assert attempts() == 0
        assert socket.gethostbyname("localhost") == "127.0.0.1"
        assert socket.getaddrinfo("192.0.2.7", 80)
        with pytest.raises(socket.gaierror) as refused:
            socket.gethostbyname("a-name-that-no-file-has.example")
    assert refused.value.errno == socket.EAI_AGAIN, "nobody has answered"
    assert attempts() > 0


def test_other_threads_ask_as_before() -> None:
    found: list[int] = []

    def look() -> None:
        with without_name_servers():
            pass
        found.append(attempts())

    with without_name_servers():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found[0] > 0
