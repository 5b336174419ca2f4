#!/usr/bin/env bash
# Start Ray on this node, with token authentication.
#   cluster/start.sh [OPTION...]                 start the head node; creates ~/.ray/auth_token if there is no token
#   cluster/start.sh HOST[:PORT] [OPTION...]     join the cluster whose head is HOST (default port 6379), with its token,
#                                                which is copied from there by ssh if this node has none
# The options are passed to `ray start`. RAY_AUTH_MODE=disabled starts Ray without a token: everybody who reaches its
# ports can then run code on the cluster.
set -euo pipefail

head=
case ${1:-} in '' | -*) ;; *) head=$1 && shift ;; esac
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

copy_token() {
    token=$(ssh -o BatchMode=yes -o ConnectTimeout=5 "${head%:*}" cat .ray/auth_token 2>/dev/null) || return 1
    (umask 077 && mkdir -p ~/.ray && printf %s "$token" >~/.ray/auth_token)
}

if [ "$RAY_AUTH_MODE" = token ]; then
    if [ -z "$head" ]; then
        (umask 077 && ray get-auth-token --generate >/dev/null)
    elif ! ray get-auth-token >/dev/null 2>&1 && ! copy_token; then
        echo "cluster/start.sh: no token: copy ~/.ray/auth_token from the head to this node, or set RAY_AUTH_TOKEN" >&2
        exit 1
    fi
else
    echo "cluster/start.sh: warning: no token: everybody who reaches the ports of this Ray can run code on it" >&2
fi
case " $* " in
    *" --dashboard-host=127."* | *" --dashboard-host=localhost "*) ;;
    *" --dashboard-host"*)
        echo "cluster/start.sh: warning: the dashboard listens beyond this machine, and is not encrypted" >&2
        ;;
esac

if [ -z "$head" ]; then
    case " $* " in *" --block "*) exec ray start --head --disable-usage-stats "$@" ;; esac
    ray start --head --disable-usage-stats "$@"
    if [ "$RAY_AUTH_MODE" = token ]; then
        echo
        echo "Ray's own commands, such as \`ray job submit\`, present the token only after: export RAY_AUTH_MODE=token"
    fi
    exit
fi
case $head in *:*) ;; *) head=$head:6379 ;; esac
exec ray start --address="$head" --disable-usage-stats "$@"
