"""An ssh server on a host, which lets the user of another host in without a password."""

import shutil
from pathlib import Path

from helpers.machines.hosts import Host

SERVER = shutil.which("sshd", path="/usr/sbin:/usr/bin")
"""The path of the server; None if it is not installed."""
_HOME = """
sed "s|^root:.*|root:x:0:0:root:$HOME:/bin/bash|" /etc/passwd >/dev/shm/passwd
mount --bind /dev/shm/passwd /etc/passwd
mkdir -m 700 ~/.ssh
ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519
"""
"""ssh and its server take the home of a user from ``/etc/passwd``."""
_SERVE = """
echo "$KEY" >~/.ssh/authorized_keys
mount -t tmpfs tmpfs /run
mkdir /run/sshd
exec "$SERVER" -f /dev/null -h ~/.ssh/id_ed25519 -o PidFile=none -o StrictModes=no
"""


def let_in(client: Host, server: Host, *, home: Path) -> None:
    """Start a server on the host ``server`` for the user of ``client``. On both, the user's home is ``home``."""
    keys = {}
    for host in (client, server):
        host.script(_HOME, HOME=str(home))
        _, keys[host] = host.run("cat", home / ".ssh" / "id_ed25519.pub")
    server.script(_SERVE, HOME=str(home), KEY=keys[client], SERVER=str(SERVER))
    client.script('echo "$KNOWN" >~/.ssh/known_hosts', HOME=str(home), KNOWN=f"{server.address} {keys[server]}")
