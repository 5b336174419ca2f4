#!/usr/bin/env bash
# Start Ray on this node.
#   cluster/start.sh                 start the head node
#   cluster/start.sh HOST[:PORT]     join the cluster whose head is HOST (default port 6379)
set -euo pipefail
head=${1:-}
if [ -z "$head" ]; then
    exec ray start --head --disable-usage-stats
fi
case $head in *:*) ;; *) head=$head:6379 ;; esac
exec ray start --address="$head" --disable-usage-stats
