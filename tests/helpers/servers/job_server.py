"""A stand-in for the job server of Ray's dashboard, which takes packages and jobs and runs none of them.

Each job has written the same log, and goes on until it is stopped or has ended.
"""

import base64
import contextlib
import hashlib
import http.server
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray


@dataclass(frozen=True)
class JobServerStandIn:
    """``packages``: the uploaded ones by URI path. ``jobs``: what was submitted. ``requests``: those on these jobs."""

    url: str
    packages: dict[str, bytes] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def files(self) -> list[list[str]]:
        """Return the names in each zip among the packages."""
        return [sorted(zipfile.ZipFile(io.BytesIO(data)).namelist()) for data in self.packages.values()]


@contextlib.contextmanager
def job_server(
    log: str = "", *, later: str = "", exit_code: int = 0, goes_on: bool = False
) -> Iterator[JobServerStandIn]:
    """Serve on a free port of this machine.

    Args:
        log: what each job has written, up to 64 KiB.
        later: what each job writes next, which only those see who follow its log; as long at most.
        exit_code: that of each job.
        goes_on: the jobs run until they are stopped.
    """
    ended = threading.Event()
    stopped: set[str] = set()

    def job_info(submission_id: str) -> dict[str, Any]:
        info = {"type": "SUBMISSION", "entrypoint": "true"}
        if submission_id in stopped:
            return info | {"status": "STOPPED"}
        if goes_on:
            return info | {"status": "RUNNING"}
        return info | {"status": "FAILED" if exit_code else "SUCCEEDED", "driver_exit_code": exit_code}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/api/version":
                self._answer(200, {"version": "4", "ray_version": ray.__version__})
            elif self.path.endswith("/logs/tail"):
                self._send_log()
            elif self.path.endswith("/logs"):
                self._answer(200, {"logs": log})
            elif self.path.startswith("/api/jobs/"):
                self._answer(200, job_info(self.path.split("/")[3]))
            else:
                self._answer(200 if self.path in stand_in.packages else 404, {})

        def do_PUT(self) -> None:
            stand_in.packages[self.path] = self._body()
            self._answer(200, {})

        def do_POST(self) -> None:
            if self.path.endswith("/stop"):
                stopped.update([self.path.split("/")[3]] if goes_on else [])
                self._answer(200, {"stopped": goes_on})
                return
            job = json.loads(self._body())
            stand_in.jobs.append(job)
            self._answer(200, {"job_id": job["submission_id"], "submission_id": job["submission_id"]})

        def do_DELETE(self) -> None:
            self._answer(200, {"deleted": True})

        def _send_log(self) -> None:
            """Send the log as frames of a WebSocket, and close it at the end of the job."""
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
            self.send_response_only(101)
            for name, value in {
                "Upgrade": "websocket",
                "Connection": "Upgrade",
                "Sec-WebSocket-Accept": accept,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            for text in filter(None, (log, later)):
                self.wfile.write(b"\x81\x7e" + len(text.encode()).to_bytes(2, "big") + text.encode())
            if goes_on:
                ended.wait(60)
            self.wfile.write(b"\x88\x02\x03\xe8")
            self.rfile.read(8)  # the answer; a connection that is closed before it is a lost one
            self.close_connection = True

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

        def parse_request(self) -> bool:
            parsed = super().parse_request()
            if parsed and self.path.startswith("/api/jobs/"):
                stand_in.requests.append(f"{self.command} {self.path}")
            return parsed

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in = JobServerStandIn(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield stand_in
    finally:
        ended.set()
        server.shutdown()
        thread.join(10)
        server.server_close()
