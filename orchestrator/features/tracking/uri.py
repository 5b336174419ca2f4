"""Addresses of MLflow servers: validation, absolute paths, redaction, and whether a server answers, without MLflow."""

from __future__ import annotations

import base64
import configparser
import contextlib
import functools
import os
import re
import shlex
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from orchestrator.config.redact import MASK, redact_text
from orchestrator.config.secret_names import is_secret
from orchestrator.config.text import did_you_mean
from orchestrator.protocol.node_report import Finding

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SCHEMES = (*_DATABASES, "http", "https", "databricks")
_SQLITE = "sqlite:///"
_EXAMPLE = "sqlite:///mlflow.db"
_LOCAL_PAGE = "http://127.0.0.1:5000"
"""Where ``mlflow ui`` listens."""
_NOT_IN_PATHS = re.compile("[%?\udc80-\udcff]")
"""The characters of a path that an address has as ``%3F`` and the like: its syntax, and bytes that are not UTF-8."""
_QUERY_VALUE = re.compile(r"([?&])([^=&]+)=([^&]*)")


def validate_uri(uri: str, *, base: Path | None = None) -> str | None:
    """Return what is wrong with ``tracking.uri`` and how to correct it; None if it is valid.

    Relative SQLite paths are resolved from ``base`` (default: the working directory). No server is contacted.
    """
    error = _error(uri, base or Path.cwd())
    return f"tracking.uri={redact_uri(uri)}: {error}" if error else None


def _error(uri: str, base: Path) -> str | None:
    if uri == "databricks":
        return None
    scheme, separator, rest = uri.partition("://")
    database, *driver = scheme.split("+")
    if scheme == "file" or uri.startswith("file:") or (not separator and ":" not in uri):
        return f"MLflow stores runs in a database, no longer in plain files; use {_EXAMPLE}"
    if not separator and re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        return f"no scheme; did you mean http://{uri}?"
    if not separator or (database if driver else scheme) not in (_DATABASES if driver else _SCHEMES):
        return f"unknown scheme; {did_you_mean(database.partition(':')[0], _SCHEMES)}"
    if len(driver) > 1 or driver == [""]:
        return f"expected one driver after the +, such as {database}+driver://"
    try:
        host, _ = urlsplit(uri).hostname, urlsplit(uri).port
    except ValueError as e:
        return f"{e}; use http://host:port"
    if scheme in ("http", "https") and not host:
        return f"no host; use {scheme}://host:port"
    if database == "sqlite":
        return _sqlite_error(uri, rest, base)
    return None


def _sqlite_error(uri: str, rest: str, base: Path) -> str | None:
    if not rest.startswith("/"):
        return f"the path comes after three slashes; did you mean sqlite:///{rest or 'mlflow.db'}?"
    path = sqlite_path(absolute_uri(uri, base))
    if path is None or ":memory:" in rest:
        return f"a database in memory ends with its process; use {_EXAMPLE}"
    if path.is_dir():
        return f"{path} is a directory; use {sqlite_uri(path / 'mlflow.db')}"
    if _NOT_IN_PATHS.search(path.name):
        return f"MLflow cannot open a file with this name; use {_EXAMPLE}"
    existing = next(p for p in (path, *path.parents) if p.exists())
    if existing != path and not existing.is_dir():
        return f"{existing} is not a directory; choose another path"
    if not os.access(existing, os.W_OK):
        return f"{existing} is not writable; choose another path"
    return None


def absolute_uri(uri: str, base: Path) -> str:
    """Return ``uri`` with a relative SQLite path resolved from ``base``."""
    scheme, separator, rest = uri.partition(":///")
    path, question_mark, query = rest.partition("?")
    if scheme.split("+")[0] != "sqlite" or not separator or not path or ":memory:" in path:
        return uri
    return f"{scheme}:///{Path(_in_address(base.absolute())) / path}{question_mark}{query}"


def sqlite_uri(path: Path) -> str:
    """Return the address of the SQLite database in the file ``path``."""
    return f"{_SQLITE}{_in_address(path)}"


def _in_address(path: Path) -> str:
    return _NOT_IN_PATHS.sub(lambda match: f"%{os.fsencode(match[0])[0]:02X}", str(path))


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of a SQLite address; None for other addresses and databases in memory."""
    scheme, separator, rest = uri.partition(":///")
    path = os.fsdecode(unquote_to_bytes(os.fsencode(rest.partition("?")[0])))
    return Path(path) if scheme.split("+")[0] == "sqlite" and separator and path else None


def uri_for_mlflow(uri: str) -> str:
    """Return ``uri`` with the path of a SQLite database as MLflow can open it, whose folder must exist.

    MLflow takes the path as it stands for the folder, and versions of SQLAlchemy differ in how they decode it.
    """
    if (path := sqlite_path(uri)) is None:
        return uri
    scheme, _, rest = uri.partition(":///")
    _, question_mark, query = rest.partition("?")
    if _NOT_IN_PATHS.search(str(path.parent)):
        path = Path(f"/proc/self/fd/{_descriptor_of(path.parent)}", path.name)
    return f"{scheme}:///{path}{question_mark}{query}"


@functools.cache
def _descriptor_of(folder: Path) -> int:
    """Open a folder for the life of the process, in which MLflow keeps a connection by address."""
    return os.open(folder, os.O_PATH | os.O_DIRECTORY)


def page_command(uri: str) -> str:
    """Return the command line that serves MLflow's page from the SQLite database at ``uri``."""
    path, folder = sqlite_path(uri), ""
    if path is not None and _NOT_IN_PATHS.search(str(path.parent)):
        folder, uri = f"cd {shlex.quote(str(path.parent))} && ", f"{_SQLITE}{path.name}"
    return folder + shlex.join(["mlflow", "ui", "--backend-store-uri", uri])


def web_page(uri: str) -> str | None:
    """Return the address of MLflow's web page: on the server, or on a local ``mlflow ui`` for a database.

    None for Databricks, whose page is another one.
    """
    scheme, _, rest = uri.partition("://")
    if scheme == "databricks":
        return None
    if scheme not in ("http", "https"):
        return _LOCAL_PAGE
    return f"{scheme}://{rest.rpartition('@')[2].rstrip('/')}"


def redact_uri(uri: str) -> str:
    """Return ``uri`` with its passwords masked, as it may be shown and stored."""

    def mask(match: re.Match[str]) -> str:
        before, key, value = match.groups()
        return f"{before}{key}={MASK if is_secret(key) else value}"

    return _QUERY_VALUE.sub(mask, redact_text(uri))


def is_redacted(uri: str) -> bool:
    """Return whether :func:`redact_uri` has masked a password in ``uri``."""
    return MASK in uri


_ASK = "/api/2.0/mlflow/experiments/search?max_results=1"
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_REFUSED = (401, 403)
_OTHER_LOGINS = ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")


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
        with urllib.request.urlopen(request, timeout=timeout_s, context=_tls()):
            return Finding(check="tracking", level="ok", text=f"{shown} answers")
    except urllib.error.HTTPError as e:
        if e.code in _REFUSED and (how := next(filter(os.environ.get, _OTHER_LOGINS), None)):
            return Finding(check="tracking", level="ok", text=f"{shown} answers; the login by {how} was not tried")
        if e.code in _REFUSED:
            remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            return _fault(f"{shown} refuses this user ({e.code})", remedy)
        return _fault(f"{shown} answers {e.code} {e.reason}", "check that tracking.uri names an MLflow server")
    except OSError as e:
        return _unreachable(shown, e)


def _credentials(user: str | None, password: str | None) -> dict[str, str]:
    """The header that MLflow's client sends: the user in the address, in the environment, or in its file."""
    env = {**_saved_login(), **os.environ}
    user, password = user or env.get("MLFLOW_TRACKING_USERNAME"), password or env.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        pair = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}
    token = env.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _saved_login() -> dict[str, str]:
    file = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, ValueError, configparser.Error):
        file.read(Path("~/.mlflow/credentials").expanduser())
    return {name.upper(): value for name, value in file["mlflow"].items()} if "mlflow" in file else {}


def _tls() -> ssl.SSLContext:
    """How MLflow's client checks the server's certificate, and which one it shows itself."""
    env = os.environ
    trusted = env.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or env.get("REQUESTS_CA_BUNDLE") or None
    is_folder = trusted is not None and Path(trusted).is_dir()
    context = ssl.create_default_context(cafile=None if is_folder else trusted, capath=trusted if is_folder else None)
    if env.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if own := env.get("MLFLOW_TRACKING_CLIENT_CERT_PATH"):
        context.load_cert_chain(own)
    return context


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
