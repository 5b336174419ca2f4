"""A network on the way to a server that fails."""

import contextlib
import socket
import threading
import time


class Proxy:
    """A TCP proxy that can refuse, answer late, or lose answers.

    ``mode`` is ``"pass"``, ``"refuse"`` or ``"lose answers"``; ``requests`` counts the packets from clients.
    """

    def __init__(self, target_port: int):
        self.mode = "pass"
        self.delay_s = 0.0
        self.requests = 0
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            threading.Thread(target=self._answers, args=(server, client), daemon=True).start()
            while data := client.recv(65536):
                self.requests += 1
                if self.mode == "refuse":
                    break
                server.sendall(data)
            for end in (server, client):
                end.shutdown(socket.SHUT_RDWR)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                time.sleep(self.delay_s)
                if self.mode == "lose answers":
                    client.shutdown(socket.SHUT_RDWR)
                else:
                    client.sendall(data)
