"""Whether the tracking server answers and accepts this user. Asks the server itself, without importing MLflow."""

from __future__ import annotations

import base64
import os
import socket
import urllib.error
import urllib.request
from urllib.parse import unquote, urlsplit

from orchestrator.protocol.finding import Finding
from orchestrator.tracking.uri import redact_uri, validate_uri

_ASK = "/api/2.0/mlflow/experiments/search?max_results=1"
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_REFUSED = (401, 403)


def check_tracking(uri: str | None, *, timeout_s: float) -> Finding:
    """Return whether runs can be uploaded to ``tracking.uri``, which is absolute; None if they are not tracked."""
    if uri is None:
        return Finding(check="tracking", level="ok", text="off (tracking.uri=null)")
    if error := validate_uri(uri):
        return _fault(error, "correct tracking.uri")
    scheme = uri.partition(":")[0]
    if scheme in ("http", "https"):
        return _server(uri, timeout_s)
    if (port := _DATABASE_PORTS.get(scheme.partition("+")[0])) is not None:
        return _database(uri, port, timeout_s)
    return Finding(check="tracking", level="ok", text=f"{redact_uri(uri)}, which needs no server to be reached")


def _server(uri: str, timeout_s: float) -> Finding:
    shown = redact_uri(uri)
    parts = urlsplit(uri)
    base = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    request = urllib.request.Request(base + _ASK, headers=_credentials(parts.username, parts.password))
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            return Finding(check="tracking", level="ok", text=f"{shown} answers")
    except urllib.error.HTTPError as e:
        if e.code in _REFUSED:
            remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            return _fault(f"{shown} refuses this user ({e.code})", remedy)
        return _fault(f"{shown} answers {e.code} {e.reason}", "check that tracking.uri names an MLflow server")
    except OSError as e:
        return _unreachable(shown, e)


def _credentials(user: str | None, password: str | None) -> dict[str, str]:
    """The header that MLflow's client sends: the user in the address, or in the environment."""
    env = os.environ
    user, password = user or env.get("MLFLOW_TRACKING_USERNAME"), password or env.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        pair = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}
    token = env.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _database(uri: str, default_port: int, timeout_s: float) -> Finding:
    shown, parts = redact_uri(uri), urlsplit(uri)
    try:
        with socket.create_connection((parts.hostname or "localhost", parts.port or default_port), timeout=timeout_s):
            return Finding(check="tracking", level="ok", text=f"{shown} answers; the login was not tried")
    except OSError as e:
        return _unreachable(shown, e)


def _unreachable(shown: str, error: OSError) -> Finding:
    reason = getattr(error, "reason", error)
    return _fault(
        f"{shown} cannot be reached ({reason})", "start the server, correct tracking.uri, or use tracking=none"
    )


def _fault(text: str, remedy: str) -> Finding:
    return Finding(check="tracking", level="fault", text=text, remedy=remedy)
