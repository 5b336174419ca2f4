"""Connections to a lost node end at once; those to other nodes stay."""

import socket
import threading

from orchestrator.worker.process.network import shut_down_connections


def connected(host: str) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=5)
        far, _ = server.accept()
    return near, far


def test_a_wait_for_a_lost_node_ends() -> None:
    (lost, far), (kept, other) = connected("127.0.0.2"), connected("127.0.0.3")
    with lost, far, kept, other:
        lost.settimeout(10)
        received: list[bytes] = []
        waiting = threading.Thread(target=lambda: received.append(lost.recv(1)))
        waiting.start()
        shut_down_connections({"127.0.0.2"})
        waiting.join(60)
        assert received == [b""]
        kept.send(b"x")
        assert other.recv(1) == b"x"
