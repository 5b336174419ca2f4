"""An MLflow server as a team runs it: PostgreSQL, artifacts behind the server, basic authentication."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.records.runs import wait_for
from helpers.servers.ports import free_port

ADMIN, ADMIN_PASSWORD = "keeper", "adm-Uu11Vv22Ww33"
_POSTGRESQL = os.pathsep.join([os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])
"""Debian keeps the programs of the server off the path."""


@dataclass
class TeamServer:
    """The server, which can be killed and started again. Its database lives on.

    ``database``: the data directory of PostgreSQL.
    """

    database: Path
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        store = f"postgresql+psycopg2://mlflow@/postgres?host={self.database}"
        settings = self.folder / "auth.ini"
        settings.write_text(
            f"[mlflow]\ndatabase_uri = {store}\ndefault_permission = EDIT\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
        words = ["--app-name", "basic-auth", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        words += ["--backend-store-uri", store, "--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *words],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "MLFLOW_AUTH_CONFIG_PATH": str(settings),
                    "MLFLOW_AUTH_ADMIN_USERNAME": ADMIN,
                    "MLFLOW_AUTH_ADMIN_PASSWORD": ADMIN_PASSWORD,
                    "MLFLOW_FLASK_SERVER_SECRET_KEY": "any",
                    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                    "MLFLOW_DISABLE_TELEMETRY": "true",
                },
                start_new_session=True,
            )
        wait_for(self._answers, "MLflow's server")

    def kill(self) -> None:
        """Kill all its processes at once, as a power failure would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=20)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{self.uri}/health", timeout=1).status == 200)
        return False


@contextlib.contextmanager
def team_server(folder: Path) -> Iterator[TeamServer]:
    """Run the server and its PostgreSQL, with files in ``folder``; skips the test if PostgreSQL is not installed."""
    with _postgresql() as database:
        server = TeamServer(database, folder, free_port())
        try:
            server.start()
            yield server
        finally:
            if server.process is not None:
                server.kill()


@contextlib.contextmanager
def _postgresql() -> Iterator[Path]:
    """Run a PostgreSQL that listens on a socket in its data directory and on no port."""
    initdb, postgres = _program("initdb"), _program("postgres")
    with tempfile.TemporaryDirectory(prefix="postgresql-") as folder:
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            owner = pwd.getpwnam("nobody")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            options |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        database = Path(folder) / "data"
        create = ["--no-sync", "--username=mlflow", "--auth=trust", "--encoding=UTF8", f"--pgdata={database}"]
        subprocess.run([initdb, *create], **options, check=True, timeout=60)
        serve = ["-D", str(database), "-k", str(database), "-c", "listen_addresses="]
        process = subprocess.Popen([postgres, *serve], **options)
        try:
            wait_for((database / ".s.PGSQL.5432").exists, "PostgreSQL")
            yield database
        finally:
            process.send_signal(signal.SIGINT)  # without waiting for clients
            process.wait(timeout=20)


def _program(name: str) -> str:
    found = shutil.which(name, path=_POSTGRESQL)
    if found is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    return found
