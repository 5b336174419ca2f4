"""The queue of runs on a cluster, and the place of a run in it."""
