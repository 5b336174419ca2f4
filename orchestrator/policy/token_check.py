"""Who may use a Ray: whether it asks for a token, and who reaches it. Pure."""

from __future__ import annotations

import ipaddress

from orchestrator.protocol.finding import Finding

OPEN = "everybody who reaches its ports can run code on its nodes"
START_WITH_TOKEN = "start Ray with cluster/start.sh on all nodes"


def check_token(*, required: bool, file: str | None) -> Finding:
    """Return whether strangers are kept out of a Ray that this process has joined.

    Args:
        required: whether the Ray asks for a token.
        file: the token file of this machine; None without one.
    """
    if required:
        return Finding(check="token", level="ok", text="this Ray asks for one, and this process presents it")
    text = f"this Ray asks for none: {OPEN}"
    if file is not None:
        text += f"; the next `ray start` here asks for the token in {file}, and nodes without it cannot join"
    return Finding(check="token", level="warning", text=text, remedy=START_WITH_TOKEN)


def exposure_warning(gcs_address: str, *, required: bool) -> str | None:
    """Return a warning if a Ray on an address that other machines reach asks for no token; None if all is well.

    Args:
        gcs_address: ``host:port`` of its GCS server.
        required: whether it asks for a token.
    """
    host = gcs_address.rpartition(":")[0].strip("[]")
    if required or _is_loopback(host):
        return None
    return f"the Ray on {host} asks for no token: {OPEN}; {START_WITH_TOKEN}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
