#!/usr/bin/env bash
# Start Ray on this machine: as the head, or as a worker of one.
#   cluster/start.sh                 the head node
#   cluster/start.sh HOST[:PORT]     a further node of the cluster whose head is HOST
set -euo pipefail
head=${1:-}
if [ -z "$head" ]; then
    exec ray start --head --disable-usage-stats
fi
case $head in *:*) ;; *) head=$head:6379 ;; esac
exec ray start --address="$head" --disable-usage-stats
